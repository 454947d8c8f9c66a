"""Step functions with integers, keys, branches, and without matrices."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from step_registry import B, F, H, T, program


@program
def sampled_latents(draw):
    """Noise and dropout from keys that each step folds its number into."""
    key = jax.random.key(3)

    def step(p, states, x, t):
        h, z = states
        noise, mask = jax.random.split(jax.random.fold_in(key, t))
        keep = jax.random.bernoulli(mask, 0.8, (B, H))
        h = jnp.tanh(jnp.concatenate([z, x], -1) @ p["w"] + h @ p["u"])
        h = jnp.where(keep, h, 0) / 0.8
        mean, raw = jnp.split(h @ p["head"], 2, -1)
        z = mean + jax.nn.softplus(raw) * jax.random.normal(noise, mean.shape)
        return (h, z), mean

    params = {"w": draw(H + F, H), "u": draw(H, H), "head": draw(H, 2 * H)}
    return step, params, (draw(B, H), draw(B, H))


@jax.custom_jvp
def spike(v):
    return (v > 0).astype(v.dtype)


spike.defjvp(lambda v, d: (spike(v[0]), d[0] / (1 + 5 * jnp.abs(v[0])) ** 2))


@program
def spiking_neurons(draw):
    """A surrogate gradient, a refractory counter of integers and a count of spikes."""

    def step(p, states, x, t):
        v, s, wait, total = states
        v = 0.9 * v * (1 - s) + x @ p["w"] + s @ p["u"]
        s = jnp.where(wait > 0, 0.0, spike(v - p["threshold"]))
        fired = s > 0
        wait = jnp.where(fired, 2, jnp.maximum(wait - 1, 0))
        total = total + fired.sum(axis=1, dtype=jnp.int32)
        return (v, s, wait, total), (s, total, jnp.argmax(v, axis=1))

    params = {"w": 3 * draw(F, H), "u": draw(H, H), "threshold": jnp.asarray(0.3)}
    wait, total = jnp.zeros((B, H), jnp.int32), jnp.arange(B, dtype=jnp.int32)
    return step, params, (draw(B, H), jnp.zeros((B, H)), wait, total)


@program
def phased_lstm(draw):
    """A time gate that opens for a part of each period."""
    leak = 0.01

    def step(p, states, inputs, t):
        (h, c), (x, time) = states, inputs
        phase = jnp.remainder(time[:, None] - p["shift"][None], p["period"][None])
        phase = phase / p["period"][None]
        rises, falls = 2 * phase / 0.6, 2 - 2 * phase / 0.6
        gate = jnp.where(
            phase < 0.3, rises, jnp.where(phase < 0.6, falls, leak * phase)
        )
        i, f, g, o = jnp.split(x @ p["w"] + h @ p["u"], 4, -1)
        new_c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        new_h = jax.nn.sigmoid(o) * jnp.tanh(new_c)
        c = gate * new_c + (1 - gate) * c
        h = gate * new_h + (1 - gate) * h
        return (h, c), h

    params = {"w": draw(F, 4 * H), "u": draw(H, 4 * H)}
    params |= {"shift": draw(H) ** 2, "period": 1.5 + draw(H) ** 2}
    time = jnp.cumsum(draw(T, B) ** 2 + 0.1, axis=0)
    return step, params, (draw(B, H), draw(B, H)), (draw(T, B, F), time)


@program
def legendre_memory(draw):
    """Constant matrices of a memory, and no product with a parameter in it."""
    rng = np.random.default_rng(6)
    a, b = 0.3 * rng.standard_normal((5, 5)), rng.standard_normal(5)

    def step(p, states, x, t):
        h, m = states
        u = x @ p["ex"] + h @ p["eh"] + m @ p["em"]
        m = m + m @ a.T + u[:, None] * b[None]
        h = jnp.tanh(x @ p["wx"] + h @ p["wh"] + m @ p["wm"])
        return (h, m), h

    shapes = {"ex": (F,), "eh": (H,), "em": (5,), "wx": (F, H), "wh": (H, H)}
    params = {k: draw(*s, scale=0.4) for k, s in (shapes | {"wm": (5, H)}).items()}
    return step, params, (draw(B, H), draw(B, 5))


@program
def no_product(draw):
    """Independent units: an exponential average, its variance and a rotation."""

    def step(p, states, x, t):
        mean, var, angle = states
        decay = jax.nn.sigmoid(p["decay"])[None]
        mean = decay * mean + (1 - decay) * x
        var = decay * var + (1 - decay) * jnp.square(x - mean)
        angle = angle + jax.scipy.special.erf(x) * p["speed"][None]
        turned = jnp.cos(angle) * mean - jnp.sin(angle) * x
        return (mean, var, angle), (turned / jnp.sqrt(var + 0.1), p["speed"][:B])

    states = draw(B, 9), draw(B, 9) ** 2, draw(B, 9)
    return step, {"decay": draw(9), "speed": draw(9)}, states, draw(T, B, 9)


@program
def branch_with_a_pole(draw):
    """The branch that is not taken would be infinite, or see NaN."""
    x = draw(T, B, F).at[1::2].set(jnp.nan)

    def step(p, h, x, t):
        def observed(h):
            return jnp.log(jnp.square(h) + 0.5) @ p["u"] + x @ p["w"]

        def missing(h):
            return 0.5 * h / (t % 2).astype(h.dtype)

        h = jnp.tanh(lax.cond(t % 2 == 0, observed, missing, h))
        return h, h

    return step, {"w": draw(F, H), "u": draw(H, H)}, draw(B, H), x
