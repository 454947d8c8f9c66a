"""Annotations of public names, which give shapes, can be read at run time."""

import inspect
import typing

import jax
import pytest

import ostinato as ost

FUNCTIONS = [
    f
    for m in (ost, ost.cells, ost.data, ost.ragged)
    for f in vars(m).values()
    if callable(f)
]
FUNCTIONS += [f for f in vars(ost.ragged.RaggedArray).values() if inspect.isfunction(f)]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_annotations_resolve_without_jaxtyping(function):
    typing.get_type_hints(function)


def test_shapes_do_not_change_types():
    hints = typing.get_type_hints(ost.rnn)
    assert hints["x"] is jax.Array
    assert "*B T I" in ost.rnn.__annotations__["x"]
