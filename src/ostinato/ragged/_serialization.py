"""Registration of batches for `jax.export`."""

from __future__ import annotations

import json
from typing import Any

from jax import export

from .types.array import RaggedArray
from .types.padded import PaddedRagged


def _written(static: Any) -> bytes:
    return json.dumps(static).encode()


def _read(data: bytes | bytearray) -> Any:
    return _with_tuples(json.loads(data))


def _with_tuples(value: Any) -> Any:
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value


for kind in (RaggedArray, PaddedRagged):
    export.register_pytree_node_serialization(
        kind,
        serialized_name=f"ostinato.{kind.__name__}",
        serialize_auxdata=_written,
        deserialize_auxdata=_read,
    )
