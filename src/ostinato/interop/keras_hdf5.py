"""Which arrays of an `.h5` file are whose: by the names of layers."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from .keras_layers import KINDS, Arrays, Place, Stored, kind_of, places_of, stored_layer

_ARRAYS = ("kernel", "recurrent_kernel", "bias")
_UNNAMED = (
    "the file does not tell its arrays: no names of arrays fit this layer alone, as if "
    "it had been renamed, or the file written in part; save the model as .keras"
)

Scope = tuple[str, ...]
"""The names of the groups around an array."""


def read_hdf5(stored: Arrays, model: Mapping[str, Any]) -> Iterator[Stored]:
    """Yield the layers of a model in an `.h5` file, where groups have their names.

    The arrays of a model inside of the file's, with those of all models in it, are
    there together.

    Args:
        stored: the arrays, those of a group in Keras's order.
        model: the description of the model.
    """
    everywhere = [*places_of(model)]
    inside: dict[str, list[Place]] = {}
    marks = collections.Counter(map(_mark, everywhere))
    for place in everywhere:
        inside.setdefault(place.names[0], []).append(place)
    for name, places in inside.items():
        cells = {}
        if any(kind_of(place.layer) in KINDS for place in places):
            cells = _cells(stored, name, inside)
        if len(places[0].names) > 1:
            scopes = _scopes(cells, places, marks)
        else:
            scopes = [[*cells]]
        for place, own in zip(places, scopes, strict=True):
            wanted = 2 if place.layer.get("class_name") == "Bidirectional" else 1
            own = _forward_first(own) if len(own) == wanted else []
            arrays = [array for scope in own for array in cells[scope]]
            yield stored_layer(place, arrays, _UNNAMED)


def _cells(
    stored: Arrays, name: str, names: Iterable[str]
) -> dict[Scope, list[np.ndarray]]:
    """Return the arrays of every cell in the group of a layer or model, by its scope.

    Names may have slashes, so that the groups of others lie in that of `name`.
    """
    group = f"model_weights/{name}/"
    others = tuple(
        f"model_weights/{other}/" for other in names if other.startswith(f"{name}/")
    )
    leaves: dict[Scope, dict[str, np.ndarray]] = {}
    for path, array in stored.items():
        if path.startswith(group) and not path.startswith(others):
            *scope, leaf = path.removeprefix(group).split("/")
            leaves.setdefault(tuple(scope), {})[leaf.split(":")[0]] = array
    return {
        scope: [found[leaf] for leaf in _ARRAYS if leaf in found]
        for scope, found in leaves.items()
        if "recurrent_kernel" in found
    }


def _mark(place: Place) -> str | None:
    """Return what descriptions of the same layer have in common, if anything."""
    mark = place.layer.get("shared_object_id")
    return None if mark is None else str(mark)


def _are_one(places: Sequence[Place], marks: collections.Counter[str | None]) -> bool:
    """Return whether the configuration says that several layers are the same one.

    Keras 2 marks all descriptions of a layer in an `.h5` file, at times but the first.
    """
    found = collections.Counter(map(_mark, places))
    unmarked = found.pop(None, 0)
    return len(places) == 1 or (
        unmarked <= 1
        and len(found) == 1
        and all(marks[mark] == count for mark, count in found.items())
    )


def _scopes(
    cells: Iterable[Scope],
    places: Sequence[Place],
    marks: collections.Counter[str | None],
) -> list[list[Scope]]:
    """Return for each layer of a model the cells that are its own by their names.

    A cell is that of the layer whose names fit best. If they fit several layers alike,
    it is none of theirs, unless the configuration says that these are the same one.
    """
    cells = [*cells]
    fits = [_fits(cells, place) for place in places]
    best: dict[Scope, tuple[bool, int]] = {}
    for fit in fits:
        best |= {scope: max(fit[scope], best.get(scope, fit[scope])) for scope in fit}
    owners: dict[Scope, list[Place]] = {scope: [] for scope in best}
    own = []
    for place, fit in zip(places, fits, strict=True):
        most = max(fit.values(), default=None)
        own.append([s for s in fit if fit[s] == most == best[s]])
        for scope in own[-1]:
            owners[scope].append(place)
    clear = {scope for scope, them in owners.items() if _are_one(them, marks)}
    return [scopes if clear.issuperset(scopes) else [] for scopes in own]


def _fits(cells: Sequence[Scope], place: Place) -> dict[Scope, tuple[bool, int]]:
    """Return the cells that have a layer's name, and how well the names before it fit.

    Names around a cell are those of models, of the layer, of the direction if the layer
    runs both, and, unless Keras was an old one, of the cell. Fits are compared first by
    whether all names are those of the models, then by how many are.
    """
    own, whole = place.names[-1].split("/"), "/".join(place.names).split("/")
    both = place.layer.get("class_name") == "Bidirectional"
    for after in (2, 1) if both else (1, 0):
        fits = {}
        for scope in cells:
            names = [*scope[: max(0, len(scope) - after)]]
            if names[-len(own) :] == own:
                same = _common_end(names, whole)
                fits[scope] = (same == min(len(names), len(whole)), same)
        if fits:
            return fits
    return {}


def _common_end(a: Sequence[str], b: Sequence[str]) -> int:
    """Return how many of the last names are the same."""
    pairs = zip(reversed(a), reversed(b), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _forward_first(scopes: list[Scope]) -> list[Scope]:
    """Return the cells in order of their directions.

    Keras lists the backward one first only if the forward one is not trained.
    """
    if len(scopes) != 2:
        return scopes
    pairs = zip(*scopes, strict=False)
    first, second = next(filter(lambda pair: pair[0] != pair[1], pairs), ("", ""))
    swapped = second.startswith("forward_") and not first.startswith("forward_")
    return scopes[::-1] if swapped else scopes
