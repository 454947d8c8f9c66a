"""Which backends this machine has, and which one a call takes."""

from __future__ import annotations

from typing import Any, NamedTuple, get_args

import jax
import numpy as np

from .. import _checks
from .._typing import Backend
from . import cpu, cuda
from .lowering import refusal, refusal_of_all, xla_refusal
from .spec import RNNSpec, check_spec


class BackendStatus(NamedTuple):
    """Whether a backend can be used here, and what it is or why it cannot."""

    available: bool
    detail: str

    def __bool__(self) -> bool:
        return self.available


class Explanation(NamedTuple):
    """Which backend a call takes, why, and why each faster one (`rejected`) cannot."""

    backend: str
    why: str
    rejected: dict[str, str]

    def __str__(self) -> str:
        lines = [f"{self.backend}: {self.why}"]
        lines += [f"not {name}: {reason}" for name, reason in self.rejected.items()]
        return "\n".join(lines)


_NATIVE = {"cuda": cuda, "cpu": cpu}  # fastest first; xla runs everything else


def backends() -> dict[str, BackendStatus]:
    """Every backend with its status on this machine.

    Returns:
        `{"xla": ..., "cpu": ..., "cuda": ...}`; a status is true where the backend can
        be used, and its `detail` says what it is, or why it cannot be.
    """
    devices = ", ".join(sorted({d.platform for d in jax.devices()}))
    found = {"xla": BackendStatus(True, f"lax.scan through XLA on {devices}")}
    for name in ("cpu", "cuda"):
        found[name] = BackendStatus(*_NATIVE[name].status())
    return found


def explain(spec: RNNSpec, x: Any) -> Explanation:
    """Say which backend `rnn(spec, weights, x)` would take, and why.

    Derivatives take it too, except for tangents (`jvp`) and whatever is differentiated
    twice: those run on xla. So does what `jax.export` makes, for any machine to run.

    Args:
        spec: the network.
        x: the input, or anything with its `dtype`: then it counts as being where JAX
            puts new arrays.

    Raises:
        TypeError: `spec` is no `RNNSpec`, or `x` has no dtype.
        ostinato.BackendError: no backend can run the spec here.
    """
    check_spec(spec)
    if not hasattr(x, "dtype"):
        raise TypeError(f"`x` must be an array, got {_checks.describe(x)}")
    platform, rejected = platform_of(x), {}
    for name in _NATIVE:
        reason = _why_not(name, spec, np.dtype(x.dtype))
        if reason is None and name == "cpu" != platform:
            reason = f"it runs on the cpu, and `x` is on the {platform}"
        if reason is None:
            detail = _NATIVE[name].status()[1]
            why = f"the fastest backend that runs this, {detail}"
            return Explanation(name, why, rejected)
        rejected[name] = reason
    reason = xla_refusal(spec)
    if reason is not None:
        raise refusal_of_all(spec, rejected | {"xla": reason})
    return Explanation("xla", "it runs every spec on every platform", rejected)


def check(backend: Any, spec: RNNSpec, dtype: Any) -> None:
    """Raise unless `backend` (None, or a name) can run the spec in this dtype."""
    if backend is not None:
        _checks.check_choice("backend", backend, get_args(Backend))
        reason = _why_not(backend, spec, dtype)
        if reason is not None:
            raise refusal(backend, reason)
    elif xla_refusal(spec) is not None:
        reasons = {name: _why_not(name, spec, dtype) for name in (*_NATIVE, "xla")}
        if None not in reasons.values():
            raise refusal_of_all(spec, reasons)


def platform_of(x: Any) -> str:
    """Where `x` is; if that cannot be told, where JAX puts new arrays."""
    if isinstance(x, jax.Array) and _checks.is_concrete(x):
        return next(iter(x.devices())).platform
    return jax.default_backend()


def _why_not(name: str, spec: RNNSpec, dtype: Any) -> str | None:
    if name == "xla":
        return xla_refusal(spec)
    return _NATIVE[name].supports(spec, dtype)
