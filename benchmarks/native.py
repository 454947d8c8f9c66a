"""The C++ programs of native/bench, compiled when needed; they print JSON."""

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from . import ROOT

_NATIVE = ROOT / "native"
_FLAGS = ("-O3", "-std=c++17", "-pthread", f"-I{_NATIVE}")
LEAST_SHARE = 0.85  # of the peak; with less, a compiler keeps the sums in memory


def peaks(threads: int) -> dict[str, Any]:
    """Measure what `threads` threads reach together; see native/bench/peaks.cc."""
    sources = ["bench/peaks.cc", "cpu/runtime/affinity.cc", "cpu/runtime/features.cc"]
    return _run(sources, "-march=native", arguments=[str(threads)])


def kernel_shares() -> dict[str, float]:
    """Measure the smallest share of the peak that products reach, by data type.

    They use the best instruction set of this machine, on full tiles of weights that are
    in the second-level cache. AMX is left out: a compiler cannot spill its registers,
    and its speed depends on the caches.
    """
    sources = [
        "bench/kernels_bench.cc",
        "cpu/runtime/caches.cc",
        "cpu/runtime/affinity.cc",
        "cpu/runtime/features.cc",
    ]
    sources += sorted(
        str(path.relative_to(_NATIVE)) for path in _NATIVE.glob("cpu/kernels/*.cc")
    )
    products = [p for p in _run(sources)["products"] if p["isa"] != "avx512_amx"]
    best = {product["dtype"]: product["isa"] for product in products}  # lowest first
    most_rows = max(product["rows"] for product in products)
    shares: dict[str, float] = {}
    for product in products:
        dtype, share = product["dtype"], product["share"]
        full = product["rows"] == most_rows and product["cache"] == "L2"
        if full and share is not None and product["isa"] == best[dtype]:
            shares[dtype] = min(share, shares.get(dtype, 1.0))
    return shares


def _run(sources: list[str], *flags: str, arguments: list[str] | None = None) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "program"
        command = [os.environ.get("CXX", "c++"), *_FLAGS, *flags]
        command += [str(_NATIVE / source) for source in sources]
        subprocess.run([*command, "-o", program], check=True)
        done = subprocess.run(
            [program, *(arguments or [])], check=True, capture_output=True, text=True
        )
    return json.loads(done.stdout)
