"""The check of what is published, on small files of the same form."""

import importlib.util
import io
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import ostinato

ROOT = Path(__file__).parents[1]


def load(name):
    """Return a module of the folder `packaging`, which is no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"packaging/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


contents = load("contents")
INFO = "ostinato-1.2.dist-info"
ELF = b"\x7fELF...\0GLIBC_2.2.5\0GLIBC_2.17\0libc.so.6\0"


def write_wheel(folder, tag, files=(), drop=(), version="1.2", said=None):
    native = tag == contents.NATIVE
    inside = dict.fromkeys(contents.IN_BOTH, b"")
    inside |= {contents.LIBRARY: ELF} if native else {contents.NOTE: b"left out"}
    pure = "false" if native else "true"
    inside[f"{INFO}/WHEEL"] = f"Root-Is-Purelib: {pure}\nTag: {said or tag}\n".encode()
    inside[f"{INFO}/METADATA"] = f"Name: ostinato\nVersion: {version}\n".encode()
    inside |= dict(files)
    with zipfile.ZipFile(folder / f"ostinato-1.2-{tag}.whl", "w") as wheel:
        for name, data in inside.items():
            if name not in drop:
                wheel.writestr(name, data)


def write_sources(folder, extra=()):
    names = [*contents.IN_SOURCES, *(f"src/{name}" for name in contents.IN_BOTH)]
    with tarfile.open(folder / "ostinato-1.2.tar.gz", "w:gz") as sources:
        for name in [*names, *extra]:
            sources.addfile(tarfile.TarInfo(f"ostinato-1.2/{name}"), io.BytesIO())


@pytest.fixture
def built(tmp_path):
    write_wheel(tmp_path, contents.NATIVE)
    write_wheel(tmp_path, contents.PURE)
    write_sources(tmp_path)
    return tmp_path


def test_a_whole_build_has_no_fault(built):
    assert contents.faults(built) == []


def test_a_missing_file_is_a_fault(tmp_path):
    write_sources(tmp_path)
    first, second = contents.faults(tmp_path)
    assert "0 files *-py3-none-manylinux_2_28_x86_64.whl, want 1" in first
    assert "0 files *-py3-none-any.whl, want 1" in second


@pytest.mark.parametrize(
    "tag, options, fault",
    [
        ("NATIVE", dict(drop=[contents.LIBRARY]), f"lacks {contents.LIBRARY}"),
        ("NATIVE", dict(drop=["ostinato/py.typed"]), "lacks ostinato/py.typed"),
        ("NATIVE", dict(files={contents.NOTE: b""}), f"has {contents.NOTE}"),
        ("PURE", dict(files={contents.LIBRARY: ELF}), f"has {contents.LIBRARY}"),
        ("PURE", dict(files={"tests/a.py": b""}), "has tests/a.py outside of"),
        ("PURE", dict(said="py3-none-linux_x86_64"), "has the tags ['py3-none-linux_"),
        ("PURE", dict(version="1.3"), "is of version ['1.3']"),
        (
            "NATIVE",
            dict(files={contents.LIBRARY: ELF + b"\0GLIBC_2.34\0"}),
            "needs glibc 2.34",
        ),
        (
            "NATIVE",
            dict(files={contents.LIBRARY: ELF + b"libstdc++.so.6\0"}),
            "needs libstdc++.so",
        ),
        ("NATIVE", dict(files={contents.LIBRARY: b"MZ"}), "has a library that is no"),
    ],
)
def test_what_is_wrong_with_a_wheel_is_found(built, tag, options, fault):
    write_wheel(built, getattr(contents, tag), **options)
    (found,) = contents.faults(built)
    assert found.startswith(f"ostinato-1.2-{getattr(contents, tag)}.whl: {fault}")


def test_sources_have_nothing_that_was_built(built):
    write_sources(built, extra=["src/ostinato/_lib/libostinato_cpu.so"])
    (found,) = contents.faults(built)
    assert "has src/ostinato/_lib/libostinato_cpu.so" in found


@pytest.mark.skipif(shutil.which("cmake") is None, reason="no cmake")
def test_the_reason_of_the_wheel_without_the_library_is_shown(tmp_path):
    sys.path.insert(0, str(ROOT / "packaging"))
    try:
        build = load("build")
    finally:
        sys.path.remove(str(ROOT / "packaging"))
    (option,) = (
        part.partition("cmake.define.")[2]
        for part in build.BUILDS["wheel without the native library"]
        if "OSTINATO_LEAVE_OUT" in part
    )
    command = ["cmake", "-S", ROOT, "-B", tmp_path, "-G", "Unix Makefiles"]
    made = subprocess.run([*command, f"-D{option}"], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    note = tmp_path / "not_built.txt"
    assert note.read_text().strip() == build.REASON


def test_the_citation_names_this_version():
    cited = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {ostinato.__version__}\n" in cited
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert f"\nlicense: {settings['project']['license']}\n" in cited
