"""Tests that the examples in pages and docstrings run, and that named tests exist."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLES = [
    pytest.param(code, id=f"{page.relative_to(ROOT)}-{n}")
    for page in PAGES
    for n, code in enumerate(re.findall("```python\n(.*?)```", page.read_text(), re.S))
]


def missing(code: str) -> str | None:
    """Return a package that `code` imports at its top and that is not installed."""
    packages = re.findall(r"^(?:from|import) (\w+)", code, re.M)
    return next((p for p in packages if importlib.util.find_spec(p) is None), None)


WITH_EXAMPLES = [
    ".".join(path.relative_to(ROOT / "src").with_suffix("").parts)
    for path in sorted((ROOT / "src" / "ostinato").rglob("*.py"))
    if ">>> " in path.read_text() and missing(path.read_text()) is None
]


def test_the_readme_has_an_example():
    assert any("README" in param.id for param in EXAMPLES)


def test_every_test_that_a_page_names_exists():
    named = {
        name for page in PAGES for name in re.findall(r"`(test_\w+)`", page.read_text())
    }
    tests = "".join(path.read_text() for path in (ROOT / "tests").glob("*.py"))
    assert named and named - set(re.findall(r"def (test_\w+)\(", tests)) == set()


@pytest.mark.parametrize("code", EXAMPLES)
def test_example_of_a_page_runs(code, tmp_path):
    if missing(code) is not None:
        pytest.skip(f"needs {missing(code)}, from the extra `peers`")
    run(code, tmp_path)


def test_examples_of_docstrings_hold():
    run(
        "import doctest, importlib\n"
        f"for name in {WITH_EXAMPLES}:\n"
        "    module = importlib.import_module(name)\n"
        "    assert doctest.testmod(module).failed == 0, name\n"
    )


def run(code: str, folder: Path | None = None) -> None:
    """Run code in a fresh interpreter, with JAX's default settings as readers have."""
    theirs = "ignore:__array__ implementation:DeprecationWarning"  # Keras's variables
    command = [sys.executable, "-W", "error", "-W", theirs, "-c", code]
    env = os.environ | {"KERAS_BACKEND": "jax"}
    if "PYTHONPATH" in env and folder:  # relative paths, seen from another folder
        env["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, sys.path))
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
