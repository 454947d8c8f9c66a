"""Tests of `ostinato.explain` for step functions and cells."""

import dataclasses
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from tolerance import assert_same_bits

import ostinato as ost
from ostinato import _native, cells
from ostinato._recurrent import explanation

native = pytest.mark.skipif(
    _native.status().library is None, reason="there is no native library"
)
X, H_0, W = jnp.ones((8, 5, 4)), jnp.zeros((8, 4)), jnp.eye(4)


def step(w, h, x, t):
    h = jnp.tanh(x @ w + h @ w)
    return h, h


def sorting(w, h, x, t):
    h = jnp.sort(x @ w + h @ w)
    return h, h


@pytest.mark.parametrize(
    "cell", [cells.MILSTM(4, 5), cells.LSTM(4, 5), cells.LRU(4, 5)]
)
def test_float64_of_numpy_is_explained_without_a_warning(cell):
    with jax.enable_x64(False):
        told, want = (ost.explain(cell, f.ones((8, 5, 4))) for f in (np, jnp))
    assert str(told) == str(want)


@native
def test_a_step_in_the_cpu_loop_is_counted():
    told = ost.explain(step, X, H_0, params=W)
    assert told.backend == "cpu" and not told.rejected
    words = (
        r"cpu loop: \d operations forward, \d+ backward, 1 product a step, 1 hoisted; "
    )
    assert re.fullmatch(words + r"stored \d x \[8, 4\]", str(told))
    assert ost.explain(cells.MILSTM(4, 5), X).backend == "cpu"


@native
def test_what_the_cpu_loop_lacks_is_named_with_its_line():
    told = ost.explain(sorting, X, H_0, params=W)
    assert told.backend == "xla"
    assert re.match(r"xla: `sort` at \S*test_explain.py:\d+ \(sorting\)\n", str(told))
    with pytest.raises(NotImplementedError, match=r"`sort` at .*test_explain.py"):
        ost.recurrent_net(sorting, X, H_0, params=W, backend="cpu")


@native
def test_values_to_recompute_have_no_line():
    def step(p, states, x, t):
        h, count = states
        h = jnp.tanh(x @ p + h @ p)
        return (h, count + jnp.int8(1)), h

    states = jnp.ones((3, 4)), jnp.zeros(3, jnp.int8)
    for recompute, what in (
        (False, r"`add` at .*:\d+"),
        (True, "a value to recompute"),
    ):
        with pytest.raises(NotImplementedError, match=what + ".* int8 .* 127"):
            ost.recurrent_net(
                step, jnp.ones((3, 5, 4)), states, params=jnp.eye(4),
                recompute=recompute, backend="cpu",
            )  # fmt: skip


@native
def test_gradients_elsewhere_are_told():
    cell, x = cells.LSTMP(4, 5, proj_size=4), jnp.ones((3, 5, 4), jnp.bfloat16)
    told = ost.explain(cell, x, return_all_states=True)
    assert told.backend == "cpu"
    assert re.search(r"\d+ operations, .* forward; gradients on xla: ", str(told))
    params, states = (
        cell.init(jax.random.key(0), x.dtype),
        cell.initial_state(3, x.dtype),
    )

    def loss(p):
        out = ost.recurrent_net(cell, x, states, params=p, return_all_states=True)
        return jnp.sum(out.outputs, dtype=jnp.float32)

    calls = (jax.jit(f).lower(params).as_text() for f in (loss, jax.grad(loss)))
    assert ["ostinato_step" in text for text in calls] == [True, False]


LACKING: dict[str, tuple[Callable, str]] = {
    "a convolution of the state": (
        lambda h: lax.conv_general_dilated(h[:, None], W[:1, None], (1,), "SAME")[:, 0],
        r"`conv_general_dilated` at",
    ),
    "an element chosen by the state": (
        lambda h: h * jnp.stack([W, W])[jnp.argmax(h, 1) % 2, :, jnp.argmin(h, 1)],
        r"`gather` at .*: it indexes axes that are apart",
    ),
    "a loop of unknown length": (
        lambda h: lax.while_loop(lambda a: a.sum() > 9, lambda a: a / 2, h),
        r"`while` at",
    ),
    "many iterations": (
        lambda h: lax.fori_loop(0, 99, lambda i, a: jnp.sin(a), h),
        r"`scan` at .*: it has a long `scan`",
    ),
    "a branch that leaves out work": (
        lambda h: lax.cond(
            W[0, 0] > 0,
            lambda a: jnp.tile(a, (1, 5000)) @ jnp.tile(W, (5000, 1)),
            jnp.sin,
            h,
        ),
        r"`cond` at .*: .* leaves out much work",
    ),
    "a mean over sequences": (
        lambda h: h - h.mean(axis=0, keepdims=True),
        r"at .*: it combines different sequences",
    ),
    "bits of integers": (
        lambda h: h * ((h > 0).astype(jnp.int32) ^ 3).astype(h.dtype),
        r"`xor` at .*: `xor` of integers",
    ),
    "a float cut to an integer": (
        lambda h: h * h.astype(jnp.int32).astype(h.dtype),
        r"`convert_element_type` at .*: it converts to integers",
    ),
}


