"""The results file, one JSON object: `run` writes it, the other modules read it."""

import json
import os
import platform
import statistics
import time
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from ostinato import _native
from ostinato.apps.bench.peers import OURS, PEERS, PREPARED, STREAM

CONTENDERS = (OURS, PREPARED, STREAM, *PEERS)
VENDORS = ("AMD", "Intel")
PACKAGES = ("jax", "jaxlib", "numpy", "torch", "onnxruntime", "flax")


class Spread(NamedTuple):
    """The median and the quartiles of a contender's rounds, in seconds."""

    low: float
    median: float
    high: float


def spread(rounds: list[float]) -> Spread:
    if len(rounds) < 2:
        return Spread(*rounds * 3)
    return Spread(*statistics.quantiles(rounds, n=4, method="inclusive"))


class Row(NamedTuple):
    """A row of the table: one measured problem.

    `seconds` holds every contender's rounds, `skipped` the reason why a contender has
    none. `detail` names the backend that ran; `floor` is None for compilations.
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
        """Return the time of `name` over ours."""
        ours, other = self.median(), self.median(name)
        return None if ours is None or other is None else other / ours

    @property
    def over_floor(self) -> float | None:
        ours = self.median()
        return None if ours is None or not self.floor else ours / self.floor


class Results(NamedTuple):
    """The rows by id, and the machine that they were measured on."""

    machine: dict[str, Any]
    rows: dict[str, Row]

    @property
    def threads(self) -> int:
        """The number of threads of most rows; a sweep over threads has others."""
        return statistics.mode(row.threads for row in self.rows.values())


def load(path: Path) -> Results:
    stored = json.loads(path.read_text())
    rows = [Row(**row) for row in stored["rows"]]
    return Results(stored["machine"], {row.id: row for row in rows})


def save(path: Path, results: Results) -> None:
    """Write results in one step, so that an interrupted run leaves a readable file."""
    rows = [row._asdict() for row in results.rows.values()]
    text = json.dumps({"machine": results.machine, "rows": rows}, indent=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(text + "\n")
    part.replace(path)


def machine() -> dict[str, Any]:
    """Describe the machine and the versions that the results depend on."""
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
    """Return the processor and the instruction set that our kernels use.

    The model's number is included, since cloud machines often hide its name.
    """
    said = machine["cpu"]
    if machine.get("family"):
        said += f" (family {machine['family']}, model {machine['model']})"
    return f"{said}, {machine['isa']}" if machine.get("isa") else said


def kind_of(machine: dict[str, Any]) -> str:
    """Return which tables the results belong to: those of one kind of processors.

    It is the vendor, AMD, Intel, or the first word of the name. It ends in "-AVX2"
    where our kernels have no AVX-512, and in "-Zen5" for AMD's family 26, whose vectors
    are twice as wide as those of the processors before.
    """
    known = (name for name in VENDORS if name in machine["cpu"])
    vendor = next(known, machine["cpu"].split()[0])
    if machine.get("isa") == "avx2":
        return f"{vendor}-AVX2"
    wide = vendor == "AMD" and machine.get("family") == "26"
    return f"{vendor}-Zen5" if wide else vendor


def _cpuinfo() -> dict[str, str]:
    """Read the properties of the first processor from Linux."""
    first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    lines = (line.split(":", 1) for line in first.splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, value in lines}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
