"""Argument checks, with the wording of all shape and dtype errors."""

from __future__ import annotations

import functools as ft
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.export import is_symbolic_dim

from ._typing import Array

FLOATS = (jnp.float32, jnp.bfloat16, jnp.float64, jnp.float16)
"""The dtypes that the operator runs in."""


def is_concrete(x: Any) -> bool:
    """Return True if the value of `x` can be read now, on the host."""
    return not isinstance(x, jax.core.Tracer)


def describe(x: Any) -> str:
    """Describe a value for an error message: dtype and shape, or type and value."""
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        if is_tensor(x):
            return f"a torch.Tensor of {x.dtype}{list(x.shape)}"
        return f"{x.dtype}{list(x.shape)}"
    text = repr(x)
    if len(text) > 60:
        text = text[:57] + "..."
    return f"{type(x).__name__} {text}"


def is_tensor(x: Any) -> bool:
    """Return whether `x` is a tensor of PyTorch, which this does not import."""
    bases = type(x).__mro__
    return any((b.__module__, b.__name__) == ("torch", "Tensor") for b in bases)


def unwrap(x: Any) -> Any:
    """Return the array of a variable, such as `nnx.Param`; anything else as it is."""
    if isinstance(x, jax.Array) or hasattr(x, "to_padded"):  # which refuses, in JAX
        return x
    if hasattr(x, "__jax_array__"):
        return x.__jax_array__()
    return x


def is_array(x: Any) -> bool:
    """Return whether `x` is an array or a number of JAX or numpy."""
    return isinstance(x, (jax.Array, np.ndarray, np.generic))


def check_array(name: str, x: Any) -> Array:
    """Return `x` as a JAX array; raise a TypeError unless it is an array."""
    x = unwrap(x)
    if isinstance(x, jax.Array):
        return x
    check_unmasked(name, x)
    if is_array(x):
        try:
            return jnp.asarray(x)
        except (TypeError, RuntimeError) as error:
            # JAX has some numbers of 8 bits and fewer on no device.
            exotic = x.dtype.kind == "V" and x.dtype != jnp.bfloat16
            if isinstance(error, RuntimeError) and not exotic:
                raise
            raise TypeError(
                f"`{name}` must hold numbers of a dtype and a byte order that JAX has, "
                f"got {x.dtype.str}{list(x.shape)}; astype makes them of others"
            ) from None
    known = type(x) in (list, tuple, int, float)
    hint = "; jnp.array makes one of it" if known else ""
    if hasattr(x, "to_padded"):
        hint = "; use its to_padded() with its lengths, or ragged.vmap"
    elif is_tensor(x):
        hint = f"; give {name}.numpy()"
    elif hasattr(x, "to_numpy"):
        hint = "; its to_numpy() is one"
    raise TypeError(f"`{name}` must be an array, got {describe(x)}{hint}")


def check_numbers(name: str, value: Any, **like: Any) -> Array:
    """Return real numbers as a JAX array in the dtype of another argument.

    Numbers of Python and of numpy, single, in lists or in arrays, are converted, as
    they have the widest dtype without anyone's choice. An array of JAX must have the
    dtype.

    Args:
        name: name of the argument in errors.
        value: the numbers.
        like: the other argument, an array, by its name.
    """
    value = unwrap(value)
    if isinstance(value, jax.Array):
        check_same_dtype(**like, **{name: value})
        return value
    known = (np.ndarray, np.generic, list, tuple, int, float, complex)
    if not isinstance(value, known):
        return check_array(name, value)  # raises
    leaves = jax.tree.leaves(
        value, is_leaf=lambda item: not isinstance(item, (list, tuple))
    )
    check_unmasked(name, leaves)
    if not all(map(_is_real, leaves)):
        raise TypeError(f"`{name}` must hold real numbers, got {describe(value)}")
    (other,) = like.values()
    return _converted(name, value, lambda x: jnp.asarray(x, other.dtype))


def _is_real(x: Any) -> bool:
    """Return whether `x` is a real number, or an array of them."""
    if not hasattr(x, "dtype"):
        return isinstance(x, (int, float))
    kinds = np.bool_, np.integer, np.floating
    return any(jnp.issubdtype(x.dtype, kind) for kind in kinds)


