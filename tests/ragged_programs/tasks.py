"""What people write: losses, taggers, classifiers, encoders with decoders."""

import jax
import jax.numpy as jnp
import optax
from jax import lax

from .attention import attention, cross, encoder_layer
from .control import rnn
from .program import STATES, WORDS, D, programs
from .sums import pairs


def token_losses(x, i, to_words):
    logits = x @ to_words
    return optax.softmax_cross_entropy_with_integer_labels(logits, i)


def mean_loss(x, i, to_words):
    labels = jax.nn.one_hot(i, WORDS, dtype=x.dtype)
    return optax.softmax_cross_entropy(x @ to_words, labels).mean()


def binary_loss(x, x2):
    labels = (x2 > 0).astype(x.dtype)
    return optax.sigmoid_binary_cross_entropy(x, labels).mean(0)


def robust_loss(x, x2):
    return optax.huber_loss(x, x2, delta=0.5).sum(), optax.cosine_similarity(x, x2)


def ctc(x, j, to_words):
    """`optax.ctc_loss` takes a batch: one token of it."""
    logits = (x @ to_words)[None]
    labels = jnp.maximum(j, 1)[None]
    paddings = jnp.zeros(logits.shape[:2]), jnp.zeros(labels.shape)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return optax.ctc_loss(logits, paddings[0], labels, paddings[1])[0]


def crf(emissions, transitions, pick):
    """Negative log likelihood of a path under a linear chain."""

    def step(alpha, emitted):
        return jax.nn.logsumexp(alpha[:, None] + transitions, 0) + emitted, None

    total = jax.nn.logsumexp(lax.scan(step, emissions[0], emissions[1:])[0])
    path = jnp.take_along_axis(emissions, pick[:, None], axis=1).sum()
    return total - path - transitions[pick[:-1], pick[1:]].sum()


def tagger(i, table, w, u, to_words):
    states, _ = rnn(table[i], w, u)
    _, back = rnn(table[i][::-1], u, w)
    return jax.nn.log_softmax((back[::-1] + states[None]) @ to_words, -1)


def language_model(i, table, w, u, to_words):
    """Mean loss of every next word."""
    _, hidden = rnn(table[i[:-1]], w, u)
    logits = hidden @ to_words
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, i[1:])
    return losses.mean()


def translation(i, j, table, w, u, to_words):
    """Encoder, decoder with attention and teacher forcing, mean loss."""
    last, memory = rnn(table[i], w, u)
    before = jnp.concatenate([jnp.zeros_like(j[:1]), j[:-1]])

    def step(h, word):
        context = jax.nn.softmax(memory @ h) @ memory
        h = jnp.tanh(table[word] @ u + (h + context) @ w)
        return h, h @ to_words

    _, logits = lax.scan(step, last, before)
    return optax.softmax_cross_entropy_with_integer_labels(logits, j).mean()


def greedy(i, table, w, u, to_words):
    """Six words, each read again."""
    last, memory = rnn(table[i], w, u)

    def step(state, _):
        h, word = state
        context = jax.nn.softmax(memory @ h) @ memory
        h = jnp.tanh(table[word] @ u + (h + context) @ w)
        word = jnp.argmax(h @ to_words).astype(jnp.int32)
        return (h, word), word

    return lax.scan(step, (last, jnp.int32(0)), None, length=6)[1]


def deep_set(x, w, u, b):
    inner = jax.nn.relu(x @ w + b[None])
    return jnp.concatenate([inner.mean(0), inner.max(0), inner.sum(0)]) @ (
        jnp.concatenate([u, w, u])
    )


def sentence_classifier(i, table, w, u, b, heads, w_in, w_out, to_words):
    hidden = encoder_layer(table[i], w, u, b, heads, w_in, w_out)
    return jax.nn.log_softmax(hidden.mean(0) @ to_words)


def retrieval(x, y, w):
    """Late interaction: the best match of every token."""
    return ((x @ w) @ y.T).max(1).sum()


def contrastive(x, x2):
    """Each token should be closest to its own other view."""
    scores = x @ x2.T
    return -jnp.diagonal(jax.nn.log_softmax(scores, -1)).mean()


def knn(x):
    """The distance to the nearest other token, and which it is."""
    n = x.shape[0]
    distance = ((x[:, None] - x[None]) ** 2).sum(-1)
    distance = jnp.where(jnp.eye(n, dtype=bool), 1e3, distance)
    return distance.min(1), distance.argmin(1)


def kernel_regression(x, s, y):
    weights = jnp.exp(-((y[:, None] - x[None]) ** 2).sum(-1))
    return (weights @ s) / weights.sum(1)


def pagerank(x):
    """Power iteration on a graph with as many nodes as tokens."""
    links = jax.nn.softmax(pairs(x), axis=0)
    start = jnp.ones(x.shape[0]) / x.shape[0]
    step = lambda _, p: 0.85 * links @ p + 0.15 / x.shape[0]  # noqa: E731
    return lax.fori_loop(0, 8, step, start)


def graph_layer(x, w):
    near = (((x[:, None] - x[None]) ** 2).sum(-1) < 2).astype(x.dtype)
    return jnp.tanh((near @ x) / near.sum(1, keepdims=True) @ w)


def advantages(s, x):
    """Discounted sums of rewards from each step on, against a baseline."""
    value = x.mean(1)
    later = jnp.concatenate([value[1:], jnp.zeros(1)])
    delta = s + 0.9 * later - value
    step = lambda total, d: (d + 0.8 * total,) * 2  # noqa: E731
    return lax.scan(step, 0.0, delta, reverse=True)[1]


def ordinary_differential_equation(x, w):
    """Euler steps over a shared grid, driven by the mean of the tokens."""

    def step(state, _):
        return state + 0.1 * jnp.tanh(state @ w + x.mean(0)), state

    return lax.scan(step, jnp.ones(D), jnp.arange(STATES))


def power_spectrum(s):
    """Return the power of two frequencies: sums over products with waves."""
    n = s.shape[0]
    angle = 2 * jnp.pi * jnp.arange(n, dtype=s.dtype) / n
    parts = [(s * wave(k * angle)).sum() for k in (1, 2) for wave in (jnp.cos, jnp.sin)]
    return jnp.stack(parts) ** 2


def reader(i, y, table, w, u):
    """Words attend to themselves, then to frames."""
    words = attention(table[i], w, u)
    return cross(words, y, w)


PROGRAMS = programs(
    {
        "token_losses": token_losses,
        "mean_loss": mean_loss,
        "binary_loss": binary_loss,
        "robust_loss": robust_loss,
        "ctc": ctc,
        "tagger": tagger,
        "translation": translation,
        "greedy": greedy,
        "deep_set": deep_set,
        "sentence_classifier": sentence_classifier,
        "retrieval": retrieval,
        "contrastive": contrastive,
        "knn": knn,
        "kernel_regression": kernel_regression,
        "pagerank": pagerank,
        "graph_layer": graph_layer,
        "advantages": advantages,
        "ordinary_differential_equation": ordinary_differential_equation,
        "power_spectrum": power_spectrum,
        "reader": reader,
    }
) + programs({"crf": crf, "language_model": language_model}, at_least=2)
