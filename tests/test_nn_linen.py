"""`nn.linen` against `flax.linen`: the same variables, outputs and gradients."""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest

flax = pytest.importorskip("flax")
linen = pytest.importorskip("flax.linen")
from ostinato.interop.flax import from_cell  # noqa: E402
from ostinato.nn.linen import RNN, ScannedRNN  # noqa: E402

X = np.random.default_rng(0).standard_normal((3, 7, 4)).astype("f4")
RESETS = np.random.default_rng(1).random((7, 3)) < 0.3
CELLS = [linen.LSTMCell, linen.OptimizedLSTMCell, linen.GRUCell, linen.SimpleCell]


def drawn(variables):
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda a: jnp.asarray(0.4 * rng.standard_normal(a.shape), "f4"), variables
    )


def close(a, b, tolerance=2e-6):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=tolerance)


def values_and_gradients(module, variables, *args):
    def loss(variables):
        out = module.apply(variables, *args)
        return sum(jnp.sum(jnp.sin(a)) for a in jax.tree.leaves(out)), out

    return jax.grad(loss, has_aux=True)(variables)


@pytest.mark.parametrize("cell_class", CELLS, ids=lambda c: c.__name__)
@pytest.mark.parametrize("options", [{}, {"reverse": True, "keep_order": True}])
def test_rnn(cell_class, options):
    ours = RNN(cell_class(5), return_carry=True, **options)
    theirs = linen.RNN(cell_class(5), return_carry=True, **options)
    key = jax.random.key(0)
    close(ours.init(key, X), theirs.init(key, X), 0)
    variables = drawn(theirs.init(key, X))
    assert ours.apply(variables, X, method="explain").backend != "flax"
    close(
        values_and_gradients(ours, variables, X),
        values_and_gradients(theirs, variables, X),
        5e-6,
    )
    lengths = jnp.array([1, 7, 4])
    carry, y = ours.apply(variables, X, seq_lengths=lengths)
    wanted, y_wanted = theirs.apply(variables, X, seq_lengths=lengths)
    valid = np.arange(7) < np.asarray(lengths)[:, None]
    close(carry, wanted)
    close(y[valid], y_wanted[valid])


def test_other_cells_run_as_in_linen():
    cell = linen.GRUCell(5, activation_fn=linen.relu)
    variables = linen.RNN(cell).init(jax.random.key(0), X)
    said = RNN(cell).apply(variables, X, method="explain")
    assert said.backend == "flax" and "activation_fn" in said.rejected["cpu"]
    close(RNN(cell).apply(variables, X), linen.RNN(cell).apply(variables, X), 0)


def without(variables, name, leaf):
    """Return variables of an RNN without one leaf of a layer of its cell."""
    cell = variables["params"]["cell"]
    layer = {k: v for k, v in cell[name].items() if k != leaf}
    return {"params": {"cell": {**cell, name: layer}}}


def test_parameters_that_do_not_fit_are_linen_s_errors():
    carry, gru, lstm = jnp.zeros((3, 5)), linen.GRUCell(5), linen.LSTMCell(5)
    of_gru, of_lstm = (linen.RNN(c).init(jax.random.key(0), X) for c in (gru, lstm))
    for cell, variables, error in (
        (gru, {"params": {}}, "collection is empty"),
        (gru, of_gru["params"], "collection is empty"),
        (gru, of_lstm, 'named "kernel" in scope "/scan.cell./ir"'),
        (gru, without(of_gru, "hn", "bias"), 'named "bias" in scope "/scan.cell./hn"'),
        (lstm, without(of_lstm, "hf", "bias"), 'named "bias" in scope'),
        (linen.GRUCell(6), of_gru, "shape"),
    ):
        for layer in (linen.RNN(cell), RNN(cell)):
            with pytest.raises(flax.errors.FlaxError, match=error):
                layer.apply(variables, X)
    # What linen passes over, it passes over here.
    cell = of_lstm["params"]["cell"]
    more = {"params": {"cell": {**cell, "ii": cell["ii"] | {"bias": jnp.ones(5)}}}}
    close(RNN(lstm).apply(more, X), linen.RNN(lstm).apply(more, X))
    layer, resets = ScannedRNN(cell_name="GRUCell_7"), jnp.asarray(RESETS)
    with pytest.raises(flax.errors.FlaxError, match="GRUCell_7"):
        named = {"params": {"GRUCell_0": of_gru["params"]["cell"]}}
        layer.apply(named, carry, (X.swapaxes(0, 1), resets))


class Reference(linen.Module):
    """The layer of reinforcement learning programs: a cell inside of `linen.scan`."""

    @ft.partial(
        linen.scan,
        variable_broadcast="params",
        in_axes=0,
        out_axes=0,
        split_rngs={"params": False},
    )
    @linen.compact
    def __call__(self, carry, at):
        x, resets = at
        carry = jnp.where(resets[:, None], jnp.zeros_like(carry), carry)
        return linen.GRUCell(features=x.shape[1])(carry, x)


