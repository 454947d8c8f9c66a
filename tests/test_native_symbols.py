"""What an object of one instruction set lets the linker see."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from ostinato import _config

NATIVE = Path(__file__).parents[1] / "native"
COMPILER = shutil.which(os.environ.get("CXX", "c++"))
NM = shutil.which("nm")


@pytest.mark.parametrize(
    "name",
    [
        *(f"kernels/{isa}" for isa in _config.CPU_ISAS),
        *(f"linear/linear_{isa}" for isa in ("portable", "avx2", "avx512")),
    ],
)
def test_kernels_share_no_function_with_other_objects(name, tmp_path):
    # Of an inline function that two objects bring along, the linker keeps either copy:
    # one that was compiled for AVX-512 must never serve a processor without it. Without
    # optimisation, every function that is used is emitted.
    if COMPILER is None or NM is None:
        pytest.skip("no C++ compiler or no nm")
    source, output = NATIVE / "cpu" / f"{name}.cc", tmp_path / "object.o"
    build = [COMPILER, "-std=c++17", "-O0", f"-I{NATIVE}", "-c", source, "-o", output]
    subprocess.run(build, check=True)
    listing = subprocess.run(
        [NM, "--extern-only", "--defined-only", output],
        check=True,
        capture_output=True,
        text=True,
    )
    kinds = {line.split()[-2] for line in listing.stdout.splitlines()}
    assert kinds <= {"D", "R", "S"}, listing.stdout  # data: the tables
