"""Run the Python code of pages, each page as a program: `python run_pages.py PAGE...`.

All pages run in one process, since importing the frameworks takes longer than they do.
A page whose packages are not installed is left out. Errors show the line of the page.
"""

import importlib.util
import re
import sys
import traceback
from pathlib import Path


def program(page: str) -> str:
    """Return the Python code of a page, each line where it stands on the page."""
    kept, inside = [], False
    for line in page.splitlines():
        fence = line.startswith("```")
        if fence:
            inside = line == "```python"
        kept.append("" if fence or not inside else line)
    return "\n".join(kept)


def missing(code: str) -> list[str]:
    """Return the packages that code imports and that are not installed."""
    packages = re.findall(r"^ *(?:from|import) (\w+)", code, re.M)
    return [name for name in packages if importlib.util.find_spec(name) is None]


def main(paths: list[str]) -> int:
    """Run all pages and return the number of those that fail."""
    failed = 0
    for path in paths:
        code = program(Path(path).read_text(encoding="utf-8"))
        if lacking := missing(code):
            print(f"{path}: not run, needs {', '.join(lacking)}")
            continue
        try:
            exec(compile(code, path, "exec"), {"__name__": "__main__"})
        except Exception:
            failed += 1
            print(f"{path}: failed\n{traceback.format_exc()}")
        else:
            print(f"{path}: ran")
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
