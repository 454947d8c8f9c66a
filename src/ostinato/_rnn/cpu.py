"""The cpu backend: whether it can run here. Its kernels are not written yet."""

from __future__ import annotations

from typing import Any

from .. import _native
from .spec import RNNSpec

_NO_KERNELS = "this version's native library has no recurrent kernels yet"


def status() -> tuple[bool, str]:
    """`(available, detail)` on this machine."""
    native = _native.status()
    if native.reason is not None:
        return False, native.reason
    features = _native.cpu_features()
    return False, f"{_NO_KERNELS} (loaded: {features.isa}, {features.cpus} CPUs)"


def supports(spec: RNNSpec, dtype: Any) -> str | None:
    """None if the backend runs this, else the reason why it does not."""
    reason = _native.status().reason
    return _NO_KERNELS if reason is None else reason
