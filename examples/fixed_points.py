# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
# ---

# %% [markdown]
# # Jacobians and fixed points of a trained network
#
# A network learns to remember the last pulse on each of two inputs. How does it store
# two bits? As Sussillo and Barak (2013) did, we look for the states that a step
# leaves where they are, and at the Jacobian there. `jax.jacfwd`, `jax.jacrev` and
# `jax.hessian` work on a step and on a whole sequence.

# %%
# %pip install --quiet ostinato optax matplotlib

# %%
import os

import jax

jax.config.update("jax_enable_x64", True)  # fixed points to machine precision

import jax.numpy as jnp  # noqa: E402
import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402

import ostinato as ost  # noqa: E402

UPDATES = int(os.environ.get("EXAMPLE_STEPS", 400))
BITS, UNITS, BATCH, STEPS = 2, 16, 64, 40

# %% [markdown]
# ## The task


# %%
def make(key):
    """Return pulses `[BATCH, STEPS, BITS]`, and the last pulse on each input."""
    when, sign = jax.random.split(key)
    shape = (BATCH, STEPS, BITS)
    pulse = jax.random.bernoulli(when, 0.15, shape).at[:, 0].set(True)
    x = pulse * jnp.where(jax.random.bernoulli(sign, 0.5, shape), 1.0, -1.0)

    def remember(last, x_t):
        last = jnp.where(x_t == 0, last, x_t)
        return last, last

    _, target = jax.lax.scan(remember, x[:, 0], jnp.swapaxes(x, 0, 1))
    return x, jnp.swapaxes(target, 0, 1)


spec = ost.RNNSpec("gru", input_size=BITS, hidden_size=UNITS)
keys = jax.random.split(jax.random.key(0), 3)
params = {
    "gru": ost.init_weights(keys[0], spec, jnp.float64),
    "out": 0.1 * jax.random.normal(keys[1], (UNITS, BITS)),
}
optimizer = optax.adam(optax.cosine_decay_schedule(1e-2, UPDATES))


@jax.jit
def update(params, state, key):
    x, target = make(key)

    def loss(params):
        y = ost.rnn(spec, params["gru"], x).y
        return jnp.mean((y @ params["out"] - target) ** 2)

    value, gradient = jax.value_and_grad(loss)(params)
    change, state = optimizer.update(gradient, state)
    return optax.apply_updates(params, change), state, value


state = optimizer.init(params)
for n, key in enumerate(jax.random.split(keys[2], UPDATES)):
    params, state, value = update(params, state, key)
    if n % 100 == 0:
        print(f"update {n}: mean squared error {value:.4f}")

# %% [markdown]
# ## Fixed points
#
# Without input, the state moves by `F(h) - h`. Its squared length `q` is 0 at fixed
# points, and small at slow points. Newton's method on `q` needs its gradient and its
# Hessian: second derivatives of a step.


# %%
def F(h):
    """Return the state `[UNITS]` after a step without a pulse."""
    return ost.rnn_step(spec, params["gru"], jnp.zeros(BITS), h[None]).state[0]


def q(h):
    return 0.5 * jnp.sum((F(h) - h) ** 2)


def descend(h):
    def step(h, _):
        gradient, curvature = jax.grad(q)(h), jax.hessian(q)(h)
        # Only downhill: directions of negative curvature are turned around.
        size, axes = jnp.linalg.eigh(curvature)
        move = axes @ ((axes.T @ gradient) / (jnp.abs(size) + 1e-9))
        move = move / jnp.maximum(1, jnp.linalg.norm(move) / 0.5)
        return jnp.where(q(h - move) < q(h), h - move, h - 0.5 * gradient), None

    return jax.lax.scan(step, h, length=60)[0]


x, _ = make(jax.random.key(1))
path = ost.rnn(spec, params["gru"], x).y  # states that the network visits
visited = path.reshape(-1, UNITS)
some = jax.random.choice(jax.random.key(2), visited, (96,), replace=False)
# Between two memories lie the points that decide between them: begin there, too.
begin = jnp.concatenate([some, (some + some[::-1]) / 2, some[:1] * 0])
found = jax.jit(jax.vmap(descend))(begin)
quality = np.asarray(jax.vmap(q)(found))

points = []
for h in np.asarray(found)[quality < 1e-16]:
    if all(np.linalg.norm(h - other) > 1e-3 for other in points):
        points.append(h)
print(f"fixed points: {len(points)}, from {len(begin)} beginnings")

# %% [markdown]
# ## Stability
#
# The eigenvalues of the Jacobian at a fixed point tell what happens to a small
# change: those outside of the unit circle grow. Stable points are memories; a point
# with one growing direction lies between two of them.

# %%
points = jnp.asarray(points).reshape(-1, UNITS)
jacobians = jax.vmap(jax.jacfwd(F))(points)
eigenvalues = np.linalg.eigvals(np.asarray(jacobians))
growing = (np.abs(eigenvalues) > 1).sum(axis=-1)
for count in sorted(set(growing.tolist())):
    print(f"{(growing == count).sum()} points with {count} growing directions")

# %% [markdown]
# ## Memory in time
#
# How much does the last output depend on each step? That is the Jacobian of a whole
# sequence.


# %%
def last_output(x):
    """Return the outputs `[BITS]` after a sequence `[STEPS, BITS]`."""
    return ost.rnn(spec, params["gru"], x).y[-1] @ params["out"]


sensitivity = jax.jit(jax.jacrev(last_output))(x[0])  # [BITS, STEPS, BITS]
strength = jnp.linalg.norm(sensitivity, axis=-1)

# %%
centre = visited.mean(0)
axes_of_path = jnp.linalg.svd(visited - centre, full_matrices=False)[2][:2].T


def flat(h):
    """Return states as points of the plane in which they vary most."""
    return np.asarray((h - centre) @ axes_of_path)


figure, panels = plt.subplots(1, 3, figsize=(12, 3.8), layout="constrained")
for line in path[:30]:
    panels[0].plot(*flat(line).T, color="#bbbbbb", lw=0.6)
for count, color in zip((0, 1, 2), ("#c1272d", "#0f6fb7", "#1b8a5a"), strict=True):
    chosen = growing == count
    panels[0].plot(*flat(points[chosen]).T, "o", color=color, label=f"{count} growing")
    values = eigenvalues[chosen].ravel()
    panels[1].plot(values.real, values.imag, "o", ms=3, color=color)
panels[0].legend(frameon=False, fontsize=8)
panels[0].set(
    title="states and fixed points", xlabel="first axis", ylabel="second axis"
)
circle = np.exp(2j * np.pi * np.linspace(0, 1, 200))
panels[1].plot(circle.real, circle.imag, color="#555555", lw=0.8)
panels[1].set(title="eigenvalues", xlabel="real part", ylabel="imaginary part")
panels[1].set_aspect("equal")
for bit in range(BITS):
    panels[2].plot(strength[bit], label=f"output {bit}")
    pulses = np.flatnonzero(x[0, :, bit])
    panels[2].plot(
        pulses, np.zeros(len(pulses)) - 0.02 * (bit + 1), "|", color=f"C{bit}"
    )
panels[2].set(title="dependence of the last outputs", xlabel="step", ylabel="size")
panels[2].legend(frameon=False, fontsize=8)
figure.savefig("fixed_points.png")