def test_scanned_rnn():
    x, carry, key = np.swapaxes(X, 0, 1), jnp.ones((3, 4), "f4"), jax.random.key(0)
    args = carry, (x, jnp.asarray(RESETS))
    close(ScannedRNN().init(key, *args), Reference().init(key, *args), 0)
    variables = drawn(Reference().init(key, *args))
    close(
        values_and_gradients(ScannedRNN(), variables, *args),
        values_and_gradients(Reference(), variables, *args),
        5e-6,
    )
    assert ScannedRNN.initialize_carry(3, 4).shape == (3, 4)

    class Own(linen.GRUCell):
        pass

    own = {"params": {"Own_0": variables["params"]["GRUCell_0"]}}
    close(ScannedRNN(Own(4)).apply(own, *args), Reference().apply(variables, *args))


class WithACellForTheCarry(Reference):
    """The same as current programs have it: another cell makes the first carry."""

    @ft.partial(
        linen.scan,
        variable_broadcast="params",
        in_axes=0,
        out_axes=0,
        split_rngs={"params": False},
    )
    @linen.compact
    def __call__(self, carry, at):
        x, resets = at
        other = linen.GRUCell(features=x.shape[1])
        first = other.initialize_carry(jax.random.key(0), x.shape)
        carry = jnp.where(resets[:, None], first, carry)
        return linen.GRUCell(features=x.shape[1])(carry, x)


def test_scanned_rnn_takes_the_name_that_the_cell_has():
    x, key = X.swapaxes(0, 1), jax.random.key(0)
    args = jnp.zeros((3, 4), "f4"), (x, jnp.asarray(RESETS))
    theirs = WithACellForTheCarry()
    variables = theirs.init(key, *args)
    assert list(variables["params"]) == ["GRUCell_1"]
    close(ScannedRNN(cell_name="GRUCell_1").init(key, *args), variables, 0)
    variables = drawn(variables)
    close(
        values_and_gradients(ScannedRNN(), variables, *args),
        values_and_gradients(theirs, variables, *args),
        5e-6,
    )


def test_parameters_with_metadata_are_those_inside():
    boxed = linen.with_partitioning(linen.initializers.lecun_normal(), (None, "m"))
    cell = linen.GRUCell(5, kernel_init=boxed)
    ours, theirs = RNN(cell), linen.RNN(cell)
    variables = theirs.init(jax.random.key(0), X)
    assert ours.apply(variables, X, method="explain").backend != "flax"
    close(ours.apply(variables, X), theirs.apply(variables, X))
    plain = from_cell(linen.meta.unbox(variables)["params"]["cell"])
    np.testing.assert_array_equal(
        from_cell(variables["params"]["cell"]).weights, plain.weights
    )
    scanned, inputs = ScannedRNN(cell), (X.swapaxes(0, 1), RESETS)
    args = jnp.zeros((3, 5), "f4"), inputs
    variables = scanned.init(jax.random.key(0), *args)
    close(
        scanned.apply(variables, *args),
        scanned.apply(linen.meta.unbox(variables), *args),
        0,
    )


def test_parameters_of_every_step_run_as_in_linen():
    fields = {
        "variable_axes": {"params": 0},
        "variable_broadcast": False,
        "split_rngs": {"params": True},
    }
    ours, theirs = (made(linen.GRUCell(5), **fields) for made in (RNN, linen.RNN))
    variables = theirs.init(jax.random.key(0), X)
    assert ours.apply(variables, X, method="explain").backend == "flax"
    close(ours.apply(variables, X), theirs.apply(variables, X))


@pytest.mark.usefixtures("jax_as_it_comes")
def test_parameters_that_were_cast_meet_a_carry_that_was_not():
    ours, theirs = RNN(linen.GRUCell(5)), linen.RNN(linen.GRUCell(5))
    variables = jax.tree.map(
        lambda a: a.astype("bfloat16"), theirs.init(jax.random.key(0), X)
    )
    x = X.astype("bfloat16")
    assert ours.apply(variables, x, method="explain").backend == "flax"
    got, want = ours.apply(variables, x), theirs.apply(variables, x)
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got, want)


@pytest.mark.usefixtures("jax_as_it_comes")
@pytest.mark.parametrize("cell_class", CELLS, ids=lambda c: c.__name__)
@pytest.mark.parametrize("kind", ["mixed", "complex"])
def test_dtypes_that_the_operator_does_not_have_run_as_in_linen(cell_class, kind):
    options = {"param_dtype": "complex64", "dtype": "complex64"}
    cell = cell_class(5, **({} if kind == "mixed" else options))
    ours, theirs = RNN(cell), linen.RNN(cell)
    x = X if kind == "mixed" else X.astype("c8")
    variables = theirs.init(jax.random.key(0), x)
    if kind == "mixed":
        cast = lambda path, a: a.astype("bfloat16") if "kernel" in str(path) else a  # noqa: E731
        variables = jax.tree_util.tree_map_with_path(cast, variables)
    assert ours.apply(variables, x, method="explain").backend == "flax"
    np.testing.assert_array_equal(ours.apply(variables, x), theirs.apply(variables, x))
