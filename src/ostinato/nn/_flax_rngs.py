"""Random numbers of layers of `flax.nnx`: for parameters, and for dropout."""

from __future__ import annotations

from typing import Any

from flax import nnx

from .. import _checks
from .._typing import Array


def check_rngs(rngs: Any) -> nnx.Rngs:
    """Return `rngs`; raise TypeError unless it is an `nnx.Rngs`."""
    if not isinstance(rngs, nnx.Rngs):
        raise TypeError(
            f"`rngs` must be an nnx.Rngs, such as nnx.Rngs(0), got "
            f"{_checks.describe(rngs)}"
        )
    return rngs


def dropout_stream(rngs: nnx.Rngs | None) -> Any:
    """Return a stream of keys for dropout, or None if there is no `dropout` stream."""
    if rngs is None or not {"dropout", "default"} & {*rngs}:
        return nnx.data(None)
    return rngs.dropout.fork()


def call_key(layer: Any, key: Array | None, random: bool) -> Array | None:
    """Return the key of one call of a layer, None for evaluation."""
    if layer.deterministic:
        return None
    if key is not None or not random:
        return key
    if layer.rngs is None:
        raise ValueError(
            "`key` must be given: the layer has dropout, and was made without a stream "
            "`dropout` in `rngs`; layer.eval() turns dropout off"
        )
    return layer.rngs()
