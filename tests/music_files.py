"""Small pieces of music, and the files that hold them, for the tests of the job."""

import json
import pickle
import zipfile

import mido
import numpy as np
from scipy.io import savemat

CHORDS = (48, 64, 67), (53, 65, 69), (55, 62, 71), (48, 64, 72)
PARTS = {"train": 8, "valid": 3, "test": 3}


def piece(length, first=0):
    """Make a piece whose frames are chords in a fixed order."""
    return [CHORDS[(first + t) % len(CHORDS)] for t in range(length)]


def collection():
    """Make three parts with pieces of 9 and 10 frames."""
    return {
        part: [piece(9 + i % 2, i) for i in range(count)]
        for part, count in PARTS.items()
    }


def matrix(frames):
    table = np.zeros((len(frames), 88))
    for row, notes in zip(table, frames, strict=True):
        row[np.array(notes, int) - 21] = 1
    return table


def cells(pieces):
    """Return pieces as a cell array `[1, N]` of matrices."""
    found = np.empty((1, len(pieces)), object)
    found[0] = [matrix(frames) for frames in pieces]
    return found


def write_json(path):
    path.write_text(json.dumps(collection()))
    return path


def write_pickle(path, protocol=2):
    path.write_bytes(pickle.dumps(collection(), protocol))
    return path


def write_mat(path):
    savemat(path, {f"{part}data": cells(p) for part, p in collection().items()})
    return path


def write_npz(path):
    parts = {}
    for part, pieces in collection().items():
        parts[part] = np.empty(len(pieces), object)
        parts[part][:] = [np.array(frames, np.float64) for frames in pieces]
    np.savez(path, **parts)
    return path


WRITERS = {
    "a.json": write_json,
    "a.pickle": write_pickle,
    "a.mat": write_mat,
    "a.npz": write_npz,
}


def write_midi(path, notes, ticks_per_beat=96, channel=0):
    """Write notes `(begin, end, number)` in ticks."""
    events = [(begin, 1, note) for begin, _, note in notes]
    events += [(end, 0, note) for _, end, note in notes]
    track, before = mido.MidiTrack(), 0
    for time, on, note in sorted(events):
        kind = "note_on" if on else "note_off"
        track.append(mido.Message(kind, note=note, time=time - before, channel=channel))
        before = time
    mido.MidiFile(ticks_per_beat=ticks_per_beat, tracks=[track]).save(path)
    return path


def bombs(path):
    """Write a small archive whose member says that it is large."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for part in PARTS:
            archive.writestr(f"{part}.npy", bytes(2**20))
    return path
