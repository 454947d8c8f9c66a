"""Settings from the environment; no other module reads an ``OSTINATO_*`` variable."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

CPU_ISAS = ("portable", "avx2", "avx512", "avx512_bf16", "avx512_amx")
"""Levels of the x86 instruction set that kernels are written for, lowest first."""
_MOST = 2**31 - 1  # of the numbers that the native library takes


class ConfigError(ValueError):
    """A variable of the environment has a value that is not allowed."""


@dataclass(frozen=True)
class Config:
    """The settings in the environment.

    Attributes:
        disable_native: do not load the native library (``OSTINATO_DISABLE_NATIVE``).
        cpu_isa: the highest level of instructions to use (``OSTINATO_CPU_ISA``).
        num_threads: most threads of one call (``OSTINATO_NUM_THREADS``); None for as
            many as the process may use.
        backend: `"cuda"` lets calls that name no backend take CUDA kernels where they
            have not been measured (``OSTINATO_BACKEND``); else None.
        cache_dir: the folder of compiled kernels (``OSTINATO_CACHE_DIR``); None for
            that of the user.
    """

    disable_native: bool
    cpu_isa: str
    num_threads: int | None
    backend: str | None = None
    cache_dir: str | None = None


def read(environ: Mapping[str, str] = os.environ) -> Config:
    """Read the current settings; an empty variable counts as unset.

    Raises:
        ConfigError: the value of a variable is not allowed.
    """
    disable = _choice(environ, "OSTINATO_DISABLE_NATIVE", ("0", "1"), default="0")
    isa = _choice(environ, "OSTINATO_CPU_ISA", CPU_ISAS, default=CPU_ISAS[-1])
    threads = _positive(environ, "OSTINATO_NUM_THREADS")
    backend = _choice(environ, "OSTINATO_BACKEND", ("cuda",), default=None)
    return Config(
        disable_native=disable == "1",
        cpu_isa=isa,
        num_threads=threads,
        backend=backend,
        cache_dir=environ.get("OSTINATO_CACHE_DIR") or None,
    )


_Default = TypeVar("_Default", bound=str | None)


def _choice(
    environ: Mapping[str, str], name: str, allowed: tuple[str, ...], default: _Default
) -> str | _Default:
    value = environ.get(name)
    if not value:
        return default
    if value not in allowed:
        raise ConfigError(
            f"environment variable {name} must be one of {', '.join(allowed)}; "
            f"got {value!r}"
        )
    return value


def _positive(environ: Mapping[str, str], name: str) -> int | None:
    value = environ.get(name)
    if not value:
        return None
    # int() would also accept signs, spaces and "1_0", which are mistakes here.
    good = value.isascii() and value.isdigit() and len(value) <= len(str(_MOST))
    if not (good and 0 < int(value) <= _MOST):
        raise ConfigError(
            f"environment variable {name} must be an integer from 1 to {_MOST}; got "
            f"{value[:40]!r}"
        )
    return int(value)
