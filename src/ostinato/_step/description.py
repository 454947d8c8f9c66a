"""What the native library runs of a loop, in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax.extend.core import JaxprEqn

from .._rnn.cuda import unasked_reason
from .._source_lines import user_line
from .control_flow import stays
from .cuda import loops as cuda
from .gradients import is_float
from .jaxprs import Origins
from .loop_programs import lower_backward, lower_forward
from .native import check_available, is_left_to_xla
from .programs.lowered import Lowered
from .programs.program import PRODUCT, Phase
from .programs.values import Unsupported
from .refusal import refusal
from .xla import Loop

_NARROW = "the rows are narrow"


def check(loop: Loop, origins: Origins) -> None:
    """Raise NotImplementedError if the backend that a loop names cannot run it."""
    lacking = None
    if loop.backend == "cpu":
        lacking = unsupported_reason(loop, origins)
    elif loop.backend == "cuda":
        lacking = _lacking(lambda: cuda.check_supported(loop, None), origins)
    if lacking is not None:
        raise refusal(str(loop.backend), lacking)


def unsupported_reason(loop: Loop, origins: Origins) -> str | None:
    """Return why the native library cannot run a loop forward, or None if it can."""

    def lower() -> None:
        check_available(loop)
        lower_forward(loop, None)

    return _lacking(lower, origins)


def _lacking(check: Callable[[], object], origins: Origins) -> str | None:
    """Return what a check says that a loop lacks, or None if it lacks nothing."""
    try:
        check()
    except Unsupported as error:
        return reason(error, origins)
    return None


def reason(error: Unsupported, origins: Origins) -> str:
    """Return what a loop lacks, and the line of the step that needs it."""
    message, *equations = error.args
    if not equations:
        return message
    (eqn,) = equations
    is_name = message == f"`{eqn.primitive.name}`"
    return equation_at_line(eqn, origins, None if is_name else message)


def equation_at_line(
    eqn: JaxprEqn, origins: Origins, lacking: str | None = None
) -> str:
    """Return the name of an operation that a loop lacks, and its line in the step.

    Args:
        eqn: the operation.
        origins: where each primitive of the step comes from.
        lacking: what is lacking; None means the operation itself.
    """
    name = eqn.primitive.name
    if name == "name":  # which `recompute` gives to values: no operation of the step
        return f"a value to recompute: {lacking}"
    if lacking is None and name in ("cond", "scan"):
        lacking = stays(eqn)
    line = user_line((*origins.get(name, ()), eqn))
    return f"`{name}` at {line}" + (f": {lacking}" if lacking else "")


def describe(loop: Loop, origins: Origins) -> tuple[str, str | None]:
    """Return what the native library runs, and the reason if it cannot run a loop."""
    step = loop.step
    wrt = tuple(is_float(v.aval) for v in step.jaxpr.invars) + (False,) * loop.masked
    try:
        check_available(loop)
        alone = lower_forward(loop, None)
    except Unsupported as error:
        return "", reason(error, origins)
    try:
        forward = lower_forward(loop, wrt)
        backward = lower_backward(loop, wrt)
    except Unsupported as error:
        lacking = reason(error, origins)
        if is_left_to_xla(loop, None):
            return "", f"without gradients, {_NARROW}; with them, {lacking}"
        return f"{operations_of(alone)} forward; gradients on xla: {lacking}", None
    shapes: dict[Any, int] = {}
    for i in dict.fromkeys(forward.sources[len(step.jaxpr.outvars) :]):
        if i is not None and i >= 0:
            shape = tuple(forward.results[i].shape)
            shapes[shape] = shapes.get(shape, 0) + 1
    products = [i for i in forward.program.instructions if i.operation == PRODUCT]
    hoisted = sum(i.phase is Phase.AHEAD for i in products)
    stored = ", ".join(f"{n} x {list(shape)}" for shape, n in shapes.items())
    told = (
        f"{_count(len(forward.program.instructions), 'operation')} forward, "
        f"{len(backward.lowered.program.instructions)} backward, "
        f"{_count(len(products) - hoisted, 'product')} a step, {hoisted} hoisted; "
        f"stored {stored or 'nothing'}"
    )
    if is_left_to_xla(loop, None):
        told += f"; without gradients on xla: {_NARROW}"
    return told, None


def describe_on_gpus(loop: Loop, origins: Origins) -> tuple[str, str | None]:
    """Return how kernels of GPUs run a loop, and the reason if they do not."""
    wrt = tuple(is_float(v.aval) for v in loop.step.jaxpr.invars)
    wrt += (False,) * loop.masked
    try:
        cuda.check_supported(loop, None)
    except Unsupported as error:
        return "", reason(error, origins)
    why = None if loop.backend == "cuda" else unasked_reason()
    if why is not None:
        return "", why
    backward = "one" if cuda.is_supported(loop, wrt) else "XLA"
    return f"{cuda.describe(loop)}; {backward} backward", None


def operations_of(lowered: Lowered) -> str:
    """Return how many operations and products a program has, in words."""
    instructions = lowered.program.instructions
    products = sum(i.operation == PRODUCT for i in instructions)
    return f"{_count(len(instructions), 'operation')}, {_count(products, 'product')}"


def _count(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
