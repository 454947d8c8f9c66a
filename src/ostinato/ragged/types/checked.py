"""`checked`: arrays together with conditions that checkify looks at.

`checkify.debug_check` alone would do, but a jitted function with its effect is called
through Python, each time: that takes 0.1 to 0.8 ms longer, the more the more arguments
there are, and it cannot be exported. This primitive has no effect, and its conditions
are dropped where the caller is not under checkify.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import checkify
from jax.interpreters import ad, batching, mlir

from ..._compat import CheckedPrimitive
from ..._typing import Array


def checked(x: Any, conditions: Mapping[str, Array]) -> Any:
    """Return `x`; where it is used under checkify, check conditions at run time.

    Args:
        x: a pytree of arrays.
        conditions: by what must hold, in words, a bool or an array of bools.
    """
    leaves, tree = jax.tree.flatten(x)
    return jax.tree.unflatten(tree, _bind(leaves, conditions))


def _bind(arrays: Sequence[Array], conditions: Mapping[str, Array]) -> list[Array]:
    def check(*values: Array) -> list[Array]:
        for message, holds in zip(conditions, values, strict=False):
            checkify.debug_check(holds, message)
        return _arrays(*values, messages=messages)

    messages = tuple(conditions)
    values = *map(jnp.all, conditions.values()), *arrays
    jaxpr = jax.make_jaxpr(check)(*values)
    return checked_p.bind(*values, call_jaxpr=jaxpr, messages=messages)


def _arrays(*values: Any, messages: tuple[str, ...], **_: Any) -> list[Any]:
    return list(values[len(messages) :])


def _jvp(primals: Any, tangents: Any, **params: Any) -> tuple[list[Any], list[Any]]:
    return checked_p.bind(*primals, **params), _arrays(*tangents, **params)


def _transpose(
    cotangents: Any, *_: Any, messages: tuple[str, ...], **__: Any
) -> list[Any]:
    return [None] * len(messages) + list(cotangents)


def _batch(values: Any, axes: Any, **params: Any) -> tuple[list[Any], list[Any]]:
    conditions = dict(zip(params["messages"], values, strict=False))
    arrays = _bind(_arrays(*values, **params), conditions)
    return arrays, _arrays(*axes, **params)


checked_p = CheckedPrimitive("ragged_checked")
checked_p.multiple_results = True
checked_p.def_impl(_arrays)
checked_p.def_abstract_eval(_arrays)
mlir.register_lowering(
    checked_p, lambda _, *values, **params: _arrays(*values, **params)
)
ad.primitive_jvps[checked_p] = _jvp
ad.primitive_transposes[checked_p] = _transpose
batching.primitive_batchers[checked_p] = _batch
