"""Code that depends on the version of JAX.

Only this module uses private names of JAX, recognises parts of JAX by their text, or
looks into the context of a lowering rule.
"""

from __future__ import annotations

import contextlib
import re
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.errors
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn, Primitive
from jax.interpreters import ad

try:
    from jax._src.dispatch import prim_requires_devices_during_lowering as _with_devices
except ImportError:
    _with_devices = None


def lower_with_devices(primitive: Primitive) -> bool:
    """Tell JAX that this primitive's lowering needs to know the mesh.

    `custom_partitioning` inside a lowering needs this. JAX 0.10 to 0.12 offer it under
    a private name only. Where a JAX lacks it, warn that sharded calls will run
    replicated, and return False.
    """
    if _with_devices is None:
        warnings.warn(
            f"this JAX has no way to partition {primitive.name} over devices: sharded "
            "calls will run replicated; use jax.shard_map, or a JAX that ostinato "
            "supports",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    _with_devices.add(primitive)
    return True


def outside_of_traces(compute: Callable[[], Any]) -> Any:
    """Return `compute()`, run where no trace and no `shard_map` is around it.

    That is a thread of its own; `jax.ensure_compile_time_eval` does not leave a
    `shard_map` that runs without `jit`.
    """

    def run() -> Any:
        with jax.enable_x64(x64):
            return compute()

    x64 = jnp.result_type(float) == jnp.float64  # as it is in this thread
    with ThreadPoolExecutor(1) as thread:
        try:
            done = thread.submit(run)
        except RuntimeError:  # at the end of Python, which starts no thread
            return run()
        return done.result()


def is_for_export(ctx: Any) -> bool:
    """Return whether a lowering rule writes for `jax.export`, to run on any machine.

    Args:
        ctx: the context that the lowering rule is given; so in the functions below.
    """
    return ctx.module_context.lowering_parameters.for_export


def platforms_of(ctx: Any) -> str:
    """Return the platforms that a lowering rule writes for, with commas between."""
    return ", ".join(ctx.module_context.platforms)


def is_in_shard_map(ctx: Any) -> bool:
    """Return whether a lowering rule writes for the inside of a `shard_map`."""
    return bool(getattr(ctx.module_context.axis_context, "manual_axes", ()))


def is_on_one_device(ctx: Any) -> bool:
    """Return whether arrays are whole here, or all are the part of one device."""
    axes = ctx.module_context.axis_context
    manual = getattr(axes, "manual_axes", None)
    if manual is not None:  # inside of shard_map
        return manual == frozenset(axes.mesh.axis_names)
    return getattr(axes, "num_devices", 1) == 1


def with_types(ctx: Any, change: Callable[[Any], Any]) -> Any:
    """Return the context with the types of operands and results changed."""
    avals_in, avals_out = (list(map(change, a)) for a in (ctx.avals_in, ctx.avals_out))
    return ctx.replace(avals_in=avals_in, avals_out=avals_out)


class CheckedPrimitive(Primitive):
    """A primitive with the checks of the jaxpr `call_jaxpr`, and without its effects.

    checkify looks into a parameter of that name, and binds the primitive once more
    with the function that computes the errors, too, as `subfuns`. That function is
    called; the primitive is gone then.
    """

    def bind(self, *args: Any, subfuns: tuple[Any, ...] = (), **params: Any) -> Any:
        """Bind the primitive, or call the function that checkify made of it."""
        if subfuns:
            return subfuns[0].call_wrapped(*args)
        return super().bind(*args, **params)


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """Return how many operands of a `lax.scan` are constants, and how many carries."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()  # JAX 0.11: a tree of three parts
    return len(consts), len(carry)


_MADE_OF_OTHERS = frozenset("Einsum Frexp Ldexp Nonzero SearchSorted".split())


def written_out(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """Return an operation of JAX 0.12 as those that it is made of.

    None for what has more to it, such as derivatives of its own.

    Args:
        eqn: an equation of the primitive `call_hi_primitive`.
    """
    whole = eqn.params["_prim"]
    if type(whole).__name__ not in _MADE_OF_OTHERS:
        return None

    def run(*operands: Any) -> Any:
        return whole.expand(*whole.in_tree.unflatten(operands))

    avals: list[Any] = [v.aval for v in eqn.invars]
    return jax.make_jaxpr(run)(*(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals))


ELEMENTWISE = frozenset(
    """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e
    cbrt ceil clamp clz complex conj convert_element_type copy copy_p cos cosh digamma
    div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a
    igammac imag integer_pow is_finite le le_to lgamma log log1p log2 logistic lt lt_to
    max min mul mulhi name ne neg nextafter not one_minus_square or polygamma polynomial
    population_count pow random_gamma_grad real reduce_precision
    regularized_incomplete_beta rem round rsqrt select_n shift_left
    shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient
    sub tan tanh xor zeta
    """.split()
)
"""The names of JAX's primitives that compute each element of the result by itself.

Their operands have the shape of the result, or are scalars, or have axes of size 1.
"""


def draws_from_first(keys: jax.Array, new_keys: bool = False) -> bool:
    """Return whether JAX draws from the first key for all keys along a mapped axis.

    Args:
        keys: an array of keys.
        new_keys: True asks about the keys that are made of them, False about numbers.
    """
    kinds = ("unsafe_rbg",) if new_keys else ("rbg", "unsafe_rbg")
    return str(jax.random.key_impl(keys)) in kinds


def is_determinant(eqn: JaxprEqn) -> bool:
    """Return whether a function with a derivative of its own is `jnp.linalg.det`'s."""
    source = eqn.params["call_jaxpr"].jaxpr.debug_info.func_src_info
    return source.startswith("_det at ") and _LINALG in source


def is_of_determinants_derivative(eqn: JaxprEqn) -> bool:
    """Return whether an equation is of the derivative of `jnp.linalg.det`.

    The function itself is one equation with a derivative of its own, as long as it is
    not differentiated.
    """
    traceback = eqn.source_info.traceback
    return any(
        frame.function_name == "det" and _LINALG in frame.file_name
        for frame in (traceback.frames if traceback else ())
    )


_LINALG = "/jax/_src/numpy/linalg.py"


def is_ordered(callback: dict[str, Any]) -> bool:
    """Return whether a debug callback with these parameters runs in program order."""
    effect = str(callback.get("effect"))
    return callback.get("ordered", effect == "OrderedDebug")


_NEEDS_A_NUMBER = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
"""The errors that JAX raises where a number, maybe made of a size, is not known."""
_WORDS_OF_SIZES = (
    "Tracer'",  # numpy's, of an operation that it does not have
    "_DimExpr",
    "__index__",
    "_plus_1",
    "floordiv(",
    "non-constant",
    "process_primitive",  # of `for row in x`, in JAX 0.11
    "shape polymorphism",
    "ymbolic dimension",
)
"""The words by which the message of JAX or numpy about a symbolic size is known."""


def is_about_sizes(error: Exception, symbols: Iterable[str]) -> bool:
    """Return whether an error of JAX or numpy may come of a size that is a symbol.

    Args:
        error: raised while a function is traced with symbolic sizes.
        symbols: the symbols.
    """
    if isinstance(error, _NEEDS_A_NUMBER):
        return True
    message = str(error)
    names = "|".join(map(re.escape, symbols))
    return any(words in message for words in _WORDS_OF_SIZES) or bool(
        re.search(rf"\b({names})\b", message)
    )


def asks_for_associative_scan(error: Exception) -> bool:
    """Return whether JAX's `associative_scan` refused a symbolic size."""
    return isinstance(error, NotImplementedError) and "associative scan" in str(error)


_REPLACING = threading.RLock()
_CUMULATIVE = {
    jax.lax.cumlogsumexp_p: jnp.logaddexp,
    jax.lax.cummax_p: jax.lax.max,
    jax.lax.cummin_p: jax.lax.min,
    jax.lax.cumprod_p: jax.lax.mul,
}
"""The cumulative operations whose derivative is that of an associative scan."""


@contextlib.contextmanager
def associative_scan_replaced(by: Callable) -> Iterator[None]:
    """Let `jax.lax.associative_scan` be another function while a function is traced.

    JAX has no hook there: its scan slices in Python. The derivatives of cumulative
    operations, which call it, are replaced, too. Other threads that call it in the
    meantime get `by` too, which must do the same for sizes that are numbers.
    """

    def jvp(join: Callable) -> Callable:
        def rule(primals: Any, tangents: Any, *, axis: int, reverse: bool) -> Any:
            scan = partial(by, join, axis=axis, reverse=reverse)
            return jax.jvp(scan, tuple(primals), tuple(tangents))

        return rule

    with _REPLACING:
        original = jax.lax.associative_scan
        rules = {p: ad.primitive_jvps[p] for p in _CUMULATIVE}
        jax.lax.associative_scan = by
        ad.primitive_jvps.update({p: jvp(join) for p, join in _CUMULATIVE.items()})
        try:
            yield
        finally:
            jax.lax.associative_scan = original
            ad.primitive_jvps.update(rules)


def is_unbound_axis_name(error: NameError) -> bool:
    """Return whether a NameError says that no axis of that name is bound."""
    return "axis name" in str(error)
