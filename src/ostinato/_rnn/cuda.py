"""The cuda backend, whose kernels are not written yet: it never runs a call."""

from __future__ import annotations

from typing import Any

from .backend import Backend, BackendStatus
from .spec import RNNSpec

_NO_KERNELS = "this version of ostinato has no CUDA kernels; on a GPU, xla runs"


def status() -> BackendStatus:
    """Return the status of the backend on this machine."""
    return BackendStatus(False, _NO_KERNELS)


def unsupported_reason(spec: RNNSpec, dtype: Any) -> str | None:
    """Return why the backend cannot run the call; None if it can."""
    return _NO_KERNELS


BACKEND = Backend(
    name="cuda",
    platform="cuda",
    status=status,
    unsupported_reason=unsupported_reason,
    implementations={},
)