@native
@pytest.mark.parametrize("name", LACKING)
def test_every_fallback_says_why_and_where(name):
    function, words = LACKING[name]

    def step(w, h, x, t):
        h = jnp.tanh(x @ w + function(h) @ w)
        return h, h

    told = ost.explain(step, X, H_0, params=W)
    assert told.backend == "xla"
    assert re.search(words, told.rejected["cpu"])
    assert "test_explain.py:" in told.rejected["cpu"]


def test_a_step_with_little_work_is_told_in_two_sentences():
    told = ost.explain(lambda p, h, x, t: (jnp.sort(h + x), h), X, jnp.zeros((8, 4)))
    assert str(told).splitlines() == [
        "xla: a step has too little work for another loop to be quicker",
        "the loop runs as `lax.scan` of the step",
    ]


@native
@pytest.mark.parametrize(
    ("batch", "units", "wanted"), [(1, 4, "xla"), (4, 2, "xla"), (2, 4, "cpu")]
)
def test_steps_with_hardly_any_products_run_as_scan(batch, units, wanted):
    """XLA multiplies the smallest matrices alone in registers, as gradients need it."""

    def dense(w, h, x, t):
        h = jnp.tanh(x @ w + h @ w)
        return h, h

    x, h = jnp.zeros((batch, 100, units)), jnp.zeros((batch, units))
    assert ost.explain(dense, x, h, params=jnp.eye(units)).backend == wanted


@native
def test_many_sequences_of_few_steps_run_as_scan():
    def backend(batch, steps, units):
        x = jax.ShapeDtypeStruct((batch, steps, units), X.dtype)
        h, w = jnp.zeros((batch, units)), jnp.eye(units)
        told = ost.explain(step, x, h, params=w)
        if told.backend == "xla":
            assert "too few steps" in told.rejected["cpu"]
        return told.backend

    assert backend(256, 1, 64) == backend(256, 4, 8) == "xla"
    assert backend(255, 1, 64) == backend(256, 9, 8) == backend(256, 2, 64) == "cpu"


@native
def test_few_sequences_of_narrow_rows_run_on_xla_without_gradients():
    def gates(a, h, x, t):
        z, r = jax.nn.sigmoid(a * h + x), jax.nn.sigmoid(x - a * h)
        h = (1 - z) * h + z * jnp.tanh(x + a * r * h)
        return h, h

    def calls(batch, units, lengths=None):
        """Return in what the native loop is called: without gradients, and with."""
        x, h = jnp.ones((batch, 20, units)), jnp.ones((batch, units))
        net = lambda a: ost.recurrent_net(  # noqa: E731
            gates, x, h, params=a, seq_lengths=lengths
        ).outputs.sum()
        told = ost.explain(gates, x, h, params=0.5, seq_lengths=lengths)
        found = [
            "ostinato_step" in jax.jit(f).lower(0.5).as_text()
            for f in (net, jax.grad(net))
        ]
        assert found[1] == (told.backend == "cpu")
        assert ("without gradients on xla" in told.why) == (found[1] and not found[0])
        return found

    assert calls(16, 4) == [False, True]
    assert calls(16, 8) == calls(16, 4, [9] * 16) == [True, True]


