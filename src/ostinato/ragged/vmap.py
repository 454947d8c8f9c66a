"""`ragged.vmap`: trace a function of one example, run it on all of them."""

from __future__ import annotations

import dataclasses
import functools as ft
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.errors
import numpy as np
from jax.tree_util import tree_flatten_with_path

from .. import _checks
from .._compat import (
    asks_for_associative_scan,
    associative_scan_replaced,
    is_about_sizes,
    is_unbound_axis_name,
)
from .core.sizes import in_program, least_nonempty
from .core.symbols import Options
from .debug_flags import with_checked_results
from .dims import check_sizes, dims_of
from .inputs import Inputs, is_ragged
from .primitives.associative_scan import associative_scan
from .registration import load_rules
from .results import wrap
from .schedule.tiers import check_tiers, resolve
from .shares import Shares
from .types.sharded import is_sharded


def vmap(
    function: Callable,
    in_axes: Any = 0,
    out_axes: Any = 0,
    *,
    min_length: int | Mapping[str, int] = 1,
    scan: Literal["auto", "padded", "packed"] = "auto",
    lanes: int | None = None,
    tiers: Any = None,
    constraints: Sequence[str] = (),
) -> Callable:
    """Map a function of one example over a batch of examples of different sizes.

    `function` is traced once, with a symbol for every size, and its operations run on
    the tokens of all examples at once. An operation that needs each example by itself,
    such as a sort, runs on padded examples under a mask. The padding, and the unused
    capacity of a RaggedArray, reach no result and no gradient, even if they are NaN.

    Args:
        function: a function of the arrays of one example. Arguments and results may be
            any pytrees.
        in_axes: as in `jax.vmap`: an int, None, or a tuple with an entry, maybe a
            pytree, for each argument. An int is the mapped axis of a dense array; None
            shares an array, or an object that is no array, among all examples. For a
            RaggedArray it must be 0: `function` sees one example of it. Keyword
            arguments are mapped over axis 0.
        out_axes: the mapped axis of dense results, or None for results that are the
            same for all examples. It must be 0 for ragged results.
        min_length: the least length of an example. `function` may rely on it: sizes are
            known to be at least that. With 0 it must accept empty arrays, which
            `x.max(0)` does not. A dict has an entry for each `dim`; others have 1.
        scan: how `lax.scan` and `recurrent_net` run over an axis of different sizes:
            `"padded"` runs all examples side by side for `max_length` steps, `"packed"`
            runs examples one after another in a number of lanes, `"auto"` takes the
            native loop where that can run the step, and else the faster of the two by
            an estimate.
        lanes: the number of lanes of a packed scan. None chooses it from the capacity
            and `max_length`.
        tiers: the groups, by length, in which values with two ragged axes are padded: a
            number of groups, `"auto"` for a few, or `((count, max), ...)` for the
            longest `count` examples, padded to `max`, and so on, as `length_tiers`
            returns them. A dict has an entry per `dim`, where there are several. If the
            lengths do not fit, or for None, the whole batch is one group.
        constraints: further properties of the sizes, in the form that
            `jax.export.symbolic_shape` takes, such as `("mod(n, 2) == 0",)`.

    Returns:
        A function of the mapped arguments. A result without ragged axes is a dense
        array `[batch, ...]`; a result with one ragged axis is a RaggedArray with zeros
        in the unused capacity; a result with several is a PaddedRagged. Their dims are
        named after the sizes: `x[1:]` has the name `n - 1`. Without a RaggedArray among
        the arguments the function is `jax.vmap`. If arguments come from `ragged.shard`,
        each device runs its share of the examples: results with one ragged axis are
        `ShardedRagged`, others `ShardedBatch`, of a dense array or a PaddedRagged.

    Raises:
        TypeError: an option or axis has the wrong type.
        ValueError: arguments have different numbers of examples, or different lengths
            under one name; lengths do not fit, are below `min_length` or break a
            constraint; an axis does not exist.
        NotImplementedError: an operation has no rule, or its rule does not support this
            case. The message names it, its operands and the line of the program.
        jax.errors.InconclusiveDimensionOperation: Python code asks something of a size
            that is not the same for all its values. `==` does not raise: to JAX an
            unknown size equals no number.

    Lengths may be traced. They are then checked if the caller is under
    `jax.experimental.checkify`; otherwise the results of an example below `min_length`
    are NaN, or the fill value of `jax.numpy.take` in other dtypes, and so are those of
    an example whose arguments come from different calls of `ragged.shard`. One
    compilation serves all lengths of one capacity and `max_length`.

    Holds under `jit`, `vmap`, `checkpoint`, `grad`, `jvp` and their mixes as far as
    `function` does; derivatives that it defines itself are kept.

    References:
        The idea is that of JAX's piles (2022), later jumbles, which were removed.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from ostinato import ragged
        >>> batch = ragged.RaggedArray.from_list([jnp.arange(3.0), jnp.arange(2.0)])
        >>> ragged.vmap(lambda x: jnp.sum(x**2))(batch).tolist()
        [5.0, 1.0]
        >>> ragged.vmap(jax.nn.softmax)(batch)
        RaggedArray(float32[5], n=[3, 2], axis=0, max_length=4)
    """
    _checks.check_choice("scan", scan, ("auto", "padded", "packed"))
    options = Options(
        scan=scan,
        lanes=None if lanes is None else _checks.check_size("lanes", lanes),
    )
    check_tiers(tiers)
    if isinstance(constraints, str):
        raise TypeError(
            f"`constraints` must be a sequence of strings, got {constraints!r}"
        )
    for least in _values(min_length):
        _checks.check_size("min_length", least, 0)

    @ft.wraps(function)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=_is_mapped)
        if not any(map(is_sharded, leaves)):
            return run(args, kwargs, check=True)
        shares = Shares(leaves, tree)
        axes = _in_axes(in_axes, args, tree)
        shares.check_axes(axes, out_axes)
        if shares.known:
            check_lengths(shares, ())

        def last(arrays: Any) -> Any:  # a shard_map must not follow checks of checkify
            return arrays if shares.known else check_lengths(shares, arrays)

        return shares.run(ft.partial(run, check=False), last)

    def check_lengths(shares: Shares, x: Any) -> Any:
        x = shares.check_orders(x)
        if ragged := shares.batches():
            x = check_sizes(x, ragged, dims_of(ragged, min_length), constraints)
        return x

    def run(args: tuple, kwargs: dict, check: bool) -> Any:
        found, tree = tree_flatten_with_path((args, kwargs), is_leaf=_is_mapped)
        leaves = [x for _, x in found]
        if not any(map(is_ragged, leaves)):
            return _dense(jax.vmap(function, in_axes, out_axes), args, kwargs)
        axes = _in_axes(in_axes, args, tree)
        # As in jax.vmap, a shared object that is no array reaches the function as is.
        plain = [_is_plain(x, a) for x, a in zip(leaves, axes, strict=True)]
        arrays = [x for x, p in zip(leaves, plain, strict=True) if not p]
        axes = [a for a, p in zip(axes, plain, strict=True) if not p]
        paths = [path for (path, _), p in zip(found, plain, strict=True) if not p]
        load_rules()
        inputs = Inputs.of(arrays, axes, paths, min_length)
        if check:
            inputs = inputs.checked(constraints)

        present = inputs.or_one_empty_example()
        own = {d.name: d for d in present.own_dims}
        in_tiers = resolve(tiers, own, present.batch)

        @ft.wraps(function)  # JAX names it in messages
        def one(*arrays: Any) -> Any:
            given = iter(arrays)
            full = [x if p else next(given) for x, p in zip(leaves, plain, strict=True)]
            args, kwargs = jax.tree.unflatten(tree, full)
            return function(*args, **kwargs)

        def attempt(bounded: bool) -> Any:
            avals = present.avals(present.scope(constraints, bounded))
            jaxpr, shapes = _trace(one, avals, present)
            out_tree = jax.tree.structure(shapes)
            result_axes = _broadcast("out_axes", out_axes, out_tree)

            def compute() -> Any:
                ctx = present.context(
                    dataclasses.replace(options, tiers=in_tiers),
                    least_nonempty(in_program(jaxpr.jaxpr)),
                    going=None if inputs.batch else present.own_dims[0].lengths > 0,
                )
                results = ctx.evaluate(jaxpr, present.values(ctx, avals))
                wrapped = [
                    wrap(ctx, inputs, value, axis)
                    for value, axis in zip(results, result_axes, strict=True)
                ]
                return jax.tree.unflatten(out_tree, wrapped)

            return with_checked_results(compute)

        try:
            return attempt(bounded=False)
        except _FROM_SIZES as error:
            if not _is_from_sizes(error, present):
                raise
        # Once more with the bound `max_length`, as `table[:n]` asks, and a rule that
        # meets `min(9, n)`. Not at first: the traced program should not change from
        # batch to batch.
        return attempt(bounded=True)

    return mapped


