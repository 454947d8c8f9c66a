"""The native library: loading, targets, and every reason for doing without."""

import multiprocessing
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closures import without_jit

from ostinato import _config, _native

needs_library = pytest.mark.skipif(
    _native.status().library is None,
    reason=f"no native library: {_native.status().reason}",
)
COMPILER = shutil.which(os.environ.get("CXX", "c++"))
CPUINFO = Path("/proc/cpuinfo")
needs_compiler = pytest.mark.skipif(not COMPILER, reason="no C++ compiler")


# JAX takes seconds to import: one process does so, which the others are forks of.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["ostinato._native"])


def run(code: str, **environ: str) -> subprocess.CompletedProcess:
    """Run `code` in a fresh process, where nothing is loaded yet."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = f"{folder}/out", f"{folder}/err"
        script = (
            "import os, sys\n"
            f"sys.stdout, sys.stderr = open({out!r}, 'w'), open({err!r}, 'w')\n"
            "os.environ.clear()\n"
            f"os.environ.update({dict(os.environ, **environ)!r})\n"
            f"from ostinato import _native\n{code}"
        )
        process = FORKS.Process(target=exec, args=(script, {}))
        process.start()
        process.join()
        stdout, stderr = Path(out).read_text(), Path(err).read_text()
        return subprocess.CompletedProcess(code, process.exitcode, stdout, stderr)


def build(folder: Path, source: str) -> list[Path]:
    """Compile a stand-in for the library; return the folders to search."""
    (folder / "fake.cc").write_text(f'extern "C" {{ {source} }}')
    out = folder / _native._LIBRARY_NAME
    command = [COMPILER, "-shared", "-fPIC", str(folder / "fake.cc"), "-o", str(out)]
    subprocess.run(command, check=True)
    return [folder]


# --- with a library -----------------------------------------------------------------


@needs_library
def test_status_holds_the_library_and_no_reason():
    library, reason = _native.status()
    assert library is not None and reason is None
    assert library.ostinato_abi_version() == _native._ABI_VERSION
    assert _native.status() is _native.status()


@needs_library
def test_loading_twice_registers_the_same_targets():
    folder = Path(_native.status().library._name).parent
    assert _native.load([folder]).reason is None


@needs_library
def test_cpu_features_are_those_of_a_machine():
    features = _native.cpu_features()
    assert features.isa in _config.CPU_ISAS
    assert 1 <= features.cpus <= os.cpu_count()


@needs_library
@pytest.mark.skipif(
    platform.machine() != "x86_64" or not CPUINFO.exists(),
    reason="no second account of the instruction set to compare with",
)
def test_cpu_features_agree_with_the_kernel_of_the_system(monkeypatch):
    monkeypatch.delenv("OSTINATO_CPU_ISA", raising=False)
    _native.cpu_features.cache_clear()
    lines = CPUINFO.read_text().splitlines()
    flags = set(next(line for line in lines if line.startswith("flags")).split())
    avx512 = {"avx512f", "avx512dq", "avx512bw", "avx512vl"}
    needs = [{"avx2", "fma"}, avx512, {"avx512_bf16"}, {"amx_tile", "amx_bf16"}]
    level = 0
    while level < len(needs) and needs[level] <= flags:
        level += 1
    refused = level == len(needs) and _native.why_no_tiles() is not None
    assert _native.cpu_features().isa == _config.CPU_ISAS[level - refused]


@needs_library
@pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="this system has no affinity masks"
)
def test_cpu_features_respect_affinity():
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "print(_native.cpu_features().cpus)"
    )
    assert run(code).stdout.split() == ["1"]


@needs_library
@pytest.mark.parametrize(
    "transform",
    [jax.jit, jax.vmap, jax.grad, jax.checkpoint, without_jit],
    ids=lambda t: t.__name__,
)
def test_cpu_features_are_concrete_while_tracing(transform):
    seen = []

    def traced(x):
        _native.cpu_features.cache_clear()
        seen.append(_native.cpu_features())
        return x

    transform(traced)(jnp.ones(3) if transform is jax.vmap else 1.0)
    assert seen == [_native.cpu_features()]
    assert type(seen[0].cpus) is int


@needs_library
def test_cpu_isa_caps_what_is_reported():
    code = "print(_native.cpu_features().isa)"
    assert run(code, OSTINATO_CPU_ISA="portable").stdout == "portable\n"
    highest = _config.CPU_ISAS[-1]
    uncapped = run(code, OSTINATO_CPU_ISA=highest).stdout
    assert uncapped == run(code, OSTINATO_CPU_ISA="").stdout


@needs_library
def test_isa_and_threads_of_the_kernels_are_reported():
    code = "import ostinato; print(ostinato.backends()['cpu'].detail)"
    done = run(code, OSTINATO_CPU_ISA="portable", OSTINATO_NUM_THREADS="3")
    assert done.stdout == "kernels for portable, threads: 3\n"


@needs_library
def test_a_level_above_the_machine_says_why():
    highest = _config.CPU_ISAS[-1]
    code = "import ostinato; print(ostinato.backends()['cpu'].detail)"
    for asked in (highest, ""):
        detail = run(code, OSTINATO_CPU_ISA=asked).stdout
        reason = _native.why_no_tiles()
        if reason is None:
            assert detail.startswith(f"kernels for {highest}, threads: ")
        else:
            assert f" (not {highest}: {reason}), threads: " in detail
    below = run(code, OSTINATO_CPU_ISA="portable").stdout
    assert "not" not in below


@needs_library
def test_a_result_of_another_size_is_refused():
    result = jax.ShapeDtypeStruct((4,), "int32")
    features = jax.ffi.ffi_call("ostinato_cpu_features", result)
    call = jax.jit(lambda: features(most_isa=np.int32(0)))
    message = "ostinato_cpu_features: the result has 4 elements, want 3"
    with pytest.raises(RuntimeError, match=message):
        call().block_until_ready()


@needs_library
def test_a_second_library_is_refused_and_jax_still_works(tmp_path):
    first = Path(_native.status().library._name).parent
    shutil.copy(_native.status().library._name, tmp_path)
    code = (
        "from pathlib import Path; import jax\n"
        f"print(_native.load([Path({str(first)!r})]).reason)\n"
        f"print(_native.load([Path({str(tmp_path)!r})]).reason)\n"
        "print(jax.numpy.ones(3).sum())"
    )
    none, reason, total = run(code).stdout.splitlines()
    assert (none, total) == ("None", "3.0")
    assert reason.startswith(f"refused by jax {jax.__version__}: ")
    assert "ostinato_cpu_features" in reason


# --- without ------------------------------------------------------------------------


def test_a_missing_library_is_a_reason(tmp_path):
    folders = [tmp_path / "a", tmp_path / "b"]
    assert _native.load(folders) == (
        None,
        f"no {_native._LIBRARY_NAME} in {folders[0]}, {folders[1]}; "
        "`pip install` builds it",
    )


def test_the_reason_of_the_build_is_shown(tmp_path):
    (tmp_path / "not_built.txt").write_text("no working C++ compiler was found\n")
    assert _native.load([tmp_path / "other", tmp_path]) == (
        None,
        "not built when ostinato was installed: no working C++ compiler was found",
    )


def test_a_damaged_library_is_a_reason(tmp_path):
    (tmp_path / _native._LIBRARY_NAME).write_bytes(b"not ELF")
    library, reason = _native.load([tmp_path])
    assert library is None
    assert reason.startswith("cannot be opened: ") and str(tmp_path) in reason


@needs_compiler
def test_a_foreign_library_is_a_reason(tmp_path):
    library, reason = _native.load(build(tmp_path, "int other() { return 0; }"))
    assert library is None
    assert reason.endswith(f"{_native._LIBRARY_NAME} is not a library of ostinato")


@needs_compiler
def test_another_abi_version_is_a_reason(tmp_path):
    source = "int ostinato_abi_version() { return 99; }"
    library, reason = _native.load(build(tmp_path, source))
    assert library is None
    assert reason.endswith(
        f"has ABI version 99, want {_native._ABI_VERSION}; "
        "reinstall ostinato to rebuild it"
    )


def test_the_variable_disables_the_library():
    code = "print(*_native.status(), sep='|')"
    assert run(code, OSTINATO_DISABLE_NATIVE="1").stdout == (
        "None|disabled by the environment variable OSTINATO_DISABLE_NATIVE\n"
    )


def test_cpu_features_without_a_library_say_why():
    done = run("_native.cpu_features()", OSTINATO_DISABLE_NATIVE="1")
    assert done.stderr.rstrip().endswith(
        "RuntimeError: cpu_features() needs the native library: disabled by the "
        "environment variable OSTINATO_DISABLE_NATIVE"
    )


@pytest.mark.parametrize(
    "name", ["OSTINATO_DISABLE_NATIVE", "OSTINATO_CPU_ISA", "OSTINATO_NUM_THREADS"]
)
def test_a_bad_variable_is_an_error(name):
    done = run("_native.status()", **{name: "perhaps"})
    assert f"ConfigError: environment variable {name} must be " in done.stderr
    assert done.stderr.rstrip().endswith("got 'perhaps'")


def test_importing_the_package_loads_nothing():
    code = "print(_native.status.cache_info().currsize)"
    assert run(code).stdout == "0\n"
