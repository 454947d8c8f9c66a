"""Tests of functions of ostinato's tuples, serialized by `jax.export`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import ostinato as ost

SPEC = ost.RNNSpec("lstm", 3, 4)
WEIGHTS = ost.init_weights(jax.random.key(0), SPEC)
X = jnp.asarray(np.random.default_rng(0).standard_normal((2, 5, 3)), jnp.float32)
CELL = ost.cells.GRU(3, 4)
FUNCTIONS = {
    "rnn": (lambda w, x: ost.rnn(SPEC, w, x), (WEIGHTS, X)),
    "prepared": (
        lambda w, x: ost.rnn(SPEC, w, x),
        (ost.prepare(SPEC, WEIGHTS), X),
    ),
    "layers": (lambda w: ost.unpack_weights(w, SPEC), (WEIGHTS,)),
    "recurrent_net": (
        lambda params, x: ost.recurrent_net(
            CELL, x, CELL.initial_state(2), params=params
        ),
        (CELL.init(jax.random.key(1)), X),
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_written_and_read_again(name):
    function, arguments = FUNCTIONS[name]
    jitted = jax.jit(lambda *args: function(*args))
    data = export.export(jitted)(*arguments).serialize()
    got, want = export.deserialize(data).call(*arguments), jitted(*arguments)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
