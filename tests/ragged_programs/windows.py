"""Convolutions and pooling along the ragged axis."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ostinato import ragged

from .program import D, Program, programs

NTC = ("NTC", "TIO", "NTC")  # batch, time, channels
conv = functools.partial(lax.conv_general_dilated, dimension_numbers=NTC)


def convolve(x, kernel, stride=1, padding="SAME", **options):
    return conv(x[None], kernel, (stride,), padding, **options)[0]


def positioned(x):
    return x + 0.2 * jnp.arange(x.shape[0], dtype=x.dtype)[:, None]


def pool(x, initial, combine, size=2, stride=1, padding="SAME"):
    return lax.reduce_window(x, initial, combine, (size, 1), (stride, 1), padding)


def max_pool(x, **options):
    return pool(x, -np.inf, lax.max, **options)


def mean_pool(x):
    counts = pool(jnp.ones_like(x), 0.0, lax.add, size=3)
    return pool(positioned(x), 0.0, lax.add, size=3) / counts


def channels_first(x, kernel):
    return lax.conv_general_dilated(
        x.T[None], kernel.transpose(2, 1, 0), (1,), [(1, 1)]
    )[0]


def text_classifier(i, table, kernel, w_out):
    """Embedding, convolution, greatest value over time, logits."""
    hidden = jax.nn.relu(convolve(table[i], kernel)).max(0)
    return hidden @ w_out[:2]


def temporal_network(x, taps):
    """Causal convolutions with growing dilation, each with a skip."""
    for dilation in (1, 2):
        causal = [(2 * dilation, 0)]
        x = x + jnp.tanh(
            convolve(
                x, taps, padding=causal, rhs_dilation=(dilation,),
                feature_group_count=D,
            )
        )  # fmt: skip
    return x


def least_with_places(s, i):
    """Windows over two arrays at once."""

    def lesser(a, b):
        first = a[0] <= b[0]
        return jnp.where(first, a[0], b[0]), jnp.where(first, a[1], b[1])

    place = jnp.arange(s.shape[0], dtype=s.dtype)
    start = np.inf, jnp.int32(-1)
    return lax.reduce_window((s + place, i), start, lesser, (3,), (2,), ((1, 1),))


def tangent_of_max_pool(x, x2):
    def both(a):
        """The padding of the second one depends on the size."""
        return max_pool(positioned(a), size=3), max_pool(a, size=3, stride=2)

    return jax.jvp(both, (x,), (x2,))


def down_and_up(x, kernel):
    """Every second token, then as many tokens again by a transposed convolution."""
    small = convolve(x, kernel, stride=2, padding=[(1, 1)])
    back = kernel.transpose(0, 2, 1)
    return convolve(small, back, padding=[(1, 1)], lhs_dilation=(2,))


def weighted(convolve):
    """Sums of the result: where it is as long as the kernel, no length differs."""

    def sums(a, v, mode):
        y = convolve(a, v, mode)
        place = jnp.arange(y.shape[0], dtype=y.dtype)
        return jnp.sum(y * jnp.cos(1.7 * place + 0.3)), jnp.ones_like(y).sum()

    return sums


CONVOLVED = {
    "kernel": lambda of, mode: lambda s, b: of(s, b, mode),
    "as_kernel": lambda of, mode: lambda s, b: of(b[:2], s, mode),
    "both": lambda of, mode: lambda s, t: of(s, t, mode),
}


def convolution(name, mode, kind):
    """One of the vectors that it convolves is ragged, or both."""
    make = CONVOLVED[kind]
    fn, plain = (make(weighted(getattr(of, name)), mode) for of in (ragged, jnp))
    return Program(f"{name}_{mode}_{kind}", fn, reference=plain)


PROGRAMS = programs(
    {
        "conv_same": lambda x, kernel: convolve(positioned(x), kernel),
        "conv_padded": lambda x, kernel: convolve(x, kernel, padding=[(1, 1)]),
        "conv_causal": lambda x, kernel: convolve(x, kernel, padding=[(2, 0)]),
        "conv_stride": lambda x, kernel: convolve(
            positioned(x), kernel, stride=2, padding=[(1, 1)]
        ),
        "conv_dilated": lambda x, kernel: convolve(
            positioned(x), kernel, padding=[(2, 2)], rhs_dilation=(2,)
        ),
        "conv_depthwise": lambda x, taps: convolve(x, taps, feature_group_count=D),
        "conv_wide": lambda x, wide: convolve(x, wide),
        "conv_own_kernel": lambda x, own_w: convolve(
            x, own_w[:, None, :], padding=[(1, 1)], feature_group_count=D
        ),
        "conv_twice": lambda x, kernel: convolve(
            jax.nn.relu(convolve(x, kernel)), kernel[:, :2]
        ),
        "channels_first": channels_first,
        "max_pool": lambda x: max_pool(positioned(x), size=3),
        "max_pool_stride": lambda x: max_pool(
            x, size=2, stride=2, padding=((0, 1), (0, 0))
        ),
        "tangent_of_max_pool": tangent_of_max_pool,
        "min_pool": lambda x: pool(positioned(x), np.inf, lax.min, size=3),
        "mean_pool": mean_pool,
        "text_classifier": text_classifier,
        "temporal_network": temporal_network,
        "down_and_up": down_and_up,
    }
) + programs(
    {
        "conv_valid": lambda x, kernel: convolve(
            positioned(x), kernel, padding="VALID"
        ),
        "max_pool_valid": lambda x: max_pool(positioned(x), size=3, padding="VALID"),
        "sum_pool_valid": lambda x: pool(x, 0.0, lax.add, padding="VALID"),
    },
    at_least=3,
)
PROGRAMS += programs({"least_with_places": least_with_places}, gradients=False)
PROGRAMS += [
    convolution("convolve", "full", "kernel"),
    convolution("convolve", "full", "both"),
    convolution("convolve", "same", "as_kernel"),
    convolution("convolve", "valid", "both"),
    convolution("correlate", "full", "as_kernel"),
    convolution("correlate", "same", "kernel"),
    convolution("correlate", "same", "both"),
    convolution("correlate", "valid", "as_kernel"),
]
