"""Slices, joins, pads, reshapes, transposes, broadcasts."""

import jax
import jax.numpy as jnp
from jax import lax

from .program import STATES, D, programs


def heads(x, w_in):
    """`[n, 8]` to two heads, `[2, n, 4]`."""
    return jnp.swapaxes((x @ w_in).reshape(x.shape[0], 2, STATES), 0, 1)


def round_trip(x):
    return jnp.sin(x.ravel()).reshape(x.shape)


def interleaved(x, x2):
    return jnp.stack([x, x2], axis=1).reshape(2 * x.shape[0], D)


def neighbours(x, w):
    """Each token with the one before it and the one behind it."""
    wider = jnp.pad(x, ((1, 1), (0, 0)))
    return jnp.concatenate([wider[:-2], x @ w, wider[2:]], axis=1)


def shifted(x):
    return jnp.concatenate([jnp.zeros((1, D)), x[:-1]])


def with_marks(x, b, d):
    return jnp.concatenate([b[None], x, d[None], x])


def ends(x):
    return x[0], x[-1]


def set_tokens(x, d):
    return x.at[0].set(d), x.at[-1].add(2 * d), x.at[:, 1].set(0)


def back_again(x, y, w):
    """As a vector, and as a matrix again."""
    pairs = jnp.sin((x @ w @ y.T).reshape(-1))
    return pairs.reshape(x.shape[0], y.shape[0]) @ y


def gradient_of_best(x):
    """Through a vector of all pairs and back, inside of the mapped function."""
    return jax.grad(lambda x: jnp.max(jnp.sin(x @ x.T).reshape(-1)))(x)


def by_head(x, w):
    """`[2, n, D]` to `[2 n, D]`, and back."""
    tokens = jnp.tanh(jnp.stack([x @ w, x]).reshape(-1, D))
    return tokens, tokens.reshape(2, x.shape[0], D).sum(0)


def best_pair(x, y, w):
    """The place of the largest of all scores, and that score."""
    scores = x @ w @ y.T
    i, j = jnp.unravel_index(jnp.argmax(scores), scores.shape)
    return i, j, scores.max(), jax.nn.softmax(scores, axis=None)


def best_of_other_tokens(x, w):
    scores = x @ w @ x.T
    other = ~jnp.eye(x.shape[0], dtype=bool)
    return jnp.where(other, scores, -jnp.inf).reshape(-1).max()


def trigrams(x):
    return x[:-2] + 2 * x[1:-1] + 3 * x[2:]