def _converted(name: str, value: Any, convert: Callable[[Any], Any]) -> Any:
    """Return what `convert` makes of a list or a number."""
    try:
        return convert(value)
    except ValueError:
        raise ValueError(
            f"`{name}` must be an array, or a list whose rows have the same length, "
            f"got {describe(value)}"
        ) from None
    except OverflowError:
        raise ValueError(f"`{name}` must hold numbers that a float can hold") from None


def _of_list(name: str, value: Any) -> Any:
    """Return a list or a number as an array of numpy, or of JAX if a part is traced."""
    known = all(map(is_concrete, jax.tree.leaves(value)))
    return _converted(name, value, np.asarray if known else jnp.asarray)


def check_unmasked(name: str, value: Any) -> None:
    """Check that neither `value` nor an item of a list is masked, in JAX's words."""
    parts = value if isinstance(value, (list, tuple)) else (value,)
    if any(isinstance(part, np.ma.MaskedArray) for part in parts):
        raise ValueError(
            f"`{name}`: numpy masked arrays are not supported as direct inputs. Use "
            "arr.filled() to convert the value to a standard numpy array."
        )


def host_numbers(name: str, value: Any, dtype: Any) -> np.ndarray:
    """Return numbers as an array of numpy; check that they convert to a dtype."""
    if type(value) is not np.ndarray:  # takes less time than the call
        check_unmasked(name, value)
        if not is_concrete(value):
            raise TypeError(
                f"`{name}` must not be traced, as it is under jit: a session computes "
                f"on the host; got {describe(value)}"
            )
    array = _converted(name, value, np.asarray)
    if not np.can_cast(array.dtype, dtype, "same_kind"):
        raise TypeError(
            f"`{name}` must hold numbers that convert to {dtype}, got {describe(value)}"
        )
    narrower = np.dtype(dtype).kind in "iu" and not np.can_cast(array.dtype, dtype)
    if narrower and array.size:
        least, most = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
        for got in map(int, (array.min(), array.max())):
            if not least <= got <= most:
                raise ValueError(
                    f"`{name}` must hold integers of {dtype}, {least} to {most}, got "
                    f"{got}"
                )
    return array


def check_floating(name: str, x: Any, allowed: Sequence[Any]) -> None:
    """Check that the dtype of `x` is one of `allowed`."""
    if x.dtype not in [np.dtype(d) for d in allowed]:
        names = ", ".join(str(np.dtype(d)) for d in allowed)
        raise TypeError(f"`{name}` must have one of the dtypes {names}, got {x.dtype}")


def check_float_dtype(dtype: Any) -> np.dtype:
    """Return the argument `dtype` as numpy's; check that it is one of floats."""
    try:
        found = None if dtype is None else np.dtype(dtype)
    except TypeError:
        found = None
    if found is None or not jnp.issubdtype(found, jnp.floating):
        raise TypeError(f"`dtype` must be a floating dtype, got {dtype!r}")
    return found


def check_rank(name: str, x: Any, *axes: str) -> None:
    """Check that `x` has as many axes as are named."""
    if x.ndim != len(axes):
        raise ValueError(
            f"`{name}` must have shape [{', '.join(axes)}], got {list(x.shape)}"
        )


def check_same_dtype(**arrays: Any) -> None:
    """Check that all arrays have the dtype of the first one; None is ignored."""
    present = [(k, v) for k, v in arrays.items() if v is not None]
    for name, x in present[1:]:
        first_name, first = present[0]
        if x.dtype != first.dtype:
            raise TypeError(
                f"`{name}` must have the dtype of `{first_name}`, {first.dtype}, "
                f"got {x.dtype}; convert one of them with .astype"
            )


def check_shape(name: str, x: Any, **dims: Any) -> None:
    """Check that `x` has the shape `dims`, which is given by axis name."""
    want = tuple(dims.values())
    if tuple(x.shape) != want:
        labels = ", ".join(dims)
        raise ValueError(
            f"`{name}` must have shape ({labels}) = {want}, got {tuple(x.shape)}"
        )


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Check that `value` is one of `choices`."""
    if is_array(value) or value not in choices:
        names = ", ".join(repr(c) for c in choices)
        raise ValueError(f"`{name}` must be one of {names}, got {value!r}")


def check_integer(name: str, value: Any) -> int:
    """Return `value` as an int; check that it is one."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, (bool, np.bool_)):
        raise TypeError(f"`{name}` must be an integer, got {describe(value)}")
    return number