def _is_mapped(x: Any) -> bool:
    return is_sharded(x) or is_ragged(x)


_FROM_SIZES = (
    AssertionError,  # of jnp.einsum
    AttributeError,
    jax.errors.InconclusiveDimensionOperation,
    IndexError,
    NotImplementedError,
    TypeError,
    ValueError,
)
"""The errors that JAX and numpy raise when they meet a symbolic size."""
_ADVICE = (
    "A size is a symbol inside of ragged.vmap, not a number: n, or n_plus_1 - 1 if "
    "`min_length` is 0, as the function is traced once for examples of all sizes. In "
    "place of a Python loop over the tokens write jax.lax.scan over the array, or "
    "jax.vmap for a function of one token; for a loop over positions scan "
    "jnp.arange(size), or take jax.lax.fori_loop(0, size, ...). Compute with jax.numpy "
    "on jnp.array(size), say what holds for all examples by `min_length` or "
    "`constraints`, and take ragged.convolve and ragged.correlate for those of JAX. "
    "The page on ragged.vmap has a table of what to write instead."
)

_INSTEAD_OF_SCAN = (
    "Inside of ragged.vmap, call jax.lax.associative_scan by that name, or "
    "ragged.associative_scan, which takes the same arguments: a function that was "
    "imported as `from jax.lax import associative_scan` cannot scan an axis whose size "
    "differs between examples."
)