def rounded_up(x):
    """Half of the size, rounded up by a division by a negative number."""
    half = -(x.shape[0] // -2)
    return jnp.arange(half), x[:half], jnp.asarray(x.shape[0] % -3, x.dtype)


def filled_up(x, y):
    """To the same size for all examples."""
    missing = 7 - x.shape[0]
    pairs = x @ y.T
    return (
        jnp.concatenate([x, jnp.ones((missing, D))]),
        jnp.pad(x, ((missing, 0), (0, 0))),
        jnp.concatenate([jnp.zeros((missing, y.shape[0])), pairs]),
    )


def before_the_tokens(x, d, own_w):
    """Values of the example along axes before that of the tokens."""
    n = x.shape[0]
    return (
        jnp.broadcast_to(d[:, None], x.T.shape),
        jnp.where(x.T > 0, x.T, x.sum(0)[:, None]),
        jnp.broadcast_to(own_w[:, :, None], (D, D, n)),
        jnp.broadcast_to(own_w[:, None], (D, n, D)),
    )


def jacobian_of_attention(x, b):
    return jax.jacrev(lambda query: jax.nn.softmax(x @ query) @ x)(b)


EMPTY = programs(
    {
        "transpose": lambda x: x.T,
        "before_the_tokens": before_the_tokens,
        "new_axis": lambda x: x[:, None],
        "squeeze": lambda x: x[:, :1].squeeze(1),
        "heads": heads,
        "ravel": lambda x: x.ravel(),
        "round_trip": round_trip,
        "split_features": lambda x: x.reshape(x.shape[0], 1, D),
        "interleaved": interleaved,
        "stack": lambda x, x2: jnp.stack([x, x2]),
        "stack_last": lambda x, x2: jnp.stack([x, x2], axis=-1),
        "move_axis": lambda square: jnp.moveaxis(square, 0, 2),
        "concatenate_two": lambda x, y: jnp.concatenate([x, y]),
        "concatenate_self": lambda x: jnp.concatenate([x, 2 * x]),
        "concatenate_features": lambda x, x2: jnp.concatenate([x, x2], axis=1),
        "token_first": lambda x, b: jnp.concatenate([b[None], x]),
        "token_last": lambda x, d: jnp.concatenate([x, d[None]]),
        "with_marks": with_marks,
        "pad": lambda x: jnp.pad(x, ((2, 1), (0, 0)), constant_values=0.5),
        "pad_features": lambda x: jnp.pad(x, ((0, 0), (1, 2))),
        "neighbours": neighbours,
        "tile": lambda x: jnp.tile(x, (2, 1)),
        "tile_to_size": lambda x, d: (
            jnp.tile(d[None], (x.shape[0], 2)),
            jnp.tile(x[:, :1], (1, x.shape[0])),
        ),
        "repeat": lambda x: jnp.repeat(x, 2, axis=0),
        "repeat_features": lambda x: jnp.repeat(x, 2, axis=1),
        "broadcast_first": lambda s: jnp.broadcast_to(s[None], (4, s.shape[0])),
        "broadcast_last": lambda s: jnp.broadcast_to(s[:, None], (s.shape[0], 4)),
        "broadcast_example": lambda d, x: jnp.broadcast_to(d[None], x.shape),
        "doubly_ragged": lambda s, y: jnp.broadcast_to(
            s[:, None], (s.shape[0], y.shape[0])
        ),
        "flip_both": lambda x: jnp.flip(x, (0, 1)),
        "column_slice": lambda x: x[:, 1:],
        "column": lambda x: x[:, 1],
        "reversed_columns": lambda x: x[:, ::-1],
        "unstack": lambda x: tuple(jnp.split(x, 3, axis=1)),
        "identity_matrix": lambda s: jnp.eye(s.shape[0]) * s[None],
        "flattened": lambda x, y, w: jnp.tanh(x @ w @ y.T).reshape(-1),
        "flattened_sum": lambda x, y, w: ((x @ w @ y.T).ravel() ** 2).sum(),
        "flattened_pairs": lambda x, y: (x[:, None] * y[None]).reshape(-1, D),
        "flattened_identity": lambda s: jnp.eye(s.shape[0]).ravel() * s.sum(),
        "flattened_columns": lambda x, w: (x @ w).T.reshape(-1),
        "other_way": lambda x, y: (x @ y.T).reshape(y.shape[0], x.shape[0]).sum(0),
        "back_again": back_again,
        "by_head": by_head,
        "sorted_pairs": lambda x, y: jnp.sort(x @ y.T, axis=None),
        "triangle": lambda s: jnp.tril(jnp.ones((s.shape[0], s.shape[0]))) @ s,
    },
    at_least=0,
)
FILLED = programs(
    {
        "jacobian_of_attention": jacobian_of_attention,
        "first_and_last": ends,
        "reverse": lambda x: x[::-1],
        "rest": lambda x: x[1:],
        "all_but_last": lambda x: x[:-1],
        "rest_and_sum": lambda x: (x[1:].sum(0), jnp.tanh(x[1:])),
        "every_second": lambda x: x[::2],
        "every_second_back": lambda x: x[::-2],
        "first_half": lambda x: x[: x.shape[0] // 2],
        "middle_token": lambda x: x[jnp.asarray(x.shape[0]) // 2],
        "difference": lambda x: jnp.diff(x, axis=0),
        "shifted": shifted,
        "products_of_neighbours": lambda x: x[1:] * x[:-1],
        "roll": lambda x: jnp.roll(x, 1, 0),
        "roll_back": lambda x: jnp.roll(x, -2, 0),
        "roll_features": lambda x: jnp.roll(x, 1, 1),
        "pad_between": lambda x: lax.pad(x, 0.5, ((1, 0, 2), (0, 0, 0))),
        "pad_negative": lambda x: lax.pad(x, 0.0, ((-1, 2, 0), (0, 0, 0))),
        "set_tokens": set_tokens,
        "best_pair": best_pair,
        "gradient_of_best": gradient_of_best,
        "median_pair": lambda x, y: jnp.median(x @ y.T),
        "best_of_one": lambda x, y: lax.top_k((x @ y.T).reshape(-1), 1),
        "rounded_up": rounded_up,
        "filled_up": filled_up,
        "set_rest": lambda x: x.at[1:].multiply(3.0),
    }
)
LONG = programs(
    {
        "best_pairs": lambda x, w: lax.top_k((x @ w @ x.T).reshape(-1), 3),
        "last_two": lambda x: x[-2:],
        "second_and_last_but_one": lambda x: (x[1], x[-2]),
        "trigrams": trigrams,
    },
    at_least=2,
) + programs({"middle_tokens": lambda x: x[2:5]}, at_least=5)
TIERED = programs(
    {
        "best_of_other_tokens": best_of_other_tokens,
        "flattened_pairs_of_tokens": lambda x, w: jnp.sin(x @ w @ x.T).ravel(),
    },
    at_least=2,
    options=({}, {"tiers": 2}),
)
PROGRAMS = EMPTY + FILLED + LONG + TIERED
