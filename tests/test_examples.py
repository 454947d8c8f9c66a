"""Tests that the scripts of examples/ run from end to end, in a few updates."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_script_runs_and_draws(script, tmp_path):
    text = script.read_text(encoding="utf-8")
    for package in re.findall(r"^(?:from|import) (\w+)", text, re.M):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}")
    env = os.environ | {"EXAMPLE_STEPS": "2", "MPLBACKEND": "agg"}
    if "PYTHONPATH" in env:  # relative paths, seen from another folder
        env["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, sys.path))
    command = [sys.executable, "-W", "error", str(script)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=env, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    picture = tmp_path / f"{script.stem}.png"
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_script_is_a_notebook(script):
    text = script.read_text(encoding="utf-8")
    first = text.split("\n# %%\n")[1]
    assert first.startswith("# %pip install --quiet ")  # for Colab
    installed = set(first.splitlines()[0].split()) - {"#", "%pip", "install", "--quiet"}
    imported = set(re.findall(r"^(?:from|import) (\w+)", text, re.M))
    assert imported - set(sys.stdlib_module_names) - {"jax", "numpy"} <= installed
