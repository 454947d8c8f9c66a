"""The primitives of a loop over a step, with all their rules.

`loop_p` runs the loop. Its JVP rule binds `loop_p` with `wrt`, so that values are
saved, and `loop_tangent_p`, which is linear in the tangents; the transpose of that
binds `loop_bwd_p`. So `grad` runs two loops. Further derivatives are those of the XLA
implementation by JAX's own rules.

The static parameters are the `Loop` and `wrt`, which tells for every operand whether
the loop is differentiated with respect to it.
"""

from __future__ import annotations

import functools as ft
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Primitive
from jax.interpreters import ad, batching, mlir

from .. import _compat
from .._rnn.cuda import unasked_reason
from .._rnn.eager import always_jitted
from .._rnn.sharding import make_varying, shaped_array
from .._typing import Array
from . import apart, mapped, members, native, tokens
from .cuda import loops as cuda
from .gradients import Mask, is_float
from .jaxprs import split_at, struct
from .loop_programs import saved_shapes
from .refusal import refusal
from .xla import Loop


def run(loop: Loop, operands: Sequence[Array]) -> list[Array]:
    """Bind `loop_p`: return final states, and the outputs of all steps."""
    return loop_p.bind(*make_varying(list(operands)), loop=loop, wrt=None)


# --------------------------------------------------------------------- implementations


@members.forward
def _forward(*operands: Array, loop: Loop, wrt: Mask | None) -> list[Array]:
    return tokens.forward(loop, wrt, operands)


@members.tangent
def _tangent(*arguments: Array, loop: Loop, wrt: Mask) -> list[Array]:
    """Return the tangents of the results that have derivatives."""
    operands, _, tangents = _of_tangent(wrt, arguments)
    which = [i for i, asked in enumerate(wrt) if asked]

    def results(*values: Array) -> list[Array]:
        full = list(operands)
        for i, value in zip(which, values, strict=True):
            full[i] = value
        return [a for a in tokens.forward(loop, None, full) if is_float(a)]

    return jax.jvp(results, [operands[i] for i in which], list(tangents))[1]


_backward = members.backward(ft.partial(mapped.backward_by, tokens.backward))
_backward_after_any = members.backward(
    ft.partial(mapped.backward_by, mapped.after_any())
)
_on_mapped_step = ft.partial(mapped.batch_loop, run)
_back_on_mapped_step = ft.partial(mapped.batch_backward, run)
_mapped = ft.partial(members.forward_by, _on_mapped_step)
_mapped_back = ft.partial(members.backward_by, _back_on_mapped_step)


def _of_tangent(wrt: Mask, arguments: Sequence[Any]) -> tuple:
    """Return operands, saved values and tangents, the arguments of `loop_tangent_p`."""
    end = len(arguments) - sum(wrt)
    return arguments[: len(wrt)], arguments[len(wrt) : end], arguments[end:]


# ------------------------------------------------------------------------------- rules


def _jvp(
    primals: Any, tangents: Any, *, loop: Loop, wrt: Mask | None
) -> tuple[list[Array], list[Any]]:
    if wrt is not None:
        return _jvp_of(_forward)(primals, tangents, loop=loop, wrt=wrt)
    wrt = tuple(
        is_float(p) and type(t) is not ad.Zero
        for p, t in zip(primals, tangents, strict=True)
    )
    out = loop_p.bind(*primals, loop=loop, wrt=wrt)
    count = len(loop.step.jaxpr.outvars)
    results, saved = out[:count], out[count:]
    given = [ad.instantiate_zeros(t) for t, w in zip(tangents, wrt, strict=True) if w]
    dot = iter(loop_tangent_p.bind(*primals, *saved, *given, loop=loop, wrt=wrt))
    return results, [next(dot) if is_float(r) else apart.no_tangent(r) for r in results]


def _jvp_of(implementation: Callable) -> Callable:
    """Return the rule that differentiates an implementation by JAX's own rules."""

    def rule(primals: Any, tangents: Any, **params: Any) -> Any:
        return apart.jvp(ft.partial(implementation, **params), primals, tangents)

    return rule


def _transpose(cotangents: Any, *arguments: Any, loop: Loop, wrt: Mask) -> list[Any]:
    operands, saved, tangents = _of_tangent(wrt, arguments)
    bar = [ad.instantiate_zeros(ct) for ct in cotangents]
    grads = loop_bwd_p.bind(*operands, *saved, *bar, loop=loop, wrt=wrt)
    return [None] * (len(operands) + len(saved)) + list(grads)


def _transpose_linear(
    cotangents: Any, *operands: Any, loop: Loop, wrt: Mask | None
) -> list[Any]:
    """Transpose a loop over a step that is linear, as for `jax.linear_transpose`."""
    function = ft.partial(_forward, loop=loop, wrt=wrt)
    return apart.transpose(function, cotangents, operands)


