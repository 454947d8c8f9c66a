"""Layers for other libraries: one module each, which imports that library."""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from .._modules import advising as _advising

if not _TYPE_CHECKING:  # to type checkers, it would make any name one of the package
    _MODULES = ("equinox", "flax", "keras", "linen", "sequence_layers")
    __getattr__ = _advising(
        __name__,
        {name: f"import {__name__}.{name}" for name in _MODULES},
        f"from {__name__}.flax import ..., or from another of {', '.join(_MODULES)}",
    )
