"""Elementwise functions, sizes as numbers, normalisation, random numbers."""

import jax
import jax.numpy as jnp
from jax import lax

from .program import WORDS, programs


def mlp(x, w, b, u):
    return jnp.tanh(x @ w + b[None]) @ u


def gated(x, w, u):
    return jax.nn.silu(x @ w) * (x @ u)


def activations(x):
    names = "relu sigmoid softplus elu leaky_relu celu soft_sign gelu mish selu"
    return {name: getattr(jax.nn, name)(x) for name in names.split()}


def special_functions(x):
    positive = 0.5 + x**2
    return lax.erf(x), lax.lgamma(positive), lax.log1p(positive), jnp.cbrt(positive)


def position_codes(x):
    position = jnp.arange(x.shape[0], dtype=x.dtype)[:, None]
    rate = 10.0 ** -jnp.arange(x.shape[1], dtype=x.dtype)[None]
    return x + jnp.sin(position * rate)


def sizes_as_numbers(x):
    n = x.shape[0]
    return x / n, x * jnp.sqrt(jnp.asarray(n, x.dtype)), jnp.asarray(n), x.size


def integers(i):
    return i % 3, i // 2, i << 1, (i & 1) | (i ^ 3), -i, i.astype(jnp.float64) / 2


def compared(x, x2):
    above = x > x2
    return above, ~above, jnp.sign(x), jnp.floor(4 * x), jnp.round(x), x == x


def layer_norm(x, b):
    centred = x - x.mean(-1, keepdims=True)
    return centred * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5) * b[None]


def rms_norm(x, b):
    return x * lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6) * b[None]


def norm_over_time(x):
    return (x - x.mean(0)[None]) / jnp.sqrt(x.var(0) + 1e-3)[None]


def l2_normalised(x):
    return x / jnp.sqrt((x**2).sum() + 1e-6)


def per_example_branch(x, e):
    return jnp.where(e > 0, x, -2 * x)


def dropout(x, key):
    return jnp.where(jax.random.bernoulli(key, 0.6, x.shape), x / 0.6, 0)


def dropout_twice(x, key):
    one, two = jax.random.split(key)
    return dropout(jnp.tanh(dropout(x, one)), two)


def fresh_noise(x, shared_key):
    return x * jax.random.normal(shared_key, x.shape, x.dtype)


def random_tokens(x, key):
    return {
        "uniform": jax.random.uniform(key, (x.shape[0],)),
        "coin": jax.random.bernoulli(key, 0.5, (x.shape[0],)),
        "integers": jax.random.randint(key, (x.shape[0], 2), 0, 9),
    }


def gumbel_sample(x, key):
    noise = jax.random.gumbel(key, x.shape, x.dtype)
    return jax.nn.softmax(x + noise, -1), jnp.argmax(x + noise, -1)


def noise_across(x, key):
    """Not the leading axis alone has different sizes: numbers count by its own ones."""
    n = x.shape[0]
    drawn = jax.random.normal(key, (2, n), x.dtype) @ x
    bits = [jax.random.bits(key, (n, 2, n), dtype) for dtype in ("uint8", "uint32")]
    return drawn, jax.random.uniform(key, (1, n, n)), bits


def dense_noise(x, key):
    return x + jax.random.normal(key, x.shape[1:], x.dtype)[None]


def numbered_keys(x, key):
    """For each token keys of all tokens."""
    n = x.shape[0]
    fold = jax.vmap(jax.random.fold_in, (None, 0))
    keys = jax.vmap(fold, (0, None))(jax.random.split(key, n), jnp.arange(n))
    return jax.random.key_data(keys).astype(x.dtype)[..., 0].max(1)


def noise_of_tokens(x, key):
    """A key for every token."""
    keys = jax.random.split(key, x.shape[0])
    return x * jax.vmap(lambda k: jax.random.normal(k, (x.shape[1],)))(keys)


