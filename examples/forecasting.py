# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
# ---

# %% [markdown]
# # Forecasting with a stream
#
# Sensors report once an hour; some of them began late, and messages get lost. One
# LSTM learns from all their histories, whose lengths differ. Then it follows the
# sensors live: each message is one step, and a lost message leaves the state of its
# sensor alone.

# %%
# %pip install --quiet ostinato optax matplotlib

# %%
import os

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import ostinato as ost

UPDATES = int(os.environ.get("EXAMPLE_STEPS", 300))
SENSORS, HOURS, LIVE, AHEAD = 64, 24 * 14, 24 * 4, 48
LOST = 0.1  # of the messages

# %% [markdown]
# ## Data
#
# A daily rhythm with a phase and a size of its own for each sensor, a weekend effect,
# and noise.

# %%
rng = np.random.default_rng(0)
hours = np.arange(HOURS + LIVE + AHEAD)
phase = rng.uniform(0, 24, (SENSORS, 1))
size = rng.uniform(0.5, 1.5, (SENSORS, 1))
weekend = (hours // 24) % 7 >= 5
values = size * np.sin(2 * np.pi * (hours + phase) / 24) * np.where(weekend, 0.5, 1.0)
values = (values + 0.3 * rng.normal(size=values.shape)).astype(np.float32)
lengths = rng.integers(24 * 5, HOURS + 1, SENSORS)  # of the histories


def inputs_of(values, hours):
    """Return features of each hour: the value, the time of day, the day of the week."""
    day, week = 2 * np.pi * hours / 24, 2 * np.pi * hours / (24 * 7)
    clock = jnp.stack([jnp.sin(day), jnp.cos(day), jnp.sin(week), jnp.cos(week)], -1)
    clock = jnp.broadcast_to(clock, (*values.shape, 4))
    return jnp.concatenate([values[..., None], clock], -1).astype(jnp.float32)


# The history of a sensor ends now, so a short one begins late: shift it to the front.
begin = HOURS - lengths
index = np.minimum(begin[:, None] + np.arange(HOURS), HOURS - 1)
history = np.take_along_axis(values, index, axis=1)
x = inputs_of(history, index)
later = np.minimum(index[..., None] + 1 + np.arange(AHEAD), HOURS - 1)
target = values[np.arange(SENSORS)[:, None, None], later]  # the AHEAD hours after each

# %% [markdown]
# ## Training
#
# At every hour the model predicts all of the next two days. `mask` says which messages
# there are: it ends where a history ends, and has gaps where a message was lost. Masked
# steps leave the state as it is, and reach neither the outputs nor the gradient. The
# loss leaves out the first day, and hours whose next two days are not known yet.

# %%
spec = ost.RNNSpec("lstm", input_size=5, hidden_size=48)
keys = jax.random.split(jax.random.key(0), 2)
params = {
    "lstm": ost.init_weights(keys[0], spec, forget_bias=1.0),
    "out": 0.1 * jax.random.normal(keys[1], (48, AHEAD)),
}
t = np.arange(HOURS)
counted = (t >= 24) & (t < lengths[:, None] - AHEAD)


def loss(params, key):
    arrived = jax.random.bernoulli(key, 1 - LOST, (SENSORS, HOURS))
    mask = arrived & (t < lengths[:, None])
    y = ost.rnn(spec, params["lstm"], x, mask=mask).y
    weight = mask & counted
    error = jnp.mean((y @ params["out"] - target) ** 2, axis=-1)
    return jnp.sum(weight * error) / jnp.sum(weight)


schedule = optax.cosine_decay_schedule(1e-2, UPDATES)
optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule))


@jax.jit
def update(params, state, key):
    value, gradient = jax.value_and_grad(loss)(params, key)
    change, state = optimizer.update(gradient, state)
    return optax.apply_updates(params, change), state, value


state, losses = optimizer.init(params), []
for n, key in enumerate(jax.random.split(jax.random.key(1), UPDATES)):
    params, state, value = update(params, state, key)
    losses.append(float(value))
    if n % 50 == 0:
        print(f"update {n}: mean squared error {value:.4f}")

# %% [markdown]
# ## Live
#
# The state after the histories is where the streams begin. Every hour one call serves
# all sensors and makes new forecasts; `active` says from which of them a message
# arrived.


# %%
@jax.jit
def follow(params, state, x_t, active):
    y, state = ost.rnn_step(spec, params["lstm"], x_t, state, active=active)
    return y @ params["out"], state


_, state = ost.rnn(spec, params["lstm"], x, seq_lengths=lengths)
arrived = rng.random((LIVE, SENSORS)) > LOST
arrived[-1] = True  # the forecasts that we look at
for hour, active in enumerate(arrived, HOURS):
    x_t = inputs_of(values[:, hour], np.full(SENSORS, hour))
    predicted, state = follow(params, state, x_t, active)

now = HOURS + LIVE
truth = values[:, now : now + AHEAD]
naive = values[:, now - 24 * 7 : now - 24 * 7 + AHEAD]  # the same hours, a week before


def error(guess):
    return float(np.sqrt(np.mean((np.asarray(guess) - truth) ** 2)))


print(f"error of the forecast {error(predicted):.3f}, of last week {error(naive):.3f}")

# %%
figure, panels = plt.subplots(3, 1, figsize=(8, 6), sharex=True, layout="constrained")
for axes, sensor in zip(panels, (0, 1, 2), strict=True):
    axes.plot(hours[now - 96 :], values[sensor, now - 96 :], color="#555555", lw=1)
    axes.plot(hours[now:], predicted[sensor], color="#c1272d", label="forecast")
    axes.axvline(now, color="#555555", lw=0.8, ls="--")
    axes.set_ylabel(f"sensor {sensor}")
panels[0].legend(frameon=False)
panels[-1].set_xlabel("hour")
figure.savefig("forecasting.png")
