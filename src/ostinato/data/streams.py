"""The function `streams`: a corpus as chunks of a few long streams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import _checks
from .._typing import Shaped
from .epochs import Epochs
from .sequences import check_list, check_sequences, on_host

Chunk = tuple[np.ndarray, np.ndarray]


class Streams(Epochs[Chunk]):
    """The result of `streams`: chunks `(x, resets)` of all lanes.

    Attributes:
        lanes: the number of streams that are read side by side.
        chunk: the number of steps of a batch.
        left_out: the number of steps at the end of the order that an epoch leaves out,
            less than `lanes * chunk`.
    """

    lanes: int
    chunk: int
    left_out: int

    def __init__(
        self,
        corpus: np.ndarray,
        lengths: np.ndarray,
        lanes: int,
        chunk: int,
        seed: int,
        shuffle: bool,
    ) -> None:
        super().__init__(seed, shuffle)
        self.lanes, self.chunk = lanes, chunk
        self.left_out = len(corpus) % (lanes * chunk)
        self._corpus, self._lengths = corpus, lengths
        self._begins = np.cumsum(lengths) - lengths

    def __repr__(self) -> str:
        sequences, steps = len(self._lengths), len(self._corpus)
        return (
            f"Streams({sequences} sequences, {steps} steps, lanes={self.lanes}, "
            f"chunk={self.chunk})"
        )

    @property
    def _facts(self) -> tuple[np.ndarray, Any]:
        step = self._corpus.dtype.str, self._corpus.shape[1:]
        return self._lengths, (self.lanes, self.chunk, step)

    def _order(self, number: int) -> Sequence[Chunk]:
        rng = self._generator(number)
        count = len(self._lengths)
        return _Chunks(
            self, np.arange(count) if rng is None else rng.permutation(count)
        )


class _Chunks(Sequence[Chunk]):
    """The chunks of one epoch, each gathered from the corpus when it is read."""

    def __init__(self, streams: Streams, order: np.ndarray) -> None:
        self._streams = streams
        self._steps = len(streams._corpus) // (streams.lanes * streams.chunk)
        self._first = np.arange(streams.lanes) * self._steps * streams.chunk
        lengths = streams._lengths[order]
        self._ends = np.cumsum(lengths)  # in the order of the epoch
        self._begins = self._ends - lengths
        self._shifts = streams._begins[order] - self._begins

    def __len__(self) -> int:
        return self._steps

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        chunk = self._streams.chunk
        at = self._first[:, None] + index * chunk + np.arange(chunk)
        which = np.searchsorted(self._ends, at, side="right")
        resets = at == self._begins[which]
        resets[:, 0] |= index == 0
        return self._streams._corpus[at + self._shifts[which]], resets


def streams(
    corpus: Shaped[np.ndarray, "N ..."] | Sequence[Shaped[np.ndarray, "n ..."]],
    lanes: int,
    chunk: int,
    *,
    seed: int = 0,
    shuffle: bool = True,
) -> Streams:
    """Cut a corpus into chunks of long streams, for truncated backpropagation.

    The sequences of the corpus are put one after another, in another order in every
    epoch, and divided into `lanes` streams of equal length. Chunk k has the steps from
    `k * chunk` on of every stream, so that the state after chunk k is the state before
    chunk k + 1.

    Args:
        corpus: one sequence `[N, ...]`, such as a text, or a list of sequences
            `[n, ...]`. An array is not copied and may be memory-mapped. A tuple
            `(inputs, targets)` would be two texts: stack them as columns of one.
        lanes: the number of streams, the batch axis.
        chunk: the number of steps of a chunk.
        seed: decides the order of every epoch, with its number. It has no effect on
            one sequence.
        shuffle: False keeps the order of the sequences. It has no effect on one.

    Returns:
        `Streams`: each batch is `(x, resets)` with x `[lanes, chunk, ...]` and bools
        `[lanes, chunk]`, True at the first step of every sequence, and of every stream
        at the beginning of an epoch. A stream may begin within a sequence.

    Raises:
        TypeError: `corpus` is neither an array nor a list of arrays of one dtype.
        ValueError: the corpus has fewer than `lanes * chunk` steps, or the shapes of
            its sequences differ in more than the first size.

    Examples:
        Inputs and targets of a language model are columns of one corpus:

        >>> import numpy as np
        >>> from ostinato import data
        >>> text = np.arange(21)
        >>> pairs = np.stack([text[:-1], text[1:]], axis=-1)
        >>> chunks = data.streams(pairs, lanes=2, chunk=4)
        >>> for x, resets in chunks:
        ...     inputs, targets = x[..., 0], x[..., 1]
        ...     print(inputs.tolist(), resets.any(1).tolist())
        [[0, 1, 2, 3], [8, 9, 10, 11]] [True, True]
        [[4, 5, 6, 7], [12, 13, 14, 15]] [False, False]
        >>> chunks.left_out
        4
    """
    lanes = _checks.check_size("lanes", lanes)
    chunk = _checks.check_size("chunk", chunk)
    if isinstance(corpus, (list, tuple)):
        arrays = check_sequences("corpus", check_list("corpus", corpus))
        array = np.concatenate(arrays)
        lengths = np.array([len(a) for a in arrays], np.int64)
    else:
        _checks.check_unmasked("corpus", corpus)
        if not hasattr(corpus, "dtype") or not getattr(corpus, "shape", ()):
            raise TypeError(
                "`corpus` must be an array [N, ...] or a list of arrays [n, ...], got "
                f"{_checks.describe(corpus)}"
            )
        array, lengths = on_host("corpus", corpus), np.array([len(corpus)], np.int64)
    if len(array) < lanes * chunk:
        raise ValueError(
            f"`corpus` must have at least lanes * chunk = {lanes * chunk} steps, got "
            f"{len(array)}; use fewer lanes or shorter chunks"
        )
    return Streams(array, lengths, lanes, chunk, seed, shuffle)