def other_generator(kind):
    """Numbers and keys of a generator that JAX runs for all keys of a batch at once."""

    def function(x, key, shared_key):
        n = x.shape[0]
        words = (jnp.tile(jax.random.key_data(k), 2) for k in (key, shared_key))
        key, same = (jax.random.wrap_key_data(w, impl=kind) for w in words)
        one, two, three = jax.random.split(key, 3)
        keys = jax.random.split(one, n)
        return (
            x + jax.random.normal(key, x.shape[1:])[None],
            jax.random.uniform(one, x.shape),
            jax.random.uniform(two, (2, n)),
            jax.random.bits(three, (n,), "uint8"),
            jax.random.key_data(jax.random.fold_in(two, jnp.asarray(n))),
            jax.random.key_data(jax.vmap(jax.random.fold_in)(keys, jnp.arange(n))),
            jax.vmap(lambda k: jax.random.normal(k, (3,)))(keys),
            jax.random.gamma(three, jnp.ones(n)),
            lax.rng_bit_generator(jax.random.key_data(key), (2,)),
            jax.random.normal(same, (n, 3)),
        )

    return function


EMPTY = programs(
    {
        "mlp": mlp,
        "gated": gated,
        "activations": activations,
        "special_functions": special_functions,
        "position_codes": position_codes,
        "integers": integers,
        "compared": compared,
        "layer_norm": layer_norm,
        "rms_norm": rms_norm,
        "l2_normalised": l2_normalised,
        "per_example_branch": per_example_branch,
        "add_per_example": lambda x, d: x + d[None],
        "scale_per_example": lambda x, e: x * e,
        "two_inputs": lambda x, x2, s: x * x2 - s[:, None],
        "where_and_clip": lambda x: jnp.where(x > 0, jnp.clip(x, 0.2, 0.9), -x),
        "clamp": lambda x: lax.clamp(-0.5, x, 0.8),
        "complex": lambda x, x2: jnp.abs(lax.complex(x, x2) * jnp.exp(1j * 0.3)),
        "through_float32": lambda x: jnp.sin(x.astype(jnp.float32)).astype(x.dtype),
        "stop_gradient": lambda x: x * lax.stop_gradient(jnp.cos(x)),
        "logaddexp": lambda x, x2: jnp.logaddexp(x, x2) + jnp.hypot(x, x2 + 1),
        "integer_powers": lambda x, i: x**3 + lax.integer_pow(x, -2) * 1e-9,
        "one_hot": lambda i: jax.nn.one_hot(i, WORDS, dtype=jnp.float64),
        "glu": lambda square: jax.nn.glu(square[:, :, :2], axis=-1),
        "softmax_features": lambda x: jax.nn.softmax(x, -1),
        "log_softmax_features": lambda x: jax.nn.log_softmax(x, -1),
        "no_nan": lambda x: jnp.nan_to_num(jnp.where(x > 1, jnp.nan, x)),
        "untouched": lambda x, d, scale: (x, d, scale),
        "constants": lambda x: (jnp.ones(2), 3.0, x),
        "fresh_arrays": lambda x: (
            jnp.zeros((x.shape[0], 2)),
            jnp.arange(x.shape[0]),
            jnp.full(x.shape, 2.5),
        ),
    },
    at_least=0,
)
LENGTHS = programs(
    {
        "sizes_as_numbers": sizes_as_numbers,
        "norm_over_time": norm_over_time,
        "standardize_time": lambda x: jax.nn.standardize(x, 0),
    }
)
RANDOM = programs(
    {
        "dropout": dropout,
        "dropout_twice": dropout_twice,
        "fresh_noise": fresh_noise,
        "random_tokens": random_tokens,
        "gumbel_sample": gumbel_sample,
        "noise_across": noise_across,
        "dense_noise": dense_noise,
        "noise_of_tokens": noise_of_tokens,
        "numbered_keys": numbered_keys,
        "categorical": lambda x, key: jax.random.categorical(key, x),
    }
)
OTHER_GENERATORS = programs(
    {kind: other_generator(kind) for kind in ("rbg", "unsafe_rbg")}, gradients=False
)
PROGRAMS = EMPTY + LENGTHS + RANDOM + OTHER_GENERATORS
