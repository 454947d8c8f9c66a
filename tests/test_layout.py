"""Tests of the flat vector: cuDNN's order, both ways, for all fields of the spec."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import assert_says
from oracles import loop64
from test_spec import GRID, spec
from tolerance import assert_same_bits

import ostinato as ost


def both(fields, layers):
    size = 4 if fields.get("input_mode") == "skip" else 3
    options = {"input_size": size, "num_layers": layers, **fields}
    return spec(**options), loop64.Spec(hidden_size=4, **options)


def test_unpacked_weights_match_the_oracle_and_pack_again():
    for fields in GRID:
        ours, theirs = both(fields, layers=2)
        flat = np.arange(ours.num_params, dtype=np.float32)
        got, want = ost.unpack_weights(flat, ours), loop64.unpack(theirs, flat)
        shapes = ost.param_shapes(ours)
        for layer, shape, oracle in zip(got, shapes, want, strict=True):
            for name in ost.LayerWeights._fields:
                a, b = getattr(layer, name), getattr(oracle, name)
                assert (a is None) == (b is None) == (getattr(shape, name) is None)
                if a is not None:
                    assert a.shape == getattr(shape, name)
                    np.testing.assert_array_equal(a, b, err_msg=name)
        assert_same_bits(ost.pack_weights(got, ours), flat)


def test_matrices_come_first_and_biases_last():
    """Check cuDNN's order, written out for one small network."""
    two = spec("gru", 2, 1, bidirectional=True)
    flat = jnp.arange(two.num_params)
    forward, reverse = ost.unpack_weights(flat, two)
    assert forward.w_ih.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert forward.w_hh.tolist() == [[6], [7], [8]]
    assert reverse.w_ih.tolist() == [[9, 10], [11, 12], [13, 14]]
    assert reverse.w_hh.tolist() == [[15], [16], [17]]
    assert forward.b_ih.tolist() == [18, 19, 20]
    assert forward.b_hh.tolist() == [21, 22, 23]
    assert reverse.b_ih.tolist() == [24, 25, 26]
    assert reverse.b_hh.tolist() == [27, 28, 29]


def test_packing_holds_under_transformations():
    one = spec("rnn_tanh", 1, 2, num_layers=2)
    flat = jnp.arange(2.0 * one.num_params).reshape(2, -1)

    def there_and_back(weights):
        return ost.pack_weights(ost.unpack_weights(weights, one), one)

    assert_same_bits(jax.jit(jax.vmap(there_and_back))(flat), flat)
    grad = jax.grad(lambda w: jnp.sum(there_and_back(w) ** 2))(flat[0])
    assert_same_bits(grad, 2 * flat[0])


def layers_of(**changes):
    one = spec("lstm", 3, 4)
    layer = ost.unpack_weights(jnp.zeros(one.num_params), one)[0]
    return [layer._replace(**changes)], one


BAD = {
    "missing": (layers_of(b_ih=None), ValueError, "`layers[0].b_ih` (16,) None"),
    "too-many": (
        layers_of(w_hr=jnp.ones((2, 4))),
        ValueError,
        "`layers[0].w_hr` None float64[2, 4]",
    ),
    "shape": (
        layers_of(w_ih=jnp.ones((3, 16))),
        ValueError,
        "`layers[0].w_ih` (16, 3) (3, 16)",
    ),
    "dtype": (
        layers_of(b_hh=jnp.ones(16, jnp.float32)),
        TypeError,
        "layers[0].b_hh float64 float32",
    ),
    "none": ((None, spec("lstm", 3, 4)), TypeError, "`layers` LayerWeights None"),
    "layer": (([None], spec("lstm", 3, 4)), TypeError, "`layers` LayerWeights [None]"),
    "count": (([], spec("lstm", 3, 4)), ValueError, "`layers` 1 0"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_layers_raise_with_name_want_and_got(name):
    args, error, words = BAD[name]
    with pytest.raises(error) as info:
        ost.pack_weights(*args)
    assert_says(info, words)


def test_wrong_length_raises_with_the_fields_it_follows_from():
    with pytest.raises(ValueError) as info:
        ost.unpack_weights(jnp.zeros(5), spec("lstm", 3, 4, bias="none"))
    for word in ("`weights`", "[112]", "[5]", "input_size=3", "bias='none'"):
        assert word in str(info.value)
