"""Attention within a sequence and to another one."""

import jax
import jax.numpy as jnp

from .pointwise import layer_norm, position_codes
from .program import D, programs

TIERS = ({}, {"tiers": 2})


def attention(x, w, u):
    return jax.nn.softmax((x @ w) @ x.T / D**0.5, -1) @ (x @ u)


def causal(x, w):
    position = jnp.arange(x.shape[0])
    scores = (x @ w) @ x.T
    seen = position[:, None] >= position[None]
    return jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), -1) @ x


def causal_by_triangle(x):
    n = x.shape[0]
    seen = jnp.tril(jnp.ones((n, n), bool))
    return jax.nn.softmax(jnp.where(seen, x @ x.T, -1e30), -1) @ x


def with_dropout(x, key):
    """Some of the weights are dropped, in each example by its own key."""
    weights = jax.nn.softmax(x @ x.T, -1)
    return jnp.where(jax.random.bernoulli(key, 0.7, weights.shape), weights, 0) @ x


def distance_biased(x, scale):
    """Scores that fall with the distance: they depend on both positions."""
    position = jnp.arange(x.shape[0], dtype=x.dtype)
    distance = jnp.abs(position[:, None] - position[None])
    return jax.nn.softmax(x @ x.T - scale * distance, -1) @ x


def local(x):
    """Each token sees those next to it."""
    position = jnp.arange(x.shape[0])
    near = jnp.abs(position[:, None] - position[None]) <= 1
    return jax.nn.softmax(jnp.where(near, x @ x.T, -jnp.inf), -1) @ x


def many_heads(x, heads):
    q, k, v = jnp.einsum("nd,pdhe->phne", x, heads)
    weights = jax.nn.softmax(q @ jnp.swapaxes(k, 1, 2), -1)
    return jnp.einsum("hnm,hme->nhe", weights, v).reshape(x.shape[0], -1)


def library_call(x, heads):
    q, k, v = jnp.einsum("nd,pdhe->pnhe", x, heads)
    with jax.numpy_dtype_promotion("standard"):
        return jax.nn.dot_product_attention(q, k, v)


def cross(x, y, w):
    return jax.nn.softmax(x @ w @ y.T, -1) @ y


def both_ways(x, y):
    """Each side reads the other; the larger of the two scores counts."""
    scores = x @ y.T + jnp.arange(y.shape[0], dtype=x.dtype)[None]
    return jax.nn.softmax(scores, 1) @ y, jax.nn.softmax(scores, 0).T @ x, scores


def encoder_layer(x, w, u, b, heads, w_in, w_out):
    """Layer norm, attention, layer norm, MLP; residual."""
    x = position_codes(x)
    mixed = many_heads(layer_norm(x, b), heads) @ jnp.concatenate([w, u])[:4]
    x = x + mixed
    return x + jax.nn.gelu(layer_norm(x, b) @ w_in) @ w_out


def stacked(x, w, u):
    """A second layer over the result of the first: tiers within tiers."""
    return attention(jnp.tanh(attention(x, w, u)), u, w).mean(0)


def linear_attention(x, w):
    """Causal and without a softmax: a running sum of outer products."""
    keys = jax.nn.elu(x @ w) + 1
    state = jnp.cumsum(keys[:, :, None] * x[:, None, :], axis=0)
    total = jnp.cumsum(keys, axis=0)
    top = jnp.einsum("nd,nde->ne", keys, state)
    return top / jnp.einsum("nd,nd->n", keys, total)[:, None]


def pooled(x, b, own_w):
    """One query for each example, of weights and of the example's own."""
    weights = jax.nn.softmax(x @ own_w @ b)
    return weights @ x, weights


def rotary(x, y):
    """Two features turned by an angle that grows with the position."""

    def turned(a):
        angle = 0.5 * jnp.arange(a.shape[0], dtype=a.dtype)
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        return jnp.stack(
            [a[:, 0] * cos - a[:, 1] * sin, a[:, 0] * sin + a[:, 1] * cos], 1
        )

    return jax.nn.softmax(turned(x) @ turned(y).T, -1) @ y


PROGRAMS = (
    programs(
        {
            "attention": attention,
            "causal": causal,
            "distance_biased": distance_biased,
            "many_heads": many_heads,
            "attention_dropout": with_dropout,
            "stacked": stacked,
            "encoder_layer": encoder_layer,
        },
        options=TIERS,
    )
    + programs(
        {
            "causal_by_triangle": causal_by_triangle,
            "local": local,
            "cross": cross,
            "both_ways": both_ways,
            "linear_attention": linear_attention,
            "pooled": pooled,
            "rotary": rotary,
            "peer_projection": lambda x, heads: jnp.einsum("te,iehq->ithq", x, heads),
            "peer_mixing": lambda x, square: jnp.einsum(
                "tsh,shq->thq", x[:, None] - x[None], square
            ),
        }
    )
    + programs({"library_call": library_call}, dtype="float32")
)
