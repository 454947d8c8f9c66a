"""Step functions as users write them, with parameters, states and inputs."""

import jax
import jax.numpy as jnp
import numpy as np
import step_programs_more
import step_programs_special
from jax import lax
from step_registry import PROGRAMS, B, F, H, T, program

__all__ = [
    "PROGRAMS",
    "B",
    "F",
    "H",
    "T",
    "step_programs_more",
    "step_programs_special",
]


def gated(z):
    i, f, g, o = jnp.split(z, 4, -1)
    return jax.nn.sigmoid(i), jax.nn.sigmoid(f), jnp.tanh(g), jax.nn.sigmoid(o)


@program
def leaky(draw):
    def step(p, h, x, t):
        h = 0.9 * h + 0.1 * jnp.tanh(x @ p["w"] + h @ p["u"] + p["b"][None])
        return h, h

    return step, {"w": draw(F, H), "u": draw(H, H), "b": draw(H)}, draw(B, H)


@program
def lstm(draw):
    def step(p, states, x, t):
        h, c = states
        i, f, g, o = gated(x @ p["w"].T + h @ p["u"].T + p["b"][None])
        c = f * c + i * g
        h = o * jnp.tanh(c)
        return (h, c), h

    params = {"w": draw(4 * H, F), "u": draw(4 * H, H), "b": draw(4 * H)}
    return step, params, (draw(B, H), draw(B, H))


@program
def multiplicative_integration(draw):
    def step(p, states, x, t):
        h, c = states
        wx, uh = x @ p["w"], h @ p["u"]
        alpha, beta, gamma = p["mi"]
        z = alpha * wx * uh + beta * wx + gamma * uh
        i, f, g, o = gated(z)
        c = f * c + i * g
        return (o * jnp.tanh(c), c), c

    params = {"w": draw(F, 4 * H), "u": draw(H, 4 * H), "mi": draw(3, 1, 4 * H)}
    return step, params, (draw(B, H), draw(B, H))


@program
def layer_norm(draw):
    def norm(a, scale):
        mean = a.mean(-1, keepdims=True)
        var = jnp.square(a - mean).mean(-1, keepdims=True)
        return (a - mean) * lax.rsqrt(var + 1e-5) * scale[None]

    def step(p, states, x, t):
        h, c = states
        i, f, g, o = gated(norm(x @ p["w"], p["s"]) + norm(h @ p["u"], p["s"]))
        c = f * c + i * g
        h = o * jnp.tanh(norm(c, p["r"]))
        return (h, c), h

    params = {"w": draw(F, 4 * H), "u": draw(H, 4 * H), "s": draw(4 * H), "r": draw(H)}
    return step, params, (draw(B, H), draw(B, H))


@program
def peephole(draw):
    def step(p, states, x, t):
        h, c = states
        z = x @ p["w"] + h @ p["u"]
        i = jax.nn.sigmoid(z[:, :H] + p["pi"][None] * c)
        f = jax.nn.sigmoid(z[:, H : 2 * H] + p["pf"][None] * c)
        c = f * c + i * jnp.tanh(z[:, 2 * H : 3 * H])
        h = jax.nn.sigmoid(z[:, 3 * H :] + p["po"][None] * c) * jnp.tanh(c)
        return (h, c), h

    params = {"w": draw(F, 4 * H), "u": draw(H, 4 * H)}
    params |= {k: draw(H) for k in ("pi", "pf", "po")}
    return step, params, (draw(B, H), draw(B, H))


@program
def gru_reset_before(draw):
    def step(p, h, x, t):
        r = jax.nn.sigmoid(x @ p["wr"] + h @ p["ur"])
        z = jax.nn.sigmoid(x @ p["wz"] + h @ p["uz"])
        n = jnp.tanh(x @ p["wn"] + (r * h) @ p["un"])
        h = (1 - z) * n + z * h
        return h, {"h": h, "gate": z}

    params = {f"w{k}": draw(F, H) for k in "rzn"} | {f"u{k}": draw(H, H) for k in "rzn"}
    return step, params, draw(B, H)


@program
def attention_over_a_memory(draw):
    memory = draw(B, 6, H)  # closed over, and differentiated as a constant

    def step(p, h, x, t):
        scores = jnp.einsum("bh,bmh->bm", h @ p["q"], memory)
        context = jnp.einsum("bm,bmh->bh", jax.nn.softmax(scores), memory)
        h = jnp.tanh(jnp.concatenate([x, context], -1) @ p["w"] + h @ p["u"])
        return h, context

    return step, {"q": draw(H, H), "w": draw(F + H, H), "u": draw(H, H)}, draw(B, H)


