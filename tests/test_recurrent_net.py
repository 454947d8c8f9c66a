"""Tests of values of `recurrent_net` against a loop in numpy and closed forms."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closures import fast_jit
from jax import lax
from oracles import net64
from tolerance import assert_close, assert_same_bits

import ostinato as ost
from ostinato._recurrent.protocol import Cell

T, B = 5, 4
LENGTHS = (3, 0, 5, 1)
PADDINGS = ("hold", "zero", "drop")


class Outputs(NamedTuple):
    y: Any
    more: dict


def rng_array(seed, *shape):
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def mixed(xp):
    """Return a step with several inputs, states and outputs, in numpy or in JAX."""

    def step(params, states, inputs, t):
        x, code = inputs["x"], inputs["code"]
        h, (count, total) = states["h"], states["more"]
        new_h = xp.tanh(
            x @ params["w"] + h @ params["u"] + 0.1 * xp.asarray(t, x.dtype)
        )
        count = count + code
        total = xp.sin(total) + new_h[..., :1] * x[..., :1]
        outputs = Outputs(y=new_h[..., :2] * total, more={"count": 2 * count})
        return {"h": new_h, "more": (count, total)}, outputs

    return step


def mixed_arguments(seed=0, batch=B, steps=T):
    rng = np.random.default_rng(seed)
    params = {"w": rng_array(1, 2, 3), "u": rng_array(2, 3, 3)}
    inputs = {
        "x": rng.standard_normal((batch, steps, 2)),
        "code": rng.integers(0, 9, (batch, steps)),
    }
    states = {
        "h": rng.standard_normal((batch, 3)),
        "more": (rng.integers(0, 9, batch), rng.standard_normal((batch, 1))),
    }
    return params, inputs, states


def poison(inputs, lengths):
    """Set inputs past the ends to NaN, and codes to indices out of range."""
    past = np.arange(T) >= np.asarray(lengths)[:, None]
    x = np.where(past[..., None], np.nan, inputs["x"])
    return {"x": x, "code": np.where(past, -(10**9), inputs["code"])}


def assert_trees_close(got, want, terms=100):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, a), b in zip(
        jax.tree_util.tree_flatten_with_path(got)[0], jax.tree.leaves(want), strict=True
    ):
        assert_close(a, b, dtype="float64", terms=terms, what=str(path))


@functools.partial(fast_jit, static_argnames=("reverse", "padding"))
def both_layouts(inputs, states, params, lengths, resets, **options):
    """Run `recurrent_net` over batch-first and over time-first arrays."""
    first = lambda tree: jax.tree.map(lambda a: jnp.swapaxes(a, 0, 1), tree)  # noqa: E731

    def run(inputs, resets, **layout):
        return ost.recurrent_net(
            mixed(jnp), inputs, states, params=params, seq_lengths=lengths,
            resets=resets, return_all_states=True, **layout, **options,
        )  # fmt: skip

    turned = run(first(inputs), first(resets), time_major=True)
    return run(inputs, resets), turned._replace(
        outputs=first(turned.outputs), all_states=first(turned.all_states)
    )


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("lengths", [None, LENGTHS, (5, 5, 5, 5), (0, 0, 2, 0)])
@pytest.mark.parametrize("resets", [False, True])
def test_pytrees_match_a_numpy_loop(padding, reverse, lengths, resets):
    if reverse and resets:
        return  # an error: see test_recurrent_net_errors
    params, inputs, states = mixed_arguments()
    resets = np.random.default_rng(3).random((B, T)) < 0.4 if resets else None
    want = net64.run(
        mixed(np), inputs, states, params=params, lengths=lengths, resets=resets,
        reverse=reverse, padding=padding,
    )  # fmt: skip
    if lengths is not None:
        inputs, lengths = poison(inputs, lengths), np.array(lengths)
    got, turned = both_layouts(
        inputs, states, params, lengths, resets, reverse=reverse, padding=padding
    )
    assert_trees_close(got, ost.RecurrentOutput(*want))
    jax.tree.map(assert_same_bits, got, turned)


@pytest.mark.parametrize("steps, batch", [(1, 3), (2, 3), (4, 3), (4, 1)])
@pytest.mark.parametrize("padding", ["hold", "drop"])
@pytest.mark.parametrize("kind", ["sum_mul", "mul"])
def test_sums_and_products_as_in_caffe2(kind, padding, steps, batch):
    """Check Caffe2's test nets, h' = x (x + h) and h' = x h, whose output is h'."""

    def step(params, h, x, t):
        h = x * (x + h) if kind == "sum_mul" else x * h
        return h, h

    x, h_0 = rng_array(steps, batch, steps, 2), rng_array(9, batch, 2)
    run = fast_jit(
        lambda lengths: ost.recurrent_net(
            step, x, h_0, seq_lengths=lengths, padding=padding, return_all_states=True
        )
    )
    for n in range(steps + 1):
        lengths = (np.arange(batch) + n) % (steps + 1)
        got = jax.tree.map(np.asarray, run(lengths))
        for b, length in enumerate(lengths):
            h, states = h_0[b], [h_0[b]]
            for t in range(length):
                h = x[b, t] * (x[b, t] + h) if kind == "sum_mul" else x[b, t] * h
                states.append(h)
            rest = 0 * h if padding == "drop" else h
            every = np.stack([*states[1:], *[rest] * (steps - length)])
            assert_close(got.all_states[b], every)
            last = rest if length < steps else h
            assert_close(got.states[b], last)
            # The same, without outputs where no step ran.
            assert_close(got.outputs[b], every * (length > 0))


def test_position_is_counted_from_the_front_in_both_directions():
    step = lambda params, s, x, t: (s, jnp.full(B, t))  # noqa: E731
    for reverse in (False, True):
        out = ost.recurrent_net(step, None, jnp.zeros(B), length=T, reverse=reverse)
        assert out.outputs.dtype == jnp.int32
        assert (np.asarray(out.outputs) == np.arange(T)).all()


def test_length_runs_a_step_without_inputs():
    def logistic_map(r, x, nothing, t):
        assert nothing is None
        x = r * x * (1 - x)
        return x, x

    out = ost.recurrent_net(
        logistic_map, None, jnp.array([0.2, 0.7]), params=3.1, length=4
    )
    x = np.array([0.2, 0.7])
    for t in range(4):
        x = 3.1 * x * (1 - x)
        assert_close(out.outputs[:, t], x)
    assert_close(out.states, x)


def test_length_may_repeat_what_the_inputs_say():
    x = jnp.ones((B, T))
    assert ost.recurrent_net(lambda p, s, x, t: (s, x), x, x[:, 0], length=T)


@pytest.mark.parametrize("options", [{}, {"segment_length": 2}, {"recompute": True}])
@pytest.mark.parametrize("padding", PADDINGS)
def test_no_steps_return_the_initial_states(padding, options):
    params, inputs, states = mixed_arguments(steps=0)
    run = functools.partial(
        ost.recurrent_net, mixed(jnp), seq_lengths=np.zeros(B, int),
        padding=padding, return_all_states=True, **options,
    )  # fmt: skip
    out = fast_jit(run)(inputs, states, params=params)
    jax.tree.map(assert_same_bits, out.states, jax.tree.map(jnp.asarray, states))
    assert out.outputs.y.shape == (B, 0, 2)
    assert out.all_states["h"].shape == (B, 0, 3)


def test_no_rows_are_allowed():
    params, inputs, states = mixed_arguments(batch=0)
    out = ost.recurrent_net(
        mixed(jnp), inputs, states, params=params, seq_lengths=np.zeros(0, int),
        segment_length=2,
    )  # fmt: skip
    assert out.outputs.y.shape == (0, T, 2)


@pytest.mark.parametrize("window", [2, 3])
def test_window_matches_one_convolution_over_what_it_made(window):
    kernel = rng_array(1, window)
    slots, x = rng_array(2, B, window, 3), rng_array(3, B, T, 3)

    def step(kernel, past, x, t):
        assert past.shape == (B, window, 3)
        new = jnp.einsum("k,bkd->bd", kernel, past) + x
        return new, new

    run = functools.partial(
        ost.recurrent_net, step, window=window, return_all_states=True
    )
    out = jax.tree.map(np.asarray, fast_jit(run)(x, slots, params=kernel))
    made = np.concatenate([slots, out.outputs], axis=1)
    for b in range(B):
        for d in range(3):
            want = np.correlate(made[b, :-1, d], kernel) + x[b, :, d]
            assert_close(out.outputs[b, :, d], want)
    assert_same_bits(out.all_states, out.outputs)
    assert_same_bits(out.states, made[:, -window:])


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("padding", PADDINGS)
def test_window_with_lengths_matches_a_numpy_loop(padding, reverse):
    def step(xp):
        def one(params, past, x, t):
            new = xp.tanh(past[..., 0, :] - 0.5 * past[..., 1, :] + x)
            return new, new[..., :1]

        return one

    slots, x = rng_array(2, B, 2, 3), rng_array(3, B, T, 3)
    resets = None if reverse else np.random.default_rng(3).random((B, T)) < 0.3
    options = {"reverse": reverse, "padding": padding, "window": 2, "resets": resets}
    want = net64.run(step(np), x, slots, lengths=LENGTHS, **options)
    run = functools.partial(
        ost.recurrent_net, step(jnp), seq_lengths=LENGTHS, return_all_states=True,
        **options,
    )  # fmt: skip
    got = fast_jit(run)(x, slots)
    assert_trees_close(got, ost.RecurrentOutput(*want))


def lstm_step(xp_sigmoid, tanh, xp):
    def step(params, states, x, t):
        h, c = states
        gates = x @ params["w_ih"].T + h @ params["w_hh"].T + params["b"]
        i, f, g, o = xp.split(gates, 4, axis=-1)
        c = xp_sigmoid(f) * c + xp_sigmoid(i) * tanh(g)
        h = xp_sigmoid(o) * tanh(c)
        return (h, c), h

    return step


@pytest.mark.parametrize("padding", ["zero", "drop"])
def test_lstm_written_as_a_step_equals_the_fused_operator(padding):
    spec = ost.RNNSpec("lstm", 3, 5, bias="input")
    weights = ost.init_weights(jax.random.key(0), spec, jnp.float64)
    layer = ost.unpack_weights(weights, spec)[0]
    params = {"w_ih": layer.w_ih, "w_hh": layer.w_hh, "b": layer.b_ih}
    step = lstm_step(jax.nn.sigmoid, jnp.tanh, jnp)
    step_of = lambda p, s, x, t: step(  # noqa: E731
        p | {"b": jnp.broadcast_to(p["b"], (B, 20))}, s, x, t
    )
    x, h, c = rng_array(1, B, T, 3), rng_array(2, B, 5), rng_array(3, B, 5)
    x = jnp.asarray(x)
    want = ost.rnn(
        spec, weights, x, (h[None], c[None]), seq_lengths=LENGTHS, padding=padding
    )
    got = ost.recurrent_net(
        step_of, x, (h, c), params=params, seq_lengths=LENGTHS, padding=padding
    )
    assert_close(got.outputs, want.y, terms=40)
    assert_close(got.states[0], want.state[0][0], terms=40)
    assert_close(got.states[1], want.state[1][0], terms=40)


def test_rows_of_16_bit_keep_their_dtype():
    x = jnp.ones((B, T, 2), jnp.bfloat16)
    step = lambda p, s, x, t: (s + x, (s * x).astype(jnp.float32))  # noqa: E731
    out = ost.recurrent_net(step, x, x[:, 0], seq_lengths=LENGTHS)
    assert out.states.dtype == jnp.bfloat16 and out.outputs.dtype == jnp.float32


def test_keys_may_be_inputs():
    keys = jax.random.split(jax.random.key(0), (B, T))

    def step(params, total, key, t):
        total = total + jax.vmap(jax.random.uniform)(key)
        return total, total

    out = ost.recurrent_net(step, keys, jnp.zeros(B), seq_lengths=LENGTHS)
    drawn = np.vectorize(lambda b, t: jax.random.uniform(keys[b, t]))(*np.mgrid[:B, :T])
    for b, n in enumerate(LENGTHS):
        assert_close(out.states[b], drawn[b, :n].sum())


def test_states_without_arrays_and_outputs_without_arrays():
    step = lambda p, s, x, t: (s, None)  # noqa: E731
    out = ost.recurrent_net(step, jnp.ones((B, T)), (), seq_lengths=LENGTHS)
    assert out == ost.RecurrentOutput(None, (), None)


# ------------------------------------------------------------------------------ cells


@dataclasses.dataclass(frozen=True)
class Elman(Cell):
    """A cell that uses every hook."""

    hoist: bool = True

    def init(self, key, dtype):
        return {
            "w": jnp.asarray(rng_array(1, 3, 3), dtype),
            "scale": jnp.ones(3, dtype),
        }

    def initial_state(self, batch, dtype):
        return jnp.zeros((batch, 3), dtype)

    def prepare(self, params):
        return params | {"w": params["w"] * params["scale"][:, None]}

    def precompute(self, params, inputs):
        return inputs @ params["w"] if self.hoist else inputs

    def step(self, params, states, inputs_t, t):
        gx = inputs_t if self.hoist else inputs_t @ params["w"]
        h = ost.tag(jnp.tanh(gx + states @ params["w"]), "h")
        return h, h


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"seq_lengths": LENGTHS},
        {"recompute": ("h",)},
        {"recompute": True, "seq_lengths": LENGTHS, "reverse": True},
        {"segment_length": 2},
    ],
)
def test_cell_equals_its_single_steps(options):
    cell = Elman()
    params = cell.init(jax.random.key(0), jnp.float64)
    x, h_0 = jnp.asarray(rng_array(2, B, T, 3)), cell.initial_state(B, jnp.float64)
    plain = lambda p, s, x, t: cell(p, s, x, t)  # noqa: E731
    want, got = (
        fast_jit(functools.partial(ost.recurrent_net, step, **options))(
            x, h_0, params=params
        )
        for step in (plain, cell)
    )
    assert_trees_close(got, want)


def test_cell_may_run_the_whole_sequence_itself():
    seen = []

    class Whole(Elman):
        def run_sequence(self, params, inputs, initial_states, options):
            seen.append(options)
            if options.reverse:
                return None
            return ost.RecurrentOutput({"x": inputs, "y": 2 * inputs}, initial_states)

    cell = Whole()
    params = cell.init(jax.random.key(0), jnp.float64)
    x, h_0 = jnp.asarray(rng_array(2, B, T, 3)), jnp.zeros((B, 3))

    def run(x, **options):
        return ost.recurrent_net(cell, x, h_0, params=params, **options)

    out = run(x, seq_lengths=LENGTHS, padding="zero", recompute=("h",))
    assert_same_bits(out.outputs["x"], x)
    assert (seen[0].length, seen[0].batch, seen[0].padding) == (T, B, "zero")
    assert seen[0].recompute == ("h",) and seen[0].seq_lengths.dtype == jnp.int32
    loss = lambda x: sum(  # noqa: E731
        jnp.sum(a) for a in run(x, outputs_with_grads=("y",)).outputs.values()
    )
    assert (jax.grad(loss)(x) == 2).all()  # the hook ignores cut outputs
    assert run(x, reverse=True).outputs.shape == (B, T, 3)


def test_cell_without_methods_says_which_it_lacks():
    bare = Cell()
    for method, arguments in (
        ("init", (None, None)),
        ("initial_state", (1, None)),
        ("step", (None, None, None, None)),
    ):
        with pytest.raises(
            NotImplementedError, match=f"Cell does not define `{method}`"
        ):
            getattr(bare, method)(*arguments)


rng = np.random.default_rng(0)


X, W = rng.random((2, 5, 3)), rng.random((3, 3))


def in_branch(p, h, x):
    named = lambda a: ost.tag(jnp.tanh(a), "gate") * h  # noqa: E731
    return lax.cond(h[0, 0] > 0, named, jnp.sin, x + h @ p)


def in_loop(p, h, x):
    def body(h, _):
        return ost.tag(jnp.tanh(x + h @ p), "gate") * h, None

    return lax.scan(body, h, None, length=2)[0]


@pytest.mark.parametrize("step", [in_branch, in_loop])
@pytest.mark.parametrize("backend", ["scan", None])
def test_a_name_inside_of_control_flow_is_found(step, backend):
    def loss(p, **options):
        def run(p, h, x, t):
            h = step(p, h, x)
            return h, h

        out = ost.recurrent_net(run, X, jnp.ones((2, 3)), params=p, **options)
        return jnp.sum(out.outputs)

    given = {"recompute": ("gate",), "backend": backend}
    both = fast_jit(lambda p: [jax.grad(loss)(p, **o) for o in (given, {})])
    got, want = both(W)
    np.testing.assert_allclose(got, want, rtol=1e-12)
    with pytest.raises(ValueError, match="the step has: 'gate'$"):
        loss(W, recompute=("gates",))


def nested(inner_options):
    """Return a step that runs a network over the 30 steps of an input."""

    def inner(p, h, x, t):
        h = ost.tag(jnp.tanh(jnp.cos(h @ p) + x), "inner")
        return h, h

    def outer(p, h, x, t):
        h = jnp.sin(h)
        options = {"params": p, "backend": "scan", **inner_options}
        h = ost.recurrent_net(inner, x, h, **options).states
        return h, h

    return outer


def test_a_network_in_a_step_does_not_decide_what_the_outer_one_stores():
    def memory(**inner):
        def loss(p, x, h):
            options = {"params": p, "backend": "scan", "recompute": True}
            return jnp.sum(ost.recurrent_net(nested(inner), x, h, **options).outputs)

        shapes = [(64, 64), (1, 40, 30, 64), (1, 64)]
        given = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        compiled = jax.jit(jax.grad(loss)).lower(*given).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert memory(recompute=("inner",)) < memory() + 4 * 30 * 64 * 4


def test_errors_about_names_show_none_of_the_package():
    with pytest.raises(ValueError, match="the step has: 'inner'$"):
        ost.recurrent_net(
            nested({"recompute": ("inner",)}), rng.random((1, 2, 3, 3)),
            jnp.ones((1, 3)), params=W, recompute=("other",),
        )  # fmt: skip
