"""A GPU that is none: a driver that records its calls and runs kernels on the CPU.

See native/tests/cuda_emulator.h and cuda_fake_driver.cc. The C++ compiler of the
machine compiles kernels, and XLA's CPU client launches them. pytest is not imported,
which children of tests would take long for.
"""

import ctypes
import dataclasses
import functools
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import jax

from ostinato import _native
from ostinato._cuda import device, kernels, nvrtc
from ostinato._rnn import backends
from ostinato._rnn import cuda as rnn_cuda

NATIVE = Path(__file__).parents[1] / "native"
COMPILER = shutil.which(os.environ.get("CXX", "c++"))
_BUILD = [COMPILER, "-std=c++17", "-O0", "-fPIC", f"-I{NATIVE}"]
# Most linkers take half as long as the compiler for the text of a kernel.
_LINK = ["-shared", *(["-fuse-ld=gold"] if shutil.which("ld.gold") else [])]
_DRIVER = (
    "tests/cuda_fake_driver.cc",
    "tests/cuda_fake_handler.cc",
    "cuda/launcher.cc",
)
_MACHINE = ("tests/cuda_machine.cc", "tests/cuda_primitives.cc")  # all kernels share it
FOLDER_VARIABLE = "FAKE_GPU"  # where the parent has built it, for its children


_here = dataclasses.replace(rnn_cuda.BACKEND, platform="cpu")
ON_CPU = (_here, *backends.BACKENDS[1:])
"""The backends, of which "cuda" runs on the CPU."""


@functools.cache
def driver() -> ctypes.CDLL:
    """Build and open the fake driver, and make its launches a target of the CPU."""
    path = str(built() / "libcuda.so.1")
    library = ctypes.CDLL(path)
    library.fake_calls.restype = library.fake_open.restype = ctypes.c_char_p
    handler = jax.ffi.pycapsule(library.fake_launch)
    jax.devices("cpu")
    jax.ffi.register_ffi_target(_native.CUDA_TARGET, handler, platform="cpu")
    assert library.fake_open(path.encode()) is None
    return library


@functools.cache
def built() -> Path:
    """Return the folder of the fake driver, and of what all kernels share.

    The latter are a header, compiled ahead, and the machine that runs kernels.
    """
    if FOLDER_VARIABLE in os.environ:
        return Path(os.environ[FOLDER_VARIABLE])
    folder = own_folder()
    build = [*_BUILD, "-Wall", "-Wextra", "-Werror", *_LINK]
    build += ["-isystem", jax.ffi.include_dir(), "-o", folder / "libcuda.so.1"]
    subprocess.run([*build, _joined("driver.cc", _DRIVER), "-ldl"], check=True)
    build = [*_BUILD, "-O1", "-fvisibility=hidden", "-c", "-o", folder / "machine.o"]
    subprocess.run([*build, _joined("machine.cc", _MACHINE)], check=True)
    header = folder / "emulator.h"
    shutil.copy(NATIVE / "tests" / "cuda_emulator.h", header)
    build = [*_BUILD, "-x", "c++-header", "-o", folder / "emulator.h.gch", header]
    subprocess.run(build, check=True)
    return folder


def _joined(name: str, sources: tuple[str, ...]) -> Path:
    """Return one source of several, so that headers are read once."""
    made = own_folder() / name
    made.write_text("".join(f'#include "{source}"\n' for source in sources))
    return made


@functools.cache
def own_folder() -> Path:
    holder = tempfile.TemporaryDirectory(prefix="ostinato-emulated-")
    own_folder.holder = holder  # lives as long as this process
    return Path(holder.name)


def calls() -> list[str]:
    """Return what the driver was asked since the last `reset`."""
    return driver().fake_calls().decode().splitlines()


def compile_emulated(compiler, text: str, options) -> nvrtc.Compiled:
    """Compile the text of a kernel for the emulator, in the place of NVRTC."""
    text = text.removeprefix(kernels._read("primitives.h"))
    named = [o[2:].replace("=", " ", 1) for o in options if o.startswith("-D")]
    # In the text, since GCC takes no header compiled ahead where macros are given.
    return _emulated("".join(f"#define {name}\n" for name in named) + text)


@functools.cache
def _emulated(text: str) -> nvrtc.Compiled:
    names = re.findall(r"OSTINATO_KERNEL[^;]*?\bvoid (\w+)\(", text)
    exports = "\n".join(f"OSTINATO_EMULATED({name})" for name in names)
    source, made = own_folder() / "kernel.cc", own_folder() / "kernel.so"
    source.write_text(f'#include "{built() / "emulator.h"}"\n{text}\n{exports}\n')
    done = subprocess.run(
        [*_BUILD, *_LINK, source, built() / "machine.o", "-o", made],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise nvrtc.CompileError(done.stderr)
    return nvrtc.Compiled(made.read_bytes(), "")


def fake_gpu(setattr_, change=lambda text: text) -> None:
    """Put the fake driver and its compiler in the place of the real ones.

    Args:
        setattr_: sets an attribute of an object.
        change: what is changed in the texts of kernels.
    """
    driver().fake_reset()
    read = kernels._read
    found = nvrtc.Found(nvrtc.Compiler(driver(), "0.0"), None)
    setattr_(kernels, "_read", lambda f: read(f) if "prim" in f else change(read(f)))
    setattr_(nvrtc, "find", lambda: found)
    setattr_(nvrtc, "compile_text", compile_emulated)
    setattr_(device, "DRIVER", driver()._name)
    device.status.cache_clear()
