"""native/tests under the sanitizers of the compiler."""

import os
import shutil
import subprocess
from pathlib import Path

import jax
import pytest

NATIVE = Path(__file__).parents[1] / "native"
COMPILER = shutil.which(os.environ.get("CXX", "c++"))
FLAGS = ["-std=c++17", "-O1", "-g1", "-Wall", "-Wextra", "-Werror", "-pthread"]
KERNELS = sorted(f"cpu/kernels/{path.name}" for path in NATIVE.glob("cpu/kernels/*.cc"))
EMULATION = "tests/tiles_emulated.cc"
SOURCES = {
    "caches_test.cc": ["cpu/caches.cc"],
    "features_test.cc": ["cpu/features.cc"],
    "guard_test.cc": [],
    "kernels_test.cc": ["cpu/features.cc", *KERNELS, EMULATION],
    "network_test.cc": sorted(f"cpu/{path.name}" for path in NATIVE.glob("cpu/*.cc")),
    "row_queue_test.cc": ["cpu/row_queue.cc", "cpu/rows.cc", "cpu/scratch.cc"],
    "scratch_test.cc": ["cpu/scratch.cc"],
    "team_test.cc": ["cpu/team.cc", "cpu/features.cc", "cpu/placement.cc"],
    "tiles_test.cc": ["cpu/features.cc"],
    "work_test.cc": ["cpu/caches.cc", "cpu/network.cc", "cpu/work.cc"],
}
# These have the kernels without a sanitizer: kernels_test has them under one.
PLAIN = {"network_test.cc", "tiles_test.cc"}
INCLUDES = [f"-I{NATIVE}", f"-I{NATIVE}/include", "-isystem", jax.ffi.include_dir()]


def require_sanitizers(flags: list[str], folder: Path) -> None:
    if COMPILER is None:
        pytest.skip("no C++ compiler")
    source, program = folder / "probe.cc", folder / "probe"
    source.write_text("int main() { return 0; }")
    built = subprocess.run([COMPILER, *flags, source, "-o", program])
    # A compiler may accept the flags without having the run-time libraries.
    if built.returncode != 0 or subprocess.run([program]).returncode != 0:
        pytest.skip(f"{COMPILER} lacks {flags[0]}")


@pytest.fixture(scope="session")
def plain_kernels(tmp_path_factory) -> list[Path]:
    """Objects of the kernels, compiled once."""
    if COMPILER is None:
        return []
    folder = tmp_path_factory.mktemp("kernels")
    sources = [NATIVE / file for file in (*KERNELS, EMULATION)]
    build = [COMPILER, *FLAGS, "-c", *INCLUDES, *sources]
    subprocess.run(build, check=True, cwd=folder)
    return [folder / f"{source.stem}.o" for source in sources]


def run_checks(
    name: str, flags: list[str], folder: Path, objects: list[Path], *arguments: str
) -> None:
    flags = [*flags, "-fno-sanitize-recover=all"]
    require_sanitizers(flags, folder)
    sources = [NATIVE / "tests" / name, *(NATIVE / file for file in SOURCES[name])]
    program = folder / "program"
    build = [COMPILER, *FLAGS, *flags, *INCLUDES, *sources, *objects, "-o", program]
    subprocess.run(build, check=True)
    done = subprocess.run([program, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all checks hold" in done.stdout


def test_every_native_test_is_run_here():
    assert {path.name for path in (NATIVE / "tests").glob("*_test.cc")} == set(SOURCES)


@pytest.mark.parametrize("name", SOURCES)
def test_native_checks_hold(name, tmp_path, request):
    objects = request.getfixturevalue("plain_kernels") if name in PLAIN else []
    run_checks(name, ["-fsanitize=address,undefined"], tmp_path, objects)


THREADED = ["network_test.cc", "row_queue_test.cc", "scratch_test.cc", "team_test.cc"]


@pytest.mark.parametrize("name", THREADED)
def test_native_checks_hold_without_data_races(name, tmp_path, request):
    objects = request.getfixturevalue("plain_kernels") if name in PLAIN else []
    # That sanitizer does not follow a fork of a process with several threads.
    run_checks(name, ["-fsanitize=thread"], tmp_path, objects, "no-fork")