@native
def test_narrow_rows_of_columns_and_small_matrices_run_as_scan():
    def pendulum(a, s, u, t):
        for _ in range(4):
            s = s + 0.05 * jnp.stack([s[:, 1], u - a * jnp.sin(s[:, 0])], 1)
        return s, s

    def covariance(a, p, x, t):
        f = jnp.eye(p.shape[-1])[None] + 0.01 * x[:, :, None] * x[:, None, :]
        p = jnp.einsum("bij,bjk,blk->bil", f, p, f) + a
        return p, p

    def backend(step, x, states, **options):
        return ost.explain(step, x, states, params=0.5, **options).backend

    x = jnp.ones((16, 20, 3))
    assert backend(pendulum, x[..., 0], jnp.ones((16, 2))) == "xla"
    for batch, want in ((15, "cpu"), (16, "xla")):
        u, lengths = x[:batch, :, 0], jnp.full(batch, 9)
        assert backend(pendulum, u, jnp.ones((batch, 2)), seq_lengths=lengths) == want
    assert backend(covariance, x, jnp.ones((16, 3, 3))) == "xla"
    x = jnp.ones((16, 20, 4))
    assert backend(covariance, x, jnp.ones((16, 4, 4))) == "cpu"


@native
def test_many_operations_on_a_number_of_each_sequence_train_natively():
    def neuron(a, s, x, t):
        v, w = s
        for _ in range(8):
            w = w + 0.01 * (jnp.exp(-v) - w)
            v = v + 0.01 * (x - a * w * jnp.tanh(v))
        return (v, w), v

    def without_gradients(batch, lengths=None):
        x, states = jnp.ones((batch, 20)), (jnp.ones(batch), jnp.ones(batch))
        told = ost.explain(neuron, x, states, params=0.5, seq_lengths=lengths)
        assert told.backend == "cpu"
        return "xla" if "without gradients on xla" in told.why else "cpu"

    assert without_gradients(64) == without_gradients(8, [9] * 8) == "xla"
    assert without_gradients(65) == without_gradients(9, [9] * 9) == "cpu"


@native
def test_xla_runs_narrow_rows_whose_gradients_it_runs_too():
    columns = np.array([1, 3])

    def step(a, memory, x, t):
        new = memory[:, :2]
        for _ in range(9):
            new = jnp.sin(a * new)
        return memory.at[:, columns].set(new), new

    told = ost.explain(step, jnp.ones((8, 5, 2)), jnp.ones((8, 6)), params=0.5)
    assert told.backend == "xla"
    why = r"without gradients, the rows are narrow; with them, `select_n` at .*step"
    assert re.match(why, told.rejected["cpu"])


@native
def test_several_sequences_of_narrow_rows_run_as_scan():
    def smooth(a, h, x, t):
        h = a * h + (1 - a) * jnp.sin(x + h)
        return h, h

    def backend(batch, units, lengths=None, step=smooth):
        x = jax.ShapeDtypeStruct((batch, 1000, units), X.dtype)
        h, a = jnp.zeros((batch, units)), jnp.ones((1, units))
        told = ost.explain(step, x, h, params=a, seq_lengths=lengths)
        if told.backend == "xla":
            assert "too narrow" in told.rejected["cpu"]
        return told.backend

    def alone(a, h, x, t):  # products of one term are none
        h = jnp.tanh(h @ a + jnp.sin(x) + h)
        return h, h

    def decay(a, h, x, t):
        h = a * h + x
        return h, h

    assert backend(64, 7, step=decay) == backend(64, 7, [9] * 64, decay) == "xla"
    assert backend(63, 7, step=decay) == backend(64, 8, step=decay) == "cpu"
    assert backend(64, 1, step=alone) == backend(256, 1, [9] * 256, alone) == "xla"
    assert backend(63, 1, step=alone) == backend(255, 1, [9] * 255, alone) == "cpu"
    # `a` has a number for each feature.
    assert backend(64, 7) == backend(1000, 1) == backend(64, 7, [9] * 64) == "cpu"

    def alphas(a, h, x, t):  # of a hidden Markov model
        h = jax.nn.logsumexp(h[:, :, None] + a[0], 1) + x
        return h, h

    def memory(a, h, x, t):  # of which one entry is written
        h = h.at[:, t % 50].set(jnp.sin(a * x + jnp.cos(h[:, t % 25])))
        return h, h[:, 0]

    with jax.numpy_rank_promotion("allow"):
        assert backend(2, 8, step=alphas) == backend(200, 8, step=alphas) == "xla"
        assert backend(2, 9, step=alphas) == backend(2, 8, [9] * 2, alphas) == "cpu"
        x = jax.ShapeDtypeStruct((9, 1000, 8), X.dtype)
        told = ost.explain(memory, x, jnp.zeros((9, 50, 8)), params=jnp.ones((1, 8)))
        assert told.backend == "cpu"


def of_all(memory, t):
    return lax.dynamic_update_index_in_dim(memory, memory[:, 0] + 1, t % 9, 1)


