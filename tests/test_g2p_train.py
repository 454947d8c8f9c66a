import csv

import jax
import numpy as np
import pytest
from g2p_words import (
    arrays,
    interrupt_after,
    language,
    learn,
    plain_jax,  # noqa: F401
    quiet,
    spell,
    train_tiny,
)

from ostinato.apps import display, files, run
from ostinato.apps import report as curves
from ostinato.apps.errors import UserError
from ostinato.apps.g2p import checkpoint, report
from ostinato.apps.g2p.job import Job
from ostinato.apps.g2p.models import MODELS
from ostinato.apps.g2p.pronounce import Pronouncer
from ostinato.apps.g2p.settings import Settings
from ostinato.apps.report import CSV_FILE, CURVE_FILE
from ostinato.apps.tensors import MODEL_FILE, RESUME_FILE

OPTIONS = {
    "ctc": dict(model="ctc", layers=2, dropout=0.2),
    "attention": dict(
        model="attention",
        hidden=24,
        lr=0.02,
        dropout=0.1,
        dictionary={w: p for w, p in language(260).items() if len(w) == 3},
    ),
}


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    """Train a tiny model of the language; return its folder and its output."""
    return learn(tmp_path_factory.mktemp("learned"), model="ctc")


@pytest.fixture(scope="module")
def attentive(tmp_path_factory):
    """Train a tiny model with attention; return its folder and its output."""
    return learn(tmp_path_factory.mktemp("attentive"), **OPTIONS["attention"])


@pytest.mark.parametrize(
    "run, beam", [("learned", "beam + n-gram"), ("attentive", "beam + CTC + n-gram")]
)
def test_a_tiny_model_learns_a_regular_language(run, beam, request):
    _, summary, _ = request.getfixturevalue(run)
    assert summary.best.dev_per < 5
    assert summary.figures["test", "greedy"].per < 10
    assert summary.figures["test", beam].per < 10


def test_the_folder_holds_model_figures_and_picture(learned):
    out, summary, _ = learned
    rows = list(csv.DictReader((out / CSV_FILE).read_text().splitlines()))
    assert len(rows) == 20
    assert float(rows[-1]["epoch"]) == 20
    assert (out / CURVE_FILE).read_bytes().startswith(b"\x89PNG")
    figures = checkpoint.load_model(out).figures
    assert figures["best"]["dev_per"] == summary.best.dev_per
    assert figures["final"]["test, greedy"]["words"] > 0
    assert not [path for path in out.iterdir() if path.name.startswith(".")]


def test_what_is_printed_fits_80_columns(learned):
    out, _, text = learned
    assert "PER %" in text and "test" in text
    assert max(map(len, text.replace(str(out), "out").splitlines())) <= 80


@pytest.mark.parametrize(
    "run, words", [("learned", ("Bakes", "sex")), ("attentive", ("Bak", "sex"))]
)
def test_a_trained_model_pronounces(run, words, request):
    out, _, _ = request.getfixturevalue(run)
    say = Pronouncer(out)
    assert say(words) == [spell(word.lower()) for word in words]
    assert say([]) == []


def test_an_unknown_letter_is_a_clear_line(learned):
    with pytest.raises(UserError, match=r"cannot pronounce 'b3t': unknown '3'; use a"):
        Pronouncer(learned[0])(["b3t"])
    with pytest.raises(UserError, match=r"cannot pronounce '-': it has no letter"):
        Pronouncer(learned[0])(["-"])


def test_attention_looks_at_the_letters_of_the_word(attentive):
    (alignment,) = Pronouncer(attentive[0]).align(["Sex"])
    assert alignment.word == "sex" and alignment.phonemes == ("S", "EH", "K", "S")
    assert alignment.weights.shape == (5, 3)
    np.testing.assert_allclose(alignment.weights.sum(-1), 1, rtol=1e-5)
    assert np.ptp(alignment.weights, axis=0).max() > 0.2  # the attention moves


def test_a_model_without_attention_has_no_alignment(learned):
    with pytest.raises(UserError, match="no attention to draw.*--model attention"):
        Pronouncer(learned[0]).align(["sex"])