def _dense(mapped: Callable, args: tuple, kwargs: dict) -> Any:
    """Call a `jax.vmap`, where no argument is a RaggedArray."""
    try:
        return mapped(*args, **kwargs)
    except (AttributeError, TypeError, ValueError) as error:
        given = (*args, *kwargs.values())
        if "inconsistent sizes" in str(error):
            for x in filter(_are_examples, given):
                lengths = ", ".join(str(a.shape[0]) for a in x[:6])
                raise ValueError(
                    "an argument is a list of arrays of different lengths "
                    f"({lengths}{', ...' if len(x) > 6 else ''}); make it a batch by "
                    "ragged.RaggedArray.from_list(arrays), or give None in `in_axes` "
                    "where all examples share the list"
                ) from error
        if isinstance(error, ValueError) or any(map(_may_be_examples, given)):
            error.add_note(
                "None of the arguments is a RaggedArray, so this was jax.vmap; "
                "ragged.RaggedArray.from_list makes one of a list of arrays."
            )
        raise


def _may_be_examples(x: Any) -> bool:
    """Return whether an argument looks like many examples: a list, or a table."""
    return isinstance(x, list) or hasattr(x, "to_numpy")


def _are_examples(x: Any) -> bool:
    """Return whether `x` is a list of arrays that differ in their first size alone."""
    if not isinstance(x, list) or not all(_checks.is_array(a) and a.ndim for a in x):
        return False
    kinds = {(a.shape[1:], a.dtype) for a in x}
    return len(kinds) == 1 and len({a.shape[0] for a in x}) > 1


