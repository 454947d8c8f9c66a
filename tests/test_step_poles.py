"""Steps with poles at values that a sequence, or a branch, does not have."""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closures import fast_jit
from jax import lax
from test_step_hunt import assert_same, draw

import ostinato as ost
from ostinato._step.control_flow import without_control_flow
from ostinato._step.jaxprs import CHECKPOINTS, flat

native = pytest.mark.skipif(not ost.backends()["cpu"], reason="no native library")
both_orders = pytest.mark.parametrize(
    "reverse", [False, True], ids=["forward", "reverse"]
)
BACKENDS = "cpu", "scan"
B, T, F, H = 3, 5, 3, 4
LENGTHS = np.array([5, 2, 0])


def on_backends(run, *arguments):
    """Return what `run(backend, *arguments)` gives on each, from one program."""
    return fast_jit(lambda *a: [run(b, *a) for b in BACKENDS])(*arguments)


def assert_finite_and_same(got, want):
    assert all(np.isfinite(a).all() for a in jax.tree.leaves(want))
    assert_same(got, want)


def length_of(z):
    return jnp.linalg.norm(z, axis=-1, keepdims=True)


# ------------------------------------------------------------------- past the end


def direction(p, h, x, t):
    z = x @ p["w"] + h @ p["u"]
    h = z / length_of(z)
    return h, h


def inverse(p, h, x, t):
    gate = jnp.tanh(p["b"][None] * h + 1 / (x @ p["w"]))
    # All sequences share the last factor.
    return gate, jnp.log(h * h) / jnp.log(2 + t.astype(h.dtype) * p["c"] ** 2)


def across(p, h, x, t):
    """The sequences are in another axis of what is stored."""
    z = (h @ p["u"]).T
    z = (z / jnp.linalg.norm(z, axis=0, keepdims=True)).T
    return z + 0.1 * (x @ p["w"]), z


STEPS = [direction, inverse, across]
each_step = pytest.mark.parametrize("step", STEPS, ids=lambda s: s.__name__)


@native
def test_a_pole_of_t_past_the_end_is_as_the_page_says():
    """Check that a guard of `t` is enough everywhere, and which loop needs it."""
    steps, h_0, n = 12, jnp.zeros((3, 4)), np.array([12, 5, 8], np.int32)
    x = jnp.ones((3, steps, 4)), jnp.broadcast_to(n[:, None], (3, steps))

    def gradient(backend, guarded):
        def step(p, h, x, t):
            left = (x[1] - t).astype(float)
            left = jnp.where(left > 0, left, 1.0) if guarded else left
            h = jnp.tanh(0.1 * h + x[0]) * jnp.sqrt(p * left)[:, None]
            return h, h

        def loss(p):
            options = {"params": p, "seq_lengths": n, "backend": backend}
            return ost.recurrent_net(step, x, h_0, **options).states.sum()

        return fast_jit(jax.grad(loss))(0.1)

    want = gradient("scan", True)
    assert np.isfinite(want) and np.isnan(gradient("scan", False))
    for backend, guarded in [("cpu", True), ("cpu", False), ("xla", True)]:
        np.testing.assert_allclose(gradient(backend, guarded), want, rtol=1e-12)


def parameters():
    return {"w": draw(0, F, H), "u": draw(1, H, H), "b": draw(2, H), "c": draw(6)}


def loss_of(step, p, x, h, lengths, backend, **options):
    out = ost.recurrent_net(
        step, x, h, params=p, seq_lengths=lengths, backend=backend, **options
    )
    return jnp.sum(jnp.sin(out.states)) + jnp.sum(out.outputs)


