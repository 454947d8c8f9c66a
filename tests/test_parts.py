"""Tests that the parts of cases that are alike are all of them."""

import argparse
import itertools
import subprocess
import sys
from pathlib import Path

import parts
import pytest

CASES = """
import pytest

def test_other():
    pass

@pytest.mark.alike
@pytest.mark.parametrize("case", range(40))
def test_alike(case):
    pass
"""


def collected(folder: Path, *arguments: str) -> set[str]:
    """Return what pytest would run, with this plugin and without another conftest."""
    (folder / "conftest.py").write_text(
        "import parts\n"
        "def pytest_addoption(parser):\n    parts.add_option(parser)\n"
        "def pytest_configure(config):\n    parts.configure(config)\n"
    )
    (folder / "test_cases.py").write_text(CASES)
    options = ["-q", "--collect-only", "-p", "no:cacheprovider", "--strict-markers"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(Path(__file__).parent)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {line.partition("::")[2] for line in done.stdout.split() if "::" in line}


def test_parts_are_all_cases_and_every_part_has_the_others(tmp_path):
    found = [collected(tmp_path, "--part", f"{k}/3") for k in (1, 2, 3)]
    alike = [{name for name in each if "alike" in name} for each in found]
    assert all("test_other" in each for each in found)
    assert min(map(len, alike)) > 5
    assert all(a.isdisjoint(b) for a, b in itertools.combinations(alike, 2))
    assert set().union(*found) == collected(tmp_path)


@pytest.mark.parametrize("text", ["", "1", "1/", "/3", "0/3", "4/3", "-1/3", "a/b"])
def test_what_is_no_part_is_told(text):
    with pytest.raises(argparse.ArgumentTypeError, match=r"such as 2/3, got '" + text):
        parts.part(text)
    assert parts.part("2/3") == (2, 3)
