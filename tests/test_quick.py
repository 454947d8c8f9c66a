"""The quick tests of `make check` call something in every module of the package."""

import ast
import importlib.util
import pstats
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "ostinato"
TESTS = "@tests/quick.txt"
# What only a package of the extra `peers` reaches.
NEEDS = {"ragged/rules/errors.py": "equinox"}


def called_functions(profile: Path) -> dict[str, set[str]]:
    """Return the names of the functions that were called, by file."""
    found: dict[str, set[str]] = {}
    for file, _, name in pstats.Stats(str(profile)).stats:  # type: ignore[attr-defined]
        found.setdefault(file, set()).add(name)
    return found


def functions(path: Path) -> set[str]:
    """Return the names of the functions that a module defines."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef)}


def test_quick_tests_call_something_in_every_module(tmp_path):
    profile = tmp_path / "profile"
    command = [sys.executable, "-m", "cProfile", "-o", profile, "-m", "pytest", "-q"]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", TESTS],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    # The code that cProfile exits with says nothing.
    *_, summary = done.stdout.splitlines()
    assert re.match(r"\d+ passed", summary), done.stdout + done.stderr
    called = called_functions(profile)
    modules = {path: functions(path) for path in SOURCE.rglob("*.py")}
    modules = {path: names for path, names in modules.items() if names}
    assert len(modules) > 50
    missed = [
        str(path.relative_to(SOURCE))
        for path, names in sorted(modules.items())
        if not names & called.get(str(path), set())
    ]
    there = importlib.util.find_spec
    assert [name for name in missed if name not in NEEDS or there(NEEDS[name])] == []
