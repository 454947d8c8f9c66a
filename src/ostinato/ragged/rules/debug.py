"""The rules of `jax.debug.print` and `jax.debug.callback`: once for each example."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from ..._compat import is_ordered
from ..core.context import Context
from ..core.example_sizes import Sizes
from ..core.registry import Unsupported, register
from ..core.values import Shared, Value, ragged_axes


@register("debug_callback", "debug_print")
def _debug(ctx: Context, eqn: JaxprEqn, *values: Value, **params: Any) -> list[Value]:
    """Bind one callback for the batch, which calls that of each example in order."""
    ragged = [bool(ragged_axes(v)) for v in values]
    keys = any(jnp.issubdtype(v.x.dtype, jax.dtypes.extended) for v in values)
    if keys and any(ragged):
        raise Unsupported(
            "keys cannot be handed over; give their `jax.random.key_data`"
        )
    shared = [isinstance(v, Shared) for v in values]
    if keys or all(shared) and not any(ragged):
        bind = eqn.primitive.bind
        return ctx.batched(lambda _, *xs: bind(*xs, **params), values, [], sized=False)
    arrays = [v.x if isinstance(v, Shared) else ctx.to_padded(v).x for v in values]
    shapes = [v.shape for v in values]

    def call(symbols: dict[str, Any], going: Any, *arrays: Any) -> None:
        symbols = {name: np.asarray(v) for name, v in symbols.items()}
        for example in np.flatnonzero(going):
            sizes = Sizes({name: int(v[example]) for name, v in symbols.items()})
            own = [
                _cut(sizes, np.asarray(x) if same else np.asarray(x)[example], shape)
                for x, shape, same in zip(arrays, shapes, shared, strict=True)
            ]
            eqn.primitive.bind(*own, **params)

    going = ctx.used_examples()
    going = jnp.ones(ctx.batch, bool) if going is None else going
    options = {"ordered": is_ordered(params), "partitioned": params["partitioned"]}
    jax.debug.callback(call, ctx.symbols.values, going, *arrays, **options)
    return []


def _cut(own: Sizes, x: np.ndarray, shape: tuple[Any, ...]) -> np.ndarray:
    """Return one example without its padding."""
    return x[tuple(slice(max(own(dim), 0)) for dim in shape)]
