"""native/tests under the address and undefined-behaviour sanitizers."""

import os
import shutil
import subprocess
from pathlib import Path

import jax
import pytest

NATIVE = Path(__file__).parents[1] / "native"
COMPILER = shutil.which(os.environ.get("CXX", "c++"))
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
FLAGS = ["-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Werror", *SANITIZE]
SOURCES = {
    "features_test.cc": ["cpu/features.cc"],
    "guard_test.cc": [],
}


def sanitizers_work(folder: Path) -> bool:
    """A compiler may accept the flags without having the run-time libraries."""
    source, program = folder / "probe.cc", folder / "probe"
    source.write_text("int main() { return 0; }")
    built = subprocess.run([COMPILER, *SANITIZE, source, "-o", program])
    return built.returncode == 0 and subprocess.run([program]).returncode == 0


def test_every_native_test_is_run_here():
    assert {path.name for path in (NATIVE / "tests").glob("*.cc")} == set(SOURCES)


@pytest.mark.parametrize("name", SOURCES)
def test_native_checks_hold(name, tmp_path):
    if COMPILER is None:
        pytest.skip("no C++ compiler")
    if not sanitizers_work(tmp_path):
        pytest.skip(f"{COMPILER} lacks the address or the undefined sanitizer")
    includes = [f"-I{NATIVE}", f"-I{NATIVE}/include", "-isystem", jax.ffi.include_dir()]
    sources = [NATIVE / "tests" / name, *(NATIVE / file for file in SOURCES[name])]
    program = tmp_path / "program"
    subprocess.run([COMPILER, *FLAGS, *includes, *sources, "-o", program], check=True)
    done = subprocess.run([program], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all checks hold" in done.stdout
