"""The record that describes a backend; `backends.py` lists all backends."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from .call import Operands, RNNCall
from .spec import RNNSpec


class BackendStatus(NamedTuple):
    """The status of a backend on this machine; true if the backend can be used.

    `detail` says what the backend is, or why it cannot be used.
    """

    available: bool
    detail: str

    def __bool__(self) -> bool:
        return self.available


@dataclasses.dataclass(frozen=True, eq=False)
class Backend:
    """A way to run the operator.

    Attributes:
        name: its name in `rnn(backend=...)`.
        platform: the JAX platform that it compiles for; None means every platform.
        status: returns its status on this machine.
        unsupported_reason: returns, for `(spec, dtype)`, why it cannot run them; None
            if it can.
        implementations: for each pass, "forward" and "backward", and "tangent" for the
            backend that runs everything: a function of a call and of the named tuples
            that the primitive of that pass takes.
        runs_ensembles: whether the implementations handle the ensemble axis themselves,
            as `implementation(call, results, ensemble, *trees)`; otherwise they run
            under `jax.vmap`.
        exports: whether files that `jax.export` writes may contain it: for every call,
            for one that names the backend, or never.
        unasked_reason: returns why calls that name no backend do not take it; None if
            they do.
        refusal: returns, for a call and its operands, why it cannot run them although
            it can run their spec; None if it can. Asked when a program is compiled.
        known_refusal: returns, for `(spec, x)`, what is known of such a reason before
            anything is compiled; None if nothing is.
        describe: returns, for `(spec, x)`, how it runs them.
        packed_size: returns, for `(spec, dtype)`, the bytes of one packed weight
            vector.
        pack: returns, for `(spec, weights [E, num_params])`, the weights in the order
            that the implementations read, uint8 `[E, packed_size]`; None if they read
            plain weights only.
    """

    name: str
    platform: str | None
    status: Callable[[], BackendStatus]
    unsupported_reason: Callable[[RNNSpec, Any], str | None]
    implementations: Mapping[str, Callable]
    runs_ensembles: bool = False
    exports: Literal["always", "named", "never"] = "always"
    unasked_reason: Callable[[], str | None] | None = None
    refusal: Callable[[RNNCall, Operands], str | None] | None = None
    known_refusal: Callable[[RNNSpec, Any], str | None] | None = None
    describe: Callable[[RNNSpec, Any], str] | None = None
    packed_size: Callable[[RNNSpec, Any], int] | None = None
    pack: Callable[[RNNSpec, Any], Any] | None = None
