"""Tests that the examples in pages and docstrings run, and that named tests exist."""

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
IMPORTS = r"^ *(?:from|import) (?:ostinato\.nn\.)?(?:{})\b"
# Those of the first take 9 s to import.
FRAMEWORKS = {"keras and torch": "keras|torch", "flax": "flax|linen|equinox|haiku"}


def programs() -> dict[str, str]:
    """Return all programs of pages by place; one that is on two pages is there once."""
    found: dict[str, str] = {}  # the place of each
    for page in reversed(PAGES):  # the first of them
        place, text = str(page.relative_to(ROOT)), page.read_text(encoding="utf-8")
        if page.parent.name in PROGRAMS:
            found[run_pages.program(text)] = place
        else:
            blocks = re.findall("```python\n(.*?)```", text, re.S)
            found |= {code: f"{place}-{n}" for n, code in enumerate(blocks)}
    return {place: code for code, place in found.items() if code.strip()}


WITH_EXAMPLES = [
    ".".join(path.relative_to(ROOT / "src").with_suffix("").parts)
    for path in sorted((ROOT / "src" / "ostinato").rglob("*.py"))
    if ">>> " in path.read_text() and not run_pages.missing(path.read_text(), indent="")
]
EXAMPLES = f"""
import doctest, importlib
for name in {WITH_EXAMPLES}:
    assert doctest.testmod(importlib.import_module(name)).failed == 0, name
"""


def groups() -> dict[str, dict[str, str]]:
    """Return programs by the process that runs them: there are few, of 40 s or less.

    A program that changes settings of the process runs alone.
    """
    found = {"flax": {"docstrings": EXAMPLES}}  # some import it
    for place, code in programs().items():
        if "jax.config" in code or "os.environ" in code:
            group = place
        else:
            group = "others"
            for framework, names in reversed(FRAMEWORKS.items()):
                if re.search(IMPORTS.format(names), code, re.M):
                    group = framework
        found.setdefault(group, {})[place] = code
    return found


GROUPS = groups()


def test_the_readme_has_an_example():
    assert "README.md-0" in programs()


def test_every_test_that_a_page_names_exists():
    named = {
        name for page in PAGES for name in re.findall(r"`(test_\w+)`", page.read_text())
    }
    tests = "".join(path.read_text() for path in (ROOT / "tests").glob("*.py"))
    assert named and named - set(re.findall(r"def (test_\w+)\(", tests)) == set()


@pytest.mark.parametrize("group", GROUPS)
def test_examples_of_pages_and_docstrings_run(group, tmp_path):
    given = {p: c for p, c in GROUPS[group].items() if not run_pages.missing(c)}
    if not given:
        pytest.skip("needs packages from the extra `peers`")
    run(run_pages.as_program(given), tmp_path)


def test_code_of_a_page_keeps_its_lines():
    page = "Text\n```python\na = 1\n```\n```console\n$ a\n```\n```python\nb = a\n```"
    lines = run_pages.program(page).split("\n")
    assert (lines[2], lines[8]) == ("a = 1", "b = a")
    assert not any(line for n, line in enumerate(lines) if n not in (2, 8))


def test_settings_of_a_program_end_with_it(capsys):
    change = "import jax, os\njax.config.update('jax_debug_nans', True)\n"
    change += "os.environ['OSTINATO_CHANGED'] = '1'\nassert jax.config.jax_debug_nans"
    look = "import jax, os\nassert not jax.config.jax_debug_nans\n"
    look += "assert 'OSTINATO_CHANGED' not in os.environ and 'change' not in globals()"
    run_pages.run({"a": change, "b": look})
    with pytest.raises(AssertionError, match=r"\['b'\]"):  # and others run on
        run_pages.run({"a": change, "b": "\nassert 1 == 2", "c": look})
    assert 'File "b", line 2' in capsys.readouterr().out


def run(code: str, folder: Path) -> None:
    """Run code in a fresh interpreter, with JAX's default settings as readers have."""
    theirs = "ignore:__array__ implementation:DeprecationWarning"  # Keras's variables
    command = [sys.executable, "-W", "error", "-W", theirs, "-c", code]
    env = os.environ | {"KERAS_BACKEND": "jax"}
    if "PYTHONPATH" in env:  # relative paths, seen from another folder
        env["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, sys.path))
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
