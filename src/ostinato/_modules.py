"""What errors say of modules that are not imported, or need what is not installed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import NoReturn


def advising(
    package: str, imports: Mapping[str, str], others: str = ""
) -> Callable[[str], NoReturn]:
    """Return the `__getattr__` of a package, which says what to import.

    Args:
        package: the name of the package.
        imports: by the name of a module what to write for it.
        others: what to write for any other public name; empty where there is none.
    """

    def refuse(name: str) -> NoReturn:
        advice = imports.get(name, "" if name.startswith("_") else others)
        raise AttributeError(
            f"module {package!r} has no attribute {name!r}"
            + (f"; write: {advice}" if advice else "")
        )

    return refuse


def not_installed(error: ModuleNotFoundError, extra: str) -> ModuleNotFoundError:
    """Return the error that says what to install.

    Args:
        error: the error of the import.
        extra: the extra of ostinato that installs the package.
    """
    return ModuleNotFoundError(
        f"this needs the package `{error.name}`, which is not installed; run: "
        f"pip install 'ostinato[{extra}]'",
        name=error.name,
    )


@contextlib.contextmanager
def needs(extra: str) -> Iterator[None]:
    """Say what to install if an import in the context finds no package.

    Args:
        extra: the extra of ostinato that installs the package.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise not_installed(error, extra) from None
