"""Tests of wrappers, stacks and both directions against numpy and their parts."""

import dataclasses
import functools as ft

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from cell_cases import (
    BATCH,
    HIDDEN,
    INPUTS,
    LENGTHS,
    STEPS,
    CellCase,
    assert_gradients,
    compiled_net,
    count,
    make,
    net,
    oracle,
    weigh,
)
from closures import fast_jit
from harness import assert_says
from oracles import cells64, net64
from tolerance import assert_close

from ostinato import cells


def close(got, want, terms=500):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_close(a, b, dtype=np.float64, terms=terms)


def residual(p, state, x):
    state, out = cells64.lstm(p, state, x)
    return state, out + x


def stack(p, state, x):
    """Run one step of an LSTM, a projected LSTM and a GRU, of different widths."""
    first, x = cells64.lstm(p[0], state[0], x)
    second, x = cells64.lstmp(p[1], state[1], x)
    third, x = cells64.gru(p[2], state[2], x)
    return (first, second, third), x


STACK = cells.Stack(
    [
        cells.LSTM(INPUTS, HIDDEN),
        cells.LSTMP(HIDDEN, 4, proj_size=2),
        cells.GRU(2, 3),
    ]
)


def evaluated_zoneout(p, state, x):
    h, c = state
    (new_h, new_c), _ = cells64.lstm(p, state, x)
    h, c = 0.25 * h + 0.75 * new_h, 0.1 * c + 0.9 * new_c
    return (h, c), h


WRAPPED = {
    "residual": CellCase(cells.Residual(cells.LSTM(INPUTS, INPUTS)), residual),
    "stack": CellCase(STACK, stack),
    "dropout-evaluated": CellCase(
        cells.Dropout(cells.LSTM(INPUTS, HIDDEN), 0.5, 0.5, 0.5), cells64.lstm
    ),
    "zoneout-evaluated": CellCase(
        cells.Zoneout(cells.LSTM(INPUTS, HIDDEN), 0.25, 0.1), evaluated_zoneout
    ),
}
every_wrapper = pytest.mark.parametrize("name", WRAPPED)


@every_wrapper
@pytest.mark.parametrize("padding", ["hold", "drop"])
@pytest.mark.parametrize("recompute", [(), ("gates",), True], ids=str)
def test_sequence_equals_numpy(name, padding, recompute):
    case = WRAPPED[name]
    params, x, states = make(case, lengths=LENGTHS)
    options = dict(padding=padding, recompute=recompute)
    got = compiled_net(case.cell, params, x, states, LENGTHS, **options)
    want = oracle(case, params, x, states, lengths=LENGTHS, padding=padding)
    close(got[:2], want[:2])


@every_wrapper
def test_gradients_equal_finite_differences(name):
    case = WRAPPED[name]
    rng = np.random.default_rng(2)
    params, x, states = make(case, lengths=LENGTHS)
    loss = weigh(rng, oracle(case, params, x, states, lengths=LENGTHS))
    assert_gradients(
        lambda *args: loss(net(case.cell, *args, LENGTHS)),
        lambda *args: loss(oracle(case, *args, lengths=LENGTHS)),
        (params, x, states),
        rng,
    )


# ---------------------------------------------------------------------------- Residual


@pytest.mark.parametrize("time_major", [False, True])
@pytest.mark.parametrize("padding", ["hold", "zero", "drop"])
def test_residual_adds_the_inputs_to_the_outputs_of_the_operator(padding, time_major):
    case = WRAPPED["residual"]
    params, x, states = make(case, lengths=LENGTHS)
    want = oracle(case, params, x, states, lengths=LENGTHS, padding=padding)
    order = (lambda a: np.swapaxes(a, 0, 1)) if time_major else (lambda a: a)
    options = dict(padding=padding, time_major=time_major)
    run = lambda *args: net(case.cell, *args, LENGTHS, **options)  # noqa: E731
    args = params, order(x), states
    assert count("ostinato_rnn", jax.make_jaxpr(run)(*args).jaxpr) == 1
    got = fast_jit(run)(*args)
    close((order(got.outputs), got.states), want[:2])


def test_residual_around_what_has_no_single_step():
    inner = cells.Bidirectional(cells.MILSTM(4, 2))
    cell = cells.Residual(inner)
    params, x, states = make(CellCase(cell, None, (4,)))
    got = compiled_net(cell, params, x, states, reverse=False)
    want = compiled_net(inner, params, x, states)
    close(got, want._replace(outputs=want.outputs + x))


