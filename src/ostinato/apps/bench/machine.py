"""The machine and the versions that results depend on."""

import os
import platform
import time
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import ostinato as ost

LOAD_PER_CPU = 0.5  # from which a machine counts as busy
PACKAGES = ("jax", "jaxlib", "torch", "onnxruntime", "flax")


def describe() -> dict[str, Any]:
    """Describe the machine and the versions that the results depend on."""
    return {
        "cpu": _cpu(),
        "threads": _cpus(),
        "load": _load(),
        "native": ost.backends()["cpu"].detail,
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        "packages": {"ostinato": ost.__version__} | _versions(),
    }


def busy(machine: dict[str, Any]) -> str:
    """Return a warning if other programs were running, or nothing."""
    if machine["load"] < LOAD_PER_CPU * machine["threads"]:
        return ""
    return (
        f"other programs use this machine (load {machine['load']:g}): times are longer "
        "than they should be, most of all those of libraries whose threads spin"
    )


def _cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _load() -> float:
    """Return how many programs wanted a CPU in the last minute; 0.0 if unknown."""
    return round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else 0.0


def _cpu() -> str:
    """Return the name of the processor, which Linux knows best."""
    try:
        for text in Path("/proc/cpuinfo").read_text().splitlines():
            if text.startswith("model name"):
                return text.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _versions() -> dict[str, str]:
    """Return the versions of the packages that are installed."""
    found = {}
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found