@native
@both_orders
@each_step
def test_jacobian_and_gradient_of_each_example_have_no_pole_past_the_end(step, reverse):
    p, x, h = parameters(), draw(3, B, T, F), draw(4, B, H)

    def derivatives(backend):
        run = ft.partial(loss_of, step, backend=backend, reverse=reverse)

        def states(p):
            return ost.recurrent_net(
                step, x, h, params=p, seq_lengths=LENGTHS, reverse=reverse,
                backend=backend,
            ).states  # fmt: skip

        def alone(x, h, length):
            return jax.grad(run)(p, x[None], h[None], length[None])

        return jax.jacrev(states)(p), jax.vmap(alone)(x, h, LENGTHS)

    assert_finite_and_same(*on_backends(derivatives))


@pytest.mark.parametrize("backend", [None, "xla", "scan"])
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_no_sequence_has_steps(backend, jit):
    """Check that zeros, at which the step has a pole, leave gradients finite."""
    p, x, h = given = jax.device_put(
        (parameters(), np.zeros((B, T, F)), np.zeros((B, H)))
    )
    slopes = jax.grad(loss_of, (1, 2, 3))
    run = ft.partial(slopes, direction, lengths=np.zeros(B, int), backend=backend)
    found = (fast_jit(run) if jit else run)(*given)
    wanted = *jax.tree.map(np.zeros_like, (p, x)), np.ones_like(h)
    assert_finite_and_same(found, wanted)


@native
@both_orders
@each_step
def test_second_derivatives_have_no_pole_past_the_end(step, reverse):
    """Check those of cotangents alone, for which the native loop runs forward."""
    p, x, h = parameters(), draw(3, B, T, F), draw(4, B, H)

    def slope(scale, p, backend):
        def loss(p):
            return scale * loss_of(step, p, x, h, LENGTHS, backend, reverse=reverse)

        return sum(jnp.sum(a * a) for a in jax.tree.leaves(jax.grad(loss)(p)))

    def both(backend):
        of_backend = ft.partial(slope, backend=backend)
        if backend == "scan":  # the same, with less to compile
            return jax.grad(of_backend, (0, 1))(1.5, p)
        return tuple(jax.grad(of_backend, i)(1.5, p) for i in range(2))

    assert_finite_and_same(*on_backends(both))


@native
def test_gradients_of_each_example_of_a_step_of_elements_have_no_pole():
    """Check the step of `test_cuda_step.py` that showed the same in kernels."""
    x, states, p = (
        1 + abs(draw(i, *s)) for i, s in enumerate(((3, 6, 5), (3, 5), (5,)))
    )

    def step(p, s, x, t):
        return jnp.tanh(p[None] * s + x), p[None] / s

    def loss(p, scale, backend):
        lengths = jnp.array([2, 6, 0])
        return scale * loss_of(step, p, x, states, lengths, backend)

    derivatives = lambda backend: (  # noqa: E731
        jax.vmap(jax.grad(loss), (None, 0, None))(p, jnp.arange(1.0, 3.0), backend),
        jax.hessian(loss)(p, 1.0, backend),
        jax.hessian(loss, 1)(p, 1.0, backend),
        jax.jacfwd(jax.grad(loss), 1)(p, 1.0, backend),
    )
    assert_finite_and_same(*on_backends(derivatives))


# ------------------------------------------------------------------------ segments


def countdown(w, left, x, t):
    return left - 1, w * jnp.log(x) / left


@ft.cache
def countdown_slopes(**options):
    x = np.array([[1, 4, np.nan, np.nan, 0], [0.25, 0, -1, 0, 0], 5 * [0]])
    left, lengths = np.array([2.0, 1, 0]), np.array([2, 1, 0])

    def loss(w, x):
        out = ost.recurrent_net(
            countdown, x, left, params=w, seq_lengths=lengths, padding="zero", **options
        )
        return jnp.sum(out.outputs) + jnp.sum(out.states * np.arange(1.0, 4.0))

    return fast_jit(jax.value_and_grad(loss, (0, 1)))(3.0, x)


@both_orders
@pytest.mark.parametrize("backend", ["scan", "xla", None])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_segments_have_no_pole_at_final_states(size, backend, reverse):
    options = {"backend": backend, "reverse": reverse}
    got = countdown_slopes(segment_length=size, **options)
    assert_finite_and_same(got, countdown_slopes(**options))


