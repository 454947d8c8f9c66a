"""The xla backend: plain JAX, on every platform; only `batch_invariant` it lacks."""

from __future__ import annotations

from typing import Any

import jax

from . import xla_packed
from .backend import Backend, BackendStatus
from .spec import RNNSpec


def status() -> BackendStatus:
    """Return the status of the backend, with the platforms of this process."""
    devices = ", ".join(sorted({d.platform for d in jax.devices()}))
    return BackendStatus(True, f"lax.scan through XLA on {devices}")


def unsupported_reason(spec: RNNSpec, dtype: Any) -> str | None:
    """Return why it cannot keep the promises of `spec`; None if it can."""
    if spec.batch_invariant:
        return "XLA sums products in an order that depends on the size of the batch"
    return None


BACKEND = Backend(
    name="xla",
    platform=None,
    status=status,
    unsupported_reason=unsupported_reason,
    implementations={
        "forward": xla_packed.forward,
        "tangent": xla_packed.tangent,
        "backward": xla_packed.backward,
    },
)
