"""The cuda backend of the operator, which has no kernels yet: it never runs a call.

Kernels of linear recurrences exist, see `_linear/cuda.py`; the status is about these.
"""

from __future__ import annotations

from typing import Any

from .._cuda import check, device, kernels, plan
from .backend import Backend, BackendStatus
from .spec import RNNSpec


def status() -> BackendStatus:
    """Return the status of the backend on this machine."""
    gpu, reason = device.status()
    if gpu is None:
        return BackendStatus(False, str(reason))
    taken = "are measured" if gpu.arch in plan.MEASURED else "run when asked for"
    detail = (
        f"{gpu.name} ({gpu.arch}), driver for CUDA {gpu.driver}; kernels of linear "
        f"recurrences, which {taken}"
    )
    for text, failure in check.failures(kernels.TEXTS, gpu).items():
        detail += f"; disabled: {text}: {failure}"
    return BackendStatus(True, detail)


def unsupported_reason(spec: RNNSpec, dtype: Any) -> str | None:
    """Return why the backend cannot run the call; None if it can."""
    return plan.rnn(spec.mode)


BACKEND = Backend(
    name="cuda",
    platform="cuda",
    status=status,
    unsupported_reason=unsupported_reason,
    implementations={},
)
