"""`linear_recurrence`: the public entry."""

from __future__ import annotations

import functools as ft
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp

from .. import _checks
from .._typing import Array, ArrayLike, Backend, Bool, Int, Shaped
from . import lowering, primitive
from .call import Recurrence

DTYPES = (*_checks.FLOATS, jnp.complex64, jnp.complex128)
"""The dtypes of recurrences."""


class LinearOutput(NamedTuple):
    """The result of `linear_recurrence`.

    Attributes:
        h: the states after all steps, in the layout of `b`; 0 past the end of a
            sequence.
        h_n: the states after the last step of each sequence, in the shape of `h_0`.
    """

    h: Array
    h_n: Array


def linear_recurrence(
    a: Shaped[Array, "*factors"],
    b: Shaped[Array, "B T *F"],
    h_0: Shaped[Array, " B *F"] | None = None,
    *,
    reverse: bool = False,
    seq_lengths: Int[ArrayLike, " B"] | None = None,
    resets: Bool[Array, "B T"] | None = None,
    time_major: bool = False,
    backend: Backend | None = None,
) -> LinearOutput:
    """Run the linear recurrence `h_t = a_t h_{t-1} + b_t` over a batch of sequences.

    Sizes: B sequences, T steps, and any axes F of units, none of them for `b [B, T]`.

    Args:
        a: the factors. `[B, T, *F]`; or `[*F]`, the same at every step. The last axis
            may have size 1, one factor for all units along it: `[B, T, heads, 1]` for
            `b [B, T, heads, D]`. With one axis more than that, a and F end with k, and
            a matrix multiplies each vector: `[B, T, *F, k]` or `[*F, k]`, such as 2x2
            blocks `[B, T, H, 2, 2]` for `b [B, T, H, 2]`. Time-major where `b` is.
        b: the inputs, `[B, T, *F]`, `[T, B, *F]` if `time_major`.
        h_0: the states before the first step, `[B, *F]`; None means zeros.
        reverse: run from the last step of each sequence to the first:
            `h_t = a_t h_{t+1} + b_t`.
        seq_lengths: integers `[B]`, each in 0..T. The final state of a sequence of
            length 0 is its initial state. Values in the padding, NaN included, reach no
            output and no gradient. None means that every sequence has T steps.
        resets: bool `[B, T]` (`[T, B]`): where True, the state counts as 0 at that
            step, `h_t = b_t`, and no gradient passes through.
        time_major: whether time is the first axis of `a`, `b`, `resets` and `h`.
        backend: `"xla"`, `"cpu"` or `"cuda"`; None takes the native library on CPUs,
            but XLA for 256 sequences and more of one step or of fewer than 64 numbers
            each; and on GPUs kernels that have been measured there (`ostinato.explain`
            says which): `OSTINATO_BACKEND=cuda` takes the others, too.

    Returns:
        `LinearOutput(h, h_n)` in the dtype of `b`: float32, float64, complex64,
        complex128, or bfloat16 or float16, whose states are kept in float32.

    Raises:
        TypeError: an argument has the wrong type or dtype, or dtypes differ.
        ValueError: a wrong shape, rank, length or choice.
        ostinato.BackendError: `backend` cannot run the call; the message says why.

    Holds under `jit` (also of arrays that are sharded along B and F), `vmap`, `grad`,
    `jvp`, `scan`, `checkpoint`, `shard_map` and `jax.export`, in any combination and
    order, and inside `ragged.vmap`. `linear_recurrence_over_devices` splits the steps.

    References:
        Martin and Cundy, Parallelizing Linear Recurrent Neural Nets Over Sequence
        Length (2018), arXiv:1709.04057, for the gradient and the associative scan that
        XLA runs. Gradients of complex arguments are JAX's.

    Examples:
        >>> import jax.numpy as jnp
        >>> import ostinato as ost
        >>> decay, x = jnp.array([0.5]), jnp.ones((1, 4, 1))
        >>> ost.linear_recurrence(decay, x).h[0, :, 0].tolist()
        [1.0, 1.5, 1.75, 1.875]
    """
    call, given = _check_arguments(
        a, b, h_0, reverse, seq_lengths, resets, time_major, backend
    )
    return _run(call, given)


