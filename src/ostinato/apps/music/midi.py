"""MIDI files: read as piano rolls, and written from them."""

import io
from pathlib import Path

import mido
import numpy as np

from .. import files
from ..errors import UserError
from .rolls import LOWEST, MOST_FRAMES, NOTES

PERCUSSION = 9  # the channel that has drums, counted from 0
TICKS, VELOCITY = 480, 80  # of a beat, of every note that is written
SLOWEST, FASTEST = 10, 1000  # quarter notes in a minute


def read(path: Path, per_beat: int) -> np.ndarray:
    """Read a MIDI file as a roll, uint8 `[T, 88]`.

    Begin and end of every note are rounded to frames; it sounds for one at least. The
    silence before the first note and after the last is left out, and so are drums,
    pedals, and notes that a piano does not have.

    Args:
        path: the file.
        per_beat: frames of a quarter note.

    Raises:
        UserError: the piece has too few or too many frames.
        Exception: the file is malformed.
    """
    file = mido.MidiFile(file=io.BytesIO(path.read_bytes()), clip=True)
    if file.type == 2:
        raise UserError(
            "it must be of type 0 or 1, got type 2, whose tracks are pieces of their "
            "own; write each track to a file"
        )
    if file.type not in (0, 1):
        raise UserError(f"it must be of type 0 or 1, got type {file.type}")
    if file.ticks_per_beat <= 0:
        raise UserError(
            "its time must be counted in ticks of a beat, not in seconds, and a beat "
            f"must have some, got the division {file.ticks_per_beat}"
        )
    spans = [span for track in file.tracks for span in _spans(track)]

    def frame(tick: int) -> int:  # the nearest, the later one of two
        return (2 * tick * per_beat + file.ticks_per_beat) // (2 * file.ticks_per_beat)

    rounded = [(frame(begin), frame(end), note) for begin, end, note in spans]
    first = min((begin for begin, _, _ in rounded), default=0)
    last = max((max(begin + 1, end) for begin, end, _ in rounded), default=0)
    if not 2 <= last - first <= MOST_FRAMES:
        raise UserError(
            f"a piece must have 2 to {MOST_FRAMES} frames, got {last - first} with "
            f"{per_beat} of them in a beat"
        )
    roll = np.zeros((last - first, NOTES), np.uint8)
    for begin, end, note in rounded:
        roll[begin - first : max(begin + 1, end) - first, note - LOWEST] = 1
    return roll


def _spans(track: mido.MidiTrack) -> list[tuple[int, int, int]]:
    """Return begin and end in ticks, and the number, of every note of a track."""
    spans, sounding, now = [], {}, 0
    for message in track:
        now += message.time
        if message.type not in ("note_on", "note_off"):
            continue
        if message.channel == PERCUSSION or not 0 <= message.note - LOWEST < NOTES:
            continue
        voice = message.channel, message.note
        if voice in sounding:
            spans.append((sounding.pop(voice), now, message.note))
        if message.type == "note_on" and message.velocity > 0:
            sounding[voice] = now
    return spans + [(begin, now, note) for (_, note), begin in sounding.items()]


def write(path: Path, roll: np.ndarray, per_beat: int, tempo: float) -> None:
    """Write a roll as a MIDI file for piano; a note sounds until a frame without it.

    Args:
        path: the file.
        roll: `[T, 88]`, 0 or 1.
        per_beat: frames of a quarter note.
        tempo: quarter notes in a minute.

    Raises:
        UserError: the file cannot be written.
    """
    track = mido.MidiTrack()
    track.append(mido.MetaMessage("set_tempo", tempo=mido.bpm2tempo(tempo)))
    silent = np.zeros((1, NOTES), np.int8)
    changes = np.diff(np.concatenate([silent, roll.astype(np.int8), silent]), axis=0)
    before = 0
    for frame, row in enumerate(changes):
        now = round(frame * TICKS / per_beat)
        for kind, sign in (("note_off", -1), ("note_on", 1)):
            for key in np.flatnonzero(row == sign):
                note, time = int(key) + LOWEST, now - before
                velocity = VELOCITY if sign > 0 else 0
                message = mido.Message(kind, note=note, velocity=velocity, time=time)
                track.append(message)
                before = now
    track.append(mido.MetaMessage("end_of_track"))
    content = io.BytesIO()
    mido.MidiFile(type=0, ticks_per_beat=TICKS, tracks=[track]).save(file=content)
    files.write(path, content.getvalue())
