"""The job that learns music: model, run, commands, samples."""

import csv
import io
import itertools

import jax
import jax.numpy as jnp
import mido
import music_files
import numpy as np
import pytest
from g2p_words import interrupt_after, plain_jax  # noqa: F401
from job_runs import empty_pictures, models_made_once  # noqa: F401
from oracles import loop64
from test_cli import one_line, ostinato
from tolerance import assert_close

from ostinato.apps import files
from ostinato.apps.errors import UserError
from ostinato.apps.music import midi, model, read, rolls, use
from ostinato.apps.music.job import Job
from ostinato.apps.music.model import Batch, Composer
from ostinato.apps.music.report import Likelihood
from ostinato.apps.music.settings import Settings
from ostinato.apps.music.train import train
from ostinato.apps.tensors import MODEL_FILE, RESUME_FILE

SIZES = dict(hidden=4, layers=1, batch=4, epochs=3, transpose=2)
TINY = "--hidden 16 --layers 1 --batch 4 --lr 0.03 --dropout 0 --transpose 0".split()
KINDS = [("gru", "independent"), ("lstm", "independent"), ("gru", "chained")]


@pytest.fixture
def pieces(tmp_path):
    return music_files.write_json(tmp_path / "pieces.json")


def random_batch(lengths):
    rng = np.random.default_rng(0)
    table = (rng.random((len(lengths), max(lengths), 88)) < 0.2).astype(np.float32)
    return Batch(jnp.asarray(table), jnp.array(lengths, jnp.int32))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


# -------------------------------------------------------------------------- the model


def nll_loop(composer, params, roll):
    """Return the negative log-likelihood of every frame of one piece, in float64."""
    p = {name: np.asarray(leaf, np.float64) for name, leaf in params.items()}
    spec = loop64.Spec(composer.mode, 88, composer.hidden)
    before = np.concatenate([np.zeros((1, 88)), roll[:-1]])
    h_0 = np.zeros((1, 1, composer.hidden))
    states = (h_0,) if composer.mode == "gru" else (h_0, h_0)
    y = loop64.forward(spec, p["rnn"], before[None], *states).y[0]
    found = np.zeros(len(roll))
    for t, frame in enumerate(roll):
        for key in range(88):
            logit = y[t] @ p["write"][:, key] + p["write_bias"][key]
            if composer.chords == "chained":
                for unit in range(model.CHAIN_UNITS):
                    degree = 1 + unit % 87
                    if key < degree:
                        continue
                    value = y[t] @ p["chain_state"][:, unit] + p["chain_bias"][unit]
                    value += frame[:degree] @ p["chain_read"][:degree, unit]
                    logit += max(value, 0) * p["chain_write"][unit, key]
                logit += frame[:key] @ p["chain_direct"][:key, key]
            chance = sigmoid(logit)
            found[t] -= np.log(chance if frame[key] else 1 - chance)
    return found


@pytest.mark.parametrize("mode, chords", KINDS)
def test_the_likelihood_equals_a_float64_loop(mode, chords):
    composer = Composer(mode, 5, 1, chords, 0.0)
    params = composer.init(jax.random.key(0))
    if chords == "chained":
        direct = jax.random.normal(jax.random.key(1), (88, 88))
        params["chain_direct"] = direct
    batch = random_batch([3, 0, 2])
    got = composer.nll(params, batch, None)
    for b, length in enumerate([3, 0, 2]):
        want = np.zeros(3)
        roll = np.asarray(batch.rolls[b, :length], np.float64)
        if length:
            want[:length] = nll_loop(composer, params, roll)
        assert_close(got[b], want, terms=1000)
    sums = composer.sums(params, batch)
    assert_close(sums, [got[:, 0].sum(), got[:, 1:].sum()], terms=100)
    loss = composer.loss(params, batch, jax.random.key(0))
    assert_close(loss, got.sum() / 5, terms=100)


@pytest.mark.parametrize("chords", ["independent", "chained"])
def test_no_probability_depends_on_what_comes_later(chords):
    composer = Composer("gru", 4, 1, chords, 0.0)
    params = composer.init(jax.random.key(0))
    if chords == "chained":
        params["chain_direct"] = jnp.ones((88, 88))
    rolls_of = random_batch([2])

    def logits(table):
        return composer.logits(params, rolls_of._replace(rolls=table))[0]

    slopes = np.asarray(jax.jacrev(logits)(rolls_of.rolls))[:, :, 0]
    slopes = slopes.reshape(2 * 88, 2 * 88)  # by the places of logits and of notes
    assert (np.triu(slopes) == 0).all()
    below = np.tril(slopes[88:, 88:], -1) if chords == "chained" else slopes[88:, :88]
    assert np.count_nonzero(below) > 1000


