"""The line of a user's program that an equation comes from."""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax.extend.core import JaxprEqn

_LIBRARIES = (Path(jax.__file__).parent, Path(__file__).parent)
_INSTALLED = {Path(sysconfig.get_paths()[k]) for k in ("stdlib", "purelib", "platlib")}


def user_line(equations: Sequence[JaxprEqn]) -> str:
    """Return the line that made the last equation, as ``file:line (function)``.

    Args:
        equations: the equation, after the ones that it stands in. Inside a jitted
            function JAX knows the lines of that function alone, so for a function of a
            library the equation around it tells.
    """
    installed = None
    for eqn in reversed(equations):
        traceback = eqn.source_info.traceback
        for frame in traceback.frames if traceback else ():  # the innermost first
            path = Path(frame.file_name)
            if frame.file_name.startswith("<frozen") or _within(path, _LIBRARIES):
                continue
            line = f"{frame.file_name}:{frame.line_num} ({frame.function_name})"
            if not _within(path, _INSTALLED):
                return line
            installed = installed or line
    return installed or "an unknown line"


def _within(path: Path, folders: Any) -> bool:
    return any(folder in path.parents for folder in folders)
