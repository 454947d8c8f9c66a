"""The function `prepare`, which packs weights for the kernels once, for serving."""

from __future__ import annotations

import functools as ft
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from .. import _checks, _compat
from .._typing import Array, Float, Shaped
from . import backends, layout, sharding
from .backend import Backend
from .eager import always_jitted
from .spec import RNNSpec, check_spec


class PreparedWeights(NamedTuple):
    """The result of `prepare`: a pytree, accepted wherever `weights` run or are saved.

    Attributes:
        weights: flat vector `[num_params]`.
        packed: uint8, a copy of the weights in the order of the cpu kernels; None if
            these would not run.
    """

    weights: Float[Array, " num_params"]
    packed: Shaped[Array, " packed_size"] | None


def prepare(spec: RNNSpec, weights: Float[Array, " num_params"]) -> PreparedWeights:
    """Pack weights once, for many calls with the same weights.

    The cpu kernels read weights in an order of their own, and every call reorders plain
    weights. For a batch of one that costs as much as several steps; prepared weights
    save it. The results have the same bits, except in calls of a few steps and
    sequences (such as `rnn_step`), which read plain weights without reordering them and
    sum in another order.

    Args:
        spec: the network of the weights.
        weights: flat vector `[num_params]`.

    Returns:
        `PreparedWeights`, which `rnn`, `rnn_step` and `rnn_forward` take instead of
        `weights`. The packed part serves the machine that made it; on another machine
        the kernels notice and pack again. Other backends read the flat vector.

    Raises:
        TypeError: `weights` is not an array of a dtype that `rnn` takes.
        ValueError: `weights` is not the flat vector of `spec`.
        BackendError: no backend runs `spec` in the dtype of `weights`.

    Holds under `jit` and `vmap`. Gradients reach only the flat vector: with respect to
    prepared weights, `jax.grad` needs `allow_int=True` and gives `packed` a gradient of
    dtype float0. Training gains nothing from prepared weights.
    """
    check_spec(spec)
    weights = layout.as_flat(weights)
    _checks.check_floating("weights", weights, _checks.FLOATS)
    layout.check_weights(weights, spec)
    place = backends.place_of(weights)
    backend, _ = backends.choose(spec, weights.dtype, place)
    if backend.pack is None:
        return PreparedWeights(weights, None)
    weights_alone = jax.lax.stop_gradient(weights)
    packed = pack_p.bind(weights_alone, spec=spec, backend=backend)
    return PreparedWeights(weights, packed)


# This primitive packs `[..., num_params]` into `[..., packed_size]`.
pack_p = Primitive("ostinato_pack")


def _packed_shape(weights: Any, spec: RNNSpec, backend: Backend) -> tuple[Any, ...]:
    assert backend.packed_size is not None
    return (*weights.shape[:-1], backend.packed_size(spec, weights.dtype))


def _pack_abstract_eval(weights: Any, *, spec: RNNSpec, backend: Backend) -> Any:
    shape = _packed_shape(weights, spec, backend)
    return sharding.shaped_array(shape, jnp.uint8, like=[weights])


def _pack(weights: Array, *, spec: RNNSpec, backend: Backend) -> Array:
    assert backend.pack is not None
    packed = backend.pack(spec, weights.reshape(-1, weights.shape[-1]))
    return packed.reshape(*weights.shape[:-1], packed.shape[-1])


def _pack_nothing(weights: Array, *, spec: RNNSpec, backend: Backend) -> Array:
    """Return zeros where the backend does not run; it would notice and pack again."""
    return jnp.zeros(_packed_shape(weights, spec, backend), jnp.uint8)


def _pack_batch(args: Any, dims: Any, **params: Any) -> tuple[Array, int]:
    (weights,), (axis,) = args, dims
    return pack_p.bind(jnp.moveaxis(weights, axis, 0), **params), 0


def _lower(
    platform: str | None, ctx: Any, *args: Any, backend: Backend, **params: Any
) -> Any:
    may_export = backend.exports == "always" or not _compat.is_for_export(ctx)
    runs = backend.platform == platform and may_export
    lower = _lower_pack if runs else _lower_nothing
    return lower(ctx, *args, backend=backend, **params)


@ft.partial(jax.jit, static_argnames=("spec", "backend"))
def _pack_alone(weights: Array, spec: RNNSpec, backend: Backend) -> Array:
    return pack_p.bind(weights, spec=spec, backend=backend)


pack_p.def_impl(always_jitted(_pack_alone))
pack_p.def_abstract_eval(_pack_abstract_eval)
batching.primitive_batchers[pack_p] = _pack_batch
_lower_pack = mlir.lower_fun(_pack, multiple_results=False)
_lower_nothing = mlir.lower_fun(_pack_nothing, multiple_results=False)
mlir.register_lowering(pack_p, _lower_nothing)
for _backend in backends.BACKENDS:
    if _backend.pack is not None:
        mlir.register_lowering(
            pack_p, ft.partial(_lower, _backend.platform), _backend.platform
        )