def test_the_probabilities_of_all_chords_sum_to_1(monkeypatch):
    monkeypatch.setattr(model, "NOTES", 5)
    monkeypatch.setattr(model, "CHAIN_UNITS", 8)
    composer = Composer("gru", 4, 1, "chained", 0.0)
    params = composer.init(jax.random.key(0))
    chords = np.array(list(itertools.product((0, 1), repeat=5)), np.float32)
    table = np.stack([np.broadcast_to(chords[9], chords.shape), chords], axis=1)
    batch = Batch(jnp.asarray(table), jnp.full(32, 2, jnp.int32))
    chances = np.exp(-np.asarray(composer.nll(params, batch, None))[:, 1])
    np.testing.assert_allclose(chances.sum(), 1, rtol=1e-5)


def test_the_default_model_has_300_000_parameters():
    settings = Settings.choose()
    for chords in model.CHORDS:
        composer = Composer(
            settings.mode, settings.hidden, settings.layers, chords, 0.0
        )
        shapes = jax.eval_shape(composer.init, jax.random.key(0))
        count = sum(leaf.size for leaf in jax.tree.leaves(shapes))
        assert 250_000 < count < 400_000


def test_dropout_acts_in_training_alone():
    composer = Composer("gru", 4, 2, "independent", 0.5)
    params, batch = composer.init(jax.random.key(0)), random_batch([4])
    loss = [float(composer.loss(params, batch, jax.random.key(i))) for i in (0, 0, 1)]
    assert loss[0] == loss[1] != loss[2]
    assert float(composer.nll(params, batch, None).sum() / 4) not in loss


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(mode="rnn"), "`mode` must be gru or lstm, got 'rnn'"),
        (dict(chords="free"), "`chords` must be independent or chained, got 'free'"),
        (dict(hidden=0), "`hidden` must be 1 to 4096, got 0"),
        (dict(layers=9), "`layers` must be 1 to 8, got 9"),
        (dict(dropout=1.0), "`dropout` must be at least 0 and below 1"),
        (dict(hidden=2**12, layers=8), "`hidden` must be smaller for this model"),
    ],
)
def test_bad_models(change, message):
    sizes = dict(mode="gru", hidden=4, layers=1, chords="chained", dropout=0.0)
    with pytest.raises(UserError, match=message):
        Composer(**sizes | change)


def test_likelihoods_are_means_over_the_frames_of_all_pieces():
    got = Likelihood.of(np.array([6.0, 20.0]), pieces=3, frames=13)
    assert got == (2.0, 2.0)
    assert Likelihood.of(np.array([3.0, 20.0]), 3, 13).nll == 2.0


def test_the_frequencies_of_notes_as_a_model(pieces):
    job = Job(Settings.choose(epochs=1), read.read([pieces], 2, 0))
    learn = np.concatenate(job.pieces.learn)
    chance = (learn.sum(0) + 0.5) / (len(learn) + 1)
    got = job._frequencies()
    nll = first = frames = 0
    for roll in job.pieces.test:
        for t, frame in enumerate(roll):
            one = -sum(
                np.log(c if on else 1 - c) for c, on in zip(chance, frame, strict=True)
            )
            nll, first = nll + one, first + (one if t == 0 else 0)
            frames += 1
    np.testing.assert_allclose(got.nll_all, nll / frames)
    np.testing.assert_allclose(got.nll, (nll - first) / (frames - 3))


def test_epochs_hold_every_piece_transposed(pieces):
    job = Job(
        Settings.choose(epochs=1, batch=4, transpose=3), read.read([pieces], 2, 0)
    )
    for number in range(2):
        batches, again = ([*job.epoch(number)] for _ in range(2))
        assert sum(map(job.count, batches)) == sum(map(len, job.pieces.learn))
        assert len(batches) == job.num_batches
        for a, b in zip(batches, again, strict=True):
            np.testing.assert_array_equal(a.rolls, b.rolls)
    found = {
        int(np.flatnonzero(roll[:length].any(0))[0])
        for batch in batches
        for roll, length in zip(batch.rolls, batch.lengths, strict=True)
        if length
    }
    assert len(found) > 1 and found <= set(range(48 - 21 - 3, 48 - 21 + 4))