# ------------------------------------------------------------------------------- Stack


@pytest.mark.parametrize(
    "options",
    [{}, {"reverse": True}, {"return_all_states": True}, {"segment_length": 2}],
    ids=str,
)
def test_stack_equals_numpy_however_it_runs(options):
    case = WRAPPED["stack"]
    params, x, states = make(case, lengths=LENGTHS)
    got = compiled_net(case.cell, params, x, states, LENGTHS, **options)
    reverse = options.get("reverse", False)
    want = oracle(case, params, x, states, lengths=LENGTHS, reverse=reverse)
    close(got[:2], want[:2])
    if "return_all_states" in options:
        close(got.all_states, want.all_states)


def test_stack_runs_layer_by_layer_fused_where_it_can():
    cell = cells.Stack((cells.LSTM(INPUTS, 4), cells.MILSTM(4, 4), cells.GRU(4, 2)))
    params, x, states = make(CellCase(cell, None))

    def trace(**options):
        run = lambda p: net(cell, p, x, states, **options).outputs  # noqa: E731
        return jax.make_jaxpr(run)(params).jaxpr

    assert count("ostinato_rnn", trace()) == 2
    assert count("ostinato_loop", trace()) == 1  # the MILSTM's own
    recomputed = trace(recompute=("gates",))
    assert count("ostinato_rnn", recomputed) == 2 and count("scan", recomputed) == 1
    assert count("scan", trace(recompute=True)) == 1


INSIDE = {
    "stack": lambda cell: cells.Stack((cell, cell)),
    "both directions": cells.Bidirectional,
}


@pytest.mark.parametrize("name", INSIDE)
def test_the_backend_reaches_the_cells_inside(name):
    cell = INSIDE[name](cells.LSTM(INPUTS, INPUTS))
    params, x, states = make(CellCase(cell, None))
    run = lambda p: net(cell, p, x, states, backend="scan")  # noqa: E731
    jaxpr = jax.make_jaxpr(run)(params).jaxpr
    assert count("ostinato_rnn", jaxpr) == count("ostinato_loop", jaxpr) == 0
    assert count("scan", jaxpr) == 2
    close(fast_jit(run)(params), compiled_net(cell, params, x, states))
    cell = INSIDE[name](Sorter(INPUTS, INPUTS))
    params, x, states = make(CellCase(cell, None))
    for backend in ("cpu", "cuda"):
        with pytest.raises(NotImplementedError, match=f"the {backend} loop cannot"):
            net(cell, params, x, states, backend=backend)


def test_names_of_one_layer_do_for_a_stack():
    attention = cells.Attention(cells.LSTM(INPUTS + 2, 4), memory_size=2)
    memory = jnp.ones((BATCH, 3, 2), jnp.float64)
    cell = cells.Stack((cells.LSTM(INPUTS, INPUTS), attention.attend(memory)))
    assert cell.recompute_names == ("gates", "energies")
    params, x, states = make(CellCase(cell, None))
    close(
        compiled_net(cell, params, x, states, recompute=("energies",)).outputs,
        compiled_net(cell, params, x, states).outputs,
    )
    for options in ({}, {"segment_length": 2}):
        with pytest.raises(ValueError) as info:
            net(cell, params, x, states, recompute=("gate",), **options)
        assert_says(info, "`recompute` 'gate' 'gates' 'energies'")


@dataclasses.dataclass(frozen=True)
class Halver(cells.SizedCell):
    """A cell as users might write it."""

    input_size: int
    output_size: int

    def init(self, key, dtype=jnp.float32):
        return jnp.full((), 0.5, dtype)

    def initial_state(self, batch, dtype=jnp.float32):
        return jnp.zeros((batch, self.output_size), dtype)

    def step(self, params, states, inputs_t, t):
        out = params * (states + inputs_t)
        return out, out


@dataclasses.dataclass(frozen=True)
class Sorter(Halver):
    """A cell that runs in no loop but XLA's."""

    def step(self, params, states, inputs_t, t):
        out = jnp.sort(params * (states + inputs_t))
        return out, out


def test_cells_of_ones_own_stand_in_stacks_and_wrappers():
    own = Halver(INPUTS, INPUTS)
    cell = cells.Stack((cells.LSTM(INPUTS, INPUTS), cells.Residual(own)))
    params, x, states = make(CellCase(cell, None))
    below = compiled_net(cell.cells[0], params[0], x, states[0]).outputs
    want = compiled_net(own, params[1], below, states[1]).outputs + below
    close(compiled_net(cell, params, x, states).outputs, want)


