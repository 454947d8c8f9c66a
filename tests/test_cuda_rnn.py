"""The operator by the kernels of GPUs, run on the CPU, against the float64 loop."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case
from cell_cases import draw, put
from cuda_driver import calls
from cuda_emulation import gpu_in_place, needs_emulator
from harness import arguments, assert_padding_is_exact, expected, named
from harness import value_and_pullback as passes
from oracles.loop64 import Spec
from tolerance import assert_same_bits

import ostinato as ost
from ostinato import cells
from ostinato._cuda import check as trials
from ostinato._cuda import device, kernels, plan
from ostinato._cuda.device import Gpu
from ostinato._rnn import cuda

H200 = Gpu("H200", (9, 0), 132, 232448, "13.0")
A100 = Gpu("A100", (8, 0), 108, 166912, "13.0")
ROUNDING = {"bfloat16": 2**-7, "float32": 2**-10}  # of a factor
LENGTHS = (6, 0, 3, 5, 1, 6, 2, 4, 6, 0, 3)


def case(mode, hidden, **options):
    lengths = options.pop("lengths", LENGTHS)
    own = {
        n: options.pop(n) for n in ("resets", "padding", "time_major") if n in options
    }
    spec = Spec(mode, 5, hidden, **options)
    return Case("", spec, 6, len(lengths), lengths, **own)


def both(mode, hidden=21, num_layers=1, **options):
    return case(mode, hidden, bidirectional=True, num_layers=num_layers, **options)


def cut(mode, hidden=21, **options):
    return case(mode, hidden, resets=True, **options)


# Cells, dtypes, blocks of a cluster, tiles, products with weights in registers.
CLASSES = [
    (both("lstm", num_layers=2), "bfloat16", (1, 1), 16),
    (cut("lstm"), "float32", (1, 1), 2),
    (both("lstm"), "float32", (2, 1), 16),
    (cut("lstm", 32), "bfloat16", (4, 2), 16),
    (both("gru"), "float32", (4, 1), 2),
    (cut("gru"), "bfloat16", (2, 1), 16),
    (both("lstm", 42, num_heads=2), "float32", (2, 1), 16),
    (cut("gru", 63, num_heads=3), "bfloat16", (1, 1), 16),
    (both("rnn_tanh", num_layers=2), "bfloat16", (1, 1), 16),
    (cut("rnn_relu"), "float32", (1, 1), 2),
    (both("rnn_tanh", 55), "float32", (8, 1), 2),  # of rnn_relu slopes would jump
    (cut("rnn_tanh", 110, num_heads=2), "bfloat16", (8, 2), 16),
    (both("slstm"), "float32", (2, 1), 2),
    (cut("slstm", 12, num_heads=12), "float32", (1, 1), 16),  # joined to one head
    (both("rnn_tanh", 60, num_heads=12), "bfloat16", (1, 1), 16),  # joined to two
    (cut("slstm", 42, num_heads=2), "bfloat16", (1, 1), 16),
]


def name_of(value):
    if isinstance(value, Case):
        heads = "-heads" if value.spec.num_heads > 1 else ""
        return f"{value.spec.mode}{heads}-{'resets' if value.resets else 'both'}"
    return "-".join(map(str, value)) if isinstance(value, tuple) else str(value)


def normal(*shape, dtype="float32", seed=0, scale=1.0):
    """Draw values in numpy, for which nothing is compiled."""
    return put(scale * np.random.default_rng(seed).standard_normal(shape), dtype)


def weights_of(spec):
    return normal(spec.num_params, scale=0.3)


def gpu_with(patch, places, held, change=lambda text: text):
    """Put the fake GPU in place, with one layout for all layers."""
    units = 64 if places[0] == 8 else 32
    patch.setattr(plan, "_PLACES", {name: {units: places} for name in plan._PLACES})
    patch.setattr(plan, "_MOST_HELD", held)
    return gpu_in_place(patch, change)


def check(made: Case, dtype: str) -> None:
    """Compare values and gradients with the loop."""
    got = named(made, *passes(made, "cuda")(arguments(made, dtype)))
    for name, want in expected(made, dtype).items():
        error = np.abs(got[name].astype(float) - want).max() / max(
            1, np.abs(want).max()
        )
        limit = ROUNDING[dtype] * (1 + np.log2(made.terms))
        assert error <= limit, f"{name}: {error}, want {limit}"
    assert_padding_is_exact(made, got)


@needs_emulator
@pytest.mark.parametrize(("made", "dtype", "places", "held"), CLASSES, ids=name_of)
def test_values_and_gradients_equal_the_loop(made, dtype, places, held, monkeypatch):
    with gpu_with(monkeypatch, places, held):
        before = len(calls())
        check(made, dtype)
        launches = [c for c in calls()[before:] if "LaunchKernelEx" in c]
    layers = made.spec.num_layers  # both directions in one launch
    for kernel in ("recurrent_run", "recurrent_backward"):
        assert sum(kernel in launch for launch in launches) == layers
    simple = made.spec.mode.startswith("rnn")  # takes a quarter of the blocks
    assert ("attribute 4" in launches[0]) == (places[0] > (4 if simple else 1))


ONE_BUFFER = [
    (both("lstm"), "float32", (2, 1), 16),
    (cut("gru"), "bfloat16", (4, 2), 2),
    (both("rnn_tanh", 55), "float32", (8, 1), 2),
    (cut("slstm"), "float32", (4, 1), 16),
]


@needs_emulator
@pytest.mark.parametrize(("made", "dtype", "places", "held"), ONE_BUFFER, ids=name_of)
def test_clusters_with_one_buffer_equal_the_loop(
    made, dtype, places, held, monkeypatch
):
    monkeypatch.setattr(plan, "_MOST_SHARED", 0)
    with gpu_with(monkeypatch, places, held):
        check(made, dtype)


@needs_emulator
def test_a_missing_wait_for_the_buffer_is_caught(monkeypatch):
    monkeypatch.setattr(plan, "_MOST_SHARED", 0)
    lengths = (40, 0, 33, 5, 38, 40, 12, 39, 40, 20, 37)  # many chances for a race
    made = dataclasses.replace(cut("lstm"), steps=40, lengths=lengths)
    change = lambda text: text.replace("(kBuffers == 1)", "(kBuffers == 7)")  # noqa: E731
    with gpu_with(monkeypatch, (2, 1), 2, change):
        with pytest.raises((AssertionError, jax.errors.JaxRuntimeError)):
            check(made, "float32")


@needs_emulator
def test_calls_of_every_form_equal_xla(monkeypatch):
    """Check no lengths, no initial state, ensembles, no steps, no sequences."""
    spec = ost.RNNSpec("gru", 3, 7, bias="recurrent")
    weights = normal(2, spec.num_params, dtype="bfloat16")
    x = normal(2, 4, 3, dtype="bfloat16", seed=1)

    @functools.partial(jax.jit, static_argnums=0)
    def run(backend):
        one = lambda w, x: ost.rnn(spec, w, x, backend=backend)  # noqa: E731
        return (
            one(weights[0], x),
            jax.vmap(one, (0, None))(weights, x),
            one(weights[0], x[:, :0]),
            one(weights[0], x[:0]),
        )

    with gpu_with(monkeypatch, (1, 1), 16):
        got, want = run("cuda"), run("xla")
        assert [c for c in calls() if "LaunchKernelEx" in c]
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        np.testing.assert_allclose(*(np.asarray(c, float) for c in (a, b)), atol=0.02)


@needs_emulator
def test_a_sequence_does_not_depend_on_the_others(monkeypatch):
    spec = ost.RNNSpec("lstm", 5, 21)
    made = arguments(cut("lstm"), "float32")
    run = jax.jit(
        lambda x, lengths: ost.rnn(
            spec, made.weights, x, seq_lengths=lengths, backend="cuda"
        )
    )
    with gpu_with(monkeypatch, (2, 1), 16):
        y = run(made.x, made.seq_lengths).y
        other = np.array(made.x)
        other[4:] = np.nan
        again = run(other, made.seq_lengths).y
    assert_same_bits(again[:4], y[:4])


@needs_emulator
@pytest.mark.parametrize("mode", ["lstm", "gru", "slstm", "rnn_tanh"])
def test_an_ensemble_is_one_launch(mode, monkeypatch):
    check_ensemble(mode, monkeypatch)


def check_ensemble(mode, monkeypatch, change=lambda text: text):
    """Compare the members of an ensemble with calls of their own by xla."""
    with gpu_with(monkeypatch, (1, 1), 16, change):
        got = ensemble(mode, "cuda")
        launches = [c.split() for c in calls() if "LaunchKernelEx" in c]
    assert [words[1] for words in launches] == ["recurrent_run", "recurrent_backward"]
    assert all(words[3] == "12" for words in launches)  # members, directions, heads
    close = lambda a, b: np.testing.assert_allclose(a, b, atol=0.01)  # noqa: E731
    jax.tree.map(close, got, ensemble_by_xla(mode))


def ensemble(mode, backend):
    """Return results and gradients of an ensemble, in numpy."""
    spec = ost.RNNSpec(mode, 3, 34, num_heads=2, bidirectional=True)
    random = np.random.default_rng(4)
    shapes = (3, spec.num_params), (3, 2, 5, 3), (2, 5, 68)
    weights, x, dy = (random.standard_normal(s).astype("float32") for s in shapes)
    lengths = np.array([[5, 2], [0, 3], [4, 5]], np.int32)

    def one(w, x, lengths):
        def run(w, x):
            return ost.rnn(spec, w, x, seq_lengths=lengths, backend=backend)

        out, pull_back = jax.vjp(run, w, x)
        return out, pull_back(jax.tree.map(jnp.ones_like, out)._replace(y=dy))

    return jax.tree.map(np.asarray, jax.jit(jax.vmap(one))(0.4 * weights, x, lengths))


ensemble_by_xla = functools.cache(functools.partial(ensemble, backend="xla"))


@needs_emulator
@pytest.mark.parametrize("mode", ["lstm", "gru", "slstm", "rnn_tanh"])
def test_gates_that_are_not_stored_are_computed_again(mode, monkeypatch):
    layers = 2 if mode == "lstm" else 1
    spec = ost.RNNSpec(mode, 3, 21, num_layers=layers, bidirectional=True)
    weights, x = weights_of(spec), normal(3, 6, 3, seed=1)
    lengths = np.array([6, 0, 4], np.int32)

    def loss(weights, x, backend):
        out = ost.rnn(
            spec, weights, x, seq_lengths=lengths, recompute=True, backend=backend
        )
        return (out.y**2).sum()

    run = jax.jit(jax.grad(loss, (0, 1)), static_argnums=2)
    want = run(weights, x, "xla")
    with gpu_with(monkeypatch, (1, 1), 16):
        before = len(calls())
        got = jax.block_until_ready(run(weights, x, "cuda"))
        launches = [c for c in calls()[before:] if "LaunchKernelEx" in c]
    assert sum("recurrent_backward" in launch for launch in launches) == layers
    assert sum("recurrent_run" in launch for launch in launches) == layers
    close = lambda a, b: np.testing.assert_allclose(a, b, atol=0.02)  # noqa: E731
    jax.tree.map(close, got, want)


def outputs(spec, weights, x, backend):
    run = jax.jit(lambda *given: ost.rnn(spec, *given, backend=backend).y)
    return np.asarray(run(weights, x))


@needs_emulator
@pytest.mark.parametrize("mode", ["gru", "rnn_tanh", "rnn_relu", "slstm"])
def test_an_infinite_input_reaches_no_unit_that_there_is_not(mode, monkeypatch):
    """Compare with xla, whose products have no rows or columns of zeros beside ours."""
    spec = ost.RNNSpec(mode, 2, 5)
    weights, x = weights_of(spec), np.ones((2, 4, 2), np.float32)
    x[0, 1, 0] = np.inf
    want = outputs(spec, weights, x, "xla")
    with gpu_with(monkeypatch, (1, 1), 16):
        got = outputs(spec, weights, x, "cuda")
    assert np.isfinite(want[1]).all() and np.isinf(want[0]).any() == (
        mode == "rnn_relu"
    )
    np.testing.assert_allclose(got[:, :2], want[:, :2], atol=0.01)
    np.testing.assert_allclose(got[1], want[1], atol=0.01)


@needs_emulator
def test_a_divided_batch_runs_kernels_that_passed_their_own_trial(monkeypatch):
    """Check that the part of a device counts: it has fewer sequences of a cluster."""
    spec = ost.RNNSpec("lstm", 3, 20, bidirectional=True)
    weights, x = weights_of(spec), normal(16, 3, 3, seed=1)
    mesh = jax.make_mesh((2,), ("b",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.device_put(x, jax.NamedSharding(mesh, jax.P("b")))
    tried = []

    def failure(text, *_):
        tried.append(text)
        return "it is wrong" if "TILES=1" in text.definitions else None

    def gradient(backend):
        loss = lambda w, x: jnp.sum(ost.rnn(spec, w, x, backend=backend).y ** 2)  # noqa: E731
        return jax.jit(jax.value_and_grad(loss))

    with gpu_with(monkeypatch, (1, 2), 16):
        gpu, _ = device.status()
        assert cuda.plan_of(spec, "float32", 16, gpu).tiles == 2
        before = len(calls())
        with monkeypatch.context() as patch:
            patch.setattr(trials, "failure", failure)
            got = jax.block_until_ready(gradient("cuda")(weights, split))
        assert not [c for c in calls()[before:] if "LaunchKernelEx" in c]
    assert {t.definitions[4] for t in tried} == {"TILES=1", "TILES=2"}
    want = gradient("xla")(weights, x)
    close = lambda a, b: np.testing.assert_allclose(a, b, atol=0.01)  # noqa: E731
    jax.tree.map(close, got, want)


@needs_emulator
def test_cells_that_the_operator_has_take_its_kernels(monkeypatch):
    cell = cells.Bidirectional(cells.GRU(3, 5))
    init = lambda: (cell.init(jax.random.key(0)), cell.initial_state(2))  # noqa: E731
    params, states = draw(np.random.default_rng(0), jax.eval_shape(init), "float32")
    x = normal(2, 4, 3, seed=1)

    @functools.partial(jax.jit, static_argnums=0)
    def run(backend):
        out = ost.recurrent_net(cell, x, states, params=params, backend=backend)
        return out.outputs

    want = run(None)
    with gpu_with(monkeypatch, (1, 1), 16):
        before = len(calls())
        got = jax.block_until_ready(run("cuda"))
        assert [c for c in calls()[before:] if "LaunchKernelEx" in c]
    np.testing.assert_allclose(got, want, atol=0.01)


@needs_emulator
def test_tanh_is_precise_near_0_too(monkeypatch):
    spec = ost.RNNSpec("rnn_tanh", 1, 1, bias="none")
    weights = np.array([1.0, 0.0], np.float32)
    x = np.array([1e-6, -1e-3, 0.05, 0.0999, 0.1001, 3.0, -30.0], np.float32)
    with gpu_with(monkeypatch, (1, 1), 16):
        y = outputs(spec, weights, x[:, None, None], "cuda")
        np.testing.assert_allclose(y[:, 0, 0], np.tanh(x), rtol=2e-6)


@needs_emulator
def test_members_that_share_weights_have_them_once(monkeypatch):
    spec = ost.RNNSpec("gru", 3, 7)
    weights, x = weights_of(spec), np.asarray(normal(3, 2, 5, 3, seed=1))

    @functools.partial(jax.jit, static_argnums=0)
    def run(backend, x):
        loss = lambda w, x: (ost.rnn(spec, w, x, backend=backend).y ** 2).sum()  # noqa: E731
        return jax.vmap(jax.grad(loss), (None, 0))(weights, x)

    with gpu_with(monkeypatch, (1, 1), 16):
        got = run("cuda", x)
        text = run.lower("cuda", x).as_text()
        none = run("cuda", x[:0])
        jax.block_until_ready(got)
    assert none.shape == (0, spec.num_params)
    np.testing.assert_allclose(got, run("xla", x), atol=0.02)
    shapes = set(re.findall(r"tensor<(\d+x[x\d]*)xui32>", text))
    assert shapes and not any(shape.startswith("3x") for shape in shapes)


FIRST = ("before == 0.f || g[0]", "g[0]")


@needs_emulator
@pytest.mark.parametrize("bug", [False, True], ids=["right", "wrong"])
def test_an_slstm_whose_input_gate_is_closed(bug, monkeypatch):
    """Check the first step: `exp(i - m)` must not be 0, as n would be."""

    def change(text):
        return text.replace(*FIRST) if bug else text

    with gpu_with(monkeypatch, (1, 1), 16, change):
        got = closed_slstm("cuda")
    assert np.allclose(got, closed_slstm("xla"), atol=0.01) is not bug


@functools.partial(jax.jit, static_argnums=0)
def closed_slstm(backend):
    spec = ost.RNNSpec("slstm", 3, 7)
    layer = ost.unpack_weights(weights_of(spec), spec)[0]
    closed = layer._replace(b_ih=layer.b_ih.at[:7].set(-200.0))
    weights = ost.pack_weights([closed], spec)
    return ost.rnn(spec, weights, normal(2, 4, 3, seed=1), backend=backend).y


# Each is a mistake that a kernel could have, as a change of its text.
BUGS = {
    "nobody waits": ("WaitFor(shared->arrivals + buffer, (k - 1) / 2 % 2);", ""),
    "one buffer": ("Put(shared, 1 - buffer,", "Put(shared, buffer,"),
    "wrong parity": ("(k - 1) / 2 % 2", "k / 2 % 2"),
    "nothing is expected": ("if (thread == 0) Expect(", "if (thread < 0) Expect("),
    "too few bytes": ("Expect(&each, sizeof shared->states[0])", "Expect(&each, 4)"),
    "blocks begin alone": ("WaitForCluster();", "WaitForBlock();"),
    "wrong gate": ("g[1] * c + g[0] * g[2]", "g[0] * c + g[1] * g[2]"),
    "no mask": ("if (k < s.length) {", "{"),
    "padding is not zeroed": ("t < r.steps; ++t) {", "t < 0; ++t) {"),
    "one direction": ("s.reverse ? s.length - 1 - k : k", "k"),
    "resets are ignored": ("if (k + 1 < longest && reset[tile][e])", "if (false)"),
    "the first reset is ignored": ("|| IsReset(s, 0)) return", ") return"),
    "weights are not all loaded": ("k < kOthers; ++k", "k < kOthers - 1; ++k"),
    "the wrong unit's weights": ("rank) * kWarps + warp)", "rank) * kWarps)"),
    "the wrong head": ("matrix % heads", "0"),
    "weights of the first head": ("(matrix * kCluster", "(all.direction * kCluster"),
    "neighbours keep their halves": ("odd ? x[0] : x[1], 4", "odd ? x[1] : x[0], 4"),
    "a block does not wait": ("if constexpr (kCluster == 1) WaitForBlock();", ""),
    "cotangents are late": ("WaitFor(shared->arrivals + buffer, n / 2 % 2);", ""),
    "one buffer of cotangents": ("const int n = longest - 1 - k, buffer = n % 2;",
                                 "const int n = longest - 1 - k, buffer = 0;"),
    "one buffer of gates": ("shared->gates[buffer]", "shared->gates[0]"),
    "gates are not awaited": ("    WaitForBlock();\n    const int half",
                              "    const int half"),
    "wrong slope": ("d[1] = whole * s.before[0] *", "d[1] = whole * s.cells[0] *"),
    "no mask of cotangents": ("if (k + 1 >= sequences[tile][e].length) continue;", ""),
    "cotangents cross resets": ("cut[tile][e] = reset[tile][e];", ""),
    "the largest does not follow": ("di + dm : di", "di : di"),
    "units of a lane lie apart": ("(place + q) / kUnitsOfWord", "place + q"),
    "a relu lets all pass": ("g[q] > 0.f ? 1.f : 0.f", "1.f"),
    "inputs of the first units": ("row * lanes + unit / kUnitsOfLane", "row * lanes"),
    "a unit beyond the last one": ("if (unit + q >= r.units) continue;", ""),
    "members share sequences": ("own * r.steps + at", "at"),
    "members share lengths": ("Load(lengths + own + at)", "Load(lengths + at)"),
    "members share states": ("member * r.directions + direction -", "direction -"),
}  # fmt: skip
BACKWARD = {
    "cotangents are late", "one buffer of cotangents", "gates are not awaited",
    "wrong slope", "no mask of cotangents", "cotangents cross resets",
    "one buffer of gates",
}  # fmt: skip
MODES = {
    "the largest does not follow": "slstm",
    "units of a lane lie apart": "rnn_tanh",
    "a relu lets all pass": "rnn_relu",
    "inputs of the first units": "rnn_tanh",
    "a unit beyond the last one": "rnn_tanh",
}
HEADS = {"the wrong head", "weights of the first head"}
RESETS = {
    "resets are ignored",
    "the first reset is ignored",
    "cotangents cross resets",
}
ALONE = {
    "neighbours keep their halves",
    "a block does not wait",
    "units of a lane lie apart",
}


@needs_emulator
@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_caught(bug, monkeypatch):
    old, new = BUGS[bug]
    texts = map(kernels._read, ("cells.h", "recurrent.h", "recurrent_backward.h"))
    assert any(old in text for text in texts)

    def change(text):
        return text.replace(old, new)

    wrong = pytest.raises((AssertionError, jax.errors.JaxRuntimeError))
    if bug.startswith("members"):
        with wrong:
            check_ensemble("lstm", monkeypatch, change)
        return
    heads = 2 if bug in HEADS else 1
    made = case("lstm", 21 * heads, bidirectional=True, num_heads=heads)
    if bug in RESETS or bug in MODES:
        made = cut(MODES.get(bug, "lstm"))
    if bug == "one buffer of gates":  # a race, which more steps make likelier
        lengths = (40, 0, 33, 5, 38, 40, 12, 39, 40, 20, 37)
        made = dataclasses.replace(made, steps=40, lengths=lengths)
    dtype, places = ("bfloat16", (1, 1)) if bug in ALONE else ("float32", (2, 1))
    with gpu_with(monkeypatch, places, 2, change), wrong:
        if bug in BACKWARD or bug in MODES:
            check(made, dtype)
        else:
            forward_only(made, dtype)


def forward_only(made: Case, dtype: str) -> None:
    given = arguments(made, dtype)
    spec = ost.RNNSpec(**dataclasses.asdict(made.spec))
    out = ost.rnn(
        spec, given.weights, given.x, (given.h_0, given.c_0), backend="cuda",
        seq_lengths=given.seq_lengths, resets=given.resets,
    )  # fmt: skip
    want = expected(made, dtype)
    for name, value in (("y", out.y), ("h_n", out.state[0]), ("c_n", out.state[1])):
        error = np.abs(np.asarray(value, float) - want[name]).max()
        assert error <= 4 * ROUNDING[dtype], f"{name}: {error}"


# --------------------------------------------------------------------------------- plan


@pytest.mark.parametrize(
    ("mode", "dtype", "hidden", "gpu", "words"),
    [
        ("elman", "float32", 32, H200, "no kernels for elman"),
        ("lstm", "float64", 32, H200, "no kernels for a lstm of float64"),
        ("gru", "float16", 32, H200, "no kernels for a gru of float16"),
        ("lstm", "bfloat16", 513, H200, "up to 512 units, not 513"),
        ("lstm", "bfloat16", 129, A100, "on sm_80 it has kernels for up to 128 units"),
        ("lstm", "float32", 97, A100, "up to 96 units, not 97; more take clusters"),
        ("rnn_tanh", "float32", 193, A100, "up to 192 units, not 193; more take"),
    ],
)
def test_the_plan_says_what_has_no_kernel(mode, dtype, hidden, gpu, words):
    assert words in plan.rnn(mode, dtype, hidden, 1, 8, gpu)


def test_the_plan_counts_no_more_blocks_than_a_launch_has():
    assert plan.rnn("gru", "float32", 512, 1, 10**9, H200).grid.blocks <= 2**31 - 1
    found = plan.rnn("gru", "float32", 512, 2, 10**10, H200)
    assert found == "10000000000 sequences are more than one launch holds"


@pytest.mark.parametrize("mode", ["gru", "slstm", "rnn_tanh"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("gpu", [H200, A100], ids=lambda g: g.name)
def test_plans_keep_the_limits_of_the_gpu(mode, dtype, gpu):
    lanes = 4 if mode == "rnn_tanh" else 1
    for hidden in range(1, 513):
        for batch in (1, 8, 9, 128, 1000):
            found = plan.rnn(mode, dtype, hidden, 2, batch, gpu)
            if isinstance(found, str):
                assert gpu is A100 and hidden > (96 if lanes == 1 else 192)
                continue
            assert found.units >= hidden
            assert found.shared_bytes <= gpu.shared_bytes
            if gpu is H200:
                assert plan.backward_reason(found, gpu) is None
            threads = found.warps * 32
            assert threads <= 512 and found.grid.threads == threads
            # With 40 registers beside weights and sums, a block's fit a processor.
            registers = 8 * found.held + 16 * found.tiles + 40
            assert registers <= 255 and threads * registers <= 65536
            assert (
                found.cluster <= 16 and found.units % (8 * lanes * found.cluster) == 0
            )
            sequences = found.clusters // 2 * 8 * found.tiles
            assert batch <= sequences < batch + 8 * found.tiles
            assert kernels.recurrent(found) in kernels.RECURRENT_TEXTS


def test_clusters_take_more_sequences_where_there_are_many():
    few, many = (plan.rnn("lstm", "bfloat16", 512, 1, n, H200) for n in (128, 129))
    assert (few.tiles, few.clusters) == (1, 16) and (many.tiles, many.clusters) == (
        2,
        9,
    )
    assert "16 clusters of 8 blocks, each of 8 sequences" in str(few)


def test_weights_are_packed_as_lanes_read_them():
    for dtype, per_word in (("bfloat16", 2), ("float32", 1)):
        found = plan.RnnPlan("lstm", dtype, 64, 2, 1, 1)
        w = jnp.asarray(np.random.default_rng(0).standard_normal((4, 60, 60)), dtype)
        got = np.asarray(cuda._packed(found, w[None]))
        padded = np.zeros((4, 64, 64), np.uint32)
        bits = jax.lax.bitcast_convert_type(w, f"uint{16 * (3 - per_word)}")
        padded[:, :60, :60] = bits
        want = np.zeros((1, 2, 4, 2, found.depth, 32, 4), np.uint32)
        for *at, lane, i in np.ndindex(want.shape):
            _, block, warp, half, k = at
            gate, unit = 2 * half + i % 2, block * 32 + warp * 8 + lane // 4
            word = k * 8 + i // 2 * 4 + lane % 4
            values = padded[gate, unit, word * per_word : (word + 1) * per_word]
            want[*at, lane, i] = sum(int(v) << (16 * j) for j, v in enumerate(values))
        np.testing.assert_array_equal(got, want)