# --------------------------------------------------------------------- run, commands


def test_train_then_sample(pieces, tmp_path):
    out, song = tmp_path / "run", tmp_path / "song.mid"
    arguments = ["--epochs", 100, "--out", out, *TINY]
    result = ostinato("train", "music", pieces, *arguments)
    assert result.exit_code == 0, result.stderr
    assert "8 pieces (76 frames) to learn from, 3 pieces (28 frames) to choose by" in (
        result.stdout
    )
    for name in (MODEL_FILE, "metrics.csv", "learning_curve.png", "rolls.png"):
        assert (out / name).stat().st_size > 0
    final = use.load(out).figures["final"]
    assert final["the model"]["nll"] < final["the model"]["nll_all"] < 2
    other = final["each note as often as in the pieces learned from"]
    assert other["nll"] > 4
    rows = list(csv.DictReader(io.StringIO((out / "metrics.csv").read_text())))
    assert len(rows) == 100 and float(rows[-1]["nll"]) < 2

    common = ["sample", "--model", out, "--out", song, "--frames", 24]
    contents = []
    for options in ([], [], ["--seed", 1], ["--temperature", 0.001]):
        assert ostinato(*common, *options).exit_code == 0
        contents.append(song.read_bytes())
    assert contents[0] == contents[1] != contents[2]
    start = ["--prime", pieces, "--prime-frames", 5, "--temperature", 0.1]
    result = ostinato(*common, *start)
    assert f"wrote 29 frames to {song}, the first 5 of {pieces}" in result.stdout
    got, prime = midi.read(song, 2), read.first_piece(pieces, 2)[:5]
    np.testing.assert_array_equal(got[:5], prime)
    want = music_files.matrix(music_files.piece(29))
    np.testing.assert_array_equal(got, want)
    ostinato("sample", "--model", out, "--out", song, "--seconds", 7, "--tempo", 60)
    np.testing.assert_allclose(mido.MidiFile(song).length, 7, rtol=0.2)


@pytest.mark.usefixtures("empty_pictures")
def test_an_interrupted_run_keeps_the_best_weights(pieces, tmp_path, monkeypatch):
    interrupt_after(monkeypatch, 7)
    assert train([pieces], tmp_path / "run", **SIZES | {"epochs": 9}).figures is None
    assert use.load(tmp_path / "run").figures["best"]["epoch"] >= 1