def test_the_alignment_is_drawn(tmp_path):
    path = tmp_path / "alignment.png"
    report.draw_alignment(path, "ab", ("AA", "B"), np.eye(3, 2))
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("letters, phonemes", [(40, 40), (100, 1)])
def test_the_picture_of_a_long_word_is_bounded(
    tmp_path, monkeypatch, letters, phonemes
):
    monkeypatch.setattr(report, "MOST_INCHES", 5.0)  # a smaller one is drawn sooner
    path = tmp_path / "alignment.png"
    weights = np.eye(phonemes + 1, letters)
    report.draw_alignment(path, "a" * letters, ("AA",) * phonemes, weights)
    width, height = np.frombuffer(path.read_bytes()[16:24], ">u4")  # of the PNG header
    assert max(width, height) <= 150 * report.MOST_INCHES


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_interrupted_and_resumed_equals_uninterrupted(tmp_path, monkeypatch, options):
    whole, halved = tmp_path / "whole", tmp_path / "halved"
    train_tiny(whole, epochs=3, **options)
    with monkeypatch.context() as patch:
        interrupt_after(patch, updates=30)  # in the middle of epoch 3
        summary = train_tiny(halved, epochs=3, **options)
    assert summary.figures is None and summary.best.epoch <= 2
    assert checkpoint.FILES.read(halved / RESUME_FILE)[1]["step"] == 30
    train_tiny(halved, resume=True, draw=True, **options)
    assert (halved / CURVE_FILE).read_bytes().startswith(b"\x89PNG")
    for name in (checkpoint.MODEL_FILE, RESUME_FILE):
        want, got = arrays(whole, name), arrays(halved, name)
        assert want.keys() == got.keys()
        for key in want:
            np.testing.assert_array_equal(got[key], want[key])


def test_an_interrupt_keeps_the_best_weights(tmp_path, monkeypatch):
    interrupt_after(monkeypatch, updates=15)
    console = quiet()
    summary = train_tiny(tmp_path, epochs=4, console=console)
    assert summary.best.epoch == 1
    assert "go on with --resume" in console.export_text()
    figures = checkpoint.load_model(tmp_path).figures
    assert figures["best"]["dev_per"] == summary.best.dev_per
    assert (tmp_path / CURVE_FILE).exists()


def test_an_interrupt_before_any_evaluation_keeps_what_there_is(tmp_path, monkeypatch):
    interrupt_after(monkeypatch, updates=2)
    summary = train_tiny(tmp_path, epochs=4)
    assert summary.best is None and summary.figures is None
    model = checkpoint.load_model(tmp_path)
    assert model.params.weights.size > 0 and model.figures["best"] is None
    monkeypatch.undo()
    assert train_tiny(tmp_path, resume=True).best.epoch > 1


def test_an_interrupt_writes_the_best_weights_again(tmp_path, monkeypatch):
    tick = display.Display.tick

    def remove_then_interrupt(self, done, text):
        if "epoch 2" in text:
            (tmp_path / MODEL_FILE).unlink()
            raise KeyboardInterrupt
        tick(self, done, text)

    monkeypatch.setattr(display.Display, "tick", remove_then_interrupt)
    summary = train_tiny(tmp_path, epochs=4)
    monkeypatch.undo()
    figures = checkpoint.load_model(tmp_path).figures
    assert figures["best"] == summary.best._asdict()
    assert train_tiny(tmp_path, epochs=3, resume=True).figures


def test_a_crash_loses_only_what_came_after_the_last_save(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "SAVE_SECONDS", 0.0)
    interrupt_after(monkeypatch, updates=5, error=MemoryError)
    with pytest.raises(MemoryError):
        train_tiny(tmp_path, epochs=1)
    assert checkpoint.FILES.read(tmp_path / RESUME_FILE)[1]["step"] == 4
    assert train_tiny(tmp_path, resume=True).best.epoch == 1


def test_a_figure_that_is_no_number_ends_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(Job, "measure", lambda *_: (1.0, np.inf))
    with pytest.raises(UserError, match="dev_wer became inf at update .*smaller --lr"):
        train_tiny(tmp_path, epochs=1)
    assert not list(tmp_path.iterdir())


def test_any_run_makes_an_update(tmp_path):
    summary = train_tiny(tmp_path, minutes=1e-6)
    assert summary.best.updates == 1
    model = checkpoint.load_model(tmp_path)
    first = jax.jit(model.config.init)(jax.random.key(0))
    assert np.abs(model.params.weights - first.weights).max() > 1e-6


def test_a_run_ends_with_its_time(tmp_path):
    summary = train_tiny(tmp_path, minutes=0.02)
    assert summary.best is not None
    saved = checkpoint.FILES.read(tmp_path / RESUME_FILE)[1]
    assert saved["elapsed"] >= 1.0
    assert saved["evaluation_seconds"] > 0


def test_a_second_run_moves_the_first_away(tmp_path):
    train_tiny(tmp_path, epochs=1)
    first = (tmp_path / checkpoint.MODEL_FILE).read_bytes()
    console = quiet()
    train_tiny(tmp_path, epochs=1, seed=1, console=console)
    previous = tmp_path / "previous"
    assert (previous / checkpoint.MODEL_FILE).read_bytes() == first
    assert "is now in" in console.export_text().replace("\n", " ")
    (tmp_path / CURVE_FILE).unlink()
    (previous / "notes.txt").touch()
    train_tiny(tmp_path, epochs=1)
    assert not (previous / CURVE_FILE).exists() and (previous / CSV_FILE).exists()
    assert (previous / "notes.txt").exists()
    (tmp_path / "rolls.png").touch()  # of a run of music
    train_tiny(tmp_path, epochs=1)
    assert (previous / "rolls.png").exists() and not (tmp_path / "rolls.png").exists()


