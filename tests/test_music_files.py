"""Files of music: piano rolls of every kind, pickles that attack, MIDI."""

import json
import os
import pickle

import mido
import music_files
import numpy as np
import pytest
from music_files import cells, collection, matrix, piece, write_midi
from scipy.io import savemat

from ostinato.apps.errors import UserError
from ostinato.apps.music import midi, read, rolls, unpickle


def bad(message, path, content):
    path.write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        read.read([path], 2, 0)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


# ------------------------------------------------------------------------------- rolls


def test_a_roll_of_notes_and_of_numbers():
    frames = [[60, np.nan, 64.0], (), (-1, 21, 108)]
    roll = rolls.roll_of(frames)
    assert roll.dtype == np.uint8 and roll.shape == (3, 88)
    assert [np.flatnonzero(row).tolist() for row in roll] == [[39, 43], [], [0, 87]]
    np.testing.assert_array_equal(rolls.roll_of(roll.tolist()), roll)


@pytest.mark.parametrize(
    "frames, message",
    [
        ([[60]], "must have 2 to 16384 frames, got 1"),
        ([[20], [60]], "a whole number, 21 to 108, got 20"),
        ([[60.5], [60]], "a whole number, 21 to 108, got 60.5"),
        ([[np.inf], [60]], "a whole number, 21 to 108, got inf"),
        ([[0.5] * 88, [0] * 88], "a frame of 88 numbers must have 0 and 1 alone"),
        ([60, 64], "a frame a list of at most 1024 numbers, got 60 as a frame"),
        ([[[60, 64]], [[62]]], r"numbers, got \[\[60, 64\]\] as a frame"),
        ("60", "a piece must be a list of frames, got '60'"),
        (["60", "64"], "numbers, got '60' as a frame"),
        ([["60"], [62]], r"numbers, got \['60'\] as a frame"),
        ([{60: 1}, {62: 1}], "numbers, got {60: 1} as a frame"),
        ([[None], [60]], r"numbers, got \[None\] as a frame"),
        (np.zeros((2, 1, 88)), "numbers, got array"),
        ([[60] * 2000, [60]], "numbers, got .* as a frame"),
    ],
)
def test_bad_frames(frames, message):
    with pytest.raises(UserError, match=message):
        rolls.roll_of(frames)


def test_transposed_stays_on_the_piano():
    roll = rolls.roll_of([[22, 60], [106]])
    for given, moved in ((1, 1), (5, 2), (-1, -1), (-9, -1), (0, 0)):
        got = rolls.transposed(roll, given)
        want = rolls.roll_of([[22 + moved, 60 + moved], [106 + moved]])
        np.testing.assert_array_equal(got, want)
    silent = np.zeros((2, 88), np.uint8)
    np.testing.assert_array_equal(rolls.transposed(silent, 3), silent)


def test_pieces_are_dealt_out_once_each():
    pieces = [rolls.roll_of([[30 + i], []]) for i in range(25)]
    parts, again = (rolls.dealt(pieces, 3) for _ in range(2))
    assert [len(part) for part in parts] == [21, 2, 2]
    seen = sorted(int(np.flatnonzero(p)[0]) for part in parts for p in part)
    assert seen == [9 + i for i in range(25)]
    for a, b in zip(parts, again, strict=True):
        np.testing.assert_array_equal(a, b)
    assert any(
        not np.array_equal(a, b)
        for a, b in zip(parts.test, rolls.dealt(pieces, 4).test, strict=True)
    )
    with pytest.raises(
        UserError,
        match="have three different pieces at least, .* got 2",
    ):
        rolls.dealt(pieces[:2], 0)


# ------------------------------------------------------------------------- collections


@pytest.mark.parametrize("name", music_files.WRITERS)
def test_every_kind_of_collection(tmp_path, name):
    path = music_files.WRITERS[name](tmp_path / name)
    got = read.read([tmp_path], 2, 0)
    for part, pieces in zip(got, collection().values(), strict=True):
        assert len(part) == len(pieces)
        for roll, frames in zip(part, pieces, strict=True):
            np.testing.assert_array_equal(roll, matrix(frames))
    np.testing.assert_array_equal(read.first_piece(path, 2), got.test[0])


