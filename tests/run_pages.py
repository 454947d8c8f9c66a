"""Run Python code of pages: every program with names of its own, all in one process.

Importing the frameworks takes longer than most programs, and so does compiling what
many of them use. Settings that a program changes are as before for the next one.
"""

import importlib.util
import os
import re
import traceback
from pathlib import Path

import jax


def program(page: str) -> str:
    """Return the Python code of a page, each line where it stands on the page."""
    kept, inside = [], False
    for line in page.splitlines():
        fence = line.startswith("```")
        if fence:
            inside = line == "```python"
        kept.append("" if fence or not inside else line)
    return "\n".join(kept)


def missing(code: str, indent: str = " *") -> list[str]:
    """Return the packages that code imports and that are not installed."""
    packages = re.findall(rf"^{indent}(?:from|import) (\w+)", code, re.M)
    layers = re.findall(rf"^{indent}from ostinato\.nn\.(\w+)", code, re.M)
    packages += ["flax" if name == "linen" else name for name in layers]
    return [name for name in packages if importlib.util.find_spec(name) is None]


# As in conftest.py: each time, all that JAX has cached is looked through.
SELDOM = "import gc\ngc.set_threshold(20_000, 20, 10)\n"


def as_program(programs: dict[str, str]) -> str:
    """Return code for `python -c` that does `run(programs)`."""
    folder = str(Path(__file__).parent)
    imports = f"import sys\nsys.path.append({folder!r})\nimport run_pages\n"
    return f"{SELDOM}{imports}run_pages.run({programs})"


def run(programs: dict[str, str]) -> None:
    """Run programs, each given by the place that errors show, and its code.

    Raises:
        AssertionError: some have failed; what they raised is printed.
    """
    failed = []
    for place, code in programs.items():
        settings, variables = dict(jax.config.values), dict(os.environ)
        try:
            exec(compile(code, place, "exec"), {"__name__": "__main__"})
        except Exception:
            failed.append(place)
            print(f"{place}: failed\n{traceback.format_exc()}")
        for name, value in settings.items():
            if jax.config.values[name] != value:
                jax.config.update(name, value)
        os.environ.clear()
        os.environ.update(variables)
    assert not failed, failed