def _trace(function: Callable, avals: Sequence[Any], inputs: Inputs) -> tuple[Any, Any]:
    """Return the jaxpr of one example, and the tree of its results.

    Loops are traced as such under `jax.disable_jit`, too: no number of steps is known.
    """
    make = jax.make_jaxpr(function, return_shape=True)

    def trace(*avals: Any) -> Any:
        with jax.disable_jit(False):
            return make(*avals)

    try:
        try:
            return trace(*avals)
        except NotImplementedError as error:
            if not asks_for_associative_scan(error):
                raise
            with associative_scan_replaced(associative_scan):
                return trace(*avals)
    except _FROM_SIZES as error:
        if asks_for_associative_scan(error):
            error.add_note(_INSTEAD_OF_SCAN)
        elif _is_from_sizes(error, inputs):
            error.add_note(_ADVICE)
        raise
    except NameError as error:
        if not is_unbound_axis_name(error):
            raise
        raise NotImplementedError(
            "ragged.vmap binds no axis name, so that no collective can run over the "
            f"examples ({error}); combine the mapped results outside"
        ) from error


def _is_from_sizes(error: Exception, inputs: Inputs) -> bool:
    return is_about_sizes(error, [d.symbol for d in inputs.own_dims])


def _is_plain(x: Any, axis: Any) -> bool:
    """Return whether `x` is shared and no array."""
    if axis is not None or is_ragged(x) or isinstance(x, (jax.Array, np.generic)):
        return False
    return not (isinstance(x, np.ndarray) and x.dtype.kind not in "OSU")


def _values(given: Any) -> list[Any]:
    return list(given.values()) if isinstance(given, Mapping) else [given]


def _per_argument(in_axes: Any, args: tuple) -> Any:
    """Return `in_axes` as a tuple of one entry per argument."""
    if in_axes is None or isinstance(in_axes, int):
        return (in_axes,) * len(args)
    if not isinstance(in_axes, (tuple, list)):
        raise TypeError(
            "`in_axes` must be an int, None or a tuple with one entry for each "
            f"argument, got {_checks.describe(in_axes)}"
        )
    if len(in_axes) != len(args):
        raise ValueError(
            f"`in_axes` must have one entry for each of {len(args)} arguments, "
            f"got {len(in_axes)}"
        )
    return tuple(in_axes)


def _in_axes(in_axes: Any, args: tuple, tree: Any) -> list[Any]:
    """Return the mapped axis of each leaf of `(args, kwargs)`, of that structure."""
    given = _per_argument(in_axes, args)
    parts = tree.children()[0].children()
    axes = [
        axis
        for one, part in zip(given, parts, strict=True)
        for axis in _broadcast("in_axes", one, part)
    ]
    return axes + [0] * (tree.num_leaves - len(axes))  # kwargs are mapped


def _broadcast(name: str, prefix: Any, tree: Any) -> list[Any]:
    """Return one axis for each leaf of a tree of the structure `tree`.

    Args:
        name: the argument that gives them, for errors.
        prefix: the axes, each for a whole part of the tree.
        tree: the structure.
    """
    full = jax.tree.unflatten(tree, [0] * tree.num_leaves)
    # A None in `prefix` is an axis, one in the tree is no leaf.
    marked = jax.tree.map(
        lambda axis: _SHARED if axis is None else axis, prefix, is_leaf=_is_none
    )
    try:
        axes = jax.tree.leaves(jax.tree.broadcast(marked, full))
    except ValueError as error:
        raise ValueError(
            f"`{name}` must have one axis, or a tree of axes like the beginning of "
            f"{tree}, got {prefix!r}"
        ) from error
    return [None if axis is _SHARED else axis for axis in axes]


_SHARED = object()


def _is_none(x: Any) -> bool:
    return x is None
