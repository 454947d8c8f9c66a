"""The folders of native/: which may include which, and how long a file may be."""

import re
from pathlib import Path

import pytest

NATIVE = Path(__file__).parents[1] / "native"
# Each may include itself and those before it; ffi alone sees the headers of XLA.
FOLDERS = [
    "cpu/runtime",
    "cpu/kernels",
    "cpu/network",
    "cpu/pass",
    "cpu/step",
    "cpu/linear",
    "cuda",
    "ffi",
]
FILES = sorted(path for path in NATIVE.rglob("*") if path.suffix in (".h", ".cc"))


def test_every_file_of_the_library_has_a_folder():
    inside = {str(f.parent.relative_to(NATIVE)) for f in FILES}
    assert inside == {*FOLDERS, "include/ostinato", "tests", "bench"}


@pytest.mark.parametrize("number", range(len(FOLDERS)), ids=FOLDERS)
def test_a_folder_includes_only_those_before_it(number):
    may = [f"{folder}/" for folder in FOLDERS[: number + 1]]
    if FOLDERS[number] == "ffi":
        may += ["xla/ffi/", "ostinato/"]
    for path in (NATIVE / FOLDERS[number]).iterdir():
        for header in re.findall(r'#include "(.*)"', path.read_text()):
            assert header.startswith(tuple(may)), f"{path.name} includes {header}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(NATIVE)))
def test_no_file_has_more_than_400_lines(path):
    assert len(path.read_text().splitlines()) <= 400
