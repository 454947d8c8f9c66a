"""native/tests under the sanitizers of the compiler."""

import fcntl
import os
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import jax
import pytest

NATIVE = Path(__file__).parents[1] / "native"
COMPILER = shutil.which(os.environ.get("CXX", "c++"))
FLAGS = ["-std=c++17", "-g1", "-Wall", "-Wextra", "-Werror", "-pthread"]
MEMORY, THREADS = "-fsanitize=address,undefined", "-fsanitize=thread"
EMULATION = "tests/tiles_emulated.cc"
KERNELS = [
    *sorted(f"cpu/kernels/{path.name}" for path in NATIVE.glob("cpu/kernels/*.cc")),
    EMULATION,
]
LINEAR_KERNELS = sorted(
    f"cpu/linear/{path.name}" for path in NATIVE.glob("cpu/linear/linear_*.cc")
)
# The folders of the library that each program is linked with. Their kernels have no
# sanitizer, but their arrays in the checks end where memory ends.
FOLDERS = {
    "barrier_test.cc": ["runtime"],
    "caches_test.cc": ["runtime"],
    "features_test.cc": ["runtime"],
    "guard_test.cc": [],
    "kernels_test.cc": ["runtime", "kernels"],
    "linear_test.cc": ["runtime", "kernels", "linear"],
    "matrices_test.cc": ["runtime", "kernels", "network"],
    "members_test.cc": ["runtime"],
    "network_test.cc": ["runtime", "kernels", "network", "pass"],
    "portion_queue_test.cc": ["runtime", "kernels", "network", "pass"],
    "schedule_test.cc": ["runtime", "kernels", "network", "pass"],
    "scratch_test.cc": ["runtime"],
    "step_loop_test.cc": ["runtime", "kernels", "step"],
    "step_program_test.cc": ["runtime", "kernels", "step"],
    "team_test.cc": ["runtime"],
    "tiles_test.cc": ["runtime", "kernels"],
}
# Kernels that do have one, but not that of threads.
WATCHED = {
    "kernels_test.cc": ["cpu/kernels/kernels.cc", "cpu/kernels/portable.cc", EMULATION],
    "linear_test.cc": ["cpu/linear/linear_portable.cc"],
}
# The kernels that most checks run on this machine. And tiles_test, which needs AVX-512,
# decodes instructions as compilers arrange them that optimise.
CPUINFO = Path("/proc/cpuinfo")
if CPUINFO.exists() and "avx512" in CPUINFO.read_text():
    OPTIMISED = [*(file for file in KERNELS if "avx512" in file), EMULATION]
else:
    OPTIMISED = ["cpu/kernels/avx2.cc"]
# Checks that take longer to run than to compile.
LONG = ["kernels", "linear", "network", "scratch", "step_loop"]
# Joined with others, these have private names or instances of templates twice.
ALONE = ("cpu/step/follow", "cpu/step/gradients", "cpu/step/tile")
INCLUDES = [f"-I{NATIVE}", f"-I{NATIVE}/include", "-isystem", jax.ffi.include_dir()]


class Object(NamedTuple):
    """Files of the library that one compilation takes, and what they are built with."""

    files: tuple[str, ...]
    flags: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{Path(self.files[0]).stem}{''.join(self.flags)}.o"


def plain(file: str) -> Object:
    # No sanitizer tells its lines, so they need no numbers.
    return Object((file,), ("-O1" if file in OPTIMISED else "-O0", "-g0"))


def sanitized(sanitizer: str, *files: str) -> Object:
    # Optimisation would take longer than what it saves.
    return Object(files, ("-O0", sanitizer, "-fno-sanitize-recover=all"))


def objects_of(folder: str, sanitizer: str) -> list[Object]:
    """One object for most files of a folder, so that headers are read once."""
    if folder == "kernels":
        return [plain(file) for file in KERNELS]
    files = [f"cpu/{folder}/{path.name}" for path in NATIVE.glob(f"cpu/{folder}/*.cc")]
    files = sorted({*files}.difference(LINEAR_KERNELS))
    alone = [file for file in files if file.startswith(ALONE)]
    joined = [file for file in files if file not in alone]
    objects = [sanitized(sanitizer, *joined), *(sanitized(sanitizer, f) for f in alone)]
    return objects + [plain(f) for f in LINEAR_KERNELS if folder == "linear"]