def test_the_folder_of_an_older_run_is_checked_before_a_run(tmp_path, monkeypatch):
    (tmp_path / checkpoint.MODEL_FILE).touch()
    check = files.check_folder

    def checked(folder):
        if folder.name == files.PREVIOUS:
            raise UserError("cannot write in previous/")
        check(folder)

    monkeypatch.setattr(files, "check_folder", checked)
    monkeypatch.setattr(run, "update", None)
    with pytest.raises(UserError, match="cannot write in previous"):
        train_tiny(tmp_path, epochs=1)


def end_now(*_, **__):
    raise KeyboardInterrupt


@pytest.mark.parametrize("moves", [0, 1, 2, 3])
def test_a_run_that_is_killed_at_any_moment_leaves_the_older_one(
    tmp_path, monkeypatch, moves
):
    train_tiny(tmp_path, epochs=1)
    kept = [MODEL_FILE, RESUME_FILE, CSV_FILE, CURVE_FILE]
    first = {name: (tmp_path / name).read_bytes() for name in kept}

    def files_in(folder):
        return {n: (folder / n).read_bytes() for n in kept if (folder / n).exists()}

    with monkeypatch.context() as patch:  # nothing is learned, twice
        patch.setattr(run, "update", end_now)
        for _ in range(2):
            assert train_tiny(tmp_path, epochs=1).best is None
            assert files_in(tmp_path) == first
    move, count = files.move, [moves]

    def move_some(path, target):  # as if the process was killed between two moves
        if not count[0]:
            raise MemoryError
        count[0] -= 1
        move(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(files, "move", move_some)
        with pytest.raises(MemoryError):
            train_tiny(tmp_path, epochs=1, seed=1)
    previous = tmp_path / "previous"
    assert files_in(previous) | files_in(tmp_path) == first
    train_tiny(tmp_path, epochs=1, seed=1)
    assert files_in(previous) == first


def test_a_missing_file_is_told_to_be_that_of_the_run_before(tmp_path):
    previous = tmp_path / "previous"
    train_tiny(previous, epochs=1)
    where = f"there is no .*; the run before has left one in {previous}; or train one"
    with pytest.raises(UserError, match=where):
        Pronouncer(tmp_path)
    with pytest.raises(UserError, match=where):
        train_tiny(tmp_path, resume=True)


def test_a_state_that_is_saved_has_a_model(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "SAVE_SECONDS", 0.0)
    interrupt_after(monkeypatch, updates=3, error=MemoryError)
    with pytest.raises(MemoryError):
        train_tiny(tmp_path, epochs=1)
    assert checkpoint.load_model(tmp_path).figures["best"] is None


@pytest.mark.parametrize(
    "limit, told",
    [(dict(epochs=1), "its 1 epoch"), (dict(minutes=1e-6), "its 1e-06 minutes")],
)
def test_a_run_that_is_over_says_why_it_learns_no_more(tmp_path, limit, told):
    name, console = *limit, quiet()
    train_tiny(tmp_path, **limit)
    train_tiny(tmp_path, resume=True, console=console)
    said = console.export_text()
    assert f"this run has used {told}, counted from its first start" in said
    assert f"give a larger --{name}" in said
    console = quiet()
    train_tiny(tmp_path, resume=True, console=console, epochs=2)
    assert "this run has used" not in console.export_text()


def test_evaluations_that_are_close_to_each_other_print_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "LEAST_SECONDS", 1e6)
    console = quiet()
    train_tiny(tmp_path, epochs=5, console=console)
    lines = [x for x in console.export_text().splitlines() if x.startswith("epoch ")]
    assert [line.split()[1] for line in lines] == ["1.0", "5.0"]
    assert len((tmp_path / CSV_FILE).read_text().splitlines()) == 1 + 5


@pytest.mark.parametrize(
    "pers, most", [([231, 60], 100), ([60, 60], 60), ([231, 120], 231)]
)
def test_percents_above_100_are_above_the_picture(tmp_path, monkeypatch, pers, most):
    """But a line that ends there is in the picture."""
    drawn = []
    monkeypatch.setattr(curves, "write_figure", lambda _, figure: drawn.append(figure))
    rows = [report.Row(1, 1, 9.0, 1, 1, 1, per, 50.0) for per in pers]
    curves.draw_curves(tmp_path, Job.curves, rows, rows[0], "a title")
    assert most < drawn[0].axes[0].get_ylim()[1] < 1.1 * most


