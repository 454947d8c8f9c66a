"""The compiler of kernels and the files that it leaves: with NVRTC, and without."""

import functools
import multiprocessing
import os
import re
import stat
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cell_cases import BATCH, CASES, INPUTS, STEPS, shapes_of

import ostinato as ost
from ostinato._cuda import cache, device, kernels, nvrtc, plan
from ostinato._cuda.launch import launch
from ostinato._step.cost import equations_of
from ostinato._step.cuda import loops

needs_nvrtc = pytest.mark.skipif(
    nvrtc.find().compiler is None, reason=str(nvrtc.find().reason)
)
OTHER_ARCHES = ("sm_80", "sm_89", "sm_100")
TEXT = kernels.TEXTS[0]


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """Keep files in a folder of the test, and nothing in memory."""
    monkeypatch.setenv("OSTINATO_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(kernels, "_compiled", {})
    return tmp_path / "cache"


@pytest.fixture
def compilations(monkeypatch):
    """Count what a compiler is asked for, whose code is the text's first letters."""
    asked = []

    def compile_text(compiler, text, options):
        asked.append(options)
        return nvrtc.Compiled(f"{text[:9]} {compiler.version} {options}".encode(), "")

    use_version(monkeypatch, "1.0")
    monkeypatch.setattr(nvrtc, "compile_text", compile_text)
    return asked


def use_version(monkeypatch, version):
    found = nvrtc.Found(nvrtc.Compiler(None, version), None)
    monkeypatch.setattr(nvrtc, "find", lambda: found)


# -------------------------------------------------------------------------------- files


def test_what_is_stored_is_loaded(folder):
    assert cache.load("a") is None
    for data in (b"", b"one", bytes(range(256)) * 99):
        cache.store("a", data)
        assert cache.load("a") == data
    assert [path.name for path in folder.iterdir()] == ["a"]


@pytest.mark.parametrize("damage", [b"", b"x", slice(0, -1), slice(1, None), "flip"])
def test_damaged_files_count_as_missing(damage, folder):
    cache.store("a", b"something long")
    whole = (folder / "a").read_bytes()
    if isinstance(damage, slice):
        damage = whole[damage]
    elif damage == "flip":
        damage = whole[:-1] + bytes([whole[-1] ^ 1])
    (folder / "a").write_bytes(damage)
    assert cache.load("a") is None
    cache.store("a", b"new")
    assert cache.load("a") == b"new"


def test_a_folder_that_cannot_be_used_is_no_error(folder, monkeypatch, tmp_path):
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    monkeypatch.setenv("OSTINATO_CACHE_DIR", str(in_the_way / "below"))
    cache.store("a", b"1")
    assert cache.load("a") is None
    monkeypatch.setenv("OSTINATO_CACHE_DIR", str(tmp_path / "locked"))
    (tmp_path / "locked").mkdir()
    (tmp_path / "locked").chmod(stat.S_IRUSR | stat.S_IXUSR)
    cache.store("a", b"1")
    assert cache.load("a") == (b"1" if os.geteuid() == 0 else None)


def test_the_folder_of_the_user(monkeypatch, tmp_path):
    monkeypatch.delenv("OSTINATO_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.folder() == tmp_path / "ostinato"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.folder() == tmp_path / ".cache" / "ostinato"
    monkeypatch.setenv("OSTINATO_CACHE_DIR", "~/kernels")
    assert cache.folder() == tmp_path / "kernels"


def test_keys_tell_texts_apart():
    keys = [
        cache.key(*parts) for parts in (["ab"], ["a", "b"], ["b", "a"], ["a", "b2"])
    ]
    assert len(set(keys)) == 4


def _store_often(folder, number):
    os.environ["OSTINATO_CACHE_DIR"] = folder
    for _ in range(40):
        cache.store("a", bytes([number]) * 5000)
        data = cache.load("a")
        assert data is not None and len(set(data)) == 1 and len(data) == 5000


@pytest.mark.filterwarnings("ignore:.*fork.*")  # the children only write files
def test_processes_share_files(folder):
    context = multiprocessing.get_context("fork")
    running = [
        context.Process(target=_store_often, args=(str(folder), n)) for n in range(3)
    ]
    for each in running:
        each.start()
    for each in running:
        each.join()
    assert [each.exitcode for each in running] == [0, 0, 0]
    assert [path.name for path in folder.iterdir()] == ["a"]


# ------------------------------------------------------------------------------ kernels


def test_a_text_is_compiled_once(compilations, folder, monkeypatch):
    code = kernels.compiled(TEXT, "sm_80")
    assert kernels.compiled(TEXT, "sm_80") is code and len(compilations) == 1
    monkeypatch.setattr(kernels, "_compiled", {})  # another process
    assert kernels.compiled(TEXT, "sm_80") == code and len(compilations) == 1
    (file,) = folder.iterdir()
    file.write_bytes(file.read_bytes()[:-1])
    monkeypatch.setattr(kernels, "_compiled", {})
    assert kernels.compiled(TEXT, "sm_80") == code and len(compilations) == 2


def test_everything_that_matters_compiles_anew(compilations, monkeypatch):
    codes = {kernels.compiled(TEXT, "sm_80").digest}
    codes.add(kernels.compiled(TEXT, "sm_90a").digest)
    codes.add(kernels.compiled(kernels.TEXTS[1], "sm_80").digest)
    use_version(monkeypatch, "1.1")
    codes.add(kernels.compiled(TEXT, "sm_80").digest)
    read = kernels._read
    monkeypatch.setattr(kernels, "_read", lambda file: "// new\n" + read(file))
    codes.add(kernels.compiled(TEXT, "sm_80").digest)
    assert len(codes) == len(compilations) == 5


def test_texts_include_no_file():
    assert "#include" not in "".join(text.source() for text in kernels.TEXTS)
    assert str(TEXT) == "linear (STORAGE=float, ACCUM=float, BLOCKS=0)"


# -------------------------------------------------------------------------------- NVRTC


def test_without_nvrtc_there_is_a_reason(tmp_path):
    broken = tmp_path / "libnvrtc.so.12"
    broken.write_text("no library")
    found = nvrtc.open_first([tmp_path / "missing.so", broken])
    assert found.compiler is None
    assert str(broken) in found.reason and "install nvidia-cuda-nvrtc" in found.reason
    assert "missing.so" not in found.reason


def test_a_library_that_is_not_nvrtc_is_passed_over():
    assert nvrtc.open_first([Path("libc.so.6")]).compiler is None


@needs_nvrtc
def test_errors_hold_what_the_compiler_says():
    compiler = nvrtc.find().compiler
    with pytest.raises(nvrtc.CompileError, match="identifier .nonsense. is undefined"):
        nvrtc.compile_text(compiler, "__global__ void f() { nonsense(); }", [])
    with pytest.raises(nvrtc.CompileError, match="gpu-architecture"):
        nvrtc.compile_text(compiler, "", ["-arch=sm_1"])


def registers_of(text, arch):
    """Return the registers of each kernel of a text, none of which may spill any."""
    options = (*text.options(arch), "--ptxas-options=-v")
    made = nvrtc.compile_text(nvrtc.find().compiler, text.source(), options)
    assert made.cubin.startswith(b"\x7fELF")
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", made.log)]
    spilled = re.findall(r"(\d+) bytes spill (?:stores|loads)", made.log)
    stack = re.findall(r"(\d+) bytes stack frame", made.log)
    assert len(spilled) == 2 * len(stack) == 2 * len(registers), made.log
    assert set(spilled) == set(stack) == {"0"}, made.log
    return registers


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_90a", *OTHER_ARCHES])
def test_texts_compile_without_spills(arch):
    """Check every text for Hopper, and for one of the other architectures."""
    texts = kernels.TEXTS
    if arch in OTHER_ARCHES:
        texts = texts[OTHER_ARCHES.index(arch) :: len(OTHER_ARCHES)]
    for text in texts:
        registers = registers_of(text, arch)
        assert len(registers) == 2 and max(registers) <= 128


# Of each kernel, mode and dtype, with weights in registers and in shared memory.
HARDEST = (
    (kernels.recurrent, plan.RnnPlan("lstm", "bfloat16", 512, 8, 2, 1), "sm_90a"),
    (
        kernels.recurrent_backward,
        plan.RnnPlan("gru", "float32", 256, 8, 2, 1),
        "sm_90a",
    ),
    (
        kernels.recurrent_backward,
        plan.RnnPlan("lstm", "float32", 192, 4, 2, 1),
        "sm_90a",
    ),
    (
        kernels.recurrent_backward,
        plan.RnnPlan("slstm", "bfloat16", 192, 2, 1, 1),
        "sm_90a",
    ),
    (
        kernels.recurrent_backward,
        plan.RnnPlan("rnn_tanh", "bfloat16", 512, 2, 1, 1),
        "sm_90a",
    ),
    (
        kernels.recurrent_backward,
        plan.RnnPlan("slstm", "float32", 512, 16, 1, 1),
        "sm_90a",
    ),
    (kernels.recurrent, plan.RnnPlan("gru", "bfloat16", 128, 1, 1, 1), "sm_100"),
    (kernels.recurrent, plan.RnnPlan("lstm", "float32", 96, 1, 1, 1), "sm_89"),
    (
        kernels.recurrent_backward,
        plan.RnnPlan("lstm", "bfloat16", 96, 1, 1, 1),
        "sm_80",
    ),
    (
        kernels.recurrent_backward,
        plan.RnnPlan("lstm", "bfloat16", 128, 1, 1, 1),
        "sm_80",
    ),
)


@needs_nvrtc
@pytest.mark.parametrize(("make", "layout", "arch"), HARDEST)
def test_recurrent_texts_compile_without_spills(make, layout, arch):
    text = make(layout)
    assert text in kernels.RECURRENT_TEXTS
    (registers,) = registers_of(text, arch)
    assert registers <= 255


@needs_nvrtc
@pytest.mark.parametrize(
    ("name", "dtype", "arch"),
    [
        ("indrnn-tanh", "float32", "sm_90a"),
        ("para-gru", "bfloat16", "sm_80"),
        ("para-gru", "float64", "sm_100"),
        ("para-lstm", "float32", "sm_90a"),
        ("para-lstm", "float64", "sm_89"),
    ],
)
def test_texts_of_steps_compile_without_spills(name, dtype, arch):
    for kernel in kernels_of_cell(CASES[name].cell, dtype):
        (registers,) = registers_of(kernel.text, arch)
        assert registers <= 168


def kernels_of_cell(cell, dtype):
    """Return the kernels of a loop: alone, and then with its backward pass."""
    params, states = shapes_of(cell, dtype)
    x = jax.ShapeDtypeStruct((BATCH, STEPS, INPUTS), dtype)
    lengths = jax.ShapeDtypeStruct((BATCH,), np.int32)

    def total(params, x, states, lengths):
        run = functools.partial(ost.recurrent_net, cell, params=params)
        out = run(x, states, seq_lengths=lengths, backend="xla")
        return sum(a.sum() for a in jax.tree.leaves((out.outputs, out.states)))

    traced = jax.make_jaxpr(jax.grad(total, (0, 1, 2)))(params, x, states, lengths)
    (eqn,) = (e for e in equations_of(traced) if "_loop_bwd" in e.primitive.name)
    loop, wrt = eqn.params["loop"], eqn.params["wrt"]
    return [*loops.kernels_of(loop, None), *loops.kernels_of(loop, wrt)]


def test_architectures():
    gpu = device.Gpu("", (9, 0), 1, 1, "")
    assert gpu.arch == "sm_90a"
    assert gpu._replace(capability=(8, 9)).arch == "sm_89"
    assert gpu._replace(capability=(10, 0)).arch == "sm_100"


def test_null_is_passed_for_what_a_call_lacks():
    code, result = kernels.Code(b"code", "d"), jax.ShapeDtypeStruct((3,), "float32")

    def run(x):
        return launch(
            code, "f", plan.Grid(1), (None, x, None, x), (None, result), (1, 2)
        )

    text = jax.jit(run).lower(jnp.ones(3)).as_text()
    assert "parameters = dense<[-1, 0, -1, 1, -1, 2]>" in text
