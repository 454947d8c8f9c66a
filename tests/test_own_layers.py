"""What our own layers share: names of parameters, frozen layers, runs of a cell."""

import functools as ft
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ostinato as ost
from ostinato.cells import sampling
from ostinato.nn import _cells, _layers

B, T, IN, H = 3, 6, 4, 5
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.standard_normal((B, T, IN)), "f4")
MASK = RNG.random((B, T)) < 0.6
MASK[0] = False
RESETS = jnp.asarray(RNG.random((B, T)) < 0.3)
SPEC = ost.RNNSpec("lstm", IN, H, 2, bidirectional=True, proj_size=2, bias="input")
WEIGHTS = jnp.asarray(RNG.standard_normal(SPEC.num_params), "f4")


def close(a, b, tolerance=2e-6):
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6, atol=tolerance), a, b
    )


def test_parameters_have_their_places_in_the_flat_vector():
    named = _layers.split_weights(SPEC, WEIGHTS)
    assert [n for n in named if "l1" in n] == [
        "weight_ih_l1",
        "weight_hh_l1",
        "bias_ih_l1",
        "weight_hr_l1",
        "weight_ih_l1_reverse",
        "weight_hh_l1_reverse",
        "bias_ih_l1_reverse",
        "weight_hr_l1_reverse",
    ]
    np.testing.assert_array_equal(_layers.join_weights(SPEC, named), WEIGHTS)
    layers = ost.unpack_weights(WEIGHTS, SPEC)
    np.testing.assert_array_equal(named["weight_hr_l1"], layers[2].w_hr)
    with pytest.raises(ValueError, match="`bias_ih_l0` must have shape"):
        _layers.join_weights(SPEC, named | {"bias_ih_l0": X[0, 0]})
    with pytest.raises(TypeError, match="`weight_hh_l0` must have the dtype of"):
        half = named["weight_hh_l0"].astype(jnp.bfloat16)
        _layers.join_weights(SPEC, named | {"weight_hh_l0": half})


def test_a_frozen_layer_is_a_pytree_that_runs_the_network():
    frozen = _layers.freeze(SPEC, WEIGHTS)
    options = {"mask": jnp.asarray(MASK), "padding": "hold"}
    state = jax.tree.map(lambda a: a + 0.5, frozen.initial_state(B))
    run = jax.jit(lambda frozen, x: frozen(x, state, **options))
    close(run(frozen, X), ost.rnn(SPEC, WEIGHTS, X, state, **options))
    assert [a.shape for a in frozen.initial_state()] == [(4, 2), (4, 5)]
    with pytest.raises(ValueError, match="unidirectional"):
        frozen.step(X[:, 0])


@pytest.mark.parametrize("library", ["flax", "equinox"])
def test_layers_of_every_library_run_the_network(library):
    pytest.importorskip(library)
    ours = importlib.import_module(f"ostinato.nn.{library}")
    if library == "flax":
        seed = {"rngs": importlib.import_module("flax.nnx").Rngs(0)}
    else:
        seed = {"key": jax.random.key(0)}
    layer = ours.Layer(SPEC, WEIGHTS)
    close(layer(X), ost.rnn(SPEC, WEIGHTS, X))
    for layer in (
        ours.RNN(IN, H, **seed),
        ours.Recurrent(ost.cells.GRU(IN, H), **seed),
    ):
        assert layer.freeze().step(X[:, 0]).y.shape == (B, H)


def test_derivatives_of_a_frozen_layer():
    def loss(weights, x, freeze):
        layer = _layers.freeze(SPEC, weights)
        return jnp.sum(jnp.sin(layer(x).y if freeze else ost.rnn(SPEC, weights, x).y))

    wanted = jax.grad(loss, (0, 1))(WEIGHTS, X, False)
    close(jax.grad(loss, (0, 1))(WEIGHTS, X, True), wanted, 2e-5)
    frozen = _layers.freeze(SPEC, WEIGHTS)
    if frozen.weights.packed is not None:
        with pytest.raises(TypeError, match="uint8"):
            jax.grad(lambda frozen: jnp.sum(frozen(X).y))(frozen)


