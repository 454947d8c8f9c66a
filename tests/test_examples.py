"""Tests that the scripts of examples/ run from end to end, in a few updates."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import run_pages

SCRIPTS = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
# Programs that are compiled quickly run slowly, and large constants take long to fold.
SMALLER = {
    "SEEDS, ENVS, STEPS, EPOCHS, MINIBATCHES = 8, 16, 64, 4, 2": (
        "SEEDS, ENVS, STEPS, EPOCHS, MINIBATCHES = 2, 8, 16, 2, 2"
    ),
    "SENSORS, HOURS, LIVE, AHEAD = 64, ": "SENSORS, HOURS, LIVE, AHEAD = 8, ",
    "\nBATCH = 128\n": "\nBATCH = 16\n",
    "spellings[:500], spellings[500:]": "spellings[:8], spellings[8:]",
}


def small(script: Path) -> str:
    text = script.read_text(encoding="utf-8")
    for usual, smaller in SMALLER.items():
        text = text.replace(usual, smaller)
    return text


def test_every_size_that_is_made_smaller_is_in_a_script():
    texts = "".join(script.read_text(encoding="utf-8") for script in SCRIPTS)
    assert all(texts.count(usual) == 1 for usual in SMALLER)


def test_scripts_run_and_draw(tmp_path):
    """Run them in one process, which imports the same packages once."""
    texts = {str(script): small(script) for script in SCRIPTS}
    given = {s: t for s, t in texts.items() if not run_pages.missing(t, indent="")}
    if not given:
        pytest.skip("needs packages of the examples")
    env = os.environ | {"EXAMPLE_STEPS": "2", "MPLBACKEND": "agg"}
    if "PYTHONPATH" in env:  # relative paths, seen from another folder
        env["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, sys.path))
    command = [sys.executable, "-W", "error", "-c", run_pages.as_program(given)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=env, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for script in given:
        picture = tmp_path / f"{Path(script).stem}.png"
        assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_script_is_a_notebook(script):
    text = script.read_text(encoding="utf-8")
    first = text.split("\n# %%\n")[1]
    assert first.startswith("# %pip install --quiet ")  # for Colab
    installed = set(first.splitlines()[0].split()) - {"#", "%pip", "install", "--quiet"}
    imported = set(re.findall(r"^(?:from|import) (\w+)", text, re.M))
    assert imported - set(sys.stdlib_module_names) - {"jax", "numpy"} <= installed
