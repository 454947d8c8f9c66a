"""The cuda backend: whether it can run here. Its kernels are not written yet."""

from __future__ import annotations

from typing import Any

from .spec import RNNSpec

_NO_KERNELS = "this version of ostinato has no CUDA kernels; on a GPU, xla runs"


def status() -> tuple[bool, str]:
    """`(available, detail)` on this machine."""
    return False, _NO_KERNELS


def supports(spec: RNNSpec, dtype: Any) -> str | None:
    """None if the backend runs this, else the reason why it does not."""
    return _NO_KERNELS
