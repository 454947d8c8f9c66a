"""What an object of one instruction set lets the linker see."""

import shutil
import subprocess

import pytest
import test_native_sanitized as native

from ostinato import _config

NM = shutil.which("nm")


@pytest.mark.parametrize(
    "name",
    [
        *(f"kernels/{isa}" for isa in _config.CPU_ISAS),
        *(f"linear/linear_{isa}" for isa in ("portable", "avx2", "avx512")),
    ],
)
def test_kernels_share_no_function_with_other_objects(name, tmp_path_factory):
    # Of an inline function that two objects bring along, the linker keeps either copy:
    # one that was compiled for AVX-512 must never serve a processor without it. Without
    # optimisation, every function that is used is emitted.
    if native.COMPILER is None or NM is None:
        pytest.skip("no C++ compiler or no nm")
    unoptimised = native.Object((f"cpu/{name}.cc",), ("-O0",))
    [output] = native.built([unoptimised], tmp_path_factory)
    listing = subprocess.run(
        [NM, "--extern-only", "--defined-only", output],
        check=True,
        capture_output=True,
        text=True,
    )
    kinds = {line.split()[-2] for line in listing.stdout.splitlines()}
    assert kinds <= {"D", "R", "S"}, listing.stdout  # data: the tables
