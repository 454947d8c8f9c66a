"""Reductions, cumulative ones, products, sorting, linear algebra."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.linalg import cho_solve, solve_triangular

from .program import programs


def pairs(x):
    """Scores of all pairs that grow with both positions: unlike any cloned token."""
    position = jnp.arange(x.shape[0], dtype=x.dtype)
    return x @ x.T + 0.3 * position[:, None] + position[None]


def pair_sums(x, b):
    scores = pairs(x * b[None])
    return scores.sum(0), scores.sum(1), scores.sum(), scores.mean(1)


def pair_extremes(x):
    # Of differences, not of products: XLA may compute those twice, with and without a
    # rounding in between, and then finds no element that is the maximum.
    scores = x[:, :1] - x[:, 1][None]
    return scores.max(1), scores.min(0), (-scores).max(0), scores.max()


def pair_products(x):
    return (1 + 0.1 * jnp.tanh(pairs(x))).prod(1)


def pair_choices(x):
    scores = pairs(x)
    return scores.argmax(1), scores.argmin(0), (-scores).argmax(0), scores.argmin(1)


def pair_logic(x):
    above = pairs(x) > 2
    bits = (pairs(x) * 4).astype(jnp.int32)
    return (
        above.any(1),
        above.all(0),
        jnp.bitwise_or.reduce(bits, axis=1),
        jnp.bitwise_and.reduce(bits, axis=0),
        jnp.bitwise_xor.reduce(bits, axis=1),
    )


def pair_scans(x):
    scores = 0.1 * pairs(x)
    return (
        jnp.cumsum(scores, 1)[:, 0],
        lax.cumsum(scores, 1, reverse=True).sum(0),
        jnp.cumprod(jnp.tanh(scores), 0).sum(1),
        lax.cummax(jnp.sin(scores), 1).sum(0),
    )


def singular_past_the_end(x, scale, e):
    """Finite at all pairs of an example, not so at the positions behind it."""
    n = x.shape[0]
    place = jnp.arange(n, dtype=x.dtype)
    left = jnp.asarray(2 * n, x.dtype) - place[:, None] - place[None]
    return scale / left, jnp.log(left) * e, (x @ x.T) / left, (scale / left) @ x


def pair_scans_back(x, u):
    """Products with weights of scans that begin in the padding."""
    pairs = x[:, None] * x[None]
    scans = lax.cummax, lax.cummin, lax.cumlogsumexp, lax.cumsum
    return [(scan(pairs, 1, reverse=True) @ u).sum((0, 1)) for scan in scans]


def logs_of_products(x, u):
    """Sums over tokens of both sides that are 0 where there are none."""
    pairs = jnp.exp(jnp.sin(x[:, None] * x[None]))
    return (jnp.log(jnp.einsum("ijd,jkd->ikd", pairs, pairs)) @ u).sum(1)


def cross_sums(x, y):
    scores = x @ y.T + jnp.arange(y.shape[0], dtype=x.dtype)[None]
    return scores.sum(0), scores.max(1), scores.argmax(0), scores.min()


def weighted_mean(x, w):
    weight = jax.nn.sigmoid((x @ w).sum(-1))
    return (weight[:, None] * x).sum(0) / weight.sum()


def covariance(x):
    centred = x - x.mean(0)[None]
    return centred.T @ centred / x.shape[0]


def gram(x, scale):
    """A positive matrix, one token for each element."""
    distance = ((x[:, None] - x[None]) ** 2).sum(-1)
    return jnp.exp(-0.5 * distance * (1 + scale**2)) + 0.5 * jnp.eye(x.shape[0])


def steep(x, scale):
    """A matrix whose later rows are larger: they are the first pivots."""
    place = jnp.arange(x.shape[0], dtype=x.dtype)
    return gram(x, scale) * (1 + place[:, None]) ** 2


def singular_pairs(x, u):
    """A product with weights; what stands past the end is infinite."""
    n = x.shape[0]
    place = jnp.arange(n, dtype=x.dtype)
    left = jnp.asarray(2 * n, x.dtype) - place[:, None] - place[None]
    return (x[:, None] * x[None] / left[..., None]) @ u


def identity(x):
    return jnp.eye(x.shape[0])


def cholesky(x, scale):
    return jnp.linalg.cholesky(gram(x, scale))


def gaussian_process(x, s, scale):
    """Log likelihood of values `s` at places `x`."""
    factor = jnp.linalg.cholesky(gram(x, scale))
    solved = cho_solve((factor, True), s)
    logs = jnp.log(jnp.diagonal(factor)).sum()
    return -0.5 * (s * solved).sum() - logs, solved


def triangular(x, s, scale):
    factor = jnp.tril(gram(x, scale))
    below = solve_triangular(factor, x, lower=True)
    return below, solve_triangular(factor.T, s, lower=False)


def triangular_past_the_end(x, scale, w):
    """The right sides are infinite at positions behind an example."""
    n = x.shape[0]
    place, feature = jnp.arange(n, dtype=x.dtype), jnp.arange(3, dtype=x.dtype)
    right = scale / (jnp.asarray(2 * n, x.dtype) - place[None] - place[:, None])
    square = solve_triangular(jnp.eye(n) + jnp.triu(x @ x.T), right, lower=False)
    below = solve_triangular(jnp.eye(n), right[:, :1] * x[:, :1], lower=True)
    wide = 1 / (jnp.asarray(n + 2, x.dtype) - place[None] - feature[:, None])
    return square, below, solve_triangular(4 * jnp.eye(3) + w, wide * x.T)


def small_matrices(x):
    small = x.T @ x + jnp.eye(x.shape[1])
    values, _ = jnp.linalg.eigh(small)
    return jnp.linalg.inv(small), values, jnp.linalg.slogdet(small)


def ranks(s):
    return jnp.argsort(jnp.argsort(s))


def sort_by_key(s, i):
    return lax.sort((s, i), num_keys=1)


def sort_pairs(x):
    return jnp.sort(-pairs(x), axis=1), jnp.argsort(jnp.sin(pairs(x)), axis=0)


def places_of(s, b):
    """As `jnp.searchsorted`, which wants to know how many `s` there are."""
    return (jnp.sort(s)[None] < b[:, None]).sum(1)


def reduced_by_a_function(x, i):
    """The least of each column with the word at its place, and products and sums."""

    def lesser(a, b):
        first = (a[0] < b[0]) | (a[0] == b[0]) & (a[1] < b[1])
        return jnp.where(first, a[0], b[0]), jnp.where(first, a[1], b[1])

    words = jnp.broadcast_to(i[:, None], x.shape)
    starts = jnp.asarray(jnp.inf), jnp.int32(99)
    both = lambda a, b: a + b + a * b  # noqa: E731
    return (
        lax.reduce((x, words), starts, lesser, (0,)),
        lax.reduce((x, words), starts, lesser, (0, 1)),
        lax.reduce((x @ x.T) / 9, jnp.zeros(()), both, (1,)),
        lax.reduce(x, jnp.zeros(()), both, (1,)),
    )


EMPTY = programs(
    {
        "sum": lambda x: x.sum(0),
        "sum_all": lambda x: x.sum(),
        "sum_features": lambda x: x.sum(1),
        "sum_integers": lambda i: (i.sum(), i.astype(jnp.float64).sum()),
        "weighted_sum": lambda x, s: (x * s[:, None]).sum(0),
        "product": lambda x: (1 + 0.3 * x).prod(0),
        "any_all": lambda x: ((x > 0.5).any(0), (x > 0).all(0), (x > 0).all()),
        "count": lambda x: jnp.count_nonzero(x > 0, axis=0),
        "norm": lambda x: jnp.sqrt((x**2).sum(0) + 1e-3),
        "max_with_initial": lambda x: x.max(0, initial=-9.0),
        "extremes_of_nothing": lambda x: (
            jnp.max(x[:, :0], initial=-9.0),
            lax.reduce_max(x[:, :0], (0, 1)),
            lax.reduce_min(x[:, :0], (1, 0)),
        ),
        "cumsum": lambda x: jnp.cumsum(x, 0),
        "cumsum_reverse": lambda x: lax.cumsum(x, 0, reverse=True),
        "cumsum_features": lambda x: jnp.cumsum(x, 1),
        "cumprod": lambda x: jnp.cumprod(1 + 0.5 * jnp.tanh(x), 0),
        "cummax": lambda x: lax.cummax(x, 0),
        "cummin_reverse": lambda x: lax.cummin(x, 0, reverse=True),
        "cumlogsumexp": lambda x: lax.cumlogsumexp(x, 0),
        "gram_features": lambda x: x.T @ x,
        "rows_times_weights": lambda x, w: jnp.einsum("nd,de->ne", x, w),
        "token_dots": lambda x, x2: jnp.einsum("nd,nd->n", x, x2),
        "outer_sum": lambda x, x2: jnp.einsum("nd,ne->de", x, x2),
        "dot": lambda s, x: s @ x,
        "vdot": lambda s: jnp.vdot(s, s),
        "own_weights": lambda x, own_w: x @ own_w,
        "bilinear": lambda x, w, y: x @ w @ y.T,
        "rows_of_matrices": lambda square, x: jnp.einsum("nab,nb->na", square, x),
        "matrices_times_weights": lambda square, w: jnp.einsum(
            "nab,bc->acn", square, w
        ),
        "weights_first": lambda x, w: w @ x.T,
        "all_pairs": lambda x: x[:, None] - x[None],
        "pair_sums_of_two": lambda x, y: (x @ y.T).sum(1),
        "pair_scans_back": pair_scans_back,
        "logs_of_products": logs_of_products,
    },
    at_least=0,
)
FILLED = programs(
    {
        "mean": lambda x: x.mean(0),
        "mean_all": lambda x: x.mean(),
        "mean_of_mlp": lambda x, w, b: jnp.tanh(x @ w + b[None]).mean(0),
        "variance": lambda x: (x.var(0), x.std(0)),
        "max": lambda x: x.max(0),
        "min_all": lambda x: x.min(),
        "max_of_ties": lambda x: jnp.maximum(x, 0.3).max(0),
        "extremes_of_ties": lambda x: (
            jnp.maximum(x, 0).max(),
            jnp.minimum(x, 0).min(),
        ),
        "max_of_nothing_finite": lambda s: jnp.where(s > 9, s, -jnp.inf).max(),
        "ptp": lambda x: jnp.ptp(x, axis=0),
        "logsumexp": lambda x: jax.nn.logsumexp(x, 0),
        "softmax": lambda x: jax.nn.softmax(x, 0),
        "softmax_pool": lambda x, w: (jax.nn.softmax(x @ w, 0) * x).sum(0),
        "argmax": lambda x: (x.argmax(0), x.argmin(0), x.argmax(1)),
        "weighted_mean": weighted_mean,
        "covariance": covariance,
        "pair_sums": pair_sums,
        "pair_extremes": pair_extremes,
        "pair_products": pair_products,
        "pair_choices": pair_choices,
        "pair_logic": pair_logic,
        "pair_scans": pair_scans,
        "pair_softmax": lambda x: jax.nn.softmax(pairs(x), 1),
        "pair_softmax_down": lambda x: jax.nn.log_softmax(pairs(x), 0),
        "pairs_squared": lambda x: (0.1 * pairs(x)) @ pairs(x) @ x,
        "singular_past_the_end": singular_past_the_end,
        "singular_pairs": lambda x, u: singular_pairs(x, u).sum((0, 1)),
        "cross_sums": cross_sums,
        "cholesky": cholesky,
        "gaussian_process": gaussian_process,
        "triangular": triangular,
        "triangular_past_the_end": triangular_past_the_end,
        "small_matrices": small_matrices,
        "solve": lambda x, scale: jnp.linalg.solve(steep(x, scale), x),
        "log_determinant": lambda x, scale: jnp.linalg.slogdet(gram(x, scale))[1],
        "determinant": lambda x, scale: jnp.linalg.det(gram(x, scale)),
        "determinant_of_products": lambda x: jnp.linalg.det(x @ x.T + identity(x)),
        "sort": lambda x: jnp.sort(x, 0),
        "sort_descending": lambda x: jnp.sort(x, 0, descending=True),
        "sort_features": lambda x: jnp.sort(x, 1),
        "argsort": lambda x: jnp.argsort(x, 0),
        "ranks": ranks,
        "sort_by_key": sort_by_key,
        "sort_pairs": sort_pairs,
        "median": lambda x: jnp.median(x, 0),
        "quantile": lambda x: jnp.quantile(x, 0.3, axis=0),
        "top_features": lambda x: lax.top_k(x, 2),
        "places_of": places_of,
    }
)
LONG = programs(
    {
        "top_k": lambda s: lax.top_k(s, 2),
        "top_k_columns": lambda x: lax.top_k(x.T, 2)[0],
    },
    at_least=2,
)
NO_GRADIENT = programs(
    {"reduced_by_a_function": reduced_by_a_function}, gradients=False, at_least=0
)
PROGRAMS = EMPTY + FILLED + LONG + NO_GRADIENT