@both_orders
def test_segments_have_the_gradients_of_a_whole_loop(reverse):
    p, x, h = parameters(), draw(3, B, T, F), draw(4, B, H)

    def gradients(backend, **options):
        loss = ft.partial(
            loss_of, direction, lengths=LENGTHS, backend=backend, reverse=reverse
        )
        return fast_jit(jax.grad(ft.partial(loss, **options), (0, 1, 2)))(p, x, h)

    whole = gradients("scan")
    for backend in ("scan", "xla", None):
        assert_finite_and_same(gradients(backend, segment_length=2), whole)


# ------------------------------------------------------------------------ branches


def of_jit(p, z):
    return z / length_of(z)


def of_scan(p, z):
    return lax.scan(lambda z, _: (1 / (z @ p["v"]), None), z, length=2)[0]


def of_loop(p, z):
    return lax.fori_loop(0, 2, lambda i, z: jnp.sqrt(z * z) @ p["v"], z)


def of_branch(p, z):
    return lax.cond(p["on"] > 0, lambda z: jnp.log(z * z) @ p["v"], jnp.sin, z)


def of_checkpoint(p, z):
    return jax.checkpoint(lambda z: jnp.log(z * z) @ p["v"])(z)


def of_branch_in_checkpoint(p, z):
    return jax.checkpoint(ft.partial(of_branch, p))(z)


def of_powers(p, z):
    return (z * z) ** 0.3 + z**-2 + jnp.log1p(z * z - 1)


def of_large_numbers(p, z):
    """Return what is infinite for a parameter where `p["large"]` is large."""
    grown = [jnp.exp(p["large"] + z), jnp.sinh(p["large"] + z), (p["large"] + z) ** 180]
    return sum(grown) * 1e-3 + jnp.square(p["large"] * 1e160 + z)


def of_large_parameters(p, z):
    """Return what is infinite by products of numbers that no step changes."""
    y = p["large"] * 1e160
    z = z * (y * y) + (y - y * y) * z
    return jnp.tanh(z * p["u"][:1])


def of_large_constants(p, z):
    """Return what is infinite by constants alone, times parameters."""
    z = (z + 1e200) * (z + 1e200)
    return z @ p["v"] + jax.jit(lambda z, b: jnp.maximum(z, b) * b)(z, p["u"][:1])


def of_large_loop(p, z):
    """Return what an inner loop and `jax.checkpoint` make infinite."""
    y = p["large"] * 1e160
    z = lax.scan(lambda z, _: ((z + y) * y, None), z, length=3)[0]
    return jax.checkpoint(lambda z, y: z * (y * y))(z, y) @ p["v"]


INNER = [
    of_jit, of_scan, of_loop, of_branch, of_checkpoint, of_branch_in_checkpoint,
    of_powers, of_large_numbers, of_large_parameters, of_large_constants, of_large_loop,
]  # fmt: skip


@native
@pytest.mark.parametrize("switch", [False, True], ids=["cond", "switch"])
@pytest.mark.parametrize("inner", INNER, ids=lambda f: f.__name__)
def test_branch_that_is_not_taken_has_no_pole(inner, switch):
    used = "large" not in inner.__name__  # else it is infinite
    large = {"large": jnp.array(0.5 if used else 1000.0)}
    p = {**parameters(), **large, "v": draw(5, H, H), "on": jnp.array(1.0)}
    x, h = draw(3, B, T, F), draw(4, B, H)

    def step(p, h, x, t):
        taken = lambda h: inner(p, h @ p["u"])  # noqa: E731
        other = lambda h: jnp.tanh(h @ p["v"])  # noqa: E731
        h = (
            lax.switch(t % 3 if used else t % 2 + 1, [taken, other, lambda h: 2 * h], h)
            if switch
            else lax.cond(t % 2 == (0 if used else 5), taken, other, h)
        )
        h = jnp.tanh(h + x @ p["w"])
        return h, h

    def loss(backend, p, x, h):
        out = ost.recurrent_net(step, x, h, params=p, backend=backend)
        return jnp.sum(jnp.sin(out.outputs))

    assert_finite_and_same(*on_backends(jax.grad(loss, (1, 2, 3)), p, x, h))


