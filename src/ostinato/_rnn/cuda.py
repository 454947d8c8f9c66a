"""The cuda backend: whether it can run here. Its kernels are not written yet."""

from __future__ import annotations

from typing import Any

from .backend import Backend, BackendStatus
from .spec import RNNSpec

_NO_KERNELS = "this version of ostinato has no CUDA kernels; on a GPU, xla runs"


def status() -> BackendStatus:
    """Tell whether this machine has it."""
    return BackendStatus(False, _NO_KERNELS)


def unsupported_reason(spec: RNNSpec, dtype: Any) -> str | None:
    """Return why the backend does not run this; None if it does."""
    return _NO_KERNELS


BACKEND = Backend(
    name="cuda",
    platform="cuda",
    status=status,
    unsupported_reason=unsupported_reason,
    implementations={},
)