def check_axis(name: str, value: Any, **of: Any) -> int:
    """Return an axis of the array `of`, given by its name, as one from 0 on."""
    axis = check_integer(name, value)
    ((other, x),) = of.items()
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(
            f"`{name}` must be an axis of `{other}`, of shape {list(x.shape)}, got "
            f"{axis}"
        )
    return axis % x.ndim


def check_size(name: str, value: Any, least: int = 1) -> int:
    """Return `value` as an int; check that it is one of 64 bits, at least `least`."""
    size = check_integer(name, value)
    if size < least:
        raise ValueError(f"`{name}` must be at least {least}, got {size}")
    if size >= 2**63:
        raise ValueError(
            f"`{name}` must be less than 2**63, got one of {size.bit_length()} bits"
        )
    return size


def check_batch(batch: Any) -> Any:
    """Return a number of sequences, 0 or more; one of JAX's symbols stays as it is."""
    return batch if is_symbolic_dim(batch) else check_size("batch", batch, 0)


def check_text(name: str, text: Any) -> None:
    """Check that `text` is one that can be written to a file.

    Args:
        name: what it is in errors, in backquotes if it is an argument.
        text: the text.
    """
    if not isinstance(text, str):
        raise TypeError(f"{name} must be a string, got {describe(text)}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"{name} must have no lone surrogates, which UTF-8 lacks, got {text!r}"
        ) from None


