"""native/tests under the sanitizers of the compiler."""

import fcntl
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import jax
import pytest

NATIVE = Path(__file__).parents[1] / "native"
COMPILER = shutil.which(os.environ.get("CXX", "c++"))
FLAGS = ["-std=c++17", "-g1", "-Wall", "-Wextra", "-Werror", "-pthread"]
KERNELS = sorted(f"cpu/kernels/{path.name}" for path in NATIVE.glob("cpu/kernels/*.cc"))
LINEAR_KERNELS = sorted(
    f"cpu/linear/{path.name}" for path in NATIVE.glob("cpu/linear/linear_*.cc")
)
EMULATION = "tests/tiles_emulated.cc"
RUNTIME = {
    name: f"cpu/runtime/{name}.cc"
    for name in ("affinity", "barrier", "caches", "features", "pool", "scratch", "team")
}
TEAM = [RUNTIME[name] for name in ("affinity", "barrier", "features", "pool", "team")]
SOURCES = {
    "barrier_test.cc": TEAM,
    "caches_test.cc": [RUNTIME["caches"]],
    "features_test.cc": [RUNTIME["affinity"], RUNTIME["features"]],
    "guard_test.cc": [],
    "kernels_test.cc": [
        RUNTIME["affinity"],
        RUNTIME["caches"],
        RUNTIME["features"],
        "cpu/kernels/kernels.cc",
        "cpu/kernels/portable.cc",
        EMULATION,
    ],
    "linear_test.cc": [
        "cpu/linear/linear_portable.cc",
        "cpu/linear/advantages.cc",
        "cpu/linear/recurrence.cc",
        RUNTIME["caches"],
        RUNTIME["scratch"],
        *TEAM,
    ],
    "matrices_test.cc": ["cpu/network/matrices.cc", RUNTIME["caches"], *TEAM],
    "network_test.cc": sorted(
        str(path.relative_to(NATIVE))
        for folder in ("runtime", "network", "pass")
        for path in NATIVE.glob(f"cpu/{folder}/*.cc")
    ),
    "portion_queue_test.cc": [
        "cpu/pass/portion_queue.cc",
        "cpu/network/sequences.cc",
        RUNTIME["scratch"],
    ],
    "schedule_test.cc": [
        "cpu/pass/schedule.cc",
        "cpu/network/heads.cc",
        "cpu/network/network.cc",
        RUNTIME["caches"],
    ],
    "scratch_test.cc": [RUNTIME["scratch"]],
    "step_loop_test.cc": sorted(
        str(path.relative_to(NATIVE))
        for folder in ("runtime", "step")
        for path in NATIVE.glob(f"cpu/{folder}/*.cc")
    ),
    "step_program_test.cc": ["cpu/step/program.cc"],
    "team_test.cc": TEAM,
    "tiles_test.cc": [RUNTIME[name] for name in ("affinity", "caches", "features")],
}
# These have kernels without a sanitizer, but for the portable ones in kernels_test and
# linear_test; their arrays end where memory ends.
PLAIN = {
    "kernels_test.cc",
    "linear_test.cc",
    "matrices_test.cc",
    "network_test.cc",
    "step_loop_test.cc",
    "tiles_test.cc",
}
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
def plain_kernels(tmp_path_factory, worker_id) -> list[Path]:
    """Objects of the kernels, compiled once for all workers."""
    if COMPILER is None:
        return []
    folder = tmp_path_factory.getbasetemp()
    if worker_id != "master":  # the folder of all workers of this run
        folder = folder.parent
    folder /= "plain_kernels"
    # Optimised where the checks would take long without.
    levels = {"-O1": (*KERNELS, EMULATION), "-O0": LINEAR_KERNELS}
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            building = Path(tempfile.mkdtemp(dir=folder.parent))
            for level, files in levels.items():
                build = [COMPILER, *FLAGS, level, "-c", *INCLUDES]
                build += [NATIVE / file for file in files]
                subprocess.run(build, check=True, cwd=building)
            building.rename(folder)
    return list(folder.glob("*.o"))


# The files of these folders share no private name, so one compilation can take them all
# and reads their headers once.
JOINED = ("cpu/runtime/", "cpu/network/", "cpu/pass/")


def sources_of(files: list[str], folder: Path) -> list[Path]:
    joined = [file for file in files if file.startswith(JOINED)]
    if not joined:
        return [NATIVE / file for file in files]
    source = folder / "joined.cc"
    source.write_text("".join(f'#include "{file}"\n' for file in joined))
    return [source, *(NATIVE / file for file in files if file not in joined)]


def run_checks(
    name: str,
    flags: list[str],
    folder: Path,
    files: list[str],
    objects: list[Path],
    *arguments: str,
) -> None:
    flags = [*flags, "-fno-sanitize-recover=all"]
    require_sanitizers(flags, folder)
    checks = NATIVE / "tests" / name
    sources = sources_of(files, folder)
    own = {Path(file).stem for file in files}
    objects = [each for each in objects if each.stem not in own]
    # The library takes longer to compile under sanitizers than to run, the checks
    # longer to run; what the latter do is of interest only where they touch the
    # library's memory.
    kernels = {*KERNELS, *LINEAR_KERNELS}.intersection(files)
    level = "-O0" if kernels or "undefined" in flags[0] else "-O1"
    built, program = folder / "checks.o", folder / "program"
    build = [COMPILER, *FLAGS, *INCLUDES, *flags]
    of_checks = ["-O1", "-fno-sanitize=undefined", "-c", checks, "-o", built]
    subprocess.run([*build, *of_checks], check=True)
    of_library = [level, *sources, built, *objects, "-o", program]
    subprocess.run([*build, *of_library], check=True)
    done = subprocess.run([program, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all checks hold" in done.stdout


def test_every_native_test_is_run_here():
    assert {path.name for path in (NATIVE / "tests").glob("*_test.cc")} == set(SOURCES)


@pytest.mark.parametrize("name", SOURCES)
def test_native_checks_hold(name, tmp_path, request):
    objects = request.getfixturevalue("plain_kernels") if name in PLAIN else []
    run_checks(name, ["-fsanitize=address,undefined"], tmp_path, SOURCES[name], objects)


THREADED = [
    "barrier_test.cc",
    "linear_test.cc",
    "matrices_test.cc",
    "network_test.cc",
    "portion_queue_test.cc",
    "scratch_test.cc",
    "step_loop_test.cc",
    "team_test.cc",
]


@pytest.mark.parametrize("name", THREADED)
def test_native_checks_hold_without_data_races(name, tmp_path, request):
    objects = request.getfixturevalue("plain_kernels") if name in PLAIN else []
    files = [file for file in SOURCES[name] if file not in LINEAR_KERNELS]
    # Less, since it slows them down; and no fork of a process with several threads.
    run_checks(name, ["-fsanitize=thread"], tmp_path, files, objects, "threads")