@pytest.mark.usefixtures("empty_pictures")
def test_interrupted_and_resumed_equals_uninterrupted(pieces, tmp_path, monkeypatch):
    """Check a run that is interrupted twice: at the end of an epoch, and amid one."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train([pieces], whole, **SIZES)
    for resume, updates in ((False, 2), (True, 3)):
        with monkeypatch.context() as patch:
            interrupt_after(patch, updates)
            options = {"resume": True} if resume else SIZES
            assert train([pieces], parts, **options).figures is None
    assert use.FILES.read(parts / RESUME_FILE)[1]["step"] == 5
    result = ostinato("train", "music", pieces, "--out", parts, "--resume")
    assert result.exit_code == 0 and "resuming at epoch" in result.stdout
    for name in (MODEL_FILE, RESUME_FILE):
        want, got = (use.FILES.read(out / name)[0] for out in (whole, parts))
        for key in want.keys() | got.keys():
            np.testing.assert_array_equal(got[key], want[key])


@pytest.mark.usefixtures("empty_pictures")
def test_two_devices_have_the_loss_curve_of_one(pieces, tmp_path):
    curves = []
    for count in (1, 2):
        out = tmp_path / str(count)
        train([pieces], out, devices=count, **SIZES)
        rows = csv.DictReader(io.StringIO((out / "metrics.csv").read_text()))
        curves.append([(float(row["loss"]), float(row["nll"])) for row in rows])
    np.testing.assert_allclose(*curves, rtol=1e-4)


@pytest.mark.usefixtures("empty_pictures")
def test_a_folder_has_one_run_at_a_time(pieces, tmp_path):
    out = tmp_path / "run"
    train([pieces], out, **SIZES | {"epochs": 1})
    kept = {path.name: path.read_bytes() for path in out.iterdir()}
    with files.reserved(out):
        for options in (SIZES, {"resume": True, "epochs": 2}):
            with pytest.raises(UserError, match="another run is writing to"):
                train([pieces], out, **options)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == kept
    train([pieces], out, resume=True, epochs=2)


@pytest.mark.usefixtures("empty_pictures")
def test_what_cannot_be_resumed(pieces, tmp_path):
    out = tmp_path / "run"
    train([pieces], out, **SIZES | {"epochs": 1})
    with pytest.raises(UserError, match="`hidden` must stay 4 when a run is resumed"):
        train([pieces], out, resume=True, hidden=6)
    other = pieces.with_name("other.json")
    other.write_text(pieces.read_text().replace("72", "71"))
    with pytest.raises(UserError, match="`--resume` needs the frames of the run"):
        train([other], out, resume=True)


def test_errors_of_the_commands(pieces, tmp_path):
    assert "--out" in one_line(ostinato("sample", "--model", tmp_path))
    message = one_line(ostinato("train", "music", tmp_path / "no.mid"))
    assert "cannot read" in message
    for option, value, wanted in (
        ("--mode", "rnn", "`mode` must be gru or lstm, got 'rnn'"),
        ("--transpose", 25, "`transpose` must be 0 to 24, got 25"),
        ("--per-beat", 0, "`per_beat` must be at least 1, got 0"),
        ("--minutes", 0, "`minutes` must be a number above 0"),
    ):
        assert wanted in one_line(ostinato("train", "music", pieces, option, value))


@pytest.fixture
def untrained(tmp_path):
    composer = Composer("lstm", 4, 2, "chained", 0.0)
    made = use.Trained(composer, composer.init(jax.random.key(0)), 2, {})
    use.save(tmp_path, made)
    return made


def test_a_model_comes_back(untrained, tmp_path):
    got = use.load(tmp_path)
    assert got.model == untrained.model and got.per_beat == 2
    for a, b in zip(*map(jax.tree.leaves, (got.params, untrained.params)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_samples_follow_the_probabilities(untrained):
    composer, params = untrained.model, untrained.params
    params["chain_direct"] = jax.random.normal(jax.random.key(2), (88, 88))
    prime = rolls.roll_of([[60], [64, 40], [30]])
    batch = Batch(np.zeros((1, 4, 88), np.float32), np.array([4]))
    chances = np.random.default_rng(5).random(88)
    batch.rolls[0, :3] = prime
    for key in range(88):  # each after the lower keys of the frame
        logits = np.asarray(composer.logits(params, batch)[0, 3], np.float64)
        batch.rolls[0, 3, key] = chances[key] < sigmoid(logits[key] / 0.7)
    got = use.sample(composer, params, 1, seed=5, temperature=0.7, prime=prime)
    np.testing.assert_array_equal(got, batch.rolls[0])


@pytest.mark.parametrize("temperature", [5e-324, 1e-320, 1.7e308])
@pytest.mark.parametrize("chords", ["independent", "chained"])
def test_any_temperature_draws_without_warnings(temperature, chords):
    composer = Composer("lstm", 4, 2, chords, 0.0)
    params = composer.init(jax.random.key(0))
    got = use.sample(composer, params, 3, temperature=temperature)
    again = use.sample(composer, params, 3, seed=1, temperature=temperature)
    assert (got == again).all() == (temperature < 1)  # the likelier key, or any


@pytest.mark.parametrize(
    "options, message",
    [
        (["--frames", 0], "`frames` must be 1 to 16384, got 0"),
        (["--seconds", -1], "`seconds` must be above 0 and at most 3600, got -1"),
        (["--seconds", 1, "--frames", 1], "one of --seconds and --frames"),
        (
            ["--tempo", 1000, "--seconds", 3600],
            "--seconds 3600 at --tempo 1000 are 120,000 frames, and 16,384 at most",
        ),
        (["--tempo", 5], "`tempo` must be 10 to 1000, got 5"),
        (["--temperature", 0], "`temperature` must be above 0, got 0"),
        (["--seed", -1], "`seed` must be at least 0, got -1"),
        (["--prime-frames", 3], "--prime-frames needs --prime FILE"),
        (["--prime", "no.mid"], "cannot read no.mid"),
        (["--out", "no/folder.mid", "--frames", 2], "cannot write no/folder.mid"),
    ],
)
def test_bad_options_of_sample(untrained, tmp_path, options, message):
    result = ostinato("sample", "--model", tmp_path, *options)
    assert message in one_line(result)


def test_a_piece_is_alone_in_what_it_is_written_to(untrained, tmp_path):
    with (tmp_path / "song.mid").open("wb") as file:
        target = f"/dev/fd/{file.fileno()}"
        options = "--model", tmp_path, "--frames", 1, "--out", target
        result = ostinato("sample", *options)
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == f"wrote 1 frame to {target}\n"
    assert (tmp_path / "song.mid").read_bytes().startswith(b"MThd")


def test_a_prime_that_would_be_written_over(untrained, tmp_path, pieces):
    before = pieces.read_bytes()
    options = ["--prime", pieces, "--out", pieces]
    message = one_line(ostinato("sample", "--model", tmp_path, *options))
    assert "`out` must lead to another file than the piece to go on with" in message
    assert pieces.read_bytes() == before


def test_a_prime_that_is_too_short(untrained, tmp_path, pieces):
    options = ["--prime", pieces, "--prime-frames", 30]
    message = one_line(ostinato("sample", "--model", tmp_path, *options))
    assert "`prime_frames` must be 1 to 9, the frames of the piece, got 30" in message


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(model={"mode": "gru"}), "`Composer` must have mode, hidden"),
        (dict(per_beat=0), "`per_beat` must be 1 to 96, got 0"),
        (dict(per_beat="2"), "`per_beat` must be an integer, got '2'"),
        (dict(figures=0), "`figures` must be a mapping, got 0"),
    ],
)
def test_a_tampered_header_is_one_line(untrained, tmp_path, change, message):
    tensors, header = use.FILES.read(tmp_path / MODEL_FILE)
    use.FILES.save(tmp_path / MODEL_FILE, tensors, {**header, **change})
    assert "is damaged or no file" in (one := one_line(sample_of(tmp_path)))
    assert message in one


def test_a_file_that_is_cut_off_is_one_line(untrained, tmp_path):
    path = tmp_path / MODEL_FILE
    path.write_bytes(path.read_bytes()[:-50])
    assert "is damaged or no file" in one_line(sample_of(tmp_path))


def sample_of(folder):
    return ostinato("sample", "--model", folder, "--out", folder / "a.mid")


def piece(*keys):
    return np.eye(88, dtype=np.uint8)[list(keys)]


def job_of(*learn):
    other = [piece(40, 41)]
    settings = Settings.choose(epochs=1, hidden=4)
    return Job(settings, rolls.Pieces(list(learn), other, other))


def test_each_epoch_moves_pieces_by_other_semitones():
    job = job_of(*(piece(40, 40) for _ in range(12)))
    lowest = [
        [int(roll[0].argmax()) for batch in job.epoch(n) for roll in batch.rolls]
        for n in range(2)
    ]
    assert sorted(lowest[0]) != sorted(lowest[1])


def test_where_pieces_end_is_in_the_fingerprint():
    one = job_of(piece(1, 2), piece(3, 4, 5))
    other = job_of(piece(1, 2, 3), piece(4, 5))
    assert one.fingerprint() != other.fingerprint()


def test_a_prime_leaves_space_for_fewer_frames():
    prime = np.zeros((rolls.MOST_FRAMES - 3, 88), np.uint8)
    model = Composer("gru", 2, 1, "independent", 0.0)
    with pytest.raises(UserError, match="`frames` must be 1 to 3, got 4"):
        use.sample(model, {}, 4, prime=prime)


def test_dropout_within_and_after_the_network_do_not_share_a_key(monkeypatch):
    keys = []

    def rnn(*given, key, **options):
        keys.append(key)
        return run(*given, **options)

    def bernoulli(key, *given):
        keys.append(key)
        return draw(key, *given)

    run, draw = model.ost.rnn, jax.random.bernoulli
    composer = Composer("gru", 4, 2, "independent", 0.5)
    params = composer.init(jax.random.key(0))
    monkeypatch.setattr(model.ost, "rnn", rnn)
    monkeypatch.setattr(jax.random, "bernoulli", bernoulli)
    composer.loss(params, random_batch([4]), jax.random.key(0))
    first, second = (jax.random.key_data(key).tolist() for key in keys)
    assert first != second