def test_several_files_are_joined(tmp_path):
    paths = [write(tmp_path / name) for name, write in music_files.WRITERS.items()]
    got = read.read(paths, 2, 0)
    assert [len(part) for part in got] == [32, 12, 12]


def test_files_that_are_none(tmp_path):
    for name in ("a.mat", "a.pickle", "a.npz", "a.json", "a.mid"):
        for content in (b"", b"\x80\x04nothing", b"[" * 5000):
            bad("cannot read .*: ", tmp_path / name, content)
    with pytest.raises(UserError, match="cannot read .*: No such file or directory"):
        read.read([tmp_path / "none.mat"], 2, 0)
    with pytest.raises(UserError, match="must be a folder, or end in .mid, .midi"):
        read.read([tmp_path / "a.txt"], 2, 0)
    with pytest.raises(UserError, match="cannot read .*/none: No such file or folder"):
        read.read([tmp_path / "none"], 2, 0)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="has no file of .mid"):
        read.read([tmp_path / "empty"], 2, 0)


@pytest.mark.parametrize(
    "content, message",
    [
        (b"[]", "it must have the parts train, valid, test"),
        (b'{"train": [], "valid": []}', "it must have the parts train, valid, test"),
        (
            b'{"train": [[[60], [61]], [[60], [200]]], "valid": [], "test": []}',
            "train, piece 2: a note must be a whole number, 21 to 108, got 200",
        ),
        (
            b'{"train": [[60, "a"]], "valid": [], "test": []}',
            "train, piece 1: a piece must be a list of frames, .* got 60 as a frame",
        ),
        (
            b'{"train": 5, "valid": [], "test": []}',
            "a.json: train must be a list of pieces, got 5",
        ),
        (
            b'{"train": [[[60], [61]]], "valid": null, "test": []}',
            "valid must be a list of pieces, got None",
        ),
    ],
)
def test_collections_with_other_content(tmp_path, content, message):
    bad(message, tmp_path / "a.json", content)


def test_matrices_hold_real_numbers(tmp_path):
    parts = {f"{part}data": cells(pieces) for part, pieces in collection().items()}
    parts["validdata"][0, 0] = parts["validdata"][0, 0] + 0.5j
    savemat(tmp_path / "a.mat", parts)
    with pytest.raises(UserError, match="a matrix must hold real numbers, got complex"):
        read.read([tmp_path / "a.mat"], 2, 0)


def test_a_part_without_pieces(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"train": [[[60], [61]]], "valid": [[[60], [61]]], "test": []}')
    with pytest.raises(UserError, match="there must be pieces to test on, got none"):
        read.read([path], 2, 0)
    with pytest.raises(UserError, match="must have a piece to test on, got none"):
        read.first_piece(path, 2)


