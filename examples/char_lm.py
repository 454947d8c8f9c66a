# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
# ---

# %% [markdown]
# # A language model of characters
#
# A GRU learns a poem by heart. Training takes pieces of the text and hands the state
# from piece to piece; writing takes one step at a time, with the same weights.

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

UPDATES = int(os.environ.get("EXAMPLE_STEPS", 600))
STREAMS, PIECE = 8, 32

# %%
# Lewis Carroll, Through the Looking-Glass (1871).
TEXT = """'Twas brillig, and the slithy toves
Did gyre and gimble in the wabe;
All mimsy were the borogoves,
And the mome raths outgrabe.

"Beware the Jabberwock, my son!
The jaws that bite, the claws that catch!
Beware the Jubjub bird, and shun
The frumious Bandersnatch!"

He took his vorpal sword in hand:
Long time the manxome foe he sought--
So rested he by the Tumtum tree,
And stood awhile in thought.

And as in uffish thought he stood,
The Jabberwock, with eyes of flame,
Came whiffling through the tulgey wood,
And burbled as it came!

One, two! One, two! And through and through
The vorpal blade went snicker-snack!
He left it dead, and with its head
He went galumphing back.

"And hast thou slain the Jabberwock?
Come to my arms, my beamish boy!
O frabjous day! Callooh! Callay!"
He chortled in his joy.

"""
ALPHABET = sorted(set(TEXT))
codes = np.array([ALPHABET.index(character) for character in TEXT], np.int32)
print(len(TEXT), "characters,", len(ALPHABET), "different ones")

# %% [markdown]
# ## The model
#
# Streams read the text from different places at the same time. The state after a
# piece is the initial state of the next one, and gradients stop between them. Now and
# then the state is forgotten, so that the model also learns to begin.

# %%
spec = ost.RNNSpec("gru", input_size=len(ALPHABET), hidden_size=128)
keys = jax.random.split(jax.random.key(0), 3)
params = {
    "gru": ost.init_weights(keys[0], spec),
    "out": 0.1 * jax.random.normal(keys[1], (128, len(ALPHABET))),
}


def loss(params, state, piece):
    """Return bits per character of a piece `[streams, PIECE + 1]`, and the state."""
    x = jax.nn.one_hot(piece[:, :-1], len(ALPHABET))
    y, state = ost.rnn(spec, params["gru"], x, state)
    nats = optax.softmax_cross_entropy_with_integer_labels(
        y @ params["out"], piece[:, 1:]
    )
    return jnp.mean(nats) / jnp.log(2), state


optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(4e-3))


@jax.jit
def update(params, optimizer_state, state, piece):
    (bits, state), gradient = jax.value_and_grad(loss, has_aux=True)(
        params, state, piece
    )
    change, optimizer_state = optimizer.update(gradient, optimizer_state)
    return optax.apply_updates(params, change), optimizer_state, state, bits


# %%
rng = np.random.default_rng(0)
starts = np.linspace(0, len(codes), STREAMS, endpoint=False).astype(int)
state = jnp.zeros(spec.state_shape(STREAMS))
optimizer_state, curve = optimizer.init(params), []
for n in range(UPDATES):
    places = starts[:, None] + n * PIECE + np.arange(PIECE + 1)
    piece = codes[places % len(codes)]  # the text repeats
    state = state * (rng.random() > 0.1)
    params, optimizer_state, state, bits = update(params, optimizer_state, state, piece)
    curve.append(float(bits))
    if n % 100 == 0:
        print(f"update {n}: {bits:.2f} bits per character")

# %% [markdown]
# ## Writing
#
# One call reads the beginning. Then `rnn_step` writes: it takes a character and the
# state, and a loop over it is one compiled program.


# %%
@jax.jit
def write(params, key, beginning):
    x = jax.nn.one_hot(beginning, len(ALPHABET))
    state = ost.rnn(spec, params["gru"], x[:-1]).state

    def step(carry, key):
        state, x = carry
        y, state = ost.rnn_step(spec, params["gru"], x, state)
        code = jax.random.categorical(key, y @ params["out"])
        return (state, jax.nn.one_hot(code, len(ALPHABET))), code

    return jax.lax.scan(step, (state, x[-1]), jax.random.split(key, 240))[1]


beginning = "One, two!"
written = write(params, keys[2], jnp.array([ALPHABET.index(c) for c in beginning]))
print(beginning + "".join(ALPHABET[code] for code in written))

# %%
figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
axes.plot(curve)
axes.set(xlabel="update", ylabel="bits per character", title="Learning a poem by heart")
figure.savefig("char_lm.png")
