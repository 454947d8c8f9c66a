"""What the published files must hold, and a check that they do."""

import re
import tarfile
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path

NATIVE = "py3-none-manylinux_2_28_x86_64"
PURE = "py3-none-any"
LIBRARY, NOTE = "ostinato/_lib/libostinato_cpu.so", "ostinato/_lib/not_built.txt"
IN_BOTH = (
    "ostinato/__init__.py",
    "ostinato/py.typed",
    "ostinato/_cuda/text/linear.h",
    "ostinato/_cuda/text/recurrent_backward.h",
    "ostinato/apps/bench/page.py",
)
IN_SOURCES = (
    "CMakeLists.txt",
    "native/CMakeLists.txt",
    "packaging/zig.cmake",
    "LICENSE",
)
NEWEST_GLIBC = (2, 28)  # what the name of the wheel promises


def faults(folder: Path) -> list[str]:
    """Return what is wrong with the files of a build, as `file: fault`."""
    found = []
    for name in (f"*-{NATIVE}.whl", f"*-{PURE}.whl", "*.tar.gz"):
        paths = list(folder.glob(name))
        if len(paths) != 1:
            found.append(f"{folder}: {len(paths)} files {name}, want 1")
        for path in paths:
            check = source_faults if path.suffix == ".gz" else wheel_faults
            found += [f"{path.name}: {fault}" for fault in check(path)]
    return found


def wheel_faults(path: Path) -> Iterator[str]:
    """Yield what is wrong with a wheel."""
    native = path.stem.endswith(NATIVE)
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
        wanted = {*IN_BOTH, LIBRARY if native else NOTE}
        unwanted = {NOTE if native else LIBRARY}
        yield from (f"lacks {name}" for name in sorted(wanted - set(names)))
        yield from (f"has {name}" for name in sorted(unwanted & set(names)))
        for name in names:
            top = name.split("/")[0]
            if top != "ostinato" and not top.endswith(".dist-info"):
                yield f"has {name} outside of the package"
        tags = _field(wheel, "WHEEL", "Tag")
        if tags != [NATIVE if native else PURE]:
            yield f"has the tags {tags}"
        pure = _field(wheel, "WHEEL", "Root-Is-Purelib")
        if pure != ["false" if native else "true"]:
            yield f"has Root-Is-Purelib {pure}"
        version = _field(wheel, "METADATA", "Version")
        if version != [path.name.split("-")[1]]:
            yield f"is of version {version}"
        if native and LIBRARY in names:
            yield from library_faults(wheel.read(LIBRARY))


def library_faults(library: bytes) -> Iterator[str]:
    """Yield what the native library needs that not every system has."""
    if not library.startswith(b"\x7fELF"):
        yield "has a library that is no ELF file"
    versions = re.findall(rb"\0GLIBC_(\d+)\.(\d+)", library)
    needed = max((tuple(map(int, version)) for version in versions), default=(0, 0))
    if needed > NEWEST_GLIBC:
        yield f"needs glibc {needed[0]}.{needed[1]}"
    for name in (b"libstdc++.so", b"libc++.so", b"libgcc_s.so"):
        if name in library:
            yield f"needs {name.decode()}"


def source_faults(path: Path) -> Iterator[str]:
    """Yield what is wrong with a source distribution."""
    with tarfile.open(path) as sources:
        names = {name.partition("/")[2] for name in sources.getnames()}
    wanted = {*IN_SOURCES, *(f"src/{name}" for name in IN_BOTH)}
    yield from (f"lacks {name}" for name in sorted(wanted - names))
    built = [name for name in names if name.endswith((".so", ".pyc"))]
    yield from (f"has {name}" for name in sorted(built))


def _field(wheel: zipfile.ZipFile, file: str, field: str) -> list[str]:
    (name,) = (n for n in wheel.namelist() if n.endswith(f".dist-info/{file}"))
    return Parser().parsestr(wheel.read(name).decode()).get_all(field) or []
