"""`lfilter` and `sosfilt`: recursive filters, as scipy's."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _checks
from .._padding import at_step, zero
from .._typing import Array, ArrayLike, Float, Int
from .filter_primitive import run


def lfilter(
    b: Float[ArrayLike, " M"],
    a: Float[ArrayLike, " N"],
    x: Float[Array, "*C T"],
    *,
    axis: int = -1,
    zi: Float[Array, "*C n"] | None = None,
    seq_lengths: Int[ArrayLike, "*C"] | None = None,
) -> Array | tuple[Array, Array]:
    """Filter signals with a rational transfer function.

        a_0 y_t = sum_k b_k x_{t-k} - sum_{k >= 1} a_k y_{t-k}

    Args:
        b: the numerator, `[M]`, or `[*C, M]` for a filter of its own in every channel:
            an array of JAX in the dtype of `x`; or lists or arrays of numpy, such as
            scipy designs, which are taken to that dtype.
        a: the denominator, `[N]` or `[*C, N]`; a_0 must not be 0.
        x: signals, whose steps are along `axis`; C are its other axes, in order.
        axis: the axis of the steps.
        zi: the state before the first step, n = max(M, N) - 1 numbers along `axis`, as
            in scipy; for streaming, the state that the call before returned. Its dtype
            is as for `b`. None means zeros.
        seq_lengths: integers `[*C]`, each in 0..T, or one for all channels. Values in
            the padding, NaN included, reach nothing. None means that every channel has
            T steps.

    Returns:
        `y` in the shape of `x`, 0 past the end of a channel; `(y, zf)` with `zi`, where
        `zf` is the state after the last step, in its shape.

    Raises:
        TypeError, ValueError: an argument has a wrong type, dtype or shape.

    Holds under every JAX transformation, in `b` and `a` too, and inside `ragged.vmap`.

    References:
        scipy.signal.lfilter; the state is that of its transposed direct form II. On
        CPUs kernels run orders up to 8, in float32 and float64.

    Examples:
        >>> import jax.numpy as jnp
        >>> import ostinato as ost
        >>> ost.lfilter([0.5], [1.0, -0.5], jnp.ones(4)).tolist()
        [0.5, 0.75, 0.875, 0.9375]
    """
    signals = _Signals(x, axis, seq_lengths)
    b, a = signals.coefficients("b", b), signals.coefficients("a", a)
    _check_first("`a`", a[..., 0])
    if zi is None:
        return signals.given(_filtered(b, a, signals.x, None, signals.lengths)[0])
    order = max(b.shape[-1], a.shape[-1]) - 1
    zi = signals.state(zi, order)
    y, zf = _filtered(b, a, signals.x, zi, signals.lengths)
    return signals.given(y), signals.given(zf)


def sosfilt(
    sos: Float[ArrayLike, "S 6"],
    x: Float[Array, "*C T"],
    *,
    axis: int = -1,
    zi: Float[Array, "S *C 2"] | None = None,
    seq_lengths: Int[ArrayLike, "*C"] | None = None,
) -> Array | tuple[Array, Array]:
    """Filter signals by second-order sections, one after another.

    Args:
        sos: `[S, 6]`, the coefficients b_0 b_1 b_2 a_0 a_1 a_2 of every section: an
            array of JAX in the dtype of `x`; or lists or an array of numpy, such as
            scipy designs, which are converted to that dtype.
        x: signals, whose steps are along `axis`; C are its other axes, in order.
        axis: the axis of the steps.
        zi: the states before the first step, `[S, ...]`, 2 numbers along `axis`; None
            means zeros.
        seq_lengths: as for `lfilter`.

    Returns:
        `y` in the shape of `x`, 0 past the end of a signal; `(y, zf)` with `zi`.

    Raises:
        TypeError, ValueError: an argument has a wrong type, dtype or shape.

    Holds under every JAX transformation, in `sos` too, and inside `ragged.vmap`.

    References:
        scipy.signal.sosfilt.

    Examples:
        >>> import jax.numpy as jnp
        >>> import ostinato as ost
        >>> sections = [[0.5, 0.0, 0.0, 1.0, -0.5, 0.0]]
        >>> ost.sosfilt(sections, jnp.ones(4)).tolist()
        [0.5, 0.75, 0.875, 0.9375]
    """
    signals = _Signals(x, axis, seq_lengths)
    sos = signals.array("sos", sos)
    if sos.ndim != 2 or sos.shape[1] != 6:
        raise ValueError(f"`sos` must have shape [S, 6], got {list(sos.shape)}")
    _check_first("the denominators of `sos`", sos[:, 3])
    states = [None] * sos.shape[0]
    if zi is not None:
        states = signals.state(zi, 2, sos.shape[0])
    y, ends = signals.x, []
    if signals.lengths is not None:
        y = zero(y, signals.lengths, 1)
    for section, state in zip(sos, states, strict=True):
        b, a = section[None, :3], section[None, 3:]
        y, end = _filtered(b, a, y, state, signals.lengths)
        ends.append(end)
    if zi is None:
        return signals.given(y)
    zf = [signals.given(z) for z in ends]
    return signals.given(y), jnp.stack(zf) if zf else jnp.asarray(zi, y.dtype)


def _check_first(what: str, first: Array) -> None:
    """Raise ValueError where the first coefficient is 0, if its value is known."""
    if _checks.is_concrete(first) and not np.all(jax.device_get(first)):
        raise ValueError(f"{what} must not begin with 0: outputs are divided by it")


def _filtered(
    b: Array, a: Array, x: Array, zi: Array | None, lengths: Array | None
) -> tuple[Array, Array]:
    """Filter `x [N, T]`, and return `y` and, where there is `zi`, the last state."""
    b, a = b / a[:, :1], a / a[:, :1]
    size = max(b.shape[1], a.shape[1]) - 1
    order = max(size, 1)  # of the kernels; a pure gain has an empty state
    b, a = (jnp.pad(c, ((0, 0), (0, order + 1 - c.shape[1]))) for c in (b, a))
    steps, ends = x.shape[1], []
    if lengths is not None:
        x, ends = zero(x, lengths, 1), [lengths]
    y = run(b, a[:, 1:], x, *ends)
    if zi is None:
        state = y
    else:
        # The state is what the past adds to the next sums of inputs.
        zi = jnp.pad(zi, ((0, 0), (0, order - zi.shape[1])))
        past = jnp.pad(zi, ((0, 0), (0, steps)))[:, :steps]
        one = jnp.zeros((1, order + 1), x.dtype).at[0, 0].set(1)
        y = y + run(one, a[:, 1:], past, *ends)
        state = _last_state(b, a, x, y, zi, lengths)[:, :size]
    return y, state


def _last_state(
    b: Array, a: Array, x: Array, y: Array, zi: Array, lengths: Array | None
) -> Array:
    """Return what the last steps add to the sums of later inputs, `[N, order]`."""
    order = b.shape[1] - 1
    channels, steps = x.shape
    if lengths is None:
        lengths = jnp.full((channels,), steps, jnp.int32)
    end = jnp.zeros((channels, order), x.dtype)
    reach = min(order, steps) if isinstance(steps, int) else order
    for back in range(reach):  # the step `back` steps before the end
        at = lengths - 1 - back
        x_t, y_t = (at_step(v, jnp.maximum(at, 0), 1) for v in (x, y))
        seen = (at >= 0)[:, None]
        adds = b[:, 1 + back :] * x_t[:, None] - a[:, 1 + back :] * y_t[:, None]
        adds = jnp.where(seen, adds, jnp.zeros((), x.dtype))
        end = end + jnp.pad(adds, ((0, 0), (0, back)))
    # Of a channel with fewer steps than the order, what is left of the first state.
    index = jnp.arange(order, dtype=jnp.int32)[None] + lengths[:, None]
    left = jnp.take_along_axis(zi, jnp.minimum(index, order - 1), 1)
    return end + jnp.where(index < order, left, jnp.zeros((), x.dtype))


class _Signals:
    """The signals of a call as `[N, T]`, and the checks of its arguments."""

    def __init__(self, x: Any, axis: Any, seq_lengths: Any):
        x = _checks.check_array("x", x)
        _checks.check_floating("x", x, _checks.FLOATS)
        self.axis = _checks.check_axis("axis", axis, x=x)
        moved = jnp.moveaxis(x, self.axis, -1)
        self.channels, steps = moved.shape[:-1], moved.shape[-1]
        self.count = math.prod(self.channels)
        self.x = moved.reshape(self.count, steps)
        self.lengths = None
        if seq_lengths is not None:
            lengths = _checks.check_integers("seq_lengths", seq_lengths)
            if lengths.shape not in ((), self.channels):
                raise ValueError(
                    f"`seq_lengths` must have shape {list(self.channels)} or [], got "
                    f"{list(lengths.shape)}"
                )
            flat = jnp.broadcast_to(lengths, self.channels).reshape(self.count)
            given = lengths.reshape(-1) if _checks.is_concrete(lengths) else flat
            self.lengths = jnp.broadcast_to(
                _checks.check_seq_lengths(given, given.shape[0], steps, False),
                (self.count,),
            )

    def array(self, name: str, value: Any) -> Array:
        """Return an array in the dtype of the signals."""
        return _checks.check_numbers(name, value, x=self.x)

    def coefficients(self, name: str, value: Any) -> Array:
        """Return coefficients `[N, k]`, or `[1, k]` if all channels share them."""
        value = self.array(name, value)
        if value.ndim == 0 or value.shape[:-1] not in ((), self.channels):
            own = ", ".join(map(str, [*self.channels, "k"]))
            hint = "" if value.ndim else "; put a single coefficient into a list"
            raise ValueError(
                f"`{name}` must have shape [k]{f' or [{own}]' if self.channels else ''}"
                f", got {list(value.shape)}{hint}"
            )
        if value.shape[-1] == 0:
            raise ValueError(f"`{name}` must have at least one coefficient along its "
                             f"last axis, got {list(value.shape)}")  # fmt: skip
        rows = 1 if value.ndim == 1 else self.count
        return value.reshape(rows, value.shape[-1])

    def state(self, zi: Any, size: int, *sections: int) -> Array:
        """Return a state `[N, size]`, or those of sections, `[S, N, size]`."""
        zi = self.array("zi", zi)
        axis = len(sections) + self.axis
        want = [*sections, *self.channels]
        want.insert(axis, size)
        if list(zi.shape) != want:
            each = " for each section" if sections else ""
            raise ValueError(
                f"`zi` must have shape {want}, {size} numbers along `axis`{each}, got "
                f"{list(zi.shape)}"
            )
        return jnp.moveaxis(zi, axis, -1).reshape(*sections, self.count, size)

    def given(self, y: Array) -> Array:
        """Return `[N, k]` in the axes of the signals as they were given."""
        return jnp.moveaxis(y.reshape(*self.channels, y.shape[1]), -1, self.axis)
