"""Files of flax hold RaggedArrays."""

import jax.numpy as jnp
import numpy as np
import pytest

from ostinato import ragged

serialization = pytest.importorskip("flax.serialization")
pytest.importorskip("ostinato.nn.flax")
pytestmark = pytest.mark.peers


def batch(lengths, **options):
    arrays = [np.arange(2.0 * n).reshape(2, n) for n in lengths]
    return ragged.stack(arrays, axis=1, dim="words", **options)


def test_bytes_there_and_back():
    saved = batch((3, 0, 5), max_length=9)
    data = serialization.to_bytes({"x": saved, "step": jnp.asarray(4)})
    target = {"x": batch((1, 1)), "step": jnp.asarray(0)}
    read = serialization.from_bytes(target, data)["x"]
    assert (read.axis, read.dim, read.max_length) == (1, "words", 9)
    for got, want in zip(read, saved, strict=True):
        np.testing.assert_array_equal(got, want)


def test_another_state_is_refused():
    with pytest.raises(ValueError, match=r"max_length, got \['data'\]"):
        serialization.from_state_dict(batch((1,)), {"data": np.zeros(3)})
    state = serialization.to_state_dict(batch((2, 1)))
    with pytest.raises(ValueError, match="`lengths` must lie in 0..max_length"):
        serialization.from_state_dict(batch((1,)), state | {"lengths": np.array([99])})