def of_each(memory, t):
    rows = jnp.arange(8)
    return memory.at[rows, jnp.argmax(memory[:, 0], -1)].add(1)


def of_two_axes(memory, t):
    return memory.at[:, t % 9, t % 4].add(1)


def several(memory, t):
    return lax.dynamic_update_slice_in_dim(memory, memory[:, :2] + 1, t % 3, 1)


def read_after(memory, t):
    new = memory.at[:, t % 3].set(1)
    return new.at[:, t % 5].add(memory[:, t % 7])


def by_multiplying(memory, t):
    return memory.at[:, t % 9].multiply(2)


@native
@pytest.mark.parametrize(
    ("write", "slots", "lengths", "is_scan"),
    [
        (of_all, 4, None, False),
        (of_all, 400, None, False),
        (of_all, 400, [5] * 8, False),
        (of_each, 400, None, False),
        (of_each, 400, [5] * 8, False),
        (several, 400, None, False),
        (several, 400, [5] * 8, False),
        (of_two_axes, 400, None, False),
        (read_after, 400, None, False),
        (by_multiplying, 400, None, True),
        (by_multiplying, 400, [5] * 8, True),
    ],
)
def test_parts_of_large_arrays_are_written_by_scan(write, slots, lengths, is_scan):
    def writing(w, states, x, t):
        h, memory = states
        h = jnp.tanh(x @ w + h @ w)
        return (h, write(memory, t)), h

    states = H_0, jnp.zeros((8, slots, 4))
    told = ost.explain(writing, X, states, params=W, seq_lengths=lengths)
    assert ("in its place" in told.rejected.get("cpu", "")) == is_scan
    if is_scan:
        run = lambda backend: ost.recurrent_net(  # noqa: E731
            writing, X, states, params=W, seq_lengths=lengths, backend=backend
        )
        jax.tree.map(assert_same_bits, run(None), run("scan"))


def test_other_reasons():
    told = ost.explain(step, X, H_0, params=W, backend="scan")
    assert "lax.scan" in told.why and "'scan'" in told.rejected["cpu"]
    told = ost.explain(step, X, H_0, params=W, backend="xla")
    assert told.backend == "xla" and "before the loop" in told.why
    same = ost.explain(cells.LSTM(4, 5), X)
    assert same == ost.explain(cells.LSTM(4, 5).spec, X)


def test_parameters_that_are_no_arrays_stay_as_they_are():
    def step(p, h, x, t):
        for _ in range(p["n"]):
            h = jnp.tanh(x @ p["w"] + h @ p["w"])
        return h, h

    given = {"w": W, "n": 3, "name": "three"}
    told = ost.explain(step, X, H_0, params=given)
    ost.recurrent_net(step, X, H_0, params=given)
    assert "3 products a step" in str(told) or told.backend == "xla"
    shapes = given | {"w": jax.ShapeDtypeStruct(W.shape, W.dtype)}
    assert ost.explain(step, X, H_0, params=shapes) == told


RESETS = jnp.zeros((8, 5), bool)
WHOLE = {
    "time-first": ({"time_major": True}, X),
    "padding": ({"padding": "zero", "seq_lengths": [5] * 8}, X),
    "resets": ({"resets": RESETS}, X),
    "names": ({"recompute": False, "outputs_with_grads": True}, X),
    "half precision": ({}, X.astype("float16")),
}


@pytest.mark.parametrize("name", WHOLE)
def test_cells_that_run_on_the_operator_are_told_so(name):
    options, x = WHOLE[name]
    cell = cells.LSTM(4, 5)
    assert ost.explain(cell, x, **options) == ost.explain(cell.spec, x)
    assert cells.explain(cell, x, **options) == ost.explain(cell.spec, x)


def test_wrappers_are_told_as_what_they_run():
    lstm, gated, key = cells.LSTM(4, 4), cells.MinGRU(4, 4), jax.random.key(0)
    drop = lambda cell, **rates: cells.Dropout(cell, **rates).sample(key, 8)  # noqa: E731
    for inner in (lstm, gated):
        want = ost.explain(inner, X)
        around = drop(inner, inputs=0.5), cells.Residual(drop(inner, outputs=0.5))
        for cell in around:
            assert ost.explain(cell, X) == cells.explain(cell, X) == want
    told = cells.explain(drop(lstm, states=0.5), X)
    assert told.backend == "xla" and "Dropout" in told.rejected["cpu"]


