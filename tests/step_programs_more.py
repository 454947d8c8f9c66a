"""Further step functions as users write them: cells of papers, and odd shapes."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from step_registry import B, F, H, T, program

M = 6  # the places of a memory


@program
def block_diagonal_heads(draw):
    """Two heads with a matrix each, the gates in an axis of their own."""

    def step(p, states, x, t):
        h, c = states
        heads = h.reshape(B, 2, H // 2)
        z = jnp.einsum("bnh,nhgk->bngk", heads, p["u"])
        z = z + (x @ p["w"]).reshape(B, 2, 4, H // 2) + p["b"][None]
        i, f, o = (jax.nn.sigmoid(z[:, :, k]) for k in range(3))
        c = f * c + i * jnp.tanh(z[:, :, 3])
        h = (o * jnp.tanh(c)).reshape(B, H)
        return (h, c), h

    params = {"u": draw(2, H // 2, 4, H // 2), "w": draw(F, 4 * H)}
    params["b"] = draw(2, 4, H // 2)
    return step, params, (draw(B, H), draw(B, 2, H // 2))


@program
def multi_head_attention(draw):
    memory = draw(B, M, H)  # closed over; keys and values are made from it

    def step(p, h, x, t):
        keys = (memory @ p["k"]).reshape(B, M, 2, H // 2)
        values = (memory @ p["v"]).reshape(B, M, 2, H // 2)
        query = (h @ p["q"]).reshape(B, 2, H // 2)
        scores = jnp.einsum("bnd,bmnd->bnm", query, keys) / np.sqrt(H // 2)
        weights = jax.nn.softmax(scores, axis=-1)
        context = jnp.einsum("bnm,bmnd->bnd", weights, values).reshape(B, H)
        h = jnp.tanh(context @ p["o"] + x @ p["w"])
        return h, weights

    return step, {k: draw(H, H) for k in "kvqo"} | {"w": draw(F, H)}, draw(B, H)


@program
def coverage_attention(draw):
    """Additive scores that know how much each place was read, and padded places."""
    memory, lengths = draw(B, M, H), np.array([6, 2, 4])
    valid = jnp.asarray(np.arange(M) < lengths[:, None])

    def step(p, states, x, t):
        h, coverage = states
        seen = (h @ p["q"])[:, None] + memory + coverage[..., None] * p["c"][None, None]
        scores = jnp.tanh(seen) @ p["v"]
        where = jax.nn.softmax(jnp.where(valid, scores, -1e30), axis=-1)
        context = jnp.sum(where[..., None] * memory, axis=1)
        h = jnp.tanh(x @ p["w"] + context @ p["u"])
        return (h, coverage + where), (h, jnp.minimum(coverage, where).sum(-1))

    params = {"q": draw(H, H), "c": draw(H), "v": draw(H)}
    return step, params | {"w": draw(F, H), "u": draw(H, H)}, (draw(B, H), draw(B, M))


@program
def zoneout_masks_as_inputs(draw):
    keep = jnp.asarray(np.random.default_rng(4).random((T, B, H)) < 0.4)

    def step(p, h, inputs, t):
        x, keep = inputs
        z, r, _ = jnp.split(jax.nn.sigmoid(x @ p["w"] + h @ p["u"]), 3, axis=-1)
        n = jnp.tanh(x @ p["wn"] + (r * h) @ p["un"])
        new = (1.0 - z) * n + z * h
        return jnp.where(keep, h, new), new

    params = {"w": draw(F, 3 * H), "u": draw(H, 3 * H)}
    params |= {"wn": draw(F, H), "un": draw(H, H)}
    return step, params, draw(B, H), (draw(T, B, F), keep)


@program
def leapfrog(draw):
    """A second-order ODE whose force is the gradient of an energy."""

    def step(p, states, x, t):
        def energy(q):
            return jnp.sum(jax.nn.softplus(q @ p["u"] + x @ p["w"])) + 0.5 * jnp.sum(
                jnp.square(q) * p["k"][None]
            )

        force = jax.grad(lambda q: -energy(q))
        q, v = states["q"], states["v"]
        v = v + 0.05 * force(q)
        q = q + 0.1 * v
        v = v + 0.05 * force(q)
        return {"q": q, "v": v}, jnp.sum(v**2, axis=-1)

    params = {"u": draw(H, H), "w": draw(F, H), "k": draw(H) ** 2}
    return step, params, {"q": draw(B, H), "v": draw(B, H)}


@program
def liquid_time_constant(draw):
    def step(p, h, inputs, t):
        x, elapsed = inputs
        for _ in range(3):
            f = jax.nn.sigmoid(x @ p["w"] + h @ p["u"] + p["b"])
            dt = elapsed[:, None] / 3
            h = (h + dt * f * p["a"]) / (1 + dt * (1 / jnp.exp(p["tau"]) + f))
        return h, jax.nn.elu(h)

    params = {"w": draw(F, H), "u": draw(H, H), "b": draw(1, H), "a": draw(1, H)}
    inputs = draw(T, B, F), draw(T, B) ** 2
    return step, params | {"tau": draw(1, H)}, draw(B, H), inputs


@program
def quasi_recurrent(draw):
    """Convolutions of width 2 over time: the last input is a state."""

    def step(p, states, x, t):
        c, last = states
        both = jnp.concatenate([last, x], axis=1)
        z, f, o = jnp.split(both @ p["w"], 3, axis=1)
        f = jax.nn.sigmoid(f)
        c = f * c + (1 - f) * jnp.tanh(z)
        return (c, x), jax.nn.sigmoid(o) * c

    return step, {"w": draw(2 * F, 3 * H)}, (draw(B, H), draw(B, F))


@program
def clockwork(draw):
    """Each of the units has a period; which of them run depends on the step."""
    period = jnp.asarray([1, 2, 4, 8], jnp.int32)

    def step(p, h, x, t):
        runs = t % period == 0
        mask = jnp.tril(jnp.ones((H, H)))
        new = jnp.tanh(x @ p["w"] + h @ (p["u"] * mask))
        h = jnp.where(runs[None], new, h)
        return h, jnp.where(t > 2, h, -h)

    return step, {"w": draw(F, H), "u": draw(H, H)}, draw(B, H)


@program
def fast_weights(draw):
    """A matrix for each sequence, to which outer products are added."""

    def step(p, states, x, t):
        h, a = states
        key, value, query = jnp.split(h @ p["u"] + x @ p["w"], 3, axis=-1)
        beta = jax.nn.sigmoid(h @ p["beta"])[:, :, None]
        old = jnp.einsum("bkv,bk->bv", a, key)
        a = 0.9 * a + beta * jnp.einsum("bk,bv->bkv", key, value - old)
        h = jnp.tanh(jnp.einsum("bkv,bk->bv", a, query))
        return (h, a), (h, jnp.swapaxes(a, 1, 2))

    shapes = {"w": (F, 3 * H), "u": (H, 3 * H), "beta": (H, 1)}
    params = {k: draw(*shape, scale=0.3) for k, shape in shapes.items()}
    return step, params, (draw(B, H), draw(B, H, H, scale=0.2))


@program
def mixture_of_experts(draw):
    def step(p, h, x, t):
        both = jnp.concatenate([h, x], axis=-1)
        gate = jax.nn.softmax(both @ p["gate"], axis=-1)
        experts = jnp.stack([jnp.tanh(both @ w) for w in p["experts"]], axis=1)
        h = jnp.einsum("be,beh->bh", gate, experts)
        best = gate == gate.max(axis=-1, keepdims=True)
        return h, jnp.where(best, gate, 0).sum(-1)

    params = {"gate": draw(H + F, 3), "experts": [draw(H + F, H) for _ in range(3)]}
    return step, params, draw(B, H)


@program
def minimal_gated_unit(draw):
    def step(p, h, x, t):
        f = jax.nn.hard_sigmoid(x @ p["wf"] + h @ p["uf"] + p["b"][None])
        n = jax.nn.leaky_relu(x @ p["wn"] + (f * h) @ p["un"])
        h = (1 - f) * h + f * n
        return h, jnp.clip(h, -0.3, 0.4)

    params = {"wf": draw(F, H), "uf": draw(H, H), "b": draw(H)}
    return step, params | {"wn": draw(F, H), "un": draw(H, H)}, draw(B, H)


@program
def neural_turing_machine(draw):
    """Addresses by content, interpolates, shifts and sharpens."""

    def step(p, states, x, t):
        h, memory, where = states
        h = jnp.tanh(x @ p["w"] + h @ p["u"])
        key, raw = jnp.tanh(h @ p["key"]), h @ p["raw"]
        beta = jnp.log1p(jnp.exp(raw[:, :1]))
        gate, gamma = jax.nn.sigmoid(raw[:, 1:2]), 1 + jax.nn.softplus(raw[:, 2:3])
        shift = jax.nn.softmax(raw[:, 3:6], axis=-1)
        dots = jnp.einsum("bmk,bk->bm", memory, key)
        sizes = jnp.sqrt(jnp.sum(memory**2, -1) * jnp.sum(key**2, -1, keepdims=True))
        content = jax.nn.softmax(beta * dots / (sizes + 1e-3), axis=-1)
        mixed = gate * content + (1 - gate) * where
        turned = sum(
            shift[:, k : k + 1] * jnp.roll(mixed, k - 1, axis=1) for k in range(3)
        )
        sharp = turned**gamma
        where = sharp / (sharp.sum(-1, keepdims=True) + 1e-6)
        erase, add = jax.nn.sigmoid(h @ p["erase"]), h @ p["add"]
        memory = memory * (1 - where[..., None] * erase[:, None])
        memory = memory + where[..., None] * add[:, None]
        return (h, memory, where), jnp.einsum("bm,bmk->bk", where, memory)

    params = {"w": draw(F, H), "u": draw(H, H), "key": draw(H, 3), "raw": draw(H, 6)}
    params |= {"erase": draw(H, 3), "add": draw(H, 3)}
    where = jax.nn.softmax(draw(B, M), axis=-1)
    return step, params, (draw(B, H), draw(B, M, 3), where)


@program
def echo_state(draw):
    """The matrices of the reservoir are constants of the function."""
    rng = np.random.default_rng(8)
    w_in, reservoir = rng.standard_normal((F, H)), 0.3 * rng.standard_normal((H, H))

    def step(p, h, x, t):
        h = 0.7 * h + 0.3 * jnp.tanh(x @ w_in + h @ reservoir)
        return h, jnp.concatenate([jnp.ones((B, 1)), h, x], axis=1) @ p["out"]

    return step, {"out": draw(1 + H + F, 3)}, draw(B, H)


@program
def max_pooling(draw):
    """A running maximum, and a maxout of three pieces."""

    def step(p, states, x, t):
        h, top = states
        pieces = (h @ p["u"] + x @ p["w"]).reshape(B, H, 3)
        h = jnp.tanh(pieces.max(axis=-1)) - pieces.min(axis=(1, 2))[:, None]
        top = jnp.maximum(top, h)
        return (h, top), top.max(axis=-1)

    return step, {"u": draw(H, 3 * H), "w": draw(F, 3 * H)}, (draw(B, H), draw(B, H))


@program
def welford(draw):
    """Normalise with the mean and variance of all steps so far."""

    def step(p, states, x, t):
        h, mean, m2, count = states
        z = h @ p["u"] + x @ p["w"]
        count = count + 1
        delta = z - mean
        mean = mean + delta / count[:, None]
        m2 = m2 + delta * (z - mean)
        std = jnp.sqrt(m2 / count[:, None] + 0.1)
        h = jnp.tanh((z - mean) / std)
        return (h, mean, m2, count), {"mean": mean, "std": std}

    states = draw(B, H), draw(B, H), draw(B, H) ** 2, jnp.zeros(B)
    return step, {"u": draw(H, H), "w": draw(F, H)}, states


@program
def safe_division(draw):
    """A double `where`: what is not chosen must not bring NaN into gradients."""

    def step(p, h, x, t):
        z = h @ p["u"] + x @ p["w"]
        positive = z > 0
        root = jnp.where(positive, jnp.sqrt(jnp.where(positive, z, 1.0)), 0.0)
        size = jnp.sum(h * h, axis=-1, keepdims=True)
        some = size > 1e-3
        h = jnp.where(some, root / jnp.where(some, size, 1.0), x @ p["w"])
        return h, jnp.isfinite(h)

    return step, {"u": draw(H, H), "w": draw(F, H)}, jnp.zeros((B, H)).at[0].set(0.4)


@program
def normalised_gates(draw):
    """jnp.var, a gated linear unit, logsumexp, and several activations."""

    def step(p, h, x, t):
        z = x @ p["w"] + h @ p["u"]
        z = (z - z.mean(-1, keepdims=True)) / jnp.sqrt(
            jnp.var(z, axis=-1, keepdims=True) + 1e-5
        )
        h = jax.nn.glu(z, axis=-1)
        some = jax.nn.gelu(h) + jax.nn.silu(h) - jax.nn.relu(h)
        return 0.9 * h + 0.1 * some, (jax.nn.logsumexp(z, axis=-1), jax.nn.relu6(z))

    return step, {"u": draw(H, 2 * H), "w": draw(F, 2 * H)}, draw(B, H)


@program
def powers(draw):
    def step(p, h, x, t):
        z = jnp.tanh(h @ p["u"] + x @ p["w"])
        h = z**3 - 0.5 * z**2 + 1 / (z**2 + 2) ** 2 + jnp.power(z * z + 0.5, 0.7)
        return h, (jnp.exp2(z), jnp.cbrt(z + 2), jnp.reciprocal(h), jnp.hypot(h, z))

    return step, {"u": draw(H, H), "w": draw(F, H)}, draw(B, H)


@program
def trees_of_many_shapes(draw):
    """States of one number, a matrix, and a truth value; outputs of several shapes."""

    def step(p, states, x, t):
        (a, b), s = states["pair"], states["scale"]
        joined = jnp.concatenate([a, b.reshape(B, 6), s[:, None]], axis=1)
        z = jnp.tanh(joined @ p["u"] + x @ p["w"])
        a, rest, s = jnp.split(z, [H, H + 6], axis=1)
        both = jnp.stack([a, -a], axis=1)
        b = rest.reshape(B, 3, 2).transpose(0, 2, 1)
        flag = states["flag"] ^ (s[:, 0] > 0)
        s = jnp.where(flag, s[:, 0], 0.5 * s[:, 0])
        states = {"pair": (a, b.swapaxes(1, 2)), "scale": s, "flag": flag}
        return states, (both, b, s > 0)

    states = {"pair": (draw(B, H), draw(B, 3, 2)), "scale": draw(B)}
    states["flag"] = jnp.array([False, True, True])
    return step, {"u": draw(H + 7, H + 7), "w": draw(F, H + 7)}, states


@program
def reversed_and_strided(draw):
    def step(p, h, x, t):
        z = jnp.tanh(h @ p["u"] + x @ p["w"])
        return jnp.flip(z, axis=1), (z[:, ::2], jnp.cumsum(z, axis=-1))

    return step, {"u": draw(H, H), "w": draw(F, H)}, draw(B, H)


@program
def teacher_forcing(draw):
    """`lax.cond` on the step, on a state of integers, and a switch."""

    def step(p, states, x, t):
        h, last = states
        x = lax.cond(t < 2, lambda: x, lambda: last)
        z = h @ p["u"] + x @ p["w"]
        z = lax.switch(t % 3, [jnp.tanh, jnp.sin, lambda a: 0.3 * a], z)
        last = z @ p["o"]
        return (z, last), last

    params = {"u": draw(H, H), "w": draw(F, H), "o": draw(H, F)}
    return step, params, (draw(B, H), draw(B, F))


@program
def window_of_inputs(draw):
    """The last three inputs as a queue in the state."""

    def step(p, states, x, t):
        h, queue = states
        queue = jnp.concatenate([queue[:, 1:], x[:, None]], axis=1)
        taps = jnp.einsum("bkf,kfh->bh", queue, p["taps"])
        h = jnp.tanh(taps + h @ p["u"]) * lax.stop_gradient(queue.mean((1, 2)))[:, None]
        return (h, queue), h

    return step, {"taps": draw(3, F, H), "u": draw(H, H)}, (draw(B, H), draw(B, 3, F))


@program
def low_rank_and_scaled(draw):
    """Matrices that the step makes: a low-rank one, a normalised one."""

    def step(p, h, x, t):
        u = p["a"] @ p["b"] + jnp.diag(p["d"])
        w = p["w"] / jnp.linalg.norm(p["w"], axis=0, keepdims=True)
        h = jax.nn.selu(jnp.dot(u, h.T).T + x @ w)
        return h, h @ w.T

    params = {"a": draw(H, 2), "b": draw(2, H), "d": draw(H), "w": draw(F, H)}
    return step, params, draw(B, H)


@program
def hopfield_iterations(draw):
    """A fixed number of updates of an inner loop, and a product of two states."""

    def step(p, states, x, t):
        h, a = states
        h = lax.fori_loop(0, 2, lambda _, h: jnp.tanh(h @ p["u"] + x @ p["w"]), h)
        a = jnp.einsum("bij,bjk->bik", a, jnp.tanh(p["m"][None] + a))
        return (h, a), jnp.trace(a, axis1=1, axis2=2) + jnp.prod(h[:, :2], axis=-1)

    params = {"u": draw(H, H), "w": draw(F, H), "m": draw(2, 2)}
    return step, params, (draw(B, H), draw(B, 2, 2))
