# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
# ---

# %% [markdown]
# # Recurrent PPO: a scanned cell, and the operator in its place
#
# Programs of reinforcement learning run a GRU over a rollout by `ScannedRNN`: a
# `lax.scan` over a cell that clears the state where an episode begins. Here it is, and
# next to it `ost.rnn` with `resets`, in the same agent with the same weights. Both
# learn a task that nobody solves without memory, eight seeds at once by `vmap`.

# %%
# %pip install --quiet ostinato optax matplotlib

# %%
import os
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import ostinato as ost

UPDATES = int(os.environ.get("EXAMPLE_STEPS", 30))
SEEDS, ENVS, STEPS, EPOCHS, MINIBATCHES = 8, 16, 64, 4, 2
UNITS, DISCOUNT, TRACE, CLIP = 128, 0.99, 0.95, 0.2
LENGTH = 10  # of an episode

# %% [markdown]
# ## The environment
#
# The chain of bsuite, as gymnax has it in `MemoryChain`: a bit is shown in
# the first step of an episode, and asked for in the last one.


# %%
class World(NamedTuple):
    bit: jax.Array  # 0 or 1
    age: jax.Array


def new_world(key):
    return World(jax.random.bernoulli(key).astype(jnp.int32), jnp.int32(0))


def observe(world):
    """Return the time left, whether the bit is asked for, and the bit while shown."""
    left = 1 - world.age / LENGTH
    asked = 1.0 * (world.age == LENGTH - 1)
    return jnp.stack([left, asked, (world.age == 0) * (2.0 * world.bit - 1)])


def advance(world, action, key):
    """Return the next world, the reward, and whether the episode has ended."""
    done = world.age == LENGTH - 1
    reward = done * jnp.where(action == world.bit, 1.0, -1.0)
    older = world._replace(age=world.age + 1)
    world = jax.tree.map(lambda a, b: jnp.where(done, a, b), new_world(key), older)
    return world, reward, done


# %% [markdown]
# ## The recurrent part, twice
#
# A network of one GRU is two functions of its weights: `step` acts, and `run` learns
# from a whole rollout `[time, environment, feature]`. A step is the same in both. The
# weights are those of `ost.init_weights`; `ScannedRNN` reads its matrices from them.

# %%
spec = ost.RNNSpec("gru", input_size=UNITS, hidden_size=UNITS)


def step(weights, x, state, begins):
    return ost.rnn_step(spec, weights, x, state, resets=begins)


def scanned_rnn(weights, x, state, begins):
    """Run a cell by `lax.scan`, as ScannedRNN of PureJaxRL and its heirs does."""
    (w,) = ost.unpack_weights(weights, spec)

    def cell(h, at):
        x, begins = at
        h = jnp.where(begins[:, None], 0.0, h)
        x_r, x_z, x_n = jnp.split(x @ w.w_ih.T + w.b_ih, 3, axis=-1)
        h_r, h_z, h_n = jnp.split(h @ w.w_hh.T + w.b_hh, 3, axis=-1)
        r, z = jax.nn.sigmoid(x_r + h_r), jax.nn.sigmoid(x_z + h_z)
        h = (1 - z) * jnp.tanh(x_n + r * h_n) + z * h
        return h, h

    return jax.lax.scan(cell, state[0], (x, begins))[1]


def operator(weights, x, state, begins):
    """Run the same by `ost.rnn`."""
    return ost.rnn(spec, weights, x, state, resets=begins, time_major=True).y


# %% [markdown]
# ## The agent


# %%
def init(key):
    embed, gru, heads = jax.random.split(key, 3)
    return {
        "embed": jax.random.normal(embed, (3, UNITS)),
        "gru": ost.init_weights(gru, spec, scheme="glorot_orthogonal"),
        "heads": 0.1 * jax.random.normal(heads, (UNITS, 3)),
    }


def embed(params, observation):
    return jax.nn.relu(observation @ params["embed"])


def heads(params, y):
    """Return logits of both actions, and the value."""
    out = y @ params["heads"]
    return out[..., :2], out[..., 2]


class Rollout(NamedTuple):
    observation: jax.Array  # all leaves [STEPS, ENVS, ...]
    begins: jax.Array
    action: jax.Array
    log_prob: jax.Array
    value: jax.Array
    reward: jax.Array
    done: jax.Array


