"""The list of backends and the choice among them, which is made only here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from .. import _checks
from . import cpu, cuda, xla
from .backend import Backend, BackendStatus
from .call import Operands, RNNCall
from .spec import RNNSpec, check_spec

BACKENDS = (cuda.BACKEND, cpu.BACKEND, xla.BACKEND)
"""Fastest first: a call takes the first one that runs it."""


class BackendError(RuntimeError):
    """The error for a call that the requested backend cannot run; it says why."""


class Explanation(NamedTuple):
    """The backend that a call takes, why, and why each faster one is `rejected`."""

    backend: str
    why: str
    rejected: dict[str, str]

    def __str__(self) -> str:
        lines = [f"{self.backend}: {self.why}"]
        lines += [f"not {name}: {reason}" for name, reason in self.rejected.items()]
        return "\n".join(lines)


class Place(NamedTuple):
    """The place where a call is to run.

    Attributes:
        platform: JAX's name of the platform.
        reason: a clause that says how the platform is known, for messages.
        exports: whether `jax.export` writes the call, to run on any machine.
    """

    platform: str
    reason: str
    exports: bool = False


def backends() -> dict[str, BackendStatus]:
    """Return every backend with its status on this machine.

    Returns:
        `{"xla": ..., "cpu": ..., "cuda": ...}`; a status is true if the backend can be
        used, and its `detail` says what the backend is, or why it cannot be used.
    """
    return {backend.name: backend.status() for backend in reversed(BACKENDS)}


def explain(spec: RNNSpec, x: Any) -> Explanation:
    """Say which backend `rnn(spec, weights, x)` would take, and why.

    Derivatives take the same backend, with two exceptions that run on xla: tangents
    (`jvp`), and anything that is differentiated twice. Exported functions
    (`jax.export`) run on xla too, so that any machine can run them.

    Args:
        spec: the network.
        x: the input, or any object with its `dtype`, which is taken to be where JAX
            puts new arrays.

    Raises:
        TypeError: `spec` is not an `RNNSpec`, or `x` has no dtype, or not one that
            `rnn` takes.
        ostinato.BackendError: no backend can run the spec here.
    """
    check_spec(spec)
    if not hasattr(x, "dtype"):
        raise TypeError(f"`x` must be an array, got {_checks.describe(x)}")
    _checks.check_floating("x", x, _checks.FLOATS)
    backend, rejected = choose(spec, np.dtype(x.dtype), place_of(x), x=x)
    detail = backend.status().detail
    if backend.describe is not None:
        detail = backend.describe(spec, x)
    why = f"the fastest backend that runs this, {detail}"
    if backend.platform is None:
        why = "it runs every spec on every platform"
    return Explanation(backend.name, why, rejected)


def choose(
    spec: RNNSpec,
    dtype: Any,
    place: Place | None,
    name: str | None = None,
    operands: tuple[RNNCall, Operands] | None = None,
    x: Any = None,
) -> tuple[Backend, dict[str, str]]:
    """Return the first backend that runs a call, and why those before it do not.

    Args:
        spec: the network.
        dtype: of all arrays.
        place: where the call runs; None while that is not known, so that no backend
            is ruled out for its platform.
        name: of the requested backend, or None.
        operands: the call and its operands, or their shapes; None while they are not
            known, so that no backend is ruled out for them.
        x: the input of a call that is only to be explained, or None.

    Raises:
        BackendError: the requested backend, or every backend, cannot run the call.
    """
    rejected: dict[str, str] = {}
    for backend in BACKENDS:
        if name not in (None, backend.name):
            continue
        reason = _unsupported_reason(
            backend, spec, dtype, place, name is not None, x is not None
        )
        if reason is None and operands is not None and backend.refusal is not None:
            reason = backend.refusal(*operands)
        if reason is None and x is not None and backend.known_refusal is not None:
            reason = backend.known_refusal(spec, x)
        if reason is None:
            return backend, rejected
        rejected[backend.name] = reason
    if name is not None:
        other = "" if name == "xla" or spec.batch_invariant else " or 'xla'"
        raise BackendError(
            f"backend {name!r} cannot run this: {rejected[name]}; use backend=None"
            f"{other}"
        )
    raise BackendError(f"no backend can run {spec}: {_listed(rejected)}")


def check(name: Any, spec: RNNSpec, dtype: Any) -> None:
    """Raise unless the named backend, or any backend for None, can run the spec."""
    if name is not None:
        _checks.check_choice("backend", name, [b.name for b in reversed(BACKENDS)])
    choose(spec, dtype, None, name)


def place_of(x: Any) -> Place:
    """Return where `x` is; while tracing, return where JAX puts new arrays."""
    device = jax.local_devices()[0]
    if isinstance(x, jax.Array) and _checks.is_concrete(x):
        device = next(iter(x.devices()))
    platform = device.platform
    if platform == "gpu":  # programs are compiled for one kind of them
        made_by_amd = "rocm" in device.client.platform_version.lower()
        platform = "rocm" if made_by_amd else "cuda"
    return Place(platform, f"`x` is on the {platform}")


def _unsupported_reason(
    backend: Backend,
    spec: RNNSpec,
    dtype: Any,
    place: Place | None,
    is_named: bool,
    is_explained: bool,
) -> str | None:
    def of_place() -> str | None:
        if place is None:
            return None
        if backend.platform not in (None, place.platform):
            return f"it runs on the {backend.platform}, and {place.reason}"
        exports = ("always", "named") if is_named else ("always",)
        if place.exports and backend.exports not in exports:
            return "what jax.export makes must run without the native library"
        return None

    def of_choice() -> str | None:
        if is_named or backend.unasked_reason is None:
            return None
        return backend.unasked_reason()

    def of_spec() -> str | None:
        return backend.unsupported_reason(spec, dtype)

    # What a backend cannot do at all is told first, and else asked last: the driver of
    # a GPU does not start for a call that is not for it.
    reasons = (of_place, of_choice, of_spec)
    if is_named or is_explained:
        reasons = (of_spec, of_place, of_choice)
    return next((found for reason in reasons if (found := reason()) is not None), None)


def _listed(reasons: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
