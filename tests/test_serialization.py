"""Tests of functions of ostinato's tuples, serialized by `jax.export`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cell_cases import CASES, shapes_of
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
    "linear_recurrence": (lambda x: ost.linear_recurrence(x, x), (X,)),
    "gae": (
        lambda x: ost.gae(x, x, x[:, 0], discounts=0.9, lambda_=0.9),
        (X[..., 0],),
    ),
}
WITHOUT_ARRAYS = {ost.BackendStatus, ost.Explanation, ost.Saved}
TUPLES = {
    kind.__name__: kind
    for module in (ost, ost.cells)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, tuple) and kind not in WITHOUT_ARRAYS
}
COMPLEX = {"lru": ost.cells.LRU(3, 4), "s5": ost.cells.S5(3, 4)}
CELLS = {name: case.cell for name, case in CASES.items()} | COMPLEX


@pytest.mark.parametrize("name", FUNCTIONS)
def test_written_and_read_again(name):
    function, arguments = FUNCTIONS[name]
    jitted = jax.jit(lambda *args: function(*args))
    data = export.export(jitted)(*arguments).serialize()
    got, want = export.deserialize(data).call(*arguments), jitted(*arguments)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def assert_serialized(*arguments):
    """Check that a function of the arguments, which it returns, is read as written."""
    function = export.export(jax.jit(lambda *given: given))(*arguments)
    read = export.deserialize(function.serialize())
    assert read.in_tree == function.in_tree == jax.tree.structure((arguments, {}))
    assert read.out_tree == jax.tree.structure(arguments)


@pytest.mark.parametrize("name", TUPLES)
def test_every_public_tuple_is_serialized(name):
    kind = TUPLES[name]
    assert_serialized(
        kind(*[jax.ShapeDtypeStruct((2,), "float32")] * len(kind._fields))
    )


@pytest.mark.parametrize("name", CELLS)
def test_parameters_and_states_of_every_cell_are_serialized(name):
    assert_serialized(*shapes_of(CELLS[name], "float32"))