def test_listed_test_words_are_the_ones_measured(tmp_path):
    listed = list(language())[::4]
    console = quiet()
    test_words = [*listed, "zz", "zzz"]
    summary = train_tiny(tmp_path, epochs=1, test_words=test_words, console=console)
    assert summary.figures["test", "greedy"].words == len(listed)
    assert "the dictionary lacks 2 test words" in console.export_text()


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(hidden=17), "`hidden` must stay 16 when a run is resumed, got 17"),
        (dict(model="attention"), "`model` must stay ctc when a run is resumed, got a"),
        (dict(ragged=True), "`ragged` must stay False when a run is resumed, got True"),
        (dict(test_words=["ab", "ba"]), "`--resume` needs the words of the run"),
    ],
    ids=["hidden", "model", "ragged", "words"],
)
def test_resuming_another_run_says_so(learned, options, message):
    with pytest.raises(UserError, match=message):
        train_tiny(learned[0], **{"resume": True, **options})


def test_resuming_with_other_pronunciations_says_so(learned):
    other = {w: tuple((*p, "ZH") for p in said) for w, said in language().items()}
    with pytest.raises(UserError, match="`--resume` needs the words of the run"):
        train_tiny(learned[0], resume=True, dictionary=other)


def test_resuming_nothing_says_so(tmp_path):
    with pytest.raises(UserError, match="there is no .*resume.safetensors"):
        train_tiny(tmp_path, resume=True)


def test_a_loss_that_is_no_number_names_the_learning_rate(tmp_path, monkeypatch):
    told = np.array([np.nan, 0])
    monkeypatch.setattr(run, "update", lambda state, *_, **__: (state, told))
    with pytest.raises(UserError, match="loss became nan at update 0.*smaller --lr"):
        train_tiny(tmp_path, epochs=1)


def test_a_list_of_all_words_says_so(tmp_path):
    with pytest.raises(UserError, match="list of test words .* leaves no train words"):
        train_tiny(tmp_path, epochs=1, test_words=list(language()))


def test_a_run_says_that_it_measures_at_the_end(learned):
    assert "learning is over; measuring the kept weights" in learned[2]


@pytest.mark.parametrize(
    "words, message",
    [
        ({}, "the dictionary is too small"),
        ({"AB": (("AA", "B"),)}, "must have words of a to z, ' and -, got 'AB'"),
        (dict.fromkeys(language(), (("AA",) * 90,)), "each .* is too long"),
    ],
    ids=["empty", "capitals", "long"],
)
def test_a_dictionary_that_teaches_nothing_says_so(tmp_path, words, message):
    with pytest.raises(UserError, match=message):
        train_tiny(tmp_path, epochs=1, dictionary=words)


def test_a_dictionary_without_held_out_words_says_so(tmp_path):
    with pytest.raises(UserError, match="too small: it leaves no (dev|test) words"):
        train_tiny(tmp_path, epochs=1, dictionary={"ab": (("AA", "B"),)})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "given, message",
    [
        (dict(minutes=0.0), "`minutes` must be a number above 0, got 0.0"),
        (
            dict(minutes=float("nan")),
            "`minutes` must be a finite number or none, got nan",
        ),
        (dict(epochs=0), "`epochs` must be at least 1, got 0"),
        (dict(hidden=0), "`hidden` must be at least 1, got 0"),
        (dict(dropout=1.0), "`dropout` must be at least 0 and below 1, got 1.0"),
        (dict(lr=-1.0), "`lr` must be a number above 0, got -1.0"),
        (dict(seed=-1), "`seed` must be at least 0, got -1"),
        (dict(seed=2**31), "`seed` must be at most 2147483646, got 2147483648"),
        (dict(hidden=10**6), "`hidden` must be at most 8192, got 1000000"),
        (dict(batch=2.5), "`batch` must be an integer, got 2.5"),
        (dict(model="gru"), "`model` must be ctc or attention, got gru"),
    ],
)
def test_bad_settings_name_the_field(given, message):
    with pytest.raises(UserError, match=message):
        Settings.choose(**given)


@pytest.mark.parametrize("name", MODELS)
def test_settings_are_chosen_by_the_time(name):
    short, long = Settings.choose(2, model=name), Settings.choose(model=name)
    assert short.model == long.model == name
    assert short.hidden < long.hidden
    assert long.minutes == Settings.default_minutes
    assert (
        Settings.choose(model=name, minutes=2, hidden=long.hidden).hidden == long.hidden
    )
    assert Settings.choose(model=name, epochs=3).minutes is None


@pytest.mark.parametrize(
    "seconds, text", [(-1, "0:00"), (61.9, "1:01"), (3661, "1:01:01")]
)
def test_clock(seconds, text):
    assert display.clock(seconds) == text