CELL = ost.cells.LayerNormGRU(IN, H)
PARAMS = jax.tree.map(
    lambda a: jnp.asarray(RNG.standard_normal(a.shape), "f4"),
    CELL.init(jax.random.key(0)),
)


@pytest.mark.parametrize(("padding", "time_major"), [("zero", False), ("hold", True)])
def test_a_mask_leaves_out_steps_of_a_cell(padding, time_major):
    state = jnp.asarray(RNG.standard_normal((B, H)), "f4")
    turn = (lambda a: jnp.swapaxes(a, 0, 1)) if time_major else jnp.asarray
    options = {"padding": padding, "time_major": time_major}
    out = jax.jit(ft.partial(_cells.run_cell, CELL, **options))(
        PARAMS,
        turn(jnp.where(MASK[..., None], X, jnp.nan)),
        state,
        mask=turn(jnp.asarray(MASK)),
        resets=turn(RESETS),
    )
    step = jax.jit(CELL.__call__)
    y = np.asarray(turn(out.y))
    for b in range(B):  # one step after the other
        h, last = state[b : b + 1], np.zeros(H)
        for t in range(T):
            h = jnp.where(RESETS[b, t], jnp.zeros_like(h), h)
            if MASK[b, t]:
                h, at = step(PARAMS, h, X[b : b + 1, t], t)
                last = np.asarray(at[0])
            wanted = last if MASK[b, t] or padding == "hold" else 0 * last
            close(y[b, t], wanted)
        close(out.state[b : b + 1], h)


def test_steps_of_a_cell_are_a_sequence():
    frozen = _cells.FrozenCell(CELL, PARAMS)
    whole = jax.jit(lambda frozen, x: frozen(x, mask=MASK, resets=RESETS))(frozen, X)
    state, ys = frozen.initial_state(B), []
    for t in range(T):
        x = jnp.where(MASK[:, t, None], X[:, t], jnp.nan)
        y, state = frozen.step(x, state, resets=RESETS[:, t], active=MASK[:, t])
        ys.append(y)
    close((jnp.stack(ys, 1), state), tuple(whole))
    with pytest.raises(ValueError, match="`step` needs a cell"):
        _cells.step_cell(ost.cells.Bidirectional(CELL), (PARAMS, PARAMS), X[:, 0])


def test_random_choices_are_drawn_in_every_wrapper():
    cells = ost.cells
    inner = cells.Zoneout(cells.GRU(IN, H), h_rate=0.5)
    cell = cells.Stack(
        (cells.Bidirectional(inner), cells.Dropout(cells.GRU(2 * H, H), outputs=0.5))
    )
    assert sampling.is_random(cell) and not sampling.is_random(cells.Stack((CELL,)))
    drawn = cells.sample(cell, jax.random.key(0), B)
    assert not sampling.is_random(drawn)
    first, second = drawn.cells[0].both
    assert first.key is not None and not np.array_equal(
        *map(jax.random.key_data, (first.key, second.key))
    )
    assert drawn.cells[1].masks.outputs.shape == (B, H)
    params = cell.init(jax.random.key(1))
    run = jax.jit(ft.partial(_cells.run_cell, cell))
    y, _ = run(params, X, key=jax.random.key(0))
    close(y, jax.jit(ft.partial(_cells.run_cell, drawn))(params, X).y)
    assert np.abs(y - run(params, X).y).max() > 0.01


def test_errors_of_a_cell():
    with pytest.raises(TypeError, match="`cell` must be a cell"):
        _cells.check_cell(lambda: None)
    masked = ost.cells.Dropout(CELL, inputs=0.5).sample(jax.random.key(0), B)
    with pytest.raises(TypeError, match="must hold no arrays"):
        _cells.check_cell(masked)
    with pytest.raises(ValueError, match="`x` must consist of arrays"):
        _cells.run_cell(CELL, PARAMS, X[0, 0])
    with pytest.raises(ValueError, match="`mask` must be None"):
        _cells.run_cell(CELL, PARAMS, X, mask=MASK, seq_lengths=[1, 2, 3])
    with pytest.raises(ValueError, match="`padding` must be 'zero' or 'hold'"):
        _cells.run_cell(CELL, PARAMS, X, mask=MASK, padding="drop")