@pytest.mark.parametrize("name", ["a.json", "a.mid", "a.mat"])
def test_pipes_are_not_waited_for(tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(UserError, match=f"cannot read .*{name}: it is no file"):
        read.read([tmp_path / name], 2, 0)
    with pytest.raises(UserError, match=f"cannot read .*{name}: it is no file"):
        read.first_piece(tmp_path / name, 2)


def test_files_that_are_too_large(tmp_path, monkeypatch):
    path = music_files.write_json(tmp_path / "a.json")
    with monkeypatch.context() as patch:
        patch.setattr(read, "MOST_TOTAL", 20)
        with pytest.raises(UserError, match="it must have at most 20 frames"):
            read.read([path], 2, 0)
    monkeypatch.setattr(read, "MOST_BYTES", 10**4)
    with pytest.raises(UserError, match="train.npy in it is too large, of 1,048,576"):
        read.read([music_files.bombs(tmp_path / "a.npz")], 2, 0)
    path.write_bytes(bytes(10**4 + 1))
    with pytest.raises(UserError, match="it is too large, of 10,001 bytes"):
        read.read([path], 2, 0)


# ----------------------------------------------------------------------------- pickles


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("order", "CF")
def test_pickles_hold_lists_numbers_and_arrays(protocol, order):
    arrays = [
        np.arange(6).reshape(2, 3, order=order).astype(kind)
        for kind in ("<i4", ">i8", "f8", "u1", "?")
    ]
    mixed = np.empty(2, object)
    mixed[:] = [(1, 2), [np.float32(0.5)]]
    arrays.append(np.arange(24).reshape(2, 3, 4, order=order).transpose(1, 0, 2))
    given = {"a": arrays, "b": mixed, "c": [np.int64(7), None, "text", 2.5, True]}
    got = unpickle.loads(pickle.dumps(given, protocol))
    for a, b in zip(got["a"], arrays, strict=True):
        np.testing.assert_array_equal(np.array(list(a)), b)
    assert list(got["b"]) == [(1, 2), [0.5]] and got["c"] == given["c"]


class Attack:
    def __init__(self, function, *arguments):
        self.given = function, arguments

    def __reduce__(self):
        return self.given


@pytest.mark.parametrize(
    "attack, name",
    [
        (Attack(exec, "raise SystemExit"), "exec"),
        (Attack(getattr, "", "join"), "getattr"),
        (Attack(np.load, "file"), "load"),
        (Attack(np.frombuffer, b"a"), "frombuffer"),
    ],
)
@pytest.mark.parametrize("protocol", [0, 2, 5])
def test_pickles_that_name_functions_are_refused(tmp_path, attack, name, protocol):
    content = pickle.dumps({"train": [attack]}, protocol)
    bad(f"this one names .*{name}, which is not run", tmp_path / "a.pickle", content)
    array = np.empty(1, object)
    array[0] = attack
    np.savez(tmp_path / "b.npz", train=array, valid=array, test=array)
    with pytest.raises(UserError, match=f"names .*{name}, which is not run"):
        read.read([tmp_path / "b.npz"], 2, 0)


def test_pickles_of_other_dtypes_are_refused():
    for kind in ("S3", "c8", "M8[s]", [("a", "i4")], [("a", "i4"), ("b", "O")]):
        with pytest.raises(UserError, match="an array must hold numbers, got the dtyp"):
            unpickle.loads(pickle.dumps(np.zeros(2, kind)))


@pytest.mark.parametrize(
    "content",
    [b"]r\xff\xff\xff\x7f.", b"]p2147483647\n.", b"\x96" + b"\0" * 5 + b"\1\0\0"],
)
def test_pickles_that_ask_for_memory_are_refused(tmp_path, content):
    bad(
        "cannot read .*(place 2,147,483,647|expected .* bytes)",
        tmp_path / "a.pkl",
        content,
    )


class Zeros:
    """An array in whose pickle a number stands for its content."""

    def __reduce__(self):
        shape = 10**9, 1
        return np._core.numeric._frombuffer, (10**9, np.dtype("u1"), shape, "C")


def test_pickles_with_numbers_in_place_of_bytes_are_refused():
    with pytest.raises(UserError, match="content as bytes, got 1000000000"):
        unpickle.loads(pickle.dumps(Zeros()))


def test_pickles_that_nest_without_end_are_refused(tmp_path):
    nested = [60]
    for _ in range(100):
        nested = [nested, nested]
    content = pickle.dumps({"train": [[nested, nested]], "valid": [], "test": []})
    bad("train, piece 1: .* numbers, got .* as a frame", tmp_path / "a.pkl", content)


def test_arrays_of_lists_have_one_axis():
    with pytest.raises(UserError, match="must have one axis, got the shape .1, 2."):
        unpickle.loads(pickle.dumps(np.array([["a", 1]], object)))


@pytest.mark.parametrize(
    "code, detail", [("os.abort()", "the reader crashed"), ("print('why')", "why")]
)
def test_a_reader_that_crashes(tmp_path, monkeypatch, code, detail):
    script = tmp_path / "script.py"
    script.write_text(f"import os; {code}")
    monkeypatch.setattr(read, "_SCRIPT", script)
    bad(f"it is damaged, or lacks cells .*{detail}", tmp_path / "a.mat", b"")


@pytest.mark.parametrize("name", [*music_files.WRITERS, "a.mid"])
def test_changed_bytes_cause_no_other_error(tmp_path, name):
    write = music_files.WRITERS.get(name, lambda path: write_midi(path, [(0, 99, 60)]))
    content, rng = write(tmp_path / name).read_bytes(), np.random.default_rng(0)
    other = tmp_path / f"b{name[1:]}"
    failed, tries = 0, 4 if name == "a.mat" else 40  # each starts a process
    for _ in range(tries):
        changed = bytearray(content)
        for at in rng.integers(0, len(content), rng.integers(1, 9)):
            changed[at] = rng.integers(256)
        other.write_bytes(changed)
        try:
            read.first_piece(other, 2)
        except UserError as error:
            failed += str(other) in str(error)
    assert failed > tries // 8


# -------------------------------------------------------------------------------- MIDI


def test_midi_is_read_by_beats(tmp_path):
    notes = [(96, 192, 60), (100, 250, 64), (192, 193, 60), (192, 240, 20)]
    path = write_midi(tmp_path / "a.mid", notes)
    got = midi.read(path, 2)  # 48 ticks a frame
    assert [(np.flatnonzero(row) + 21).tolist() for row in got] == [
        [60, 64],
        [60, 64],
        [60, 64],
    ]
    assert midi.read(path, 96).shape == (250 - 96, 88)
    drums = write_midi(tmp_path / "b.mid", notes, channel=9)
    with pytest.raises(UserError, match="must have 2 to 16384 frames, got 0"):
        midi.read(drums, 2)
    long = write_midi(tmp_path / "c.mid", [(0, 96 * 20000, 60)])
    with pytest.raises(UserError, match="got 40000 with 2 of them in a beat"):
        midi.read(long, 2)


def test_notes_that_do_not_end_and_notes_twice(tmp_path):
    track = mido.MidiTrack(
        [
            mido.Message("note_on", note=60, time=0),
            mido.Message("note_on", note=60, time=96),
            mido.Message("note_on", note=60, velocity=0, time=96),
            mido.Message("note_off", note=60, time=10),
            mido.Message("note_on", note=62, time=86),
            mido.MetaMessage("end_of_track", time=96),
        ]
    )
    path = tmp_path / "a.mid"
    mido.MidiFile(ticks_per_beat=96, tracks=[track]).save(path)
    got = midi.read(path, 1)
    assert [(np.flatnonzero(row) + 21).tolist() for row in got] == [
        [60],
        [60],
        [],
        [62],
    ]


def test_half_frames_are_rounded_up(tmp_path):
    notes = [(60 * i, 60 * i + 60, 60 + i) for i in range(8)]
    path = write_midi(tmp_path / "a.mid", notes, ticks_per_beat=240)
    got = midi.read(path, 2)  # 120 ticks a frame
    assert [(np.flatnonzero(row) + 60 - 39).tolist() for row in got] == [
        [60],
        [61, 62],
        [63, 64],
        [65, 66],
        [67],
    ]


@pytest.mark.parametrize("kind", [2, 3])
def test_midi_files_of_other_types_are_refused(tmp_path, kind):
    track = mido.MidiTrack([mido.Message("note_on", note=60, time=0)])
    path = tmp_path / "a.mid"
    mido.MidiFile(type=2, tracks=[track, track]).save(path)
    content = bytearray(path.read_bytes())
    content[9] = kind  # of the header: its name, length and type
    path.write_bytes(content)
    with pytest.raises(UserError, match=f"must be of type 0 or 1, got type {kind}"):
        read.read([path], 2, 0)


def test_equal_pieces_are_read_once(tmp_path):
    for i in range(4):
        midi.write(tmp_path / f"{i}.mid", rolls.roll_of(piece(6, i)), 2, 120)
    (tmp_path / "x.mid").write_bytes((tmp_path / "0.mid").read_bytes())
    notes = []
    got = read.read([tmp_path, tmp_path / "0.mid"], 2, 0, notes.append)
    assert [len(part) for part in got] == [2, 1, 1]
    (note,) = notes
    assert note == f"left out, since another file has the same notes: {tmp_path}/x.mid"


def test_hidden_files_of_folders_are_left_out(tmp_path):
    for i in range(3):
        midi.write(tmp_path / f"{i}.mid", rolls.roll_of(piece(6, i)), 2, 120)
    (tmp_path / ".hidden").mkdir()
    for name in ("._0.mid", ".hidden/1.mid"):
        (tmp_path / name).write_bytes(b"")
    assert sum(map(len, read.read([tmp_path], 2, 0))) == 3


@pytest.mark.parametrize("per_beat", [1, 3, 7])
def test_what_is_written_is_read(tmp_path, per_beat):
    roll = np.random.default_rng(0).random((20, 88)) < 0.1
    roll[0, 0] = roll[-1, 87] = True
    path = tmp_path / "a.mid"
    midi.write(path, roll, per_beat, 120)
    np.testing.assert_array_equal(midi.read(path, per_beat), roll)
    seconds = 20 / per_beat * 60 / 120
    np.testing.assert_allclose(mido.MidiFile(path).length, seconds, rtol=1e-2)


def test_midi_files_are_dealt_out(tmp_path):
    for i in range(5):
        roll = rolls.roll_of(piece(6 + i, i))
        midi.write(tmp_path / f"{i}.mid", roll, 2, 120)
    got = read.read([tmp_path], 2, 0)
    assert [len(part) for part in got] == [3, 1, 1]
    bad("cannot read .*: it is damaged", tmp_path / "x.mid", b"MThd\0\0\0\6")
    bad(r"it is damaged \(EOFError\)", tmp_path / "x.mid", b"")
    header = b"MThd\0\0\0\6\0\0\0\1\0\0"
    track = b"MTrk\0\0\0\4\0\xff\x2f\0"
    bad("got the division 0", tmp_path / "x.mid", header + track)


def test_a_note_of_two_channels_sounds_until_both_have_ended(tmp_path):
    track = mido.MidiTrack()
    for kind, channel, time in [
        ("note_on", 0, 0), ("note_on", 1, 1), ("note_off", 0, 1), ("note_off", 1, 2),
    ]:  # fmt: skip
        track.append(mido.Message(kind, note=60, channel=channel, time=time))
    file = mido.MidiFile(type=0, ticks_per_beat=1, tracks=[track])
    file.save(tmp_path / "a.mid")
    roll = midi.read(tmp_path / "a.mid", 1)
    assert roll.shape == (4, 88)
    np.testing.assert_array_equal(np.argwhere(roll), [[t, 60 - 21] for t in range(4)])


def test_a_collection_that_two_paths_lead_to_is_read_once(tmp_path):
    path, link = tmp_path / "a.json", tmp_path / "b.json"
    parts = {part: [[[60], [61, n]]] for n, part in enumerate(read.PARTS, 70)}
    path.write_text(json.dumps(parts))
    link.symlink_to(path)
    pieces = read.read([tmp_path, path, link], 2, 0)
    assert list(map(len, pieces)) == [1, 1, 1]


def test_a_mat_file_may_have_a_part_without_pieces(tmp_path):
    io = pytest.importorskip("scipy.io")
    piece = np.zeros((3, 88))
    piece[:, 7] = 1
    cells = {"traindata": [piece, piece], "validdata": [], "testdata": [piece]}
    for name, pieces in cells.items():
        cells[name] = np.empty((1, len(pieces)), object)
        cells[name][0, :] = pieces
    io.savemat(tmp_path / "a.mat", cells)
    found = read.first_piece(tmp_path / "a.mat", 2)
    np.testing.assert_array_equal(found, piece)