def test_the_backend_of_a_linear_cell_is_told():
    cell = cells.MinGRU(4, 5)
    told = ost.explain(cell, X, backend="xla")
    assert told == ("xla", "one linear recurrence over all steps", {})
    for options in ({"backend": "scan"}, {"segment_length": 2}):
        assert "in a loop" in cells.explain(cell, X, **options).why
        assert "linear recurrence" not in ost.explain(cell, X, **options).why
    assert "`gates`" in cells.explain(cell, X, recompute=("a",)).rejected["cpu"]
    if not ost.backends()["cuda"]:
        for network in (cell, cells.LSTM(4, 5)):
            with pytest.raises(ost.BackendError, match="'cuda' cannot run this"):
                ost.explain(network, X, backend="cuda")


@native
def test_a_linear_cell_on_the_cpu_backend():
    told = ost.explain(cells.MinGRU(4, 5), X, backend="cpu")
    assert told == ("cpu", "one linear recurrence over all steps", {})


@pytest.mark.parametrize(
    "arguments, options, words",
    [
        ((step, X, H_0), {"lengths": 3}, "no argument lengths"),
        ((cells.LSTM(4, 5), X), {"lengths": 3}, "no argument lengths"),
        ((step, X), {}, "`initial_states` must be given"),
        ((3, X), {}, "an RNNSpec, a cell or a step function"),
        ((ost.RNNSpec("gru", 4, 5), X), {"window": 2}, "no further arguments"),
    ],
    ids=[
        "unknown option",
        "of a cell",
        "no states",
        "not a network",
        "options of a spec",
    ],
)
def test_errors(arguments, options, words):
    with pytest.raises(TypeError, match=words):
        ost.explain(*arguments, **options)


@native
def test_layers_and_directions_are_explained_one_by_one():
    loop = cells.MILSTM(4, 5)
    both = cells.Bidirectional(loop, cells.GRU(4, 3))
    stack = cells.Stack((both, cells.LSTM(8, 4), cells.Residual(cells.LRU(4, 4))))
    told = ost.explain(stack, X)
    inputs = {c: jnp.ones((8, 5, c.input_size)) for c in stack.cells}
    each = [ost.explain(c, x) for c, x in inputs.items()]
    assert told.backend == "cpu"
    assert "; cells[1], cells[2]: " in told.rejected["cuda"]
    flat = lambda told: re.sub(r"\n +", "\n", str(told))  # noqa: E731
    text = "".join(f"\ncells[{n}]: {flat(one)}" for n, one in enumerate(each))
    assert flat(told) == f"cpu: cell after cell{text}"
    assert flat(each[0]) == (
        f"cpu: cell after cell\nforward: {ost.explain(loop, X)}\n"
        f"backward: {ost.explain(cells.GRU(4, 3), X, reverse=True)}"
    )
    stack = cells.Stack((loop, cells.MILSTM(5, 3)))  # all layers at each step: one loop
    assert str(ost.explain(stack, X, segment_length=2)).startswith("cpu loop: ")


def test_layers_that_run_on_two_backends_are_told_apart():
    @dataclasses.dataclass(frozen=True)
    class Sorting(cells.SizedCell):
        input_size = output_size = 4

        def init(self, key, dtype=jnp.float32):
            return W

        def initial_state(self, batch, dtype=jnp.float32):
            return jnp.zeros((batch, 4), dtype)

        def step(self, params, states, inputs_t, t):
            return sorting(params, states, inputs_t, t)

    told = ost.explain(cells.Stack((cells.MILSTM(4, 4), Sorting())), X)
    assert "cells[1]: `sort` at " in told.rejected["cpu"]


NOT_RUN = {
    "a GPU that is not there": (cells.PeepholeLSTM(4, 4), {"backend": "cuda"}),
    "a backend that lacks the step": (sorting, {"backend": "cpu"}),
    "lengths": (cells.LSTM(4, 4), {"seq_lengths": [9] * 8}),
    "padding": (cells.MinGRU(4, 4), {"padding": "none"}),
    "reverse": (cells.Bidirectional(cells.LSTM(4, 4)), {"reverse": True}),
    "resets": (cells.Bidirectional(cells.MILSTM(4, 4)), {"resets": RESETS}),
    "window": (cells.Stack((cells.LSTM(4, 4),)), {"window": 2}),
}


