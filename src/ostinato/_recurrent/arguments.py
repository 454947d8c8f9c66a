"""The checks of `recurrent_net`: its arguments and the results of its step function."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import keystr, tree_flatten_with_path, tree_map_with_path

from .. import _checks
from .._segments import near_divisor
from .._typing import Array, Padding
from .protocol import Cell, SequenceOptions
from .sharding import batch_sharding, with_batch_axis


def check_arguments(
    step: Any,
    inputs: Any,
    initial_states: Any,
    *,
    seq_lengths: Any,
    resets: Any,
    reverse: Any,
    time_major: Any,
    padding: Padding,
    recompute: Any,
    segment_length: Any,
    return_all_states: Any,
    window: Any,
    length: Any,
    backend: Any,
) -> tuple[Any, Any, SequenceOptions]:
    """Check all arguments; return inputs and states as JAX arrays, and the options."""
    if not callable(step):
        raise TypeError(
            "`step` must be a function or a cell, called as step(params, states, "
            f"inputs_t, t), got {_checks.describe(step)}"
        )
    _checks.check_choice("padding", padding, get_args(Padding))
    if backend is not None:
        _checks.check_choice("backend", backend, ("xla", "cpu", "cuda", "scan"))
    reverse = _checks.check_bool("reverse", reverse)
    time_major = _checks.check_bool("time_major", time_major)
    window = _checks.check_size("window", window)
    inputs = tree_map_with_path(_array_checker("inputs"), inputs)
    states = tree_map_with_path(_array_checker("initial_states"), initial_states)
    length, batch = _steps_and_batch(inputs, states, length, time_major)
    _check_states(states, batch, window)
    sharding = batch_sharding(inputs, states, time_major)
    states = jax.tree.map(lambda leaf: with_batch_axis(leaf, sharding), states)
    if seq_lengths is not None:
        seq_lengths = _checks.check_seq_lengths(seq_lengths, batch, length, False)
        # Masks made of them need it, and the check of concrete lengths loses it.
        seq_lengths = with_batch_axis(seq_lengths, sharding)
    if resets is not None:
        if reverse:
            raise ValueError(
                "`resets` needs reverse=False, got reverse=True: a reverse run would "
                "carry later episodes into earlier ones"
            )
        sizes = {"T": length, "B": batch} if time_major else {"B": batch, "T": length}
        resets = _checks.check_mask("resets", resets, **sizes)
    options = SequenceOptions(
        length=length,
        batch=batch,
        seq_lengths=seq_lengths,
        resets=resets,
        reverse=reverse,
        time_major=time_major,
        padding=padding,
        recompute=_checked_recompute(recompute),
        segment_length=_resolve_segment_length(segment_length, length),
        return_all_states=_checks.check_bool("return_all_states", return_all_states),
        window=window,
        backend=backend,
    )
    return inputs, states, options


def _array_checker(name: str) -> Callable[[Any, Any], Array]:
    def check(path: Any, leaf: Any) -> Array:
        return _checks.check_array(name + keystr(path), leaf)

    return check


def _steps_and_batch(
    inputs: Any, states: Any, length: Any, time_major: bool
) -> tuple[Any, Any]:
    """Return `(T, B)`, the axes that all leaves of `inputs` share."""
    if length is not None:
        length = _checks.check_size("length", length, 0)
    leaves = tree_flatten_with_path(inputs)[0]
    order = ("T", "B") if time_major else ("B", "T")
    for path, leaf in leaves:
        name = f"inputs{keystr(path)}"
        if leaf.ndim < 2:
            raise ValueError(
                f"`{name}` must have shape [{', '.join(order)}, ...], got "
                f"{_checks.describe(leaf)}; one sequence needs a batch axis of 1"
            )
        want = leaves[0][1].shape[:2]
        if leaf.shape[:2] != want:
            raise ValueError(
                f"`{name}` must begin with [{', '.join(order)}] = {list(want)} as "
                f"`inputs{keystr(leaves[0][0])}` does, got {list(leaf.shape)}"
            )
    if leaves:
        sizes = dict(zip(order, leaves[0][1].shape, strict=False))
        if length not in (None, sizes["T"]):
            raise ValueError(
                f"`length` must be None or T = {sizes['T']}, that of `inputs`, "
                f"got {length}"
            )
        return sizes["T"], sizes["B"]
    if length is None:
        raise ValueError("`length` must be given where `inputs` holds no array")
    batches = [leaf.shape[0] for leaf in jax.tree.leaves(states) if leaf.ndim]
    if not batches:
        raise ValueError(
            "`initial_states` must hold an array [B, ...] where `inputs` holds none, "
            f"got {_checks.describe(states)}"
        )
    return length, batches[0]


def _check_states(states: Any, batch: Any, window: int) -> None:
    want = {"B": batch} | ({"window": window} if window > 1 else {})
    for path, leaf in tree_flatten_with_path(states)[0]:
        name = f"initial_states{keystr(path)}"
        if leaf.shape[: len(want)] != tuple(want.values()):
            raise ValueError(
                f"`{name}` must have shape [{', '.join(want)}, ...] with "
                f"[{', '.join(want)}] = {list(want.values())}, got {list(leaf.shape)}"
            )
        check_state_dtype(name, leaf)


def check_state_dtype(name: str, leaf: Any) -> None:
    """Check that an array of states holds numbers or bools."""
    if not (jnp.issubdtype(leaf.dtype, jnp.number) or leaf.dtype == jnp.bool_):
        keys = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        hint = "; keep keys as their jax.random.key_data" if keys else ""
        raise TypeError(f"`{name}` must hold numbers or bools, got {leaf.dtype}{hint}")


def _checked_recompute(recompute: Any) -> tuple[str, ...] | Literal[True]:
    if isinstance(recompute, bool):
        return recompute or ()
    return check_names("recompute", recompute, (str,), "('gates',)")


def check_names(name: str, value: Any, kinds: tuple[type, ...], such: str) -> tuple:
    """Return a tuple, list or set of names as a tuple; raise TypeError for a string.

    Args:
        name: name of the argument in errors.
        value: the argument.
        kinds: the types of names.
        such: an example of the argument.
    """
    if isinstance(value, (tuple, list, set, frozenset)) and all(
        isinstance(item, kinds) for item in value
    ):
        return tuple(value)
    raise TypeError(
        f"`{name}` must be a tuple of names, such as {such}, or one of the other "
        f"forms that its documentation lists, got {_checks.describe(value)}"
    )


def _resolve_segment_length(segment_length: Any, length: Any) -> int | None:
    if segment_length is None:
        return None
    if not isinstance(length, int):
        raise NotImplementedError(
            f"`segment_length` needs a fixed number of steps, got {length} of them; "
            "use `recompute=True` in ragged.vmap and with symbolic sizes"
        )
    if isinstance(segment_length, str):
        if segment_length != "auto":
            raise ValueError(
                f"`segment_length` must be an integer or 'auto', got {segment_length!r}"
            )
        return near_divisor(length, max(1, math.isqrt(length)))
    return _checks.check_size("segment_length", segment_length)


# ------------------------------------------------------------ what the step returns


def check_takes_four(step: Callable, error: TypeError) -> None:
    """Check that a step can be called as one, where an error may come of the call.

    Not before the call, as signatures may be wrong: `functools.wraps` copies them.
    """
    if isinstance(step, Cell) or "positional argument" not in str(error):
        return
    try:
        signature = inspect.signature(step, follow_wrapped=False)
    except (TypeError, ValueError):  # what is no Python function may have none
        return
    try:
        signature.bind(*(None,) * 4)
    except TypeError:
        raise TypeError(
            "`step` must take four arguments, step(params, states, inputs_t, t), got "
            f"a function of {signature}"
        ) from error


def check_result(result: Any, states: Any, batch: Any) -> tuple[Any, Any]:
    """Check the result of the step; return `(new_states, outputs_t)` as JAX arrays.

    Args:
        result: the result of the step.
        states: one slot of the states before the step; the new states must have the
            same structure, shapes and dtypes.
        batch: B, the leading axis of every output.
    """
    if not (isinstance(result, tuple) and len(result) == 2):
        raise TypeError(
            "`step` must return a tuple (new_states, outputs_t), got "
            f"{_checks.describe(result)}"
        )
    new_states, outputs = result
    want, got = jax.tree.structure(states), jax.tree.structure(new_states)
    if want != got:
        raise TypeError(
            f"`step` must return states of the structure {want}, that of "
            f"`initial_states`, got {got}{_first_difference(states, new_states)}"
        )
    old_leaves = tree_flatten_with_path(states)[0]
    for (path, old), new in zip(old_leaves, jax.tree.leaves(new_states), strict=True):
        shape, dtype = jnp.shape(new), jnp.result_type(new)
        if shape != old.shape:
            raise ValueError(
                f"`step` must return `states{keystr(path)}` with the shape "
                f"{list(old.shape)}, that of the initial state, got {list(shape)}"
            )
        if dtype != old.dtype:
            raise TypeError(
                f"`step` must return `states{keystr(path)}` in {old.dtype}, the dtype "
                f"of the initial state, got {dtype}"
            )
    for path, output in tree_flatten_with_path(outputs)[0]:
        shape = jnp.shape(output)
        if shape[:1] != (batch,):
            got = list(shape) if hasattr(output, "shape") else _checks.describe(output)
            raise ValueError(
                f"`step` must return `outputs{keystr(path)}` with the shape [B, ...], "
                f"B = {batch}, got {got}"
            )
    return jax.tree.map(jnp.asarray, (new_states, outputs))


def _first_difference(states: Any, new_states: Any) -> str:
    paths = [
        [keystr(path) for path, _ in tree_flatten_with_path(tree)[0]]
        for tree in (states, new_states)
    ]
    for name, here, there in (
        ("without", paths[0], paths[1]),
        ("with", paths[1], paths[0]),
    ):
        for path in here:
            if path not in there:
                return f", {name} `states{path}`"
    return ""


# ------------------------------------------------------------- outputs without grads


def cut_outputs(outputs: Any, with_grads: Any) -> Any:
    """Return `outputs`; stop the gradient of those that `with_grads` leaves out."""
    if with_grads is None:
        return outputs

    def cut(keep: bool, part: Any) -> Any:
        return part if keep else jax.tree.map(lax.stop_gradient, part)

    chosen = jax.tree.leaves(with_grads)
    if chosen and all(isinstance(item, bool) for item in chosen):
        try:
            return jax.tree.map(cut, with_grads, outputs)
        except ValueError as error:
            raise ValueError(
                "`outputs_with_grads` must be bools in the structure of the outputs, "
                f"{jax.tree.structure(outputs)}, or in its upper part, got {with_grads}"
            ) from error
    chosen = check_names("outputs_with_grads", with_grads, (str, int), "('y',)")
    parts, names = _named_children(outputs)
    unknown = [item for item in chosen if all(item not in known for known in names)]
    if unknown:
        there = ", ".join(" or ".join(map(repr, known)) for known in names) or "none"
        raise ValueError(
            f"`outputs_with_grads` must name parts of the outputs, got {unknown[0]!r}; "
            f"there are: {there}"
        )
    keep = [any(item in known for item in chosen) for known in names]
    children = [cut(*pair) for pair in zip(keep, parts, strict=True)]
    structure = jax.tree.structure(outputs, is_leaf=lambda node: node is not outputs)
    return jax.tree.unflatten(structure, children)


def _named_children(outputs: Any) -> tuple[list[Any], list[tuple]]:
    """Return the children of a pytree, and for each its names: key, field or index."""
    found = tree_flatten_with_path(outputs, is_leaf=lambda node: node is not outputs)[0]
    names = []
    for index, (path, _) in enumerate(found):
        key = path[0] if path else None
        attributes = (getattr(key, name, None) for name in ("key", "name"))
        known = [name for name in attributes if isinstance(name, (str, int))]
        if isinstance(outputs, (tuple, list)):
            known.append(index)
        names.append(tuple(known))
    return [part for _, part in found], names
