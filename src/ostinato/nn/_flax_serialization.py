"""`flax.serialization` of RaggedArrays; importing this module registers it."""

from __future__ import annotations

from typing import Any

from flax import serialization

from ..ragged import RaggedArray


def to_state_dict(batch: RaggedArray) -> dict[str, Any]:
    """Return what is saved of a batch."""
    arrays = {"data": batch.data, "lengths": batch.lengths}
    return {**arrays, "max_length": batch.max_length}


def from_state_dict(batch: RaggedArray, state: dict[str, Any]) -> RaggedArray:
    """Return a saved batch, with the axis and the dim of `batch`.

    Raises:
        ValueError: the state is not that of a RaggedArray, or does not fit together.
    """
    missing = {"data", "lengths", "max_length"} - state.keys()
    if missing:
        raise ValueError(
            "the state of a RaggedArray must have data, lengths and max_length, got "
            f"{sorted(state)}"
        )
    return RaggedArray(
        state["data"],
        state["lengths"],
        axis=batch.axis,
        dim=batch.dim,
        max_length=int(state["max_length"]),
    )


serialization.register_serialization_state(
    RaggedArray, to_state_dict, from_state_dict, override=True
)