def collect(params, worlds, state, key):
    """Act for STEPS steps in all environments."""

    def act(carry, key):
        worlds, state = carry
        choose, renew = jax.random.split(key)
        observation, begins = jax.vmap(observe)(worlds), worlds.age == 0
        y, state = step(params["gru"], embed(params, observation), state, begins)
        logits, value = heads(params, y)
        action = jax.random.categorical(choose, logits)
        log_prob = jnp.take_along_axis(jax.nn.log_softmax(logits), action[:, None], 1)
        worlds, reward, done = jax.vmap(advance)(
            worlds, action, jax.random.split(renew, ENVS)
        )
        seen = Rollout(observation, begins, action, log_prob[:, 0], value, reward, done)
        return (worlds, state), seen

    (worlds, state), rollout = jax.lax.scan(
        act, (worlds, state), jax.random.split(key, STEPS)
    )
    x = embed(params, jax.vmap(observe)(worlds))
    y, _ = step(params["gru"], x, state, worlds.age == 0)
    return worlds, state, rollout, heads(params, y)[1]


def loss(params, run, state, rollout, advantage):
    """Return PPO's clipped loss; `state` is the one before the rollout."""
    x = embed(params, rollout.observation)
    logits, value = heads(params, run(params["gru"], x, state, rollout.begins))
    log_probs = jax.nn.log_softmax(logits)
    log_prob = jnp.take_along_axis(log_probs, rollout.action[..., None], -1)[..., 0]
    ratio = jnp.exp(log_prob - rollout.log_prob)
    scaled = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    gain = jnp.minimum(
        ratio * scaled, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * scaled
    ).mean()
    error = jnp.mean((value - rollout.value - advantage) ** 2)
    entropy = -jnp.mean(jnp.sum(jnp.exp(log_probs) * log_probs, -1))
    return -gain + 0.5 * error - 0.01 * entropy


# %% [markdown]
# ## Training
#
# `train` is a function of a key. `vmap` makes an ensemble of it: the operator runs all
# seeds in one call, each with its own weights. A minibatch takes whole environments.

# %%
optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-3))


def train(run, key):
    """Train one agent, and return the mean reward of an episode for every update."""
    keys = jax.random.split(key, 3)
    params = init(keys[0])
    worlds = jax.vmap(new_world)(jax.random.split(keys[1], ENVS))
    state = jnp.zeros(spec.state_shape(ENVS))

    def update(carry, key):
        params, optimizer_state, worlds, state = carry
        act, shuffle = jax.random.split(key)
        worlds, after, rollout, last_value = collect(params, worlds, state, act)
        advantage, _ = ost.gae(
            rollout.reward,
            rollout.value,
            last_value,
            discounts=DISCOUNT,
            lambda_=TRACE,
            terminations=rollout.done,
            time_major=True,
        )

        def minibatch(carry, chosen):
            params, optimizer_state = carry
            some = jax.tree.map(lambda a: a[:, chosen], (state, rollout, advantage))
            gradient = jax.grad(loss)(params, run, *some)
            change, optimizer_state = optimizer.update(gradient, optimizer_state)
            return (optax.apply_updates(params, change), optimizer_state), None

        orders = jax.vmap(lambda key: jax.random.permutation(key, ENVS))(
            jax.random.split(shuffle, EPOCHS)
        )
        (params, optimizer_state), _ = jax.lax.scan(
            minibatch,
            (params, optimizer_state),
            orders.reshape(EPOCHS * MINIBATCHES, -1),
        )
        score = rollout.reward.sum() / jnp.maximum(rollout.done.sum(), 1)
        return (params, optimizer_state, worlds, after), score

    start = params, optimizer.init(params), worlds, state
    return jax.lax.scan(update, start, jax.random.split(keys[2], UPDATES))[1]


scores, seconds = {}, {}
seeds = jax.random.split(jax.random.key(0), SEEDS)
for name, run in {"ScannedRNN": scanned_rnn, "ost.rnn": operator}.items():
    trains = jax.jit(jax.vmap(lambda key, run=run: train(run, key)))
    compiled = trains.lower(seeds).compile()
    start = time.perf_counter()
    scores[name] = np.asarray(compiled(seeds))
    seconds[name] = time.perf_counter() - start
    speed = SEEDS * UPDATES * ENVS * STEPS / seconds[name]
    last = scores[name][:, -5:].mean()
    print(f"{name:10} {speed:9,.0f} steps/s, reward of the last updates {last:.2f}")
print(f"{seconds['ScannedRNN'] / seconds['ost.rnn']:.1f} times as many steps a second")

# %%
figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
for name, colour in {"ScannedRNN": "#999999", "ost.rnn": "#c2410c"}.items():
    at = np.linspace(0, seconds[name], UPDATES)
    axes.plot(at, scores[name].mean(0), color=colour, label=name)
    low, high = np.quantile(scores[name], [0, 1], axis=0)
    axes.fill_between(at, low, high, color=colour, alpha=0.2, lw=0)
axes.axhline(1, color="#555555", lw=0.8, ls="--")
axes.set(
    xlabel="seconds",
    ylabel="reward of an episode",
    title=f"Recurrent PPO, {SEEDS} seeds: mean, least and largest reward",
)
axes.legend(frameon=False, loc="lower right")
figure.savefig("recurrent_ppo.png")