@pytest.mark.parametrize("name", NOT_RUN)
def test_what_the_call_raises_is_raised(name):
    network, options = NOT_RUN[name]
    if name == "a GPU that is not there" and ost.backends()["cuda"]:
        pytest.skip("it is there")
    states = params = None
    if network is sorting:
        states, params = H_0, W
    with pytest.raises(Exception) as told:
        ost.explain(network, X, states, params=params, **options)
    if network is not sorting:
        states = network.initial_state(8, X.dtype)
        params = network.init(jax.random.key(0), X.dtype)
    with pytest.raises(told.type) as raised:
        ost.recurrent_net(network, X, states, params=params, **options)
    assert str(told.value) == str(raised.value)


def test_integers_are_refused():
    for network in (ost.RNNSpec("gru", 4, 4), cells.LSTM(4, 4)):
        with pytest.raises(TypeError, match="dtype"):
            ost.explain(network, jnp.ones((8, 5, 4), int))


@dataclasses.dataclass(frozen=True)
class Gated(cells.SizedCell):
    """A cell of a user, of inputs in a dict."""

    input_size: int = 4
    output_size: int = 4

    def init(self, key, dtype=jnp.float32):
        return jnp.eye(4, dtype=dtype)

    def initial_state(self, batch, dtype=jnp.float32):
        return jnp.zeros((batch, 4), dtype)

    def step(self, params, h, x, t):
        h = jnp.tanh(h @ params + x["x"]) * x["gate"]
        return h, h


def test_inputs_of_a_cell_may_be_a_pytree():
    x = {"x": X, "gate": X}
    want = ost.explain(lambda p, h, x, t: Gated().step(p, h, x, t), x, H_0, params=W)
    assert ost.explain(Gated(), x) == want
    swapped = jax.tree.map(lambda a: a.swapaxes(0, 1), x)
    assert ost.explain(Gated(), swapped, time_major=True).backend == want.backend
    for wrong in ({}, {"x": 3.0}, {"x": jnp.ones(4)}):
        with pytest.raises(TypeError, match=r"`x` must be inputs \[B, T, ...\]"):
            ost.explain(Gated(), wrong)


def two_factors(w, h, x, t):
    gate = jax.nn.sigmoid(x @ w)
    h = gate * jnp.tanh(x + h @ w) + jnp.sin(h)
    return h, h


@native
@pytest.mark.parametrize("options", [{}, {"recompute": True}], ids=str)
def test_what_is_stored_is_what_the_backward_pass_is_given(options):
    def loss(w):
        out = ost.recurrent_net(two_factors, X, H_0, params=w, **options)
        return jnp.sum(out.outputs)

    told = str(ost.explain(two_factors, X, H_0, params=W, **options))
    stored = re.search(r"stored (\d+) x \[8, 4\]", told)
    equations = jax.make_jaxpr(jax.grad(loss))(W).eqns
    (loop,) = (e for e in equations if e.primitive.name == "ostinato_loop")
    steps = [v.aval.shape for v in loop.outvars].count((5, 8, 4))
    outputs = 1
    assert stored is not None and int(stored[1]) == steps - outputs
    if not options:
        assert steps - outputs > 1


@pytest.mark.parametrize("lengths", [None, np.full(len(X), 2)], ids=["all", "some"])
def test_the_loop_that_is_explained_has_the_lengths_of_the_call(lengths, monkeypatch):
    """A kernel for sequences that end differs, and so may what is told of it."""
    told, describe = [], explanation.description.describe

    def noted(loop, origins):
        told.append(loop)
        return describe(loop, origins)

    monkeypatch.setattr(explanation.description, "describe", noted)
    ost.explain(two_factors, X, H_0, params=W, seq_lengths=lengths)
    (loop,) = told
    assert loop.masked == (lengths is not None)


pytestmark = native


OF_THE_STEP = {
    "the step has PRNG keys": lambda h: (
        h + jax.random.normal(jax.random.key(jnp.argmax(h)), h.shape, h.dtype)
    ),
    "the step has complex values": lambda h: jnp.abs(jax.lax.complex(h, h)),
    "the step has effects: Debug": lambda h: (
        jax.debug.callback(lambda: None), h,
    )[1],
}  # fmt: skip


@pytest.mark.parametrize("words", OF_THE_STEP)
def test_what_no_other_loop_takes_is_said_of_the_step(words):
    def step(w, h, x, t):
        h = jnp.tanh(x @ w + OF_THE_STEP[words](h) @ w)
        return h, h

    told = ost.explain(step, X, H_0, params=W)
    assert told.backend == "xla"
    assert told.rejected["cpu"] == words