def _batch(
    args: Sequence[Array], dims: Sequence[Any], *, loop: Loop, wrt: Mask | None
) -> tuple[list[Array], list[int]]:
    if loop.members is not None:
        return mapped.batch(_mapped, args, dims, loop=loop, wrt=wrt)
    if not members.are_worth_it(loop, args, dims, wrt):
        return _on_mapped_step(args, dims, loop=loop, wrt=wrt)
    loop, args = members.of_mapped(loop, args, dims, [False] * len(args))
    out = loop_p.bind(*make_varying(args), loop=loop, wrt=wrt)
    return out, [0] * len(out)


def _batch_back(
    args: Sequence[Array], dims: Sequence[Any], *, loop: Loop, wrt: Mask
) -> tuple[list[Array], list[int]]:
    if loop.members is not None:
        return mapped.batch(_mapped_back, args, dims, loop=loop, wrt=wrt)
    if not members.are_worth_it(loop, args, dims, wrt):
        return _back_on_mapped_step(args, dims, loop=loop, wrt=wrt)
    # Each member has a gradient of its own, of what it shares with others, too.
    whole = [*wrt, *[True] * (len(args) - len(wrt))]
    loop, args = members.of_mapped(loop, args, dims, whole)
    out = loop_bwd_p.bind(*make_varying(args), loop=loop, wrt=wrt)
    return out, [0] * len(out)


# ------------------------------------------------------------------------ registration


def _forward_types(*avals: Any, loop: Loop, wrt: Mask | None) -> list[Any]:
    if loop.members is not None:
        size, loop = loop.members.size, members.of_one(loop)
        found = _forward_types(loop=loop, wrt=wrt)
        return [jax.ShapeDtypeStruct((size, *a.shape), a.dtype) for a in found]
    results = [struct(v.aval) for v in loop.step.jaxpr.outvars]
    states, outputs = split_at(results, [loop.step.num_states])
    saved = [] if wrt is None else saved_shapes(loop, wrt)
    return [*states, *tokens.stacked_types(loop, wrt, [*outputs, *saved])]


def _tangent_types(*avals: Any, loop: Loop, wrt: Mask) -> list[Any]:
    results = _forward_types(*avals, loop=loop, wrt=None)
    return [a for a in results if is_float(a)]


def _backward_types(*avals: Any, loop: Loop, wrt: Mask) -> list[Any]:
    return [a for a, asked in zip(avals, wrt, strict=False) if asked]


def _primitive(name: str, implementation: Callable, types: Callable) -> Primitive:
    """Return a primitive.

    Args:
        name: its name.
        implementation: in primitives of JAX.
        types: returns the types of its results, much quicker than a trace.
    """
    primitive = Primitive(name)
    primitive.multiple_results = True

    @ft.partial(jax.jit, static_argnames=("loop", "wrt"))
    def apply(*args: Array, loop: Loop, wrt: Mask | None) -> list[Array]:
        return primitive.bind(*args, loop=loop, wrt=wrt)

    def shapes(*avals: Any, **params: Any) -> list[Any]:
        found = types(*avals, **params)
        return [shaped_array(a.shape, a.dtype, avals) for a in found]

    primitive.def_impl(always_jitted(apply))
    primitive.def_abstract_eval(shapes)
    batching.primitive_batchers[primitive] = ft.partial(mapped.batch, implementation)
    ad.primitive_jvps[primitive] = _jvp_of(implementation)
    mlir.register_lowering(primitive, apart.lowered(implementation))
    return primitive


loop_p = _primitive("ostinato_loop", _forward, _forward_types)
loop_tangent_p = _primitive("ostinato_loop_tangent", _tangent, _tangent_types)
loop_bwd_p = _primitive("ostinato_loop_bwd", _backward, _backward_types)
batching.primitive_batchers[loop_p] = _batch
batching.primitive_batchers[loop_bwd_p] = _batch_back
ad.primitive_jvps[loop_p] = _jvp
ad.primitive_jvps[loop_bwd_p] = _jvp_of(_backward_after_any)
ad.primitive_transposes[loop_p] = _transpose_linear
ad.primitive_transposes[loop_tangent_p] = _transpose


def _lower_on_cpus(
    native_of: Callable, xla_rule: Callable, mapped_rule: Callable, splits: bool
) -> Callable:
    """Return a lowering rule that takes the native library where it can be called.

    Args:
        native_of: from whether arrays may be split over devices, to the rule that does.
        xla_rule: the rule for all other places.
        mapped_rule: the rule for members that do not run natively.
        splits: whether this JAX can split its arrays over devices.
    """

    def lower(ctx: Any, *args: Any, loop: Loop, wrt: Mask | None) -> Any:
        if loop.backend == "cuda":
            raise refusal("cuda", _ELSEWHERE + "cpu")
        one = _compat.is_on_one_device(ctx)
        may_split = one or (splits and not _compat.is_in_shard_map(ctx))
        elsewhere = _compat.is_for_export(ctx) or not may_split
        by_xla = elsewhere or native.is_left_to_xla(loop, wrt)
        rule = xla_rule if by_xla else native_of(not one)
        if loop.members is not None and not elsewhere:
            alone = one and native.can_run(members.of_one(loop), wrt)
            rule = rule if alone else mapped_rule
        return rule(ctx, *args, loop=loop, wrt=wrt)

    return lower


