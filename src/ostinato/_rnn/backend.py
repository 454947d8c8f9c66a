"""The record that describes a backend; `backends.py` lists those that there are."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .spec import RNNSpec


class BackendStatus(NamedTuple):
    """Whether a backend can be used here, and what it is or why it cannot."""

    available: bool
    detail: str

    def __bool__(self) -> bool:
        return self.available


@dataclasses.dataclass(frozen=True, eq=False)
class Backend:
    """One way to run the operator.

    Attributes:
        name: what `rnn(backend=...)` calls it.
        platform: the platform of JAX that it compiles for; None: every one.
        status: tells whether this machine has it.
        unsupported_reason: `(spec, dtype)` to why it does not run them, None if it
            does.
        implementations: by the name of a pass, "forward" or "backward", and for the
            backend that runs everything "tangent": a function of a call and the named
            tuples that the primitive of that pass takes.
        runs_ensembles: whether the implementations take the ensemble axis themselves,
            as `implementation(call, results, ensemble, *trees)`; else they are under
            `jax.vmap`.
        exports: whether what `jax.export` writes may contain it.
        packed_size: `(spec, dtype)` to the bytes of one packed weight vector.
        pack: `(spec, weights [E, num_params])` to weights as the implementations read
            them, uint8 `[E, packed_size]`; None: they read plain weights alone.
    """

    name: str
    platform: str | None
    status: Callable[[], BackendStatus]
    unsupported_reason: Callable[[RNNSpec, Any], str | None]
    implementations: Mapping[str, Callable]
    runs_ensembles: bool = False
    exports: bool = True
    packed_size: Callable[[RNNSpec, Any], int] | None = None
    pack: Callable[[RNNSpec, Any], Any] | None = None