@program
def stabilised_exponential_gates(draw):
    def step(p, states, x, t):
        h, c, n, m = states
        z, i, f, o = jnp.split(x @ p["w"] + h @ p["r"], 4, -1)
        log_f = jax.nn.log_sigmoid(f)
        new_m = jnp.maximum(log_f + m, i)
        i, f = jnp.exp(i - new_m), jnp.exp(log_f + m - new_m)
        c, n = f * c + i * jnp.tanh(z), f * n + i
        h = jax.nn.sigmoid(o) * c / n
        return (h, c, n, new_m), h

    states = draw(B, H), draw(B, H), 1 + draw(B, H) ** 2, draw(B, H)
    return step, {"w": draw(F, 4 * H), "r": draw(H, 4 * H)}, states


@program
def mogrifier(draw):
    def step(p, states, x, t):
        h, c = states
        for k, q in enumerate(p["q"]):
            if k % 2 == 0:
                x = 2 * jax.nn.sigmoid(h @ q) * x
            else:
                h = 2 * jax.nn.sigmoid(x @ q) * h
        i, f, g, o = gated(x @ p["w"] + h @ p["u"])
        c = f * c + i * g
        return (o * jnp.tanh(c), c), x

    params = {"w": draw(F, 4 * H), "u": draw(H, 4 * H)}
    params["q"] = [draw(H, F), draw(F, H), draw(H, F)]
    return step, params, (draw(B, H), draw(B, H))


@program
def simple_recurrent_unit(draw):
    def step(p, c, x, t):
        z, f, r = x @ p["w"], x @ p["f"], x @ p["r"]
        f = jax.nn.sigmoid(f + p["v"][None] * c)
        c = f * c + (1 - f) * z
        r = jax.nn.sigmoid(r)
        return c, r * jnp.tanh(c)

    return step, {k: draw(F, H) for k in "wfr"} | {"v": draw(H)}, draw(B, H)


@program
def neural_ode(draw):
    def step(p, h, x, t):
        def f(h):
            return jnp.tanh(h @ p["a"] + x @ p["w"]) @ p["b"]

        k1 = f(h)
        k2 = f(h + 0.5 * k1)
        h = h + 0.1 * (k1 + 2 * k2)
        return h, k2

    return step, {"a": draw(H, H), "b": draw(H, H), "w": draw(F, H)}, draw(B, H)


@program
def recurrent_state_space(draw):
    noise = draw(T, B, H)

    def step(p, states, inputs, t):
        h, z = states
        action, eps = inputs
        h = jnp.tanh(jnp.concatenate([z, action], -1) @ p["w"] + h @ p["u"])
        mean, raw = jnp.split(h @ p["head"], 2, -1)
        std = jax.nn.softplus(raw) + 0.1
        z = mean + std * eps
        return (h, z), {"mean": mean, "std": std}

    params = {"w": draw(H + F, H), "u": draw(H, H), "head": draw(H, 2 * H)}
    return step, params, (draw(B, H), draw(B, H)), (draw(T, B, F), noise)


@program
def read_write_memory(draw):
    def step(p, states, x, t):
        memory, h = states
        where = jax.nn.softmax(h @ p["key"])
        read = jnp.einsum("bm,bmh->bh", where, memory)
        h = jnp.tanh(x @ p["w"] + read @ p["u"])
        memory = memory * (1 - where[..., None]) + where[..., None] * h[:, None]
        return (memory, h), read

    params = {"key": draw(H, 3), "w": draw(F, H), "u": draw(H, H)}
    return step, params, (draw(B, 3, H), draw(B, H))


@program
def integers_and_bools(draw):
    def step(p, states, x, t):
        h, count, active = states
        code = (x[:, 0] > 0).astype(jnp.int32)
        new = jnp.tanh(p["table"][code] + h @ p["u"])
        h = jnp.where(active[:, None], new, h)
        count = count + code * t
        return (h, count, ~active), (h, count)

    states = draw(B, H), jnp.arange(B, dtype=jnp.int32), jnp.array([True, False, True])
    return step, {"table": draw(2, H), "u": draw(H, H)}, states


@program
def conditional(draw):
    def step(p, h, x, t):
        h = lax.cond(
            t % 2 == 0,
            lambda h: jnp.tanh(h @ p["u"]),
            lambda h: jnp.sin(h @ p["v"]) + x @ p["w"],
            h,
        )
        return h, h

    return step, {"u": draw(H, H), "v": draw(H, H), "w": draw(F, H)}, draw(B, H)


