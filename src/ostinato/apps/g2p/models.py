"""A table of the models by name."""

from . import attention, ctc
from .errors import G2PError
from .model import Config

MODELS: dict[str, type[Config]] = {c.name: c for c in (ctc.Config, attention.Config)}


def config_class(name: str) -> type[Config]:
    """Return the `Config` class of a model.

    Raises:
        G2PError: no model has this name.
    """
    if name not in MODELS:
        raise G2PError(f"`model` must be {' or '.join(MODELS)}, got {name}")
    return MODELS[name]