def objects_for(name: str, sanitizer: str) -> list[Object]:
    watched = WATCHED.get(name, []) if sanitizer == MEMORY else []
    objects = [o for f in FOLDERS[name] for o in objects_of(f, sanitizer)]
    objects = [each for each in objects if each.files[0] not in watched]
    return objects + [sanitized(sanitizer, file) for file in watched]


def built(objects: list[Object], run: pytest.TempPathFactory) -> list[Path]:
    """Compile each object once in a run, by whichever worker comes first.

    What another worker is compiling is left until last.
    """
    folder = run.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # the folder of all workers of this run
        folder = folder.parent
    folder /= "native_objects"
    folder.mkdir(exist_ok=True)
    missing = objects
    for how in (fcntl.LOCK_EX | fcntl.LOCK_NB, fcntl.LOCK_EX):
        missing = [each for each in missing if not compiled(each, folder, how)]
    return [folder / each.name for each in objects]


def compiled(each: Object, folder: Path, how: int) -> bool:
    """Whether it is there or could be compiled; not if another worker is at it."""
    path = folder / each.name
    with open(f"{path}.lock", "w") as lock:
        try:
            fcntl.flock(lock, how)
        except BlockingIOError:
            return False
        if not path.exists():
            source = NATIVE / each.files[0]
            if len(each.files) > 1:
                source = path.with_suffix(".cc")
                lines = (f'#include "{file}"\n' for file in each.files)
                source.write_text("".join(lines))
            command = [COMPILER, *FLAGS, *INCLUDES, *each.flags]
            command += ["-c", source, "-o", f"{path}.part"]
            subprocess.run(command, check=True)
            os.rename(f"{path}.part", path)
    return True


def require_sanitizer(sanitizer: str, folder: Path) -> None:
    if COMPILER is None:
        pytest.skip("no C++ compiler")
    source, program = folder / "probe.cc", folder / "probe"
    source.write_text("int main() { return 0; }")
    built = subprocess.run([COMPILER, sanitizer, source, "-o", program])
    # A compiler may accept the flags without having the run-time libraries.
    if built.returncode != 0 or subprocess.run([program]).returncode != 0:
        pytest.skip(f"{COMPILER} lacks {sanitizer}")


def run_checks(
    name: str,
    sanitizer: str,
    run: pytest.TempPathFactory,
    folder: Path,
    *arguments: str,
) -> None:
    require_sanitizer(sanitizer, folder)
    objects = built(objects_for(name, sanitizer), run)
    # What the checks do is of interest only where they touch the library's memory.
    level = "-O1" if name.removesuffix("_test.cc") in LONG else "-O0"
    flags = [level, sanitizer, "-fno-sanitize-recover=all", "-fno-sanitize=undefined"]
    checks, program = folder / "checks.o", folder / "program"
    compile_checks = [COMPILER, *FLAGS, *INCLUDES, *flags]
    compile_checks += ["-c", NATIVE / "tests" / name, "-o", checks]
    subprocess.run(compile_checks, check=True)
    link = [COMPILER, "-pthread", sanitizer, checks, *objects, "-o", program]
    subprocess.run(link, check=True)
    done = subprocess.run([program, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all checks hold" in done.stdout


def test_every_native_test_is_run_here():
    assert {path.name for path in (NATIVE / "tests").glob("*_test.cc")} == set(FOLDERS)


@pytest.mark.parametrize("name", FOLDERS)
def test_native_checks_hold(name, tmp_path, tmp_path_factory):
    run_checks(name, MEMORY, tmp_path_factory, tmp_path)


THREADED = [
    "barrier_test.cc",
    "linear_test.cc",
    "matrices_test.cc",
    "members_test.cc",
    "network_test.cc",
    "portion_queue_test.cc",
    "scratch_test.cc",
    "step_loop_test.cc",
    "team_test.cc",
]


@pytest.mark.parametrize("name", THREADED)
def test_native_checks_hold_without_data_races(name, tmp_path, tmp_path_factory):
    # Less, since it slows them down; and no fork of a process with several threads.
    run_checks(name, THREADS, tmp_path_factory, tmp_path, "threads")