class _Given(NamedTuple):
    a: Array
    b: Array
    h_0: Array | None
    lengths: Array | None
    resets: Array | None


def _check_arguments(
    a: Any,
    b: Any,
    h_0: Any,
    reverse: Any,
    seq_lengths: Any,
    resets: Any,
    time_major: Any,
    backend: Any,
) -> tuple[Recurrence, _Given]:
    reverse = _checks.check_bool("reverse", reverse)
    time_major = _checks.check_bool("time_major", time_major)
    if backend is not None:
        _checks.check_choice("backend", backend, get_args(Backend))
    a, b = _checks.check_array("a", a), _checks.check_array("b", b)
    _checks.check_floating("b", b, DTYPES)
    order = ("T", "B") if time_major else ("B", "T")
    if b.ndim < 2:
        raise ValueError(
            f"`b` must have shape [{', '.join(order)}, ...], got "
            f"{_checks.describe(b)}; one sequence needs a batch axis of 1"
        )
    blocks = _check_factors(a, b, order)
    sizes = dict(zip(order, b.shape[:2], strict=True))
    if h_0 is not None:
        h_0 = _checks.check_array("h_0", h_0)
        units = {f"F{n}": size for n, size in enumerate(b.shape[2:])}
        _checks.check_shape("h_0", h_0, B=sizes["B"], **units)
    _checks.check_same_dtype(b=b, a=a, h_0=h_0)
    if seq_lengths is not None:
        seq_lengths = _checks.check_seq_lengths(
            seq_lengths, sizes["B"], sizes["T"], False
        )
    if resets is not None:
        resets = _checks.check_mask("resets", resets, **sizes)
    call = Recurrence(
        reverse,
        False,
        time_major,
        blocks,
        seq_lengths is not None,
        resets is not None,
        backend,
    )
    lowering.check_backend(call, b)
    return call, _Given(a, b, h_0, seq_lengths, resets)


def _check_factors(a: Any, b: Any, order: tuple[str, str]) -> bool:
    """Check the shape of `a`; return whether it holds matrices."""
    units = b.shape[2:]
    extra = a.ndim - len(units)
    blocks = extra in (1, 3) and len(units) > 0
    lead, rest = a.shape[: extra - blocks], a.shape[max(0, extra - blocks) :]
    if extra in (0, 2) or blocks:
        if blocks:
            want = [(*units, units[-1])]
        else:
            want = [units, (*units[:-1], 1)] if units else [units]
        if lead in ((), b.shape[:2]) and rest in want:
            return blocks
    axes = ", ".join([*order, *map(str, units)])
    constant = ", ".join(map(str, units))
    hint = ""
    if a.ndim == 0:
        hint = f"; jnp.full({units}, a) makes a constant of a number"
    elif a.shape == b.shape[:-1]:
        hint = "; a[..., None] is one factor for all units along the last axis"
    raise ValueError(
        f"`a` must have the shape [{axes}] of `b`, or [{constant}], the last axis "
        f"maybe of size 1, or one axis more for matrices, got {list(a.shape)}{hint}"
    )


@ft.partial(jax.jit, static_argnums=0, inline=True)
def _run(call: Recurrence, given: _Given) -> LinearOutput:
    a, b, h_0, lengths, resets = given
    if a.ndim < b.ndim:  # the same at every step
        a = jnp.expand_dims(a, (0, 1))
    if h_0 is None:
        batch = b.shape[call.batch_axis]
        h_0 = jnp.zeros((batch, *b.shape[2:]), b.dtype)
    masks = [m for m in (lengths, resets) if m is not None]
    return LinearOutput(*primitive.run(call, a, b, h_0, *masks))
