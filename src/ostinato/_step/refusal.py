"""The error for a loop that the named backend cannot run."""

from __future__ import annotations

NAMED = ("cpu", "cuda")
"""The backends that a caller gets if he names one, or this error."""


def refusal(backend: str, reason: str) -> NotImplementedError:
    """Return the error that says why a backend cannot run a loop."""
    return NotImplementedError(
        f"the {backend} loop cannot run this step: {reason}; use backend=None or 'xla'"
    )
