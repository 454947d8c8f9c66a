"""Transforms and factors over axes of fixed size; what stands in where they are not."""

import jax
import jax.numpy as jnp
from jax import lax

from .program import D, Program, programs


def positive(x):
    """Symmetric matrices with eigenvalues well above 0, and apart."""
    diagonal = jnp.diag(jnp.arange(1.0, D + 1))
    return x @ jnp.swapaxes(x, -1, -2) + jnp.broadcast_to(diagonal, x.shape)


def fourier(square, w):
    y = jnp.fft.fft(square @ w, axis=1)
    return y.real, y.imag


def fourier_both_ways(x, w):
    y = jnp.fft.rfft(x @ w)
    return jnp.fft.irfft(y * (2 - 1j), n=D), jnp.abs(y)


def fourier_of_columns(x, w):
    """The ragged axis comes last, and is not the one that is transformed."""
    return jnp.abs(jnp.fft.fft((x @ w).T, axis=0))


def fourier_of_pairs(x, y, w):
    pairs = jnp.tanh(x[:, None] * y[None]) @ w
    return jnp.fft.fft(pairs, axis=-1).real.sum(1)


def eigenvectors(square, w):
    values, vectors = jnp.linalg.eigh(positive(square @ w))
    return values, vectors**2 @ w  # whatever their signs


def singular(square, w):
    u, s, vt = jnp.linalg.svd(square @ w)
    return u**2, s, vt**2 @ w


def orthogonal(square, w):
    q, r = jnp.linalg.qr((square @ w)[:, :, :2])
    return q @ r, jnp.abs(r)


def factored(square, w):
    lower = jnp.linalg.cholesky(positive(square @ w))
    return jax.scipy.linalg.solve_triangular(lower, square, lower=True) @ w


def solved_with_a_remark(x, s, scale):
    """A solver of its own that tells more than the solution."""
    distance = ((x[:, None] - x[None]) ** 2).sum(-1)
    matrix = jnp.exp(-distance * (1 + scale**2)) + jnp.eye(x.shape[0])

    def solve(_, b):
        return jnp.linalg.solve(matrix, b), (jnp.argsort(b), jnp.int32(3))

    return lax.custom_linear_solve(
        lambda b: matrix @ b, s, solve, solve, symmetric=True, has_aux=True
    )


def pair_factors(square, w):
    """`[n, n, D, D]`, with another matrix for each pair of tokens."""
    place = jnp.arange(square.shape[0], dtype=square.dtype)[:, None, None, None]
    pairs = jnp.tanh(square[:, None] * square[None] + place) @ w
    return jnp.linalg.cholesky(positive(pairs)).sum(1) @ w


def discrete_fourier(x):
    """The matrix of the transform, whose size is the example's."""
    n = x.shape[0]
    k = jnp.arange(n, dtype=jnp.int32)
    turns = (k[:, None] * k[None] % jnp.asarray(n, jnp.int32)).astype(x.dtype) / n
    return jnp.cos(2 * jnp.pi * turns) @ x, -jnp.sin(2 * jnp.pi * turns) @ x


def discrete_fourier_of_jax(x):
    y = jnp.fft.fft(x, axis=0)
    return y.real, y.imag


def rectangular(x):
    """Orthogonal columns, by the factor of a matrix of fixed size."""
    upper = jnp.linalg.cholesky(x.T @ x).T
    q = jax.scipy.linalg.solve_triangular(upper.T, x.T, lower=True).T
    return q, upper, jnp.linalg.eigvalsh(x.T @ x)


def rectangular_of_jax(x):
    q, r = jnp.linalg.qr(x)
    sign = jnp.sign(jnp.diagonal(r))
    return q * sign[None], r * sign[:, None], jnp.linalg.svd(x, False)[1][::-1] ** 2


PROGRAMS = (
    programs(
        {
            "fourier": fourier,
            "fourier_both_ways": fourier_both_ways,
            "fourier_of_columns": fourier_of_columns,
            "fourier_of_pairs": fourier_of_pairs,
            "fourier_2d": lambda square, w: jnp.abs(jnp.fft.fft2(square @ w)),
            "eigenvectors": eigenvectors,
            "singular": singular,
            "orthogonal": orthogonal,
            "factored": factored,
            "pair_factors": pair_factors,
            "tridiagonal": lambda square, w: lax.linalg.tridiagonal_solve(
                square[:, 0], 9 + square[:, 1], square[:, 2], square @ w
            ),
        },
        at_least=0,
    )
    + programs(
        {
            "eigenvalues": lambda square: jnp.linalg.eigvals(square).real.sum(-1),
            "triangular_factors": lambda square: lax.linalg.lu(square)[0],
            "hessenberg": lambda square: jnp.abs(lax.linalg.hessenberg(square)[0]),
            "schur": lambda square: jnp.abs(lax.linalg.schur(square)[0]),
        },
        at_least=0,
        gradients=False,
    )
    + [
        Program("solved_with_a_remark", solved_with_a_remark),
        Program(
            "discrete_fourier", discrete_fourier, reference=discrete_fourier_of_jax
        ),
        Program(
            "rectangular",
            rectangular,
            at_least=D,
            reference=rectangular_of_jax,
            dtype="float32",  # x.T @ x has the square of the condition number
        ),
        Program(
            "pseudo_inverse",
            # Not near a matrix of lower rank, whose gradient is inexact in any library.
            lambda square, w: jnp.linalg.pinv(
                (square @ w)[:, :, :2] + 2 * jnp.eye(square.shape[1], 2)[None]
            ),
        ),
    ]
)
