# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
# ---

# %% [markdown]
# # Recurrent PPO with several seeds
#
# A cue is shown in the first step of an episode, and asked for some steps later: an
# agent without memory earns nothing. Episodes end in the middle of a rollout;
# `resets` begins the next one with an empty memory. The whole training is one
# function of a key, and `vmap` runs it for several seeds at once.

# %%
# %pip install --quiet ostinato optax matplotlib

# %%
import os
from typing import NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import ostinato as ost

UPDATES = int(os.environ.get("EXAMPLE_STEPS", 40))
SEEDS, ENVS, STEPS, EPOCHS = 4, 32, 32, 4
UNITS, DISCOUNT, TRACE, CLIP = 32, 0.95, 0.9, 0.2

# %% [markdown]
# ## The environment


# %%
class World(NamedTuple):
    cue: jax.Array  # -1 or 1, shown at age 0
    wait: jax.Array  # the age at which the agent is asked
    age: jax.Array


def new_world(key):
    cue, wait = jax.random.split(key)
    return World(
        jnp.where(jax.random.bernoulli(cue), 1.0, -1.0),
        jax.random.randint(wait, (), 2, 9),
        jnp.int32(0),
    )


def observe(world):
    """Return what the agent sees: the cue at first, and whether it is asked."""
    return jnp.stack(
        [jnp.where(world.age == 0, world.cue, 0.0), 1.0 * (world.age == world.wait)]
    )


def advance(world, action, key):
    """Return the next world, the reward, and whether the episode has ended."""
    done = world.age == world.wait
    reward = jnp.where(done, world.cue * (2 * action - 1), 0.0)
    older = world._replace(age=world.age + 1)
    world = jax.tree.map(lambda a, b: jnp.where(done, a, b), new_world(key), older)
    return world, reward, done


# %% [markdown]
# ## The agent
#
# One GRU with two heads. Acting takes one step of it, learning a whole rollout in one
# call.

# %%
spec = ost.RNNSpec("gru", input_size=2, hidden_size=UNITS)


def init(key):
    gru, heads = jax.random.split(key)
    return {
        "gru": ost.init_weights(gru, spec, scheme="glorot_orthogonal"),
        "heads": 0.1 * jax.random.normal(heads, (UNITS, 3)),
    }


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

    def step(carry, key):
        worlds, state = carry
        choose, renew = jax.random.split(key)
        observation, begins = jax.vmap(observe)(worlds), worlds.age == 0
        y, state = ost.rnn_step(spec, params["gru"], observation, state, resets=begins)
        logits, value = heads(params, y)
        action = jax.random.categorical(choose, logits)
        log_prob = jnp.take_along_axis(jax.nn.log_softmax(logits), action[:, None], 1)
        worlds, reward, done = jax.vmap(advance)(
            worlds, action, jax.random.split(renew, ENVS)
        )
        seen = Rollout(observation, begins, action, log_prob[:, 0], value, reward, done)
        return (worlds, state), seen

    (worlds, state), rollout = jax.lax.scan(
        step, (worlds, state), jax.random.split(key, STEPS)
    )
    y, _ = ost.rnn_step(
        spec, params["gru"], jax.vmap(observe)(worlds), state, resets=worlds.age == 0
    )
    return worlds, state, rollout, heads(params, y)[1]


def advantages(rollout, last_value):
    """Return generalised advantage estimates, `[STEPS, ENVS]`."""

    def step(carry, at):
        advantage, after = carry
        reward, value, done = at
        going_on = 1.0 - done
        delta = reward + DISCOUNT * going_on * after - value
        advantage = delta + DISCOUNT * TRACE * going_on * advantage
        return (advantage, value), advantage

    start = jnp.zeros_like(last_value), last_value
    xs = rollout.reward, rollout.value, rollout.done
    return jax.lax.scan(step, start, xs, reverse=True)[1]


def loss(params, state, rollout, advantage):
    """Return PPO's clipped loss; `state` is the one before the rollout."""
    y, _ = ost.rnn(
        spec,
        params["gru"],
        rollout.observation,
        state,
        resets=rollout.begins,
        time_major=True,
    )
    logits, value = heads(params, y)
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
# `train` is a function of a key. `vmap` makes an ensemble of it: the operator runs
# all seeds in one call, each with its own weights.

# %%
optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(3e-3))


def train(key):
    keys = jax.random.split(key, 3)
    params = init(keys[0])
    worlds = jax.vmap(new_world)(jax.random.split(keys[1], ENVS))
    state = jnp.zeros(spec.state_shape(ENVS))

    def update(carry, key):
        params, optimizer_state, worlds, state = carry
        worlds, after, rollout, last_value = collect(params, worlds, state, key)
        advantage = advantages(rollout, last_value)

        def epoch(carry, _):
            params, optimizer_state = carry
            gradient = jax.grad(loss)(params, state, rollout, advantage)
            change, optimizer_state = optimizer.update(gradient, optimizer_state)
            return (optax.apply_updates(params, change), optimizer_state), None

        (params, optimizer_state), _ = jax.lax.scan(
            epoch, (params, optimizer_state), length=EPOCHS
        )
        score = rollout.reward.sum() / jnp.maximum(rollout.done.sum(), 1)
        return (params, optimizer_state, worlds, after), score

    start = params, optimizer.init(params), worlds, state
    (params, *_), scores = jax.lax.scan(
        update, start, jax.random.split(keys[2], UPDATES)
    )
    return params, scores


params, scores = jax.jit(jax.vmap(train))(jax.random.split(jax.random.key(0), SEEDS))
scores = np.asarray(scores)
for seed, curve in enumerate(scores):
    print(f"seed {seed}: first reward {curve[0]:.2f}, last {curve[-10:].mean():.2f}")

# %%
figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
for seed, curve in enumerate(scores):
    axes.plot(curve, lw=1, label=f"seed {seed}")
axes.axhline(1, color="#555555", lw=0.8, ls="--")
axes.set(xlabel="update", ylabel="reward of an episode", title="Recurrent PPO")
axes.legend(frameon=False, ncols=SEEDS)
figure.savefig("recurrent_ppo.png")
