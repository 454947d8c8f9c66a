"""The file that `run` writes and the others read: one JSON object."""

import json
import os
import platform
import statistics
import time
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from ostinato import _native

from .peers import OURS

VENDORS = ("AMD", "Intel")
PACKAGES = ("jax", "jaxlib", "numpy", "torch", "onnxruntime", "flax")


class Spread(NamedTuple):
    """Median and quartiles of a contender's rounds, in seconds."""

    low: float
    median: float
    high: float


def spread(rounds: list[float]) -> Spread:
    if len(rounds) < 2:
        return Spread(*rounds * 3)
    return Spread(*statistics.quantiles(rounds, n=4, method="inclusive"))


class Row(NamedTuple):
    """One measured problem.

    `seconds` holds every contender's rounds, `skipped` why one has none; `detail` says
    which backend did the work, `floor` is None where there is no model.
    """

    mode: str
    name: str
    sizes: dict[str, int]
    threads: int
    seconds: dict[str, list[float]]
    skipped: dict[str, str]
    detail: dict[str, str]
    floor: float | None

    @property
    def id(self) -> str:
        return self.key(self.mode, self.name, self.threads)

    @staticmethod
    def key(mode: str, name: str, threads: int) -> str:
        return f"{mode}/{name}/{threads} threads"

    def median(self, name: str = OURS) -> float | None:
        return spread(self.seconds[name]).median if name in self.seconds else None

    def ratio(self, name: str) -> float | None:
        """Time of `name` over ours."""
        ours, other = self.median(), self.median(name)
        return None if ours is None or other is None else other / ours

    @property
    def over_floor(self) -> float | None:
        ours = self.median()
        return None if ours is None or not self.floor else ours / self.floor


class Results(NamedTuple):
    """Rows by id, and the machine that they were measured on."""

    machine: dict[str, Any]
    rows: dict[str, Row]

    @property
    def threads(self) -> int:
        """Of most rows: a sweep over threads has others."""
        return statistics.mode(row.threads for row in self.rows.values())


def load(path: Path) -> Results:
    stored = json.loads(path.read_text())
    rows = [Row(**row) for row in stored["rows"]]
    return Results(stored["machine"], {row.id: row for row in rows})


def save(path: Path, results: Results) -> None:
    """Whole or not at all, so that an interrupted run leaves a readable file."""
    rows = [row._asdict() for row in results.rows.values()]
    text = json.dumps({"machine": results.machine, "rows": rows}, indent=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(text + "\n")
    part.replace(path)


def machine() -> dict[str, Any]:
    """What the figures depend on, besides the code."""
    library, _ = _native.status()
    cpu = _cpuinfo()
    return {
        "cpu": cpu.get("model name", platform.machine()),
        "family": cpu.get("cpu family"),
        "model": cpu.get("model"),
        "isa": None if library is None else _native.cpu_features().isa,
        "cpus": len(os.sched_getaffinity(0)),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        "packages": {name: _version(name) for name in PACKAGES},
    }


def cpu_of(machine: dict[str, Any]) -> str:
    """The processor and what our kernels use of it, for the head of a table.

    Cloud machines often hide the name of a model, hence its number.
    """
    said = machine["cpu"]
    if machine.get("family"):
        said += f" (family {machine['family']}, model {machine['model']})"
    return f"{said}, {machine['isa']}" if machine.get("isa") else said


def vendor_of(machine: dict[str, Any]) -> str:
    """Whose tables of results.md these are: AMD's, Intel's, or of another name."""
    known = (name for name in VENDORS if name in machine["cpu"])
    return next(known, machine["cpu"].split()[0])


def _cpuinfo() -> dict[str, str]:
    """What Linux says of the first processor."""
    first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    lines = (line.split(":", 1) for line in first.splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, value in lines}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
