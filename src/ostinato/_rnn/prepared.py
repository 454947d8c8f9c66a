"""`prepare`: weights that the cpu kernels read as they are, for serving."""

from __future__ import annotations

import functools as ft
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from .. import _checks
from .._typing import Array
from . import backends, cpu, layout, sharding
from .lowering import always_jitted
from .spec import RNNSpec, check_spec


class PreparedWeights(NamedTuple):
    """What `prepare` returns; a pytree, taken wherever `weights` are.

    Attributes:
        weights: flat vector `[num_params]`.
        packed: uint8, the same once more in the order of the cpu kernels; None where
            those would not run.
    """

    weights: Array
    packed: Array | None


def prepare(spec: RNNSpec, weights: Array) -> PreparedWeights:
    """Pack weights once, for many calls with the same weights.

    The cpu kernels read weights in an order of their own and reorder them in every
    call. That costs as much as several steps of a batch of one; prepared weights save
    it. The results have the same bits, but for calls of a few steps and rows (such as
    `rnn_step`): those read plain weights unpacked and sum in another order.

    Args:
        spec: the network that the weights are of.
        weights: flat vector `[num_params]`.

    Returns:
        `PreparedWeights`, which `rnn`, `rnn_step` and `rnn_forward` take instead of
        `weights`. The packed part serves the machine that made it; elsewhere the
        kernels notice and pack again, and other backends read the flat vector.

    Raises:
        TypeError: `weights` is no array of a dtype that `rnn` takes.
        ValueError: `weights` is not the flat vector of `spec`.

    Holds under `jit` and `vmap`. Gradients reach the flat vector alone: with respect to
    prepared weights, `jax.grad` needs `allow_int=True` and gives `packed` a gradient of
    dtype float0. Training gains nothing from it.
    """
    check_spec(spec)
    weights = _checks.check_array("weights", weights)
    _checks.check_floating("weights", weights, _checks.FLOATS)
    layout.check_weights(weights, spec)
    reason = cpu.supports(spec, weights.dtype)
    if reason is not None or backends.platform_of(weights) != "cpu":
        return PreparedWeights(weights, None)
    return PreparedWeights(
        weights, pack_p.bind(jax.lax.stop_gradient(weights), spec=spec)
    )


# Packs `[..., num_params]` into `[..., packed_size]`.
pack_p = Primitive("ostinato_pack")


def _pack_abstract_eval(weights: Any, *, spec: RNNSpec) -> Any:
    shape = (*weights.shape[:-1], cpu.packed_size(spec, weights.dtype))
    return sharding.shaped_array(shape, jnp.uint8, like=[weights])


def _pack(weights: Array, *, spec: RNNSpec) -> Array:
    packed = cpu.pack(spec, weights.reshape(-1, weights.shape[-1]))
    return packed.reshape(*weights.shape[:-1], -1)


def _pack_nothing(weights: Array, *, spec: RNNSpec) -> Array:
    """Where the kernels do not run; should they ever see this, they pack again."""
    shape = (*weights.shape[:-1], cpu.packed_size(spec, weights.dtype))
    return jnp.zeros(shape, jnp.uint8)


def _pack_batch(args: Any, dims: Any, *, spec: RNNSpec) -> tuple[Array, int]:
    (weights,), (axis,) = args, dims
    return pack_p.bind(jnp.moveaxis(weights, axis, 0), spec=spec), 0


def _pack_on_cpu(ctx: Any, *args: Any, **params: Any) -> Any:
    exports = ctx.module_context.lowering_parameters.for_export
    return (_lower_nothing if exports else _lower_pack)(ctx, *args, **params)


@ft.partial(jax.jit, static_argnames="spec")
def _pack_alone(weights: Array, spec: RNNSpec) -> Array:
    return pack_p.bind(weights, spec=spec)


pack_p.def_impl(always_jitted(_pack_alone))
pack_p.def_abstract_eval(_pack_abstract_eval)
batching.primitive_batchers[pack_p] = _pack_batch
_lower_pack = mlir.lower_fun(_pack, multiple_results=False)
_lower_nothing = mlir.lower_fun(_pack_nothing, multiple_results=False)
mlir.register_lowering(pack_p, _lower_nothing)
mlir.register_lowering(pack_p, _pack_on_cpu, platform="cpu")