@pytest.mark.parametrize("prevent_cse", [False, True])
def test_checkpoint_in_a_branch_keeps_its_options(prevent_cse):
    log = jax.checkpoint(jnp.log, prevent_cse=prevent_cse)
    step = jax.make_jaxpr(lambda t, h: lax.cond(t > 1, log, jnp.sin, h))(2, 1.0)
    written_out = without_control_flow(flat(step.jaxpr), 0)
    names = [eqn.primitive.name for eqn in written_out.eqns]
    (at,) = (i for i, name in enumerate(names) if name in CHECKPOINTS)
    assert "cond" not in names
    assert written_out.eqns[at].params["prevent_cse"] == prevent_cse


@native
def test_branches_with_functions_of_jax_run_natively():
    """Check that neither `softplus` nor a norm keeps a branch in the loop."""

    def step(p, h, x, t):
        near = lambda h: jax.nn.softplus(h @ p["u"]) / 2  # noqa: E731
        h = lax.cond(t % 2 == 0, near, lambda h: of_jit(p, h @ p["u"]), h)
        return h + x @ p["w"], h

    p, x, h = parameters(), draw(3, B, T, F), draw(4, B, H)
    run = lambda b: ost.recurrent_net(step, x, h, params=p, backend=b)  # noqa: E731
    assert_same(*on_backends(run))


@pytest.mark.parametrize("backend", [None, "xla", "scan"])
def test_a_reverse_sequence_runs_its_own_first_step_past_its_end(backend):
    """Check a step that has a pole at the initial state and the input of time 0."""
    lengths, n = np.array([2, 4, 0]), 4
    x = np.random.default_rng(0).random((3, n, 2)) + 0.5
    x[:, 0] = 0.0  # where the last step of a sequence has a state that is not 0
    u = np.eye(2) + 0.1

    def step(u, h, x, t):
        h = jnp.sqrt(x + h @ u)
        return h, h

    def loss(u, x):
        h = jnp.zeros((3, 2))
        options = {"params": u, "reverse": True, "backend": backend}
        out = ost.recurrent_net(step, x, h, seq_lengths=lengths, **options)
        return jnp.sum(jnp.sin(out.states)) + jnp.sum(out.outputs[0, :2])

    def plain(u, x):
        total = 0.0
        for b, length in enumerate(lengths[:2]):
            h = jnp.zeros(2)
            for t in reversed(range(length)):
                h = jnp.sqrt(x[b, t] + h @ u)
                total += jnp.sum(h) if b == 0 else 0.0
            total += jnp.sum(jnp.sin(h))
        return total

    got, want = (jax.grad(f, (0, 1))(u, jnp.asarray(x)) for f in (loss, plain))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10)


@native
def test_an_infinite_value_times_what_is_left_of_1():
    """As `a (1 - b)` stands there, it is infinite, and not infinity less infinity."""

    def step(p, h, x, t):
        share = jnp.tanh(h @ p)
        y = (x * x + h) * (1 - share)
        return jnp.tanh(y), y

    x = np.array([[[1.0, 1e200], [-1.0, 2.0]]])
    p, h = np.array([[0.2, -0.1], [0.1, 0.3]]), np.full((1, 2), 0.5)
    out = ost.recurrent_net(step, x, h, params=p, backend="cpu")
    for t in range(2):
        with np.errstate(over="ignore"):
            want = (x[:, t] ** 2 + h) * (1 - np.tanh(h @ p))
        np.testing.assert_allclose(out.outputs[:, t], want, rtol=1e-12)
        h = np.tanh(want)