_ELSEWHERE = "it runs on the cuda platform, and the computation is compiled for "


def _lower_on_gpus(kernel_rule: Callable, xla_rule: Callable) -> Callable:
    """Return a lowering rule that takes a kernel where there is one for a loop."""

    def lower(ctx: Any, *args: Any, loop: Loop, wrt: Mask | None) -> Any:
        # A loop that names kernels has one: this may be a derivative without one.
        named = loop.backend == "cuda"
        asked = named or loop.backend is None and unasked_reason() is None
        if not asked or not cuda.is_supported(loop, wrt):
            return xla_rule(ctx, *args, loop=loop, wrt=wrt)
        if not _compat.is_on_one_device(ctx):
            reason = "its arrays are split over devices; use jax.shard_map"
        elif _compat.is_for_export(ctx) and not named:
            reason = "what jax.export makes must run on any machine"
        else:
            reason = cuda.failure(loop, wrt)
        if reason is not None and named:
            raise refusal("cuda", reason)
        rule = kernel_rule if reason is None else xla_rule
        return rule(ctx, *args, loop=loop, wrt=wrt)

    return lower


def _lower_elsewhere(xla_rule: Callable) -> Callable:
    """Return a lowering rule for all other platforms."""

    def lower(ctx: Any, *args: Any, loop: Loop, wrt: Mask | None) -> Any:
        if loop.backend == "cuda":
            raise refusal("cuda", _ELSEWHERE + _compat.platforms_of(ctx))
        return xla_rule(ctx, *args, loop=loop, wrt=wrt)

    return lower


def _unless_members(rule: Callable, mapped_rule: Callable) -> Callable:
    """Return a lowering rule that takes another one for loops of members."""

    def lower(ctx: Any, *args: Any, loop: Loop, wrt: Mask | None) -> Any:
        chosen = rule if loop.members is None else mapped_rule
        return chosen(ctx, *args, loop=loop, wrt=wrt)

    return lower


def _native_loop(split: bool) -> Callable:
    def forward(*operands: Array, loop: Loop, wrt: Mask | None) -> list[Array]:
        return native.forward(loop, wrt, operands, split)

    return apart.lowered(members.forward(forward, members.natively))


def _native_back(split: bool) -> Callable:
    backward = ft.partial(mapped.backward_by, ft.partial(native.backward, split=split))
    return apart.lowered(members.backward(backward, members.natively))


def _kernel_loop(*operands: Array, loop: Loop, wrt: Mask | None) -> list[Array]:
    return cuda.forward(loop, wrt, operands)


_kernel_back = ft.partial(mapped.backward_by, cuda.backward)


def _rules_of(
    primitive: Primitive, native_of: Callable, kernel: Callable, by_mapped: Callable
) -> dict[str | None, Callable]:
    """Return the lowering rule of a primitive for each platform, None for others."""
    by_xla = IMPLEMENTATIONS[primitive]
    xla_rule, kernel_rule, mapped_rule = (
        apart.lowered(f) for f in (by_xla, kernel, by_mapped)
    )
    splits = _compat.lower_with_devices(primitive)
    return {
        None: _unless_members(_lower_elsewhere(xla_rule), mapped_rule),
        "cpu": _lower_on_cpus(native_of, xla_rule, mapped_rule, splits),
        "cuda": _unless_members(_lower_on_gpus(kernel_rule, xla_rule), mapped_rule),
    }


IMPLEMENTATIONS = {loop_p: _forward, loop_tangent_p: _tangent, loop_bwd_p: _backward}
RULES = {
    loop_p: _rules_of(loop_p, _native_loop, _kernel_loop, _mapped),
    loop_bwd_p: _rules_of(loop_bwd_p, _native_back, _kernel_back, _mapped_back),
}
"""The lowering rules by platform."""
for _loop_primitive, _rules in RULES.items():
    for _platform, _rule in _rules.items():
        mlir.register_lowering(_loop_primitive, _rule, _platform)


def implementation(eqn: JaxprEqn) -> ClosedJaxpr:
    """Return what the equation of a loop runs, in primitives of JAX."""
    run = ft.partial(IMPLEMENTATIONS[eqn.primitive], **eqn.params)
    return jax.make_jaxpr(run)(*(v.aval for v in eqn.invars))