# ----------------------------------------------------------------------- Bidirectional

PAIRS = {
    "fused": (
        cells.LSTM(INPUTS, 4, 0.5),
        None,
        ft.partial(cells64.lstm, forget_bias=0.5),
    ),
    "mixed": (cells.LSTM(INPUTS, 4), cells.GRU(INPUTS, 2), cells64.gru),
    "steps": (cells.MILSTM(INPUTS, 4), None, cells64.milstm),
}


def directions(name):
    """Return a cell and the oracles of its two directions."""
    forward, backward, second = PAIRS[name]
    if name == "mixed":
        return cells.Bidirectional(forward, backward), (cells64.lstm, second)
    return cells.Bidirectional(forward, backward), (second, second)


def both_in_numpy(cell, oracles, params, x, states, **options):
    parts = [
        oracle(CellCase(c, o), p, x, s, reverse=r, **options)
        for c, o, p, s, r in zip(
            cell.both, oracles, params, states, (False, True), strict=True
        )
    ]
    outputs = np.concatenate([part.outputs for part in parts], axis=-1)
    return parts[0]._replace(
        outputs=outputs, states=cells.BothDirections(*(p.states for p in parts))
    )


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize(
    ("padding", "lengths"),
    [("hold", None), ("hold", LENGTHS), ("zero", LENGTHS), ("drop", LENGTHS)],
)
def test_both_directions_equal_numpy(name, padding, lengths):
    cell, oracles = directions(name)
    params, x, states = make(CellCase(cell, None), lengths=lengths)
    got = compiled_net(cell, params, x, states, lengths, padding=padding)
    want = both_in_numpy(
        cell, oracles, params, x, states, lengths=lengths, padding=padding
    )
    close(got[:2], want[:2])
    calls = count(
        "ostinato_rnn",
        jax.make_jaxpr(lambda p: net(cell, p, x, states, lengths))(params).jaxpr,
    )
    mixed = 1 if lengths else 2  # reversed sequences of different lengths run in steps
    assert calls == {"fused": 1, "mixed": mixed, "steps": 0}[name]


@pytest.mark.parametrize("name", PAIRS)
def test_gradients_of_both_directions_equal_finite_differences(name):
    cell, oracles = directions(name)
    rng = np.random.default_rng(4)
    args = make(CellCase(cell, None), lengths=LENGTHS)
    reference = lambda *args: both_in_numpy(  # noqa: E731
        cell, oracles, *args, lengths=LENGTHS
    )
    loss = weigh(rng, reference(*args))
    assert_gradients(
        lambda *args: loss(net(cell, *args, LENGTHS)),
        lambda *args: loss(reference(*args)),
        args,
        rng,
    )


def test_stack_of_both_directions_takes_every_option():
    layer = cells.Bidirectional(cells.LSTM(INPUTS, 2))
    cell = cells.Stack((layer, cells.Bidirectional(cells.GRU(4, 3))))
    params, x, states = make(CellCase(cell, None), lengths=LENGTHS)
    want = compiled_net(cell, params, x, states, LENGTHS)
    for options in (
        dict(recompute=True),
        dict(recompute=("gates",), segment_length=2),
        dict(return_all_states=True),
    ):
        got = compiled_net(cell, params, x, states, LENGTHS, **options)
        close(got[:2], want[:2])
    assert got.all_states[0].forward[0].shape == (BATCH, STEPS, 2)


def test_all_states_of_both_directions_equal_numpy():
    """Each direction has its own states after every step, in the order of inputs."""
    forward, backward = cells.MILSTM(INPUTS, HIDDEN), cells.LSTM(INPUTS, HIDDEN)
    cell = cells.Bidirectional(forward, backward)
    params, x, states = make(CellCase(cell, None), lengths=LENGTHS)
    got = compiled_net(cell, params, x, states, LENGTHS, return_all_states=True)
    for kept, step, p, first, reverse in zip(
        got.all_states,
        (cells64.milstm, cells64.lstm),
        params,
        states,
        (False, True),
        strict=True,
    ):
        want = net64.run(
            lambda p, s, x, t, step=step: step(p, s, x),
            np.asarray(x),
            jax.tree.map(np.asarray, first),
            params=jax.tree.map(np.asarray, p),
            lengths=LENGTHS,
            reverse=reverse,
        )
        close(kept, want.all_states)