@program
def inner_loop(draw):
    def step(p, h, x, t):
        def inner(h, u):
            return jnp.tanh(h @ u), None

        h, _ = lax.scan(inner, h + x @ p["w"], p["u"])
        return h, jnp.linalg.norm(h, axis=-1)

    return step, {"u": draw(3, H, H), "w": draw(F, H)}, draw(B, H)


@jax.custom_vjp
def clipped(x):
    return jnp.clip(x, -0.5, 0.5)


clipped.defvjp(lambda x: (clipped(x), None), lambda _, g: (g,))


@jax.custom_jvp
def soft(x):
    return jnp.log1p(jnp.exp(x))


soft.defjvp(lambda x, d: (soft(x[0]), jax.nn.sigmoid(x[0]) * d[0]))


@program
def custom_jvp(draw):
    def step(p, h, x, t):
        h = soft(h @ p["u"] - x @ p["w"]) - jax.nn.gelu(h)
        return h, jax.nn.silu(h)

    return step, {"u": draw(H, H), "w": draw(F, H)}, draw(B, H)


@program
def straight_through(draw):
    def step(p, h, x, t):
        z = h @ p["u"] + x @ p["w"]
        h = jnp.tanh(z + lax.stop_gradient(jnp.round(z) - z))
        return h, z

    return step, {"u": draw(H, H), "w": draw(F, H)}, draw(B, H)


@program
def custom_vjp(draw):
    def step(p, h, x, t):
        h = clipped(h @ p["u"] + x @ p["w"])
        return h, h

    return step, {"u": draw(H, H), "w": draw(F, H)}, draw(B, H)


@program
def jitted(draw):
    @jax.jit
    def dense(x, w, b):
        return jnp.tanh(x @ w + b[None])

    def step(p, h, x, t):
        h = dense(jnp.concatenate([h, x], -1), p["w"], p["b"])
        return h, dense(h, p["o"], p["c"])

    params = {"w": draw(H + F, H), "b": draw(H), "o": draw(H, F), "c": draw(F)}
    return step, params, draw(B, H)


@program
def tied_weights(draw):
    """One matrix in two products, transposed in one, and by itself."""

    def step(p, h, x, t):
        z = jnp.tanh(h @ p["u"] + x @ p["u"][:F])
        h = z @ p["u"].T + p["u"].sum(0)[None]
        return h, h @ p["u"] + p["u"].mean()

    return step, {"u": draw(H, H, scale=0.4)}, draw(B, H)


@program
def numbers_per_sequence(draw):
    def step(p, states, x, t):
        h, scale, total = states
        h = jnp.tanh(h @ p["u"] * scale[:, None] + x @ p["w"])
        return (h, 0.9 * scale, total + t), scale * h[:, 0]

    states = draw(B, H), draw(B), jnp.arange(B, dtype=jnp.int32)
    return step, {"u": draw(H, H), "w": draw(F, H)}, states


@program
def outputs_that_are_inputs(draw):
    def step(p, states, x, t):
        h, old = states
        new = jnp.tanh(h @ p["u"])
        return (new, h), (x, h, p["u"][:B], jnp.ones(B), new)

    return step, {"u": draw(H, H)}, (draw(B, H), draw(B, H))


@program
def batched_products(draw):
    """Heads: a product with a batch axis, and an einsum with the matrix first."""

    def step(p, h, x, t):
        heads = h.reshape(B, 2, H // 2)
        mixed = jnp.einsum("bnh,nhk->bnk", heads, p["per_head"]).reshape(B, H)
        h = jnp.tanh(mixed + jnp.einsum("hf,bf->bh", p["w"], x))
        return h, jnp.einsum("hk,bk->bh", p["o"], h)

    params = {"per_head": draw(2, H // 2, H // 2), "w": draw(H, F), "o": draw(3, H)}
    return step, params, draw(B, H)


@program
def convolution(draw):
    def step(p, h, x, t):
        def conv(a, kernel):
            return lax.conv_general_dilated(a, kernel, (1,), "SAME")

        h = jnp.tanh(conv(x, p["w"]) + conv(h, p["u"]))
        return h, h.sum(1)

    params = {"w": draw(H, F, 3), "u": draw(H, H, 3)}
    return step, params, draw(B, H, 6), draw(T, B, F, 6)


@program
def embedding(draw):
    codes = jnp.asarray(np.random.default_rng(3).integers(0, 7, (T, B)))

    def step(p, h, code, t):
        h = jnp.tanh(p["table"][code] @ p["w"] + h @ p["u"])
        return h, h @ p["table"].T @ p["o"]

    params = {"table": draw(7, F), "w": draw(F, H), "u": draw(H, H)}
    params["table"] = draw(7, H)
    params["w"], params["o"] = draw(H, H), draw(7, 2)
    return step, params, draw(B, H), codes
