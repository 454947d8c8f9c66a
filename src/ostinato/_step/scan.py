"""A loop over a step, with the interface of `lax.scan`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxprs_in_params

from .. import _config
from .._rnn.sharding import make_varying, shaped_array, unvarying, varying
from .._typing import Array
from . import description, native, primitive, tokens
from .constants import with_all_constants
from .control_flow import without_control_flow
from .cost import dominating, is_brief, is_narrow, is_small, writes_in_place
from .gradients import Policy
from .jaxprs import Origins, evaluate, flat, origins_of, split_at
from .known import known
from .maxima import steady
from .own_rows import with_own_rows
from .precomputed import Precomputed, precompute
from .refusal import NAMED
from .split import Step, has_inner, without_invariants
from .xla import Loop, map_steps

_IN_PLACE = "`lax.scan` writes a part of the large array in its place"


class PreparedLoop(NamedTuple):
    """A loop over a step, ready to run.

    Attributes:
        step: the step, without what is the same at every step.
        precomputed: what is computed before the loop and makes the last inputs of the
            step; None if nothing is.
        invariant: the invariant values of `precomputed`, or of the step.
        inputs: their inputs, time first.
        kept: which inputs of the loop these are.
        states: the initial states.
        results: the tree of the new states and the outputs.
        origins: where each primitive comes from.
    """

    step: Step
    precomputed: Precomputed | None
    invariant: list[Any]
    inputs: list[Array]
    kept: tuple[int, ...]
    states: list[Array]
    results: Any
    origins: Origins

    def loop(
        self,
        length: int,
        total: int,
        reverse: bool,
        policy: Policy,
        masked: bool,
        backend: str | None,
    ) -> Loop:
        """Return what is static; see `run`."""
        return Loop(self.step, length, total, reverse, policy, masked, backend)

    def run(
        self,
        length: int,
        total: int,
        reverse: bool,
        policy: Policy,
        lengths: Array | None,
        backend: str | None,
        capacity: int | None = None,
    ) -> tuple[Any, Any]:
        """Return the final states, and the outputs of all steps.

        Args:
            length: the number of steps.
            total: the number of steps of the sequences, of which these may be a part.
            reverse: whether the last step runs first.
            policy: what is saved for the backward pass, as for `jax.checkpoint`.
            lengths: int32 `[B]`, the steps of each sequence; None if all have all.
            backend: `"xla"`, `"cpu"`, `"cuda"`, or None for the quickest one.
            capacity: see `Loop`.

        Raises:
            NotImplementedError: the backend that is named cannot run the step.
        """
        invariant, inputs = self.invariant, self.inputs
        if self.precomputed is not None:
            values = map_steps(self.precomputed.values, invariant, inputs)
            invariant = [invariant[i] for i in self.precomputed.invariant]
            inputs = [*(inputs[i] for i in self.precomputed.kept), *values]
        operands = [*map(jnp.asarray, invariant), *inputs, *self.states]
        if lengths is not None:
            operands.append(lengths)
        loop = self.loop(length, total, reverse, policy, lengths is not None, backend)
        loop = loop._replace(capacity=capacity)
        description.check(loop, self.origins)
        results = primitive.run(loop, operands)
        if capacity is not None:
            results = tokens.all_as_tokens(loop, operands[-1], results)
        return jax.tree.unflatten(self.results, results)


class RunsAsScan(Exception):
    """The reason why `lax.scan` runs a loop."""


def prepare(
    body: Callable,
    arrays: Any,
    states: Any,
    inputs: Any,
    backend: str | None,
    at_step: Sequence[Any] | None = None,
    counts: Sequence[int] | None = None,
    has_lengths: bool = True,
) -> PreparedLoop:
    """Take the loop `lax.scan(partial(body, arrays), states, inputs)` apart.

    Args:
        body: `body(arrays, states, inputs_t) -> (new_states, outputs_t)`, the states in
            unchanged types.
        arrays: a pytree of arrays that do not change.
        states: a pytree of arrays.
        inputs: a pytree of arrays, time first.
        backend: see `PreparedLoop.run`.
        at_step: the types of the leaves of `inputs` at a step, where their shapes do
            not tell, since sequences lie one after another.
        counts: which leaves of `inputs`, by position, are numbers of steps; None means
            those that are one number at a step.
        has_lengths: whether sequences may end before the last step.

    Raises:
        RunsAsScan: `lax.scan` runs this loop.
    """
    everything = jax.tree.leaves((arrays, states, inputs))
    if any(jax.typeof(a).sharding.mesh.explicit_axes for a in everything):
        raise RunsAsScan("arrays have explicit sharding")
    is_batch = at_step is None
    if at_step is None:
        at_step = [_type(a, a.shape[1:]) for a in jax.tree.leaves(inputs)]
    if counts is None:
        counts = [i for i, a in enumerate(at_step) if not a.shape]
    traced = _trace_loop(body, arrays, states, inputs, at_step)
    num_arrays, num_states = len(traced.arrays), len(traced.states)
    steps = traced.inputs[0].shape[0] if traced.inputs else 1

    def loop_of(step: Step) -> Loop:
        return Loop(step, steps, steps, False, None, False, backend)

    def runs_natively(step: Step) -> bool:
        return native.can_run(loop_of(step))

    once, step, kept = without_invariants(
        with_own_rows(without_control_flow(traced.jaxpr, num_arrays)),
        num_arrays,
        num_states,
        tuple(counts),
        keep_parts=backend != "xla" and jax.default_backend() == "cpu",
    )
    for_gpus = backend == "cuda" or _config.read().backend == "cuda"
    if backend is None and not for_gpus:
        batch = next((a.shape[0] for a in traced.states if a.shape), 0)
        lacking = "for another loop to be quicker"
        if is_small(step.jaxpr):
            raise RunsAsScan(f"a step has too little work {lacking}")
        if is_batch and is_brief(step.jaxpr, batch, steps):
            raise RunsAsScan(f"so many sequences have too few steps {lacking}")
        if is_batch and is_narrow(step.jaxpr, batch, has_lengths):
            raise RunsAsScan(f"rows are too narrow {lacking}")
    reason = _unsupported_reason(step.jaxpr)
    precomputed = _precomputed_of(
        step, traced.states, reason is not None, runs_natively
    )
    if precomputed is not None:
        step, reason = precomputed.step, _unsupported_reason(precomputed.step.jaxpr)
    if reason is None and backend not in NAMED and not runs_natively(step):
        reason = _reason_for_scan(loop_of(step), traced.jaxpr, traced.origins)
    if reason is not None:
        raise RunsAsScan(reason)
    outside = [*once.eqns, *([] if precomputed is None else precomputed.values.eqns)]
    if traced.varies and any(map(has_inner, outside)):  # see `_trace`
        raise RunsAsScan("in a `shard_map`, its functions are computed before the loop")
    return PreparedLoop(
        step,
        precomputed,
        evaluate(once, traced.arrays, steady),
        [traced.inputs[i] for i in kept],
        kept,
        traced.states,
        traced.results,
        traced.origins,
    )


class _Traced(NamedTuple):
    """A step that has been traced, and the arrays of the loop over it.

    Attributes:
        jaxpr: the step, flat and without constants, of arrays, states and inputs.
        arrays: what is the same at every step, also what the step closes over.
        states: the initial states.
        inputs: the inputs, time first.
        results: the tree of the new states and the outputs.
        origins: where each primitive comes from.
        varies: whether values vary over axes of a `shard_map`.
    """

    jaxpr: Jaxpr
    arrays: list[Array]
    states: list[Array]
    inputs: list[Array]
    results: Any
    origins: Origins
    varies: bool


def _trace_loop(
    body: Callable, arrays: Any, states: Any, inputs: Any, at_step: Sequence[Any]
) -> _Traced:
    """Trace the step of a loop; see `prepare`."""
    given, tree = jax.tree.flatten((arrays, states))
    leaves, input_tree = jax.tree.flatten(inputs)
    trees: list[Any] = []

    def flattened(*values: Any) -> list[Any]:
        arrays, states = jax.tree.unflatten(tree, values[: len(given)])
        at = jax.tree.unflatten(input_tree, values[len(given) :])
        results, results_tree = jax.tree.flatten(body(arrays, states, at))
        trees.append(results_tree)
        return results

    # In shard_map, all values vary over the same axes from here on.
    everything = make_varying([*given, *leaves])
    given, leaves = split_at(everything, [len(given)])
    types = [_type(a, a.shape) for a in given]
    types += [_type(a, t.shape) for a, t in zip(leaves, at_step, strict=True)]
    closed = _trace(flattened, types)
    if closed.effects:
        effects = ", ".join(map(str, closed.effects))
        raise RunsAsScan(f"the step has effects: {effects}")
    origins = origins_of(closed.jaxpr)
    closed = with_all_constants(closed)
    # The arrays that the step closes over are invariant too, and need not vary yet.
    everything = make_varying([*closed.consts, *given, *leaves])
    first_state = len(closed.consts) + len(jax.tree.leaves(arrays))
    own, start, leaves = split_at(
        everything, [first_state, len(closed.consts) + len(given)]
    )
    varies = any(map(varying, types))
    if any(varying(v.aval) for v in closed.jaxpr.invars):  # see `_trace`
        if any(map(_has_function, closed.jaxpr.eqns)):
            raise RunsAsScan("in a `shard_map`, its functions read values that vary")
    return _Traced(
        flat(known(closed.jaxpr)),
        own,
        start,
        leaves,
        trees[-1],
        origins,
        varies,
    )


def _trace(step: Callable, types: Sequence[Any]) -> ClosedJaxpr:
    """Return the jaxpr of a step, in a `shard_map` as if no value varied.

    Functions that stand in it, such as those with derivatives of their own, keep the
    types that they were traced with, while the operations around them are traced anew.
    Where the step closes over values that vary, or needs such, all values vary.
    """
    if any(map(varying, types)):
        try:
            traced = jax.make_jaxpr(step)(*map(unvarying, types))
        except Exception:  # a collective needs values that vary
            pass
        else:
            if not any(varying(jax.typeof(a)) for a in traced.consts):
                return traced
    return jax.make_jaxpr(step)(*types)


def _has_function(eqn: JaxprEqn) -> bool:
    """Return whether functions stand in an equation that `flat` leaves there."""
    if eqn.primitive.name != "jit":
        return has_inner(eqn)
    return any(_has_function(e) for j in jaxprs_in_params(eqn.params) for e in j.eqns)


def _type(a: Array, shape: tuple[int, ...]) -> Any:
    """Return the type of an array, with another shape.

    A weak type decides what the step computes in.
    """
    like = jax.typeof(a)
    weak = like.weak_type
    return shaped_array(shape, a.dtype, [like]).update(weak_type=weak)


def _reason_for_scan(loop: Loop, as_it_is: Jaxpr, origins: Origins) -> str | None:
    """Return why `lax.scan` runs what the native loop cannot, or None if XLA's does.

    Without a product, or beside much else, `lax.scan` is as quick as XLA's loop.
    """
    if not loop.step.products:
        return description.unsupported_reason(loop, origins)
    if writes_in_place(loop.step.jaxpr):
        return f"{description.unsupported_reason(loop, origins)}; {_IN_PLACE}"
    eqn = dominating(as_it_is)
    return None if eqn is None else description.equation_at_line(eqn, origins)


def _precomputed_of(
    step: Step,
    states: Sequence[Array],
    needed: bool,
    runs_natively: Callable[[Step], bool],
) -> Precomputed | None:
    """Return what to compute before the loop, or None if nothing.

    Args:
        step: the step.
        states: the initial states.
        needed: whether the loop cannot run otherwise.
        runs_natively: whether the native library runs the loop over a step.
    """
    found = [precompute(step, a.shape[0], s) for a in states[:1] for s in (True, False)]
    found = [part for part in found if part is not None]
    native = [part for part in found if runs_natively(part.step)]
    return next(iter(native or (found if needed else [])), None)


def saves_loops(policy: Callable[..., bool]) -> Policy:
    """Return a policy that also saves what loops over steps return."""

    def saves(prim: Any, *avals: Any, **params: Any) -> bool:
        return prim is primitive.loop_p or policy(prim, *avals, **params)

    return saves


def _unsupported_reason(jaxpr: Jaxpr) -> str | None:
    """Return why a step cannot be taken apart, or None."""
    for aval in _types(jaxpr):
        if jnp.issubdtype(aval.dtype, jnp.complexfloating):
            return "the step has complex values"
        if jnp.issubdtype(aval.dtype, jax.dtypes.extended):
            return "the step has PRNG keys"
    return None


def _types(jaxpr: Any) -> list[Any]:
    """Return the types of all values of a jaxpr and of its inner ones."""
    types = [v.aval for v in (*jaxpr.constvars, *jaxpr.invars)]
    for eqn in jaxpr.eqns:
        types += [v.aval for v in eqn.outvars]
        for inner in jaxprs_in_params(eqn.params):
            types += _types(inner)
    return types
