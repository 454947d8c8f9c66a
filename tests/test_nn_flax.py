"""`nn.flax` against `flax.nnx`: the same trees, outputs and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

nnx = pytest.importorskip("flax.nnx")
from ostinato.interop.flax import from_cell  # noqa: E402
from ostinato.nn.flax import RNN, Bidirectional  # noqa: E402

CELLS = [nnx.LSTMCell, nnx.OptimizedLSTMCell, nnx.GRUCell, nnx.SimpleCell]
cells = pytest.mark.parametrize("cell_class", CELLS, ids=lambda c: c.__name__)
X = np.random.default_rng(0).standard_normal((2, 3, 7, 4)).astype("f4")


def drawn(cell_class, seed=0):
    """Return a cell with weights that differ from gate to gate."""
    cell = cell_class(4, 5, rngs=nnx.Rngs(seed))
    rng = np.random.default_rng(seed)
    state = jax.tree.map(
        lambda a: jnp.asarray(0.4 * rng.standard_normal(a.shape), "f4"),
        nnx.state(cell, nnx.Param),
    )
    nnx.update(cell, state)
    return cell


def close(a, b, tolerance=2e-6):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.shape == y.shape
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=tolerance)


@cells
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"return_carry": True, "reverse": True},
        {"reverse": True, "keep_order": True},
        {"time_major": True, "return_carry": True},
    ],
    ids=str,
)
def test_outputs_carry_and_gradients(cell_class, options):
    cell = drawn(cell_class)
    theirs, ours = nnx.RNN(cell, **options), RNN(cell, **options)
    assert ours.explain(X).backend != "flax"
    close(ours(X), theirs(X))

    def gradient(layer):
        loss = lambda m: sum(jnp.sum(jnp.sin(a)) for a in jax.tree.leaves(m(X)))  # noqa: E731
        return nnx.grad(loss)(layer)

    close(gradient(ours), gradient(theirs), 5e-6)


@cells
@pytest.mark.parametrize("reverse", [False, True])
def test_lengths(cell_class, reverse):
    cell, lengths = drawn(cell_class), jnp.array([1, 7, 4])
    options = {"return_carry": True, "reverse": reverse, "keep_order": True}
    carry, y = RNN(cell, **options)(X[0], seq_lengths=lengths)
    wanted, y_wanted = nnx.RNN(cell, **options)(X[0], seq_lengths=lengths)
    valid = np.arange(7) < np.asarray(lengths)[:, None]
    close(carry, wanted)
    close(y[valid], y_wanted[valid])
    assert not np.asarray(y)[~valid].any()
    by_time = RNN(cell, time_major=True, **options)
    x = X[0].swapaxes(0, 1)
    carry_by_time, y_by_time = by_time(x, seq_lengths=lengths)
    close((carry_by_time, y_by_time.swapaxes(0, 1)), (carry, y))
    start = jax.tree.map(jnp.ones_like, carry)
    none = RNN(cell, **options)(X[0], initial_carry=start, seq_lengths=0 * lengths)
    close(none[0], start, 0)


@cells
def test_both_directions_are_one_call(cell_class):
    layers = drawn(cell_class), drawn(cell_class, 1)
    for options in ({"return_carry": True}, {"time_major": True}):
        ours = Bidirectional(*map(RNN, layers), **options)
        theirs = nnx.Bidirectional(*map(nnx.RNN, layers), **options)
        close(ours(X), theirs(X))
    jaxpr = jax.make_jaxpr(lambda x: Bidirectional(*map(RNN, layers))(x))(X)
    assert str(jaxpr).count("ostinato_rnn") == 1


@cells
def test_resets_in_fused_and_in_other_cells(cell_class):
    class Other(cell_class):
        def __call__(self, carry, inputs):
            return super().__call__(carry, inputs)

    cell = drawn(cell_class)
    other = Other(4, 5, rngs=nnx.Rngs(0))
    nnx.update(other, nnx.state(cell, nnx.Param))
    assert RNN(other).explain(X).backend == "flax"
    resets = jnp.asarray(np.random.default_rng(1).random((3, 7)) < 0.3)
    y = RNN(cell)(X[0], resets=resets)
    close(RNN(other)(X[0], resets=resets), y)
    lengths = jnp.array([2, 7, 0])
    close(
        RNN(other, return_carry=True)(X[0], resets=resets, seq_lengths=lengths),
        RNN(cell, return_carry=True)(X[0], resets=resets, seq_lengths=lengths),
    )
    for b in range(3):  # what a reset leaves is what a new sequence gives
        start = int(np.flatnonzero(np.asarray(resets[b]))[-1])
        close(RNN(cell)(X[0, b, start:]), y[b, start:])
    with pytest.raises(ValueError, match="`resets`"):
        RNN(cell, reverse=True)(X[0], resets=resets)


@pytest.mark.parametrize("broadcast", [None, "dropout"])
def test_random_numbers_are_broadcast_with_resets_too(broadcast):
    class Dropping(nnx.Module):
        num_feature_axes = 1

        def __init__(self, rngs):
            self.cell = nnx.GRUCell(4, 5, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def initialize_carry(self, shape, rngs=None):
            return self.cell.initialize_carry(shape, rngs)

        def __call__(self, carry, x):
            return self.cell(self.dropout(carry), x)

    found = []
    for layer, options in ((nnx.RNN, {}), (RNN, {"resets": jnp.zeros((3, 7), bool)})):
        rngs = nnx.Rngs(params=0, dropout=1)
        made = layer(Dropping(rngs), broadcast_rngs=broadcast)
        found.append([made(X[0], **options) for _ in range(2)])
    for want, got in zip(*found, strict=True):
        close(got, want)


def test_a_layer_with_a_dtype_of_its_own_runs_as_in_nnx():
    cell = nnx.GRUCell(4, 5, rngs=nnx.Rngs(0))
    cell.dense_i.dtype = jnp.bfloat16
    assert "`dense_i.dtype`" in RNN(cell).explain(X).rejected["cpu"]
    with jax.numpy_dtype_promotion("standard"):
        close(RNN(cell)(X), nnx.RNN(cell)(X))


def test_resets_and_lengths_of_another_shape_or_dtype():
    resets, lengths = jnp.zeros((7, 3), bool), jnp.ones((7, 3), "i4")
    relu = nnx.GRUCell(4, 5, activation_fn=nnx.relu, rngs=nnx.Rngs(0))
    for cell in (relu, drawn(nnx.GRUCell)):  # step by step, and fused
        layer = RNN(cell)
        with pytest.raises(ValueError, match=r"`resets` .* \(B, T\) = \(3, 7\), got"):
            layer(X[0], resets=resets)
        with pytest.raises(TypeError, match="`resets` must be bool, got int32"):
            layer(X[0], resets=lengths.T)
    with pytest.raises(ValueError, match=r"`resets` .* \(T, B\) = \(7, 3\), got"):
        layer(X[0].swapaxes(0, 1), resets=resets.T, time_major=True)
    with pytest.raises(ValueError, match=r"\(B1, B2, T\) = \(2, 3, 7\), got"):
        layer(X, resets=jnp.zeros((3, 2, 7), bool))
    with pytest.raises(ValueError, match=r"`seq_lengths` .* \(B\) = \(3,\), got"):
        layer(X[0], seq_lengths=jnp.array([7, 2]))
    close(
        layer(X[0], seq_lengths=[7, 2, 0]),
        layer(X[0], seq_lengths=jnp.array([7, 2, 0])),
    )


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        (lambda r: nnx.LSTMCell(4, 5, gate_fn=nnx.relu, rngs=r), "gate_fn"),
        (lambda r: nnx.GRUCell(4, 5, activation_fn=nnx.relu, rngs=r), "activation_fn"),
        (lambda r: nnx.SimpleCell(4, 5, residual=True, rngs=r), "residual"),
        (lambda r: nnx.GRUCell(4, 5, dtype=jnp.bfloat16, rngs=r), "bfloat16"),
    ],
)
def test_other_cells_run_as_in_nnx(cell, words):
    cell = cell(nnx.Rngs(0))
    said = RNN(cell).explain(X)
    assert said.backend == "flax" and words in said.rejected["cpu"]
    if cell.dtype != jnp.bfloat16:  # which nnx promotes, as these tests forbid
        close(RNN(cell)(X), nnx.RNN(cell)(X), 0)


def test_carries_of_both_directions_that_are_left_out():
    cells = drawn(nnx.GRUCell), drawn(nnx.GRUCell, 1)
    carry = jnp.asarray(X[:, :, 0, :1] + np.zeros(5), "f4")
    for carries in ((None, carry), (carry, None), (None, None)):
        ours = Bidirectional(*map(RNN, cells), rngs=nnx.Rngs(0))
        theirs = nnx.Bidirectional(*map(nnx.RNN, cells), rngs=nnx.Rngs(0))
        close(ours(X, initial_carry=carries), theirs(X, initial_carry=carries))


def test_numbers_of_numpy_that_jax_narrows_are_fused():
    lengths = np.array([[7, 0, 3], [2, 7, 0]], "i4")
    carry = np.ones((2, 3, 5))
    layer = RNN(drawn(nnx.GRUCell), return_carry=True)
    with jax.enable_x64(False):
        assert layer.explain(X.astype("f8")).backend != "flax"
        run = nnx.jit(lambda m, x, h: m(x, seq_lengths=lengths, initial_carry=h))
        eager = layer(X.astype("f8"), seq_lengths=lengths, initial_carry=carry)
        close(eager, run(layer, X.astype("f8"), carry))


def test_transformations_and_jit():
    cell = drawn(nnx.GRUCell)
    layer = RNN(cell)
    close(nnx.jit(lambda m, x: m(x))(layer, X), layer(X))
    close(nnx.vmap(lambda m, x: m(x), in_axes=(None, 0))(layer, X), layer(X))


def test_a_wrong_carry_is_named_in_the_order_of_flax():
    h = jnp.zeros((3, 5), jnp.float32)
    lstm = RNN(nnx.LSTMCell(4, 5, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(0))
    gru = RNN(nnx.GRUCell(4, 5, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(0))
    x = jnp.ones((3, 9, 4), jnp.float32)
    wanted = r"`initial_carry` must be \(c, h\), two arrays of shape \[3, 5\]"
    for carry in (h, (h,), (h, h[:2])):
        with pytest.raises(ValueError, match=wanted):
            lstm(x, initial_carry=carry)
    for carry in ((h, h), h[None]):
        with pytest.raises(ValueError, match="`initial_carry` must be an array of"):
            gru(x, initial_carry=carry)
    both = Bidirectional(lstm, lstm, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"`initial_carry\[1\]` must be \(c, h\)"):
        both(x, initial_carry=((h, h), (h, h[:1])))
    with pytest.raises(ValueError, match="`initial_carry` must be a pair.* got 3"):
        both(x, initial_carry=((h, h),) * 3)


class _Doubled(nnx.Linear):
    """A layer that computes something else from the same parameters."""

    def __call__(self, *args, **options):
        return 2 * super().__call__(*args, **options)


def _with_own_product(linear):
    linear.dot_general = lambda *args, **options: (
        2 * jax.lax.dot_general(*args, **options)
    )
    return linear


def _with_own_promotion(linear):
    linear.promote_dtype = lambda arrays, **_: [
        None if a is None else 2 * a for a in arrays
    ]
    return linear


def _with_adapter(linear):
    sizes = linear.in_features, linear.out_features
    made = nnx.LoRALinear(
        *sizes, lora_rank=2, use_bias=linear.use_bias, rngs=nnx.Rngs(1)
    )
    made.lora.lora_b[...] = jnp.ones(made.lora.lora_b.shape)
    return made


def _doubled(linear):
    sizes = linear.in_features, linear.out_features
    return _Doubled(*sizes, use_bias=linear.use_bias, rngs=nnx.Rngs(1))


CHANGES = {
    "own product": _with_own_product,
    "own promotion": _with_own_promotion,
    "adapter": _with_adapter,
    "subclass": _doubled,
    "wrapped": lambda linear: nnx.WeightNorm(linear, rngs=nnx.Rngs(1)),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    ("cell_class", "name"), [(nnx.GRUCell, "dense_h"), (nnx.LSTMCell, "hf")]
)
@pytest.mark.usefixtures("jax_as_it_comes")
def test_cells_whose_layers_are_changed_run_as_in_flax(cell_class, name, change):
    with jax.enable_x64(False):  # for what Flax computes by itself
        cell = drawn(cell_class)
        setattr(cell, name, CHANGES[change](getattr(cell, name)))
        assert RNN(cell).explain(X).backend == "flax"
        close(RNN(cell)(X), nnx.RNN(cell)(X))
        with pytest.raises(
            ValueError, match=f"`{name}` of the .* must be an nnx.Linear"
        ):
            from_cell(cell)


@pytest.mark.usefixtures("jax_as_it_comes")
@pytest.mark.parametrize("cell_class", [nnx.GRUCell, nnx.LSTMCell])
def test_parameters_that_were_cast_meet_a_carry_that_was_not(cell_class):
    layers = []
    for made in (nnx.RNN, RNN):
        graph, state = nnx.split(made(drawn(cell_class)))
        state = jax.tree.map(
            lambda a: a.astype("bfloat16") if a.dtype == "float32" else a, state
        )
        layers.append(nnx.merge(graph, state))
    x = X.astype("bfloat16")
    assert layers[1].explain(x).backend == "flax"
    got, want = layers[1](x), layers[0](x)
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got, want)


def test_a_carry_of_its_own_is_noted():
    ones = jax.nn.initializers.ones
    with pytest.warns(UserWarning, match="carry_init is provided"):
        cell = nnx.GRUCell(4, 5, carry_init=ones, rngs=nnx.Rngs(0))
    assert "carry_init" in from_cell(cell).notes[0]
    assert from_cell(drawn(nnx.GRUCell)).notes == ()
    close(RNN(cell)(X), nnx.RNN(cell)(X))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32"])
@pytest.mark.parametrize("reverse", [False, True])
def test_traced_lengths_beyond_the_steps_are_clamped(reverse, dtype):
    """Reversed sequences were NaN, where `rnn` clamps."""
    layer = RNN(drawn(nnx.GRUCell), reverse=reverse, keep_order=True)
    graph, state = nnx.split(layer)
    carry = jnp.zeros((3, 5), "f4")

    @jax.jit
    def run(lengths):
        layer = nnx.merge(graph, state)
        return layer(X[0], seq_lengths=lengths, initial_carry=carry)

    close(run(jnp.asarray([9, 5, 7], dtype)), run(jnp.asarray([7, 5, 7], dtype)))


@pytest.mark.parametrize("fused", [False, True])
def test_resets_of_calls_with_time_first(fused):
    """A sequence that begins at a reset equals one of its own, in any layout."""
    relu = nnx.GRUCell(4, 5, activation_fn=nnx.relu, rngs=nnx.Rngs(0))
    layer = RNN(drawn(nnx.GRUCell) if fused else relu)
    carry, resets = jnp.zeros((3, 5), "f4"), np.zeros((3, 7), bool)
    begins = (2, 0, 5)
    resets[range(3), begins] = True
    y = layer(
        X[0].swapaxes(0, 1), resets=resets.T, time_major=True, initial_carry=carry
    )
    for b, t in enumerate(begins):
        for part in (slice(0, t), slice(t, 7)):
            if part.start < part.stop:
                alone = layer(X[0, b : b + 1, part], initial_carry=carry[:1])
                close(y[part, b], alone[0])