@pytest.mark.parametrize("backend", [pytest.param("cpu", marks=native), "xla", "scan"])
def test_mapped_lengths_have_no_pole_past_the_end(backend):
    """One step more than a sequence has would take the root of a negative number."""
    starts = np.array(
        [[[4.0] * 2, [0.0] * 2], [[30.0] * 2, [5.0] * 2]]
    )  # 0 is that of no step
    lengths, w = np.array([[2, 0], [4, 2]]), np.eye(2)
    x = np.random.default_rng(0).random((2, 2, 6, 2)) / 10
    x[np.arange(6) >= lengths[..., None]] = np.nan

    def step(w, h, x, t):
        h = jnp.sqrt(h @ w - 1 + x)
        return h, h

    def loss(w, x, h, lengths):
        options = {"params": w, "padding": "zero", "backend": backend}
        out = ost.recurrent_net(step, x, h, seq_lengths=lengths, **options)
        return jnp.sum(jnp.sin(out.states)) + jnp.sum(out.outputs)

    def plain(w, x, h):
        total = 0.0
        for m, b in np.ndindex(2, 2):
            state = h[m, b]
            for t in range(lengths[m, b]):
                state = jnp.sqrt(state @ w - 1 + x[m, b, t])
                total += jnp.sum(state)
            total += jnp.sum(jnp.sin(state))
        return total

    def members(w, x, h):
        return jnp.sum(jax.vmap(loss, (None, 0, 0, 0))(w, x, h, lengths))

    def both(*given):
        return [jax.grad(f, (0, 1, 2))(*given) for f in (members, plain)]

    got, want = fast_jit(both)(w, jnp.asarray(x), jnp.asarray(starts))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10)


@pytest.mark.parametrize("backend", [pytest.param("cpu", marks=native), "xla"])
def test_a_step_that_is_no_scan_has_no_pole_past_the_end(backend):
    """One step more than a sequence has would take the root of a negative number."""
    size, lengths = 16, np.array([2, 0, 4])
    starts, w = np.array([[4.0], [0.0], [30.0]]) * np.ones(size), np.eye(size)
    x = np.random.default_rng(0).random((3, 6, size)) / 10
    x[np.arange(6) >= lengths[:, None]] = np.nan

    def step(w, h, x, t):
        h = jnp.sqrt(h @ w - 1 + x)
        return h, h

    def loss(w, x, h):
        options = {"params": w, "padding": "zero", "backend": backend}
        out = ost.recurrent_net(step, x, h, seq_lengths=lengths, **options)
        return jnp.sum(jnp.sin(out.states)) + jnp.sum(out.outputs)

    def plain(w, x, h):
        total = 0.0
        for b, length in enumerate(lengths):
            state = h[b]
            for t in range(length):
                state = jnp.sqrt(state @ w - 1 + x[b, t])
                total += jnp.sum(state)
            total += jnp.sum(jnp.sin(state))
        return total

    given = w, jnp.asarray(x), jnp.asarray(starts)
    assert "ostinato_loop" in str(jax.make_jaxpr(loss)(*given))
    got, want = (fast_jit(jax.grad(f, (0, 1, 2)))(*given) for f in (loss, plain))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10)


def with_rule(function):
    """Return a function whose own rule for derivatives is the usual one."""
    found = jax.custom_jvp(function)
    found.defjvp(lambda given, slopes: jax.jvp(function, given, slopes))
    return found


