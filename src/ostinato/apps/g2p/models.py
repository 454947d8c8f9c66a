"""A table of the models by name."""

from ..errors import UserError
from . import attention, ctc
from .model import Config

MODELS: dict[str, type[Config]] = {c.name: c for c in (ctc.Config, attention.Config)}


def config_class(name: str) -> type[Config]:
    """Return the `Config` class of a model.

    Raises:
        UserError: no model has this name.
    """
    if name not in MODELS:
        raise UserError(f"`model` must be {' or '.join(MODELS)}, got {name}")
    return MODELS[name]
