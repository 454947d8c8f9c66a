"""An emulation of the tile products of avx512_amx, in C++, for other processors.

The library has a hook for another table of kernels, but no setting for users.
"""

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from ostinato import _config, _native

NATIVE = Path(__file__).parents[1] / "native"
COMPILER = shutil.which(os.environ.get("CXX", "c++"))
EMULATED = "emulated"
_NEEDS = "avx512_bf16"  # the level of all code except the tiles


def level_of_machine() -> str:
    library, _ = _native.status()
    return "portable" if library is None else _native.cpu_features().isa


def why_not(isa: str) -> str | None:
    """Return why tests of this level cannot run here; None if they can."""
    levels, machine = _config.CPU_ISAS, level_of_machine()
    if isa != EMULATED:
        if levels.index(isa) <= levels.index(machine):
            return None
        tiles = isa == "avx512_amx" and _native.status().library is not None
        why = _native.why_no_tiles() if tiles else f"this machine has {machine}"
        return f"no {isa}: {why}"
    if levels.index(machine) < levels.index(_NEEDS):
        return f"emulated tiles need {_NEEDS}, this machine has {machine}"
    return None if COMPILER else "emulated tiles need a C++ compiler"


def level(isa: str, *others):
    """Return a parameter of a test, which is skipped if the machine lacks the level."""
    reason = why_not(isa)
    marks = [] if reason is None else [pytest.mark.skip(reason=reason)]
    return pytest.param(isa, *others, marks=marks)


@functools.cache
def tiles() -> ctypes.CDLL:
    """Return the emulation, compiled once for the process."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "tiles.so"
        assert COMPILER is not None
        flags = ["-std=c++17", "-O2", "-shared", "-fPIC", f"-I{NATIVE}"]
        sources = ["tests/tiles_emulated.cc", "cpu/runtime/caches.cc"]
        paths = [NATIVE / source for source in sources]
        subprocess.run([COMPILER, *flags, *paths, "-o", out], check=True)
        library = ctypes.CDLL(str(out))
    library.ostinato_emulated_tiles.restype = ctypes.c_void_p
    library.ostinato_tile_products.restype = ctypes.c_long
    return library


def use(isa: str) -> str:
    """Switch the emulation on or off; return the level that kernels then need."""
    library, _ = _native.status()
    assert library is not None
    library.ostinato_use_tiles.argtypes = (ctypes.c_void_p,)
    library.ostinato_use_tiles.restype = None
    emulate = isa == EMULATED
    library.ostinato_use_tiles(tiles().ostinato_emulated_tiles() if emulate else None)
    return _NEEDS if emulate else isa