OPERATIONS = {
    "acos": lambda z: jnp.arccos(1 + z),
    "acosh": lambda z: jnp.arccosh(1 + z),
    "asin": lambda z: jnp.arcsin(1 + z),
    "atan2": lambda z: jnp.arctan2(z, z),
    "atanh": lambda z: jnp.arctanh(1 + z),
    "cbrt": jnp.cbrt,
    "div": lambda z: 1 / z,
    "log": jnp.log,
    "log1p": lambda z: jnp.log1p(z - 1),
    "log2": jnp.log2,
    "negative power": lambda z: lax.integer_pow(z, -1),
    "power": lambda z: jnp.abs(z) ** 0.3,
    "rem": lambda z: lax.rem(jnp.ones_like(z), z),
    "rsqrt": lax.rsqrt,
    "sqrt": jnp.sqrt,
    "cosh": lambda z: jnp.cosh(z + 1000),
    "exp": lambda z: jnp.exp(z + 1000),
    "exp2": lambda z: jnp.exp2(z + 2000),
    "expm1": lambda z: jnp.expm1(z + 1000),
    "large power": lambda z: (z + 1e200) ** 3,
    "sinh": lambda z: jnp.sinh(z + 1000),
    "square": lambda z: jnp.sin(jnp.square(z + 1e200)),
}


INSIDE = {  # of a function, where no operation is guarded: they stay
    "negative power": with_rule(lambda z: lax.integer_pow(z, -1)),
    "log1p": with_rule(lambda z: jnp.log1p(z - 1)),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_branch_that_is_never_taken_has_no_gradient(name):
    assert_never_taken(lambda z, y: z * OPERATIONS[name](y))


def test_sums_with_large_parameters_in_a_branch_that_is_never_taken():
    def taken(z, y):
        large = z + (1e200 + y) - z
        return jnp.sin(large * large)

    assert_never_taken(taken)


@pytest.mark.parametrize("name", INSIDE)
def test_a_function_that_is_never_called_has_no_gradient(name):
    assert_never_taken(lambda z, y: z * INSIDE[name](y))


def assert_never_taken(branch):
    """Check that parameters of a branch have gradients of 0, and others their own."""
    x, h_0, w = draw(3, 8, T, 16), draw(4, 8, 16), draw(5, 16, 16) / 4

    def step(p, h, x, t):
        w, y = p
        h = lax.cond(t % 2 == 5, lambda h: branch(h, y), lambda h: 2 * h, h)
        h = jnp.tanh(h @ w + x)
        return h, h

    def net(w, h, y):
        return ost.recurrent_net(step, x, h, params=(w, y)).outputs

    def without(w, h, y):
        found = []
        for t in range(T):
            h = jnp.tanh(2 * h @ w + x[:, t])
            found.append(h)
        return jnp.stack(found, 1)

    got, want = (
        jax.grad(lambda *a, run=run: jnp.sum(jnp.sin(run(*a))), (0, 1, 2))(
            w, h_0, jnp.zeros((1, 16))
        )
        for run in (net, without)
    )
    assert_finite_and_same(got, want)


@both_orders
@pytest.mark.parametrize("recompute", [False, True])
def test_a_product_over_a_state_that_ends_at_zero_has_no_pole(recompute, reverse):
    x, w, left = draw(0, 3, 4, 8), draw(1, 8, 8), jnp.array([4.0, 2.0, 0.0])[:, None]

    def step(w, states, x, t):
        left, h = states
        h = jnp.tanh(x @ w + h @ w) / left
        return (left - 1, h), h

    def gradient(backend):
        def loss(w, x, left):
            out = ost.recurrent_net(
                step, x, (left, jnp.zeros((3, 8))), params=w, reverse=reverse,
                seq_lengths=np.array([4, 2, 0]), padding="zero", recompute=recompute,
                backend=backend,
            )  # fmt: skip
            return jnp.sum(jnp.sin(out.outputs)) + jnp.sum(out.states[1])

        return fast_jit(jax.grad(loss, (0, 1, 2)))(w, x, left)

    assert_finite_and_same(gradient("xla"), gradient("scan"))


def test_rows_that_a_loop_in_a_branch_that_is_never_taken_runs_over():
    """Of two arrays of the loop one is the same at every step, the other is not."""

    def taken(z, y):
        def add(total, pair):
            large = pair[0] + (1e200 + pair[1]) - pair[0]
            return total + jnp.sin(large * large), None

        return z + lax.scan(add, z[:, 0], (z.T, y[0]))[0][:, None]

    assert_never_taken(taken)
