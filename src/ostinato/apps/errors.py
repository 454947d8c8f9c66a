"""The error for problems that the user can fix, such as a missing package."""

import importlib
from types import ModuleType


class UserError(Exception):
    """A problem that the user can fix; the command line prints it as one line."""


def require(module: str) -> ModuleType:
    """Import an optional package, or raise a UserError that says how to install it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise UserError(
            f"this command needs the package `{error.name}`, which is not installed; "
            "run: pip install 'ostinato[demo]'"
        ) from None
