"""Tests that the examples in pages and docstrings run, and that named tests exist."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import run_pages

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# On these pages a block goes on where the one before ended: a page is one program.
PROGRAMS = ("guides", "migration")
PLACES = {  # of each block; one that is on two pages runs once
    code: f"{page.relative_to(ROOT)}-{n}"
    for page in reversed(PAGES)  # the first of them
    if page.parent.name not in PROGRAMS
    for n, code in enumerate(re.findall("```python\n(.*?)```", page.read_text(), re.S))
}


def groups() -> dict[str, list[str]]:
    """Return the places of blocks that run in one process: those of a page.

    A block that changes settings of the process runs alone.
    """
    found: dict[str, list[str]] = {}
    for place, code in zip(PLACES.values(), PLACES, strict=True):
        alone = "jax.config" in code or "environ" in code
        found.setdefault(place if alone else place.rpartition("-")[0], []).append(place)
    return found


GROUPS = groups()
CODE = {place: code for code, place in PLACES.items()}


def missing(code: str) -> str | None:
    """Return a package that `code` imports at its top and that is not installed."""
    packages = re.findall(r"^(?:from|import) (\w+)", code, re.M)
    layers = re.findall(r"^from ostinato\.nn\.(\w+)", code, re.M)
    packages += ["flax" if name == "linen" else name for name in layers]
    return next((p for p in packages if importlib.util.find_spec(p) is None), None)


WITH_EXAMPLES = [
    ".".join(path.relative_to(ROOT / "src").with_suffix("").parts)
    for path in sorted((ROOT / "src" / "ostinato").rglob("*.py"))
    if ">>> " in path.read_text() and missing(path.read_text()) is None
]


def test_the_readme_has_an_example():
    assert "README.md" in GROUPS


def test_every_test_that_a_page_names_exists():
    named = {
        name for page in PAGES for name in re.findall(r"`(test_\w+)`", page.read_text())
    }
    tests = "".join(path.read_text() for path in (ROOT / "tests").glob("*.py"))
    assert named and named - set(re.findall(r"def (test_\w+)\(", tests)) == set()


@pytest.mark.parametrize("group", GROUPS)
def test_examples_of_a_page_run(group, tmp_path):
    blocks = {p: CODE[p] for p in GROUPS[group] if missing(CODE[p]) is None}
    if not blocks:
        pytest.skip(f"needs {missing(CODE[GROUPS[group][0]])}, from the extra `peers`")
    run(
        f"for place, code in {blocks}.items():\n"
        "    exec(compile(code, place, 'exec'), {'__name__': '__main__'})",
        tmp_path,
    )


@pytest.mark.parametrize("folder", PROGRAMS)
def test_pages_that_are_programs_run(folder, tmp_path):
    pages = [str(page) for page in PAGES if page.parent.name == folder]
    code = f"import run_pages\nassert run_pages.main({pages}) == 0"
    run(f"import sys\nsys.path.append({str(ROOT / 'tests')!r})\n{code}", tmp_path)


def test_code_of_a_page_keeps_its_lines():
    page = "Text\n```python\na = 1\n```\n```console\n$ a\n```\n```python\nb = a\n```"
    lines = run_pages.program(page).split("\n")
    assert (lines[2], lines[8]) == ("a = 1", "b = a")
    assert not any(line for n, line in enumerate(lines) if n not in (2, 8))


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