def check_bool(name: str, value: Any) -> bool:
    """Return `value` as a bool; check that it is one."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"`{name}` must be True or False, got {describe(value)}")
    return bool(value)


def check_real(name: str, value: Any) -> float:
    """Return `value` as a float; check that it is a number and not a bool."""
    check_unmasked(name, value)
    if is_array(value) and value.shape == () and is_concrete(value):
        is_number = jnp.issubdtype(value.dtype, np.number)
        value = value.item() if is_number else value
    if isinstance(value, (bool, np.bool_)) or not isinstance(
        value, (int, float, np.integer, np.floating)
    ):
        raise TypeError(f"`{name}` must be a number, got {describe(value)}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(
            f"`{name}` must be a number that a float can hold, got one of "
            f"{int(value).bit_length()} bits"
        ) from None


def check_finite(name: str, value: Any) -> float:
    """Return `value` as a float; check that it is a finite number."""
    value = check_real(name, value)
    if not abs(value) < float("inf"):
        raise ValueError(f"`{name}` must be finite, got {value}")
    return value


def check_integers(name: str, value: Any) -> Any:
    """Return `value` as an array of integers, JAX's or numpy's."""
    value = unwrap(value)
    if is_tensor(value):
        check_array(name, value)  # raises
    check_unmasked(name, value)
    if not hasattr(value, "dtype"):
        value = _of_list(name, value)
        if value.size == 0:  # numpy calls an empty list float64
            value = value.astype(np.int32)
    if not jnp.issubdtype(value.dtype, jnp.integer):
        is_float = jnp.issubdtype(value.dtype, jnp.floating)
        hint = "; convert with .astype(int)" if is_float else ""
        raise TypeError(f"`{name}` must hold integers, got {describe(value)}{hint}")
    return value


def check_seq_lengths(
    seq_lengths: Any,
    batch: Any,
    steps: Any,
    scalar: bool,
    name: str = "seq_lengths",
    size: str = "T",
) -> Any:
    """Return lengths as int32 in 0..steps: checked if concrete, clamped if traced.

    Args:
        seq_lengths: integers, shape `[batch]`, or `[]` for one sequence.
        batch: number of sequences.
        steps: T, the largest length allowed; if symbolic, lengths are clamped to it.
        scalar: True for one sequence without a batch axis.
        name: name of the argument in errors.
        size: name of the largest length in errors.
    """
    if is_symbolic_dim(seq_lengths):
        seq_lengths = jnp.asarray(seq_lengths)
    seq_lengths = check_integers(name, seq_lengths)
    check_shape(name, seq_lengths, **({} if scalar else {"B": batch}))
    symbolic = bool(is_symbolic_dim(steps))
    if symbolic or not is_concrete(seq_lengths):
        return clamped(seq_lengths, 0, steps)
    _check_lengths(jax.device_get(seq_lengths), steps, name, size)
    return as_int32(seq_lengths)


def clamped(x: Any, least: int, most: Any) -> Array:
    """Return integers of any type as int32 in least..most.

    Narrow types are widened first, since they may not hold the bounds; wide types are
    clamped first, since their values may not fit into int32.
    """
    if x.dtype.itemsize < 4:
        x = x.astype(jnp.int32)
    if not jnp.issubdtype(x.dtype, jnp.signedinteger):
        least = max(least, 0)
    return jnp.clip(x, least, most).astype(jnp.int32)


def host_seq_lengths(seq_lengths: Any, batch: int, steps: int) -> np.ndarray:
    """Return lengths `[batch]` as int32 of numpy; see `check_seq_lengths`."""
    name = "seq_lengths"
    if type(seq_lengths) is not np.ndarray:
        check_unmasked(name, seq_lengths)
    seq_lengths = check_integers(name, seq_lengths)
    check_shape(name, seq_lengths, B=batch)
    values = np.asarray(seq_lengths)
    _check_lengths(values, steps, name, "T")
    return values.astype(np.int32)


def _check_lengths(values: Any, steps: Any, name: str, size: str) -> None:
    """Check that lengths, `[B]` or `[]`, lie in 0..steps."""
    wrong = np.flatnonzero((values < 0) | (values > steps))
    if wrong.size:
        got = int(values.reshape(-1)[wrong[0]])
        where = f" for sequence {wrong[0]}" if values.ndim else ""
        raise ValueError(
            f"`{name}` must lie in 0..{size} = 0..{steps}, got {got}{where}"
        )


def as_int32(value: Any) -> Array:
    """Return integers as an int32 array of JAX; those beyond int32 as its ends.

    An array of JAX is not read, so that nothing is transferred.
    """
    if isinstance(value, jax.Array):
        return _saturated(value)
    ends = np.iinfo(np.int32)
    return jnp.asarray(np.clip(value, ends.min, ends.max).astype(np.int32))


@ft.partial(jax.jit, inline=True)  # the constants of eager code would be transferred
def _saturated(value: Array) -> Array:
    ends, own = jnp.iinfo(jnp.int32), jnp.iinfo(value.dtype)
    if own.max > ends.max:
        value = value.clip(max(own.min, ends.min), ends.max)
    return value.astype(jnp.int32)


def check_mask(name: str, value: Any, **dims: Any) -> Array:
    """Return `value`, an array or a list, as a bool array of the shape `dims`."""
    return jnp.asarray(_checked_mask(name, value, **dims))


def host_mask(name: str, value: Any, **dims: Any) -> np.ndarray:
    """Return `value` as an array of numpy; see `check_mask`."""
    if type(value) is not np.ndarray:
        check_unmasked(name, value)
    return np.asarray(_checked_mask(name, value, **dims))


def _checked_mask(name: str, value: Any, **dims: Any) -> Any:
    value = unwrap(value)
    if not hasattr(value, "dtype"):
        value = _of_list(name, value)
    if value.dtype != np.bool_:
        raise TypeError(f"`{name}` must be bool, got {describe(value)}")
    check_shape(name, value, **dims)
    return value


def check_key(key: Any) -> Any:
    """Return `key`; check that it is one PRNG key, typed or as uint32 words."""
    key = unwrap(key)
    if isinstance(key, (jax.Array, np.ndarray)):
        if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.shape == ():
            return key
        # The number of words depends on the generator: 2 or 4.
        if key.dtype == jnp.uint32 and key.shape in ((2,), (4,)):
            return jnp.asarray(key)
    raise TypeError(
        f"`key` must be one PRNG key as jax.random.key(seed) makes, got {describe(key)}"
    )
