"""Errors that the user can mend, and packages that may be missing."""

import importlib
from types import ModuleType


class G2PError(Exception):
    """Something the user can mend; the command line prints it as one line."""


def require(module: str) -> ModuleType:
    """Import an optional package, or say in one line how to get it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise G2PError(
            f"this command needs the package `{error.name}`, which is not installed; "
            "run: pip install 'ostinato[demo]'"
        ) from None
