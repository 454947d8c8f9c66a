"""Piano rolls: which of the 88 keys of a piano sound in each frame of a piece."""

from collections.abc import Sequence
from numbers import Real
from reprlib import repr as short
from typing import Any, NamedTuple

import numpy as np

from ..errors import UserError

NOTES, LOWEST = 88, 21  # keys, and the number that MIDI gives to the lowest
MOST_FRAMES = 2**14  # of a piece
MOST_TOTAL = 2**23  # of all pieces
MOST_VOICES = 1024  # of a frame


class Pieces(NamedTuple):
    """Pieces to learn from, to choose weights by and to test on: uint8 `[T, 88]`."""

    learn: list[np.ndarray]
    choose: list[np.ndarray]
    test: list[np.ndarray]


def roll_of(frames: Any) -> np.ndarray:
    """Return the roll of a piece, uint8 `[T, 88]`.

    Args:
        frames: a list of them. Each has the numbers of its notes, 21 to 108, where NaN
            and numbers below 0 stand for silent voices; or every one has 88 numbers, 0
            or 1.

    Raises:
        UserError: a frame holds something else than numbers, a note is no such number,
            or there are too few or too many frames.
    """
    if not isinstance(frames, list | tuple | np.ndarray):
        raise UserError(f"a piece must be a list of frames, got {short(frames)}")
    if not 2 <= len(frames) <= MOST_FRAMES:
        raise UserError(
            f"a piece must have 2 to {MOST_FRAMES} frames, got {len(frames)}"
        )
    rows = [_numbers(frame) for frame in frames]
    if all(row.size == NOTES for row in rows):
        table = np.stack(rows)
        if not np.isin(table, (0, 1)).all():
            raise UserError("a frame of 88 numbers must have 0 and 1 alone")
        return table.astype(np.uint8)
    roll = np.zeros((len(rows), NOTES), np.uint8)
    for frame, row in zip(roll, rows, strict=True):
        keys = row[row >= 0] - LOWEST
        if not np.isin(keys, np.arange(NOTES)).all():
            raise UserError(
                f"a note must be a whole number, {LOWEST} to {LOWEST + NOTES - 1}, got "
                f"{keys[~np.isin(keys, np.arange(NOTES))][0] + LOWEST:g}"
            )
        frame[keys.astype(np.int64)] = 1
    return roll


def _numbers(frame: Any) -> np.ndarray:
    """Return the numbers of a frame, float64 `[N]`.

    Raises:
        UserError: it is no list of numbers. What is nested in it is not looked at: a
            file may nest more than memory holds.
    """
    if isinstance(frame, np.ndarray):
        good = frame.ndim == 1 and frame.dtype.kind in "biuf"
    else:
        good = isinstance(frame, list | tuple) and len(frame) <= MOST_VOICES
        good = good and all(isinstance(one, Real | np.bool_) for one in frame)
    if not good:
        raise UserError(
            "a piece must be a list of frames, and a frame a list of at most "
            f"{MOST_VOICES} numbers, got {short(frame)} as a frame"
        )
    return np.array(frame, np.float64)


def transposed(roll: np.ndarray, semitones: int) -> np.ndarray:
    """Return a roll in which every note is higher by so many semitones.

    It is moved less far if a note would leave the piano.
    """
    keys = np.flatnonzero(roll.any(0))
    if keys.size:
        semitones = int(np.clip(semitones, -keys[0], NOTES - 1 - keys[-1]))
    return np.roll(roll, semitones, axis=1)


def dealt(pieces: Sequence[np.ndarray], seed: int) -> Pieces:
    """Deal pieces out at random: a tenth to choose by, a tenth to test on.

    Args:
        pieces: three at least, or none.
        seed: with the number of pieces it decides which go where.

    Raises:
        UserError: there are fewer than three.
    """
    if not pieces:
        return Pieces([], [], [])
    if len(pieces) < 3:
        raise UserError(
            "files of one piece must have three different pieces at least, to learn "
            f"from, to choose by and to test on, got {len(pieces)}; give more of them"
        )
    held = max(1, len(pieces) // 10)
    order = np.random.default_rng(seed).permutation(len(pieces))
    parts = np.sort(order[2 * held :]), order[:held], order[held : 2 * held]
    return Pieces(*([pieces[i] for i in part] for part in parts))
