"""The job that forecasts the columns of a table: file, model, run, commands."""

import csv
import itertools
import shutil
import time
import types
from datetime import datetime, timedelta

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from g2p_words import interrupt_after, plain_jax  # noqa: F401
from job_runs import empty_pictures, models_made_once  # noqa: F401
from oracles import loop64
from rich.console import Console
from test_cli import one_line, ostinato
from tolerance import assert_close

from ostinato.apps import display, run
from ostinato.apps.devices import Devices
from ostinato.apps.errors import UserError
from ostinato.apps.forecast import report, table, use
from ostinato.apps.forecast.job import Job
from ostinato.apps.forecast.model import Batch, Forecaster, _dropped
from ostinato.apps.forecast.settings import Settings
from ostinato.apps.forecast.train import train
from ostinato.apps.forecast.windows import Scale, Windows, constant_in
from ostinato.apps.settings import resumed
from ostinato.apps.tensors import MODEL_FILE, RESUME_FILE

BEGIN = datetime(2020, 1, 1)
CONSTANT = "9007199254740991"
TINY = "--look-back 8 --horizon 8 --segment 4 --hidden 16 --dropout 0 --lr 0.03"


def write(path, lines):
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def waves(tmp_path):
    """Write two waves of 8 hours, with gaps, and a constant column."""
    rows = ["wave,when,other,constant"]
    for hour in range(300):
        value = f"{np.sin(hour * np.pi / 4):.6f}" if hour % 50 else ""
        other = 5 + 3 * np.cos(hour * np.pi / 4)
        date = BEGIN + timedelta(hours=hour)
        rows.append(f"{value},{date},{other:.6f},{CONSTANT}")
    return write(tmp_path / "waves.csv", rows)


# -------------------------------------------------------------------------- the table


def test_read_finds_dates_numbers_and_gaps(waves):
    read = table.read(waves)
    assert read.names == ("wave", "other", "constant")
    assert read.dates[1] == BEGIN + timedelta(hours=1)
    assert read.step == timedelta(hours=1)
    assert read.values.shape == (300, 3) and np.isnan(read.values).sum() == 6
    filled = table.filled(read)
    assert filled[50, 0] == filled[49, 0] and filled[0, 0] == filled[1, 0]
    assert np.isfinite(filled).all()


def test_scale_of_a_constant_column():
    values = np.array([[1.0, 2.0], [3.0, 2.0]])
    scale = Scale.of(values)
    standard = scale.apply(values, "ab")
    assert standard.tolist() == [[-1, 0], [1, 0]]
    np.testing.assert_allclose(scale.undo(standard), values)


@pytest.mark.parametrize(
    "offset, size", [(0, 1e-9), (3e-12, 1e-12), (1e12, 100), (0, 1e200), (0, 1e-200)]
)
def test_scale_is_relative_to_its_column(offset, size):
    waves = np.sin(np.arange(100.0))[:, None]
    values = offset + size * waves
    assert not constant_in(values).any()
    got = Scale.of(values).apply(values, "a")
    np.testing.assert_allclose(
        got, waves / waves.std() - (waves / waves.std()).mean(), atol=1e-4
    )


def test_constant_columns_are_so_up_to_rounding():
    values = np.full((1000, 3), [0.1, 0.0, -1e300])
    assert constant_in(values).all()
    scale = Scale.of(values)
    assert scale.mean.tolist() == [0.1, 0.0, -1e300] and (scale.deviation == 1).all()


@pytest.mark.parametrize("rest", [1e25, -1.7e308])
def test_columns_of_other_magnitudes_are_named(rest):
    learn = np.array([[1.0, 1.0], [3.0, 3.0]])
    with pytest.raises(UserError, match="the column 'b' must stay within 1e.15 stand"):
        Scale.of(learn).apply(np.array([[1.0, rest]]), "ab")


@pytest.mark.parametrize(
    "lines, message",
    [
        (["a,b"], "must have a row of names and two rows of numbers"),
        (["a,b", "1,2", "3,4"], "must have a column of dates such as .* got 1, 2 in"),
        (["d,a", "2020-01-01,1", "x,2"], "line 3: no date: 'x'"),
        (["d,a", "2020-01-02,1", "2020-01-01,2"], "line 3: dates must ascend, got"),
        (["d,a", "2020-01-01,1", "2020-01-02,one"], "line 3: 'a' is no number: 'one'"),
        (["d,a", "2020-01-01,1", "2020-01-02,inf"], "line 3: 'a' is no number: 'inf'"),
        (["d,a", "2020-01-01,1", "2020-01-02,1_0"], "line 3: 'a' is no number: '1_0'"),
        (["d,a", "2020-01-01,1", "2020-01-02,١"], "line 3: 'a' is no number: '١'"),
        (
            ["d,a", "2020-01-01,1", "2020-01-02,-2e300"],
            r"at most 1e\+300, got '-2e300'",
        ),
        (["d,a", "2020-01-01,1", "2020-01-02"], "line 3: must have 2 cells, got 1"),
        (["d", "2020-01-01", "2020-01-02"], "must have a column of numbers beside 'd'"),
    ],
)
def test_bad_files(tmp_path, lines, message):
    with pytest.raises(UserError, match=message):
        table.read(write(tmp_path / "bad.csv", lines))


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(UserError, match="cannot read .*: No such file or directory"):
        table.read(tmp_path / "none.csv")
    (tmp_path / "bytes.csv").write_bytes(b"a,b\n\xff\xfe\x00")
    with pytest.raises(UserError, match="no CSV file in UTF-8: .*; save it as UTF-8"):
        table.read(tmp_path / "bytes.csv")
    empty = ["d,a", "2020-01-01,", "2020-01-02,NaN"]
    with pytest.raises(UserError, match="the column 'a' has no numbers"):
        table.filled(table.read(write(tmp_path / "empty.csv", empty)))


def test_parts():
    assert table.parts_of(100, (0.6, 0.2, 0.2)) == (60, 20, 20)
    assert table.parts_of(101, (0.5, 0.25, 0.25)) == (50, 25, 26)
    assert table.parts_of(100, (50, 20, 10)) == (50, 20, 10)
    assert table.parts_of(90, (0.7, 0.1, 0.2)) == (63, 9, 18)  # 0.7 * 90 < 63 in floats
    for rows, split in ((4, (0.6, 0.2, 0.2)), (100, (0.001, 0.4, 0.5))):
        with pytest.raises(UserError, match=f"the table has too few rows, {rows}, for"):
            table.parts_of(rows, split)


@pytest.mark.parametrize(
    "split, message",
    [
        ((0.5, 0.5), "three numbers, for the rows to learn from, .* got 2: 0.5,0.5"),
        ((600, 0, 0), "above 0, got 0 for the rows to choose by, in 600,0,0"),
        ((1, 1, -1), "above 0, got -1 for the rows to test on, in 1,1,-1"),
        ((np.nan, 1, 1), "above 0, got nan for the rows to learn from"),
        ((0.5, np.inf, 0.5), "above 0, got inf for the rows to choose by"),
        ((0.6, 0.6, 0.2), "shares that sum to at most 1, .*, which sum to 1.4$"),
        ((50, 50, 50), "that sum to at most 100, got 50,50,50, which sum to 150"),
        ((50, 0.2, 0.2), "three shares .* or three whole numbers .* got 50,0.2,0.2"),
        ((30.9, 20.9, 20.9), "three whole numbers of rows .* got 30.9,20.9,20.9"),
    ],
)
def test_parts_that_cannot_be_are_told(split, message):
    with pytest.raises(UserError, match=message):
        table.parts_of(100, split)


# -------------------------------------------------------------------------- the model


def test_the_forecast_equals_a_float64_loop():
    model = Forecaster(3, 6, 4, 2, 4, 0.0)
    params = model.init(jax.random.key(0))
    x = np.random.default_rng(0).standard_normal((2, 6, 3), np.float32)
    got = model.forecast(params, jnp.asarray(x))
    p, spec = {k: np.asarray(a) for k, a in params.items()}, loop64.Spec("gru", 4, 4)
    want = np.zeros((2, 4, 3))
    for b in range(2):
        for c in range(3):
            past = (x[b, :, c] - x[b, -1, c]).reshape(3, 2)
            read = np.maximum(past @ p["read"] + p["read_bias"], 0)
            last = loop64.forward(spec, p["gru"], read[None], np.zeros((1, 1, 4))).h_n
            for place in range(2):
                wanted = np.concatenate([p["place"][place], p["column"][c]])
                y = loop64.forward(spec, p["gru"], wanted[None, None], last).y[0, 0]
                segment = y @ p["write"] + p["write_bias"] + x[b, -1, c]
                want[b, 2 * place : 2 * place + 2, c] = segment
    assert_close(got, want, terms=100)


def test_windows_of_weight_0_do_not_count():
    """They fill up the last batch."""
    model = Forecaster(3, 6, 4, 2, 4, 0.0)
    params = model.init(jax.random.key(0))
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, 6, 3), np.float32)
    y = rng.standard_normal((4, 4, 3), np.float32)
    weights = np.float32([1, 0, 1, 0])
    error = np.asarray(model.forecast(params, jnp.asarray(x)), np.float64) - y
    batch = Batch(*map(jnp.asarray, (x, y, weights)))
    loss = model.loss(params, batch, jax.random.key(1))
    assert_close(loss, np.abs(error[::2]).mean(), dtype=np.float32, terms=100)
    want = [(error[::2] ** 2).sum(), np.abs(error[::2]).sum()]
    assert_close(model.errors(params, *batch), want, dtype=np.float32, terms=100)


@pytest.mark.parametrize("rate, dropped", [(0.3, 77 / 256), (0.999, 255 / 256)])
def test_dropout_keeps_the_mean(rate, dropped):
    y = _dropped(jax.random.key(0), rate, jnp.ones(100_000))
    assert abs(np.mean(np.asarray(y) == 0) - dropped) < 0.006
    np.testing.assert_allclose(np.unique(y), [0, 1 / (1 - dropped)], rtol=1e-6)


def test_windows_are_those_whose_horizon_is_in_the_part():
    model = Forecaster(1, 4, 2, 2, 2, 0.0)
    values = np.arange(20.0)[:, None]
    windows = Windows(values, 10, 15, model, "test on")
    assert windows.count == 4
    x, y, weights = windows.take(np.arange(4), 6)
    assert x[0, :, 0].tolist() == [6, 7, 8, 9] and y[0, :, 0].tolist() == [10, 11]
    assert y[3, :, 0].tolist() == [13, 14] and weights.tolist() == [1, 1, 1, 1, 0, 0]
    assert Windows(values, 0, 10, model, "learn from").take([0])[0][0, 0, 0] == 0
    assert sorted(np.concatenate(list(windows.shuffled(3, 0)))) == [0, 1, 2, 3]
    with pytest.raises(
        UserError,
        match="rows to test on must hold 2 rows, .* after the first 4 rows .*; rows 20 "
        "to 20 do not; take a shorter --horizon or --look-back",
    ):
        Windows(values, 19, 20, model, "test on")


@pytest.mark.parametrize(
    "sizes, message",
    [
        ((1, 5, 4, 2, 4, 0.0), "`look_back` must be a multiple of segment = 2, got 5"),
        ((1, 4, 4, 2, 3, 0.0), "`hidden` must be even, got 3"),
        ((0, 4, 4, 2, 4, 0.0), "`columns` must be 1 to 16384, got 0"),
        ((1, 4, 4, 2, 4, 1.0), "`dropout` must be at least 0 and below 1"),
        ((1, 4, 4, 2, 4, 0.0, 1, (1,)), "`constant` must be numbers of columns, fro"),
        ((1, 4, 4, 2, 2**14, 0.0), "`hidden` must be smaller for this model"),
    ],
)
def test_bad_models(sizes, message):
    with pytest.raises(UserError, match=message):
        Forecaster(*sizes)


# --------------------------------------------------------------------- run, commands


def test_train_then_forecast(waves, tmp_path):
    out = tmp_path / "run"
    arguments = ["--epochs", 12, "--batch", 8, "--out", out, *TINY.split()]
    result = ostinato("train", "forecast", waves, *arguments)
    assert result.exit_code == 0, result.output
    assert "300 rows of 3 columns: 180 to learn from, 60 to choose by" in result.stdout
    final = use.load(out).figures["final"]
    assert final["forecast"]["mse"] < 0.1 < final["the last value, repeated"]["mse"]
    assert (out / "forecasts.png").read_bytes().startswith(b"\x89PNG")
    rows = list(csv.DictReader((out / "metrics.csv").read_text().splitlines()))
    assert len(rows) == 4 * 12 and float(rows[-1]["mse"]) < float(rows[0]["mse"])

    written = tmp_path / "next.csv"
    result = ostinato("forecast", waves, "--model", out, "--out", written)
    assert result.exit_code == 0, result.output
    head, *rows = csv.reader(written.read_text().splitlines())
    assert head == ["when", "wave", "other", "constant"] and len(rows) == 8
    assert rows[0][0] == str(BEGIN + timedelta(hours=300))
    want = 5 + 3 * np.cos(np.arange(300, 308) * np.pi / 4)
    np.testing.assert_allclose([float(row[2]) for row in rows], want, atol=1.5)
    assert all(row[3] == CONSTANT for row in rows)
    before = waves.read_bytes()
    message = one_line(ostinato("forecast", waves, "--model", out, "--out", waves))
    assert "`out` must lead to another file than the given one" in message
    assert waves.read_bytes() == before


def test_the_errors_are_printed_before_pictures_are_drawn(waves, tmp_path, monkeypatch):
    def fail(*_):
        raise MemoryError

    monkeypatch.setattr(report, "draw", fail)
    sizes = "--look-back 8 --horizon 8 --segment 4 --hidden 4".split()  # as in `SIZES`
    arguments = ["--epochs", 1, "--out", tmp_path / "run", *sizes]
    result = ostinato("train", "forecast", waves, *arguments)
    assert isinstance(result.exception, MemoryError)
    assert "the last value, repeated" in result.stdout


@pytest.mark.usefixtures("empty_pictures")
def test_an_interrupted_run_keeps_the_best_weights(waves, tmp_path, monkeypatch):
    interrupt_after(monkeypatch, 14)
    sizes = dict(look_back=8, horizon=8, segment=4, hidden=4)
    assert train(waves, tmp_path, **sizes, epochs=9).figures is None
    rows = list(csv.DictReader((tmp_path / "metrics.csv").read_text().splitlines()))
    least = min(rows, key=lambda row: float(row["mse"]))
    assert use.load(tmp_path).figures["best"]["updates"] == int(least["updates"]) > 0


@pytest.mark.usefixtures("empty_pictures")
@pytest.mark.parametrize("keep, row", [("best", 0), ("last", -1)])
def test_the_last_weights_are_kept_where_asked_for(
    waves, tmp_path, monkeypatch, keep, row
):
    errors = itertools.count()  # more with every evaluation
    monkeypatch.setattr(Job, "measure", lambda *_: (next(errors), 0.0))
    sizes = dict(look_back=8, horizon=8, segment=4, hidden=4)
    assert train(waves, tmp_path, **sizes, epochs=1, keep=keep).figures
    rows = list(csv.DictReader((tmp_path / "metrics.csv").read_text().splitlines()))
    kept = use.load(tmp_path).figures["best"]["updates"]
    assert len(rows) > 1 and kept == int(rows[row]["updates"])
    with pytest.raises(UserError, match="`keep` must be best or last, got 'first'"):
        train(waves, tmp_path, **sizes, keep="first")


@pytest.mark.usefixtures("empty_pictures")
def test_evaluations_of_a_timed_run_are_apart(waves, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "LEAST_SECONDS", 1e6)
    sizes = dict(look_back=8, horizon=8, segment=4, hidden=4)
    summary = train(waves, tmp_path, **sizes, minutes=0.02)
    rows = (tmp_path / "metrics.csv").read_text().splitlines()[1:]
    assert len(rows) <= run.EVALUATIONS + 1 and summary.best.updates > 0


@pytest.mark.usefixtures("empty_pictures")
def test_the_speed_is_that_of_learning(waves, tmp_path, monkeypatch):
    """The time of an evaluation, here made longer, does not count."""
    evaluations = []
    clock = lambda: time.monotonic() + 1e6 * len(evaluations)  # noqa: E731
    monkeypatch.setattr(display, "time", types.SimpleNamespace(monotonic=clock))
    monkeypatch.setattr(Job, "measure", lambda *_: evaluations.append(0) or (1.0, 1.0))
    train(waves, tmp_path, **SIZES)
    rows = list(csv.DictReader((tmp_path / "metrics.csv").read_text().splitlines()))
    assert all(float(row["windows_per_second"]) > 1 for row in rows)


SIZES = dict(look_back=8, horizon=8, segment=4, hidden=4, epochs=3)


@pytest.mark.usefixtures("empty_pictures")
def test_interrupted_and_resumed_equals_uninterrupted(waves, tmp_path, monkeypatch):
    """Check a run that is interrupted twice: before the first evaluation, and after."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(waves, whole, **SIZES)
    for resume, updates in ((False, 2), (True, 3)):
        with monkeypatch.context() as patch:
            interrupt_after(patch, updates)
            options = {"resume": True} if resume else SIZES
            assert train(waves, parts, **options).figures is None
    assert use.FILES.read(parts / RESUME_FILE)[1]["step"] == 5
    result = ostinato("train", "forecast", waves, "--out", parts, "--resume")
    assert result.exit_code == 0 and "resuming at epoch" in result.stdout
    for name in (MODEL_FILE, RESUME_FILE):
        want, got = (use.FILES.read(out / name)[0] for out in (whole, parts))
        for key in want.keys() | got.keys():
            np.testing.assert_array_equal(got[key], want[key])
    assert (parts / "learning_curve.png").exists()


@pytest.mark.usefixtures("empty_pictures")
def test_an_interrupted_evaluation_is_made_when_the_run_goes_on(
    waves, tmp_path, monkeypatch
):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(waves, whole, **SIZES)
    evaluate = run.Run._evaluate

    def stopped(self):
        if self.rows:
            raise KeyboardInterrupt
        evaluate(self)

    with monkeypatch.context() as patch:
        patch.setattr(run.Run, "_evaluate", stopped)
        train(waves, parts, **SIZES)
    train(waves, parts, resume=True)
    want, got = (use.FILES.read(out / RESUME_FILE)[1]["rows"] for out in (whole, parts))
    timed = {2, 3}  # seconds and speed
    for rows in zip(got, want, strict=True):
        a, b = ([v for i, v in enumerate(r) if i not in timed] for r in rows)
        assert a == pytest.approx(b)


@pytest.mark.usefixtures("empty_pictures")
def test_an_ensemble_learns_and_forecasts_the_mean_of_its_members(waves, tmp_path):
    out = tmp_path / "run"
    arguments = ["--epochs", 2, "--ensemble", 3, "--out", out, *TINY.split()]
    result = ostinato("train", "forecast", waves, *arguments)
    assert result.exit_code == 0, result.output
    assert "ensemble of 3, 8 rows to forecast 8" in result.stdout
    trained = use.load(out)
    assert trained.params["read"].shape[0] == trained.model.members == 3
    x = np.random.default_rng(0).normal(size=(2, 8, 3)).astype(np.float32)
    members = [jax.tree.map(lambda a, k=k: a[k], trained.params) for k in range(3)]
    each = [trained.model.forecast_of_one(params, x) for params in members]
    assert np.abs(each[0] - each[1]).max() > 1e-3
    got = trained.model.forecast(trained.params, x)
    np.testing.assert_allclose(got, np.mean(each, axis=0), atol=1e-6)
    result = ostinato("forecast", waves, "--model", out, "--out", tmp_path / "next.csv")
    assert result.exit_code == 0, result.output
    message = one_line(ostinato("train", "forecast", waves, "--ensemble", 0))
    assert "`ensemble` must be at least 1, got 0" in message


@pytest.mark.usefixtures("empty_pictures")
def test_what_cannot_be_resumed(waves, tmp_path):
    out = tmp_path / "run"
    with pytest.raises(UserError, match="there is no .*resume.safetensors"):
        train(waves, out, resume=True)
    train(waves, out, **SIZES | {"epochs": 1})
    with pytest.raises(UserError, match="`hidden` must stay 4 when a run is resumed"):
        train(waves, out, resume=True, hidden=6)
    other = waves.with_name("other.csv")
    other.write_text(waves.read_text().replace("5.0", "5.1"))
    with pytest.raises(UserError, match="`--resume` needs the windows of the run"):
        train(other, out, resume=True)
    good = (out / MODEL_FILE).read_bytes()
    for data, changed in ((waves, {"hidden": 6}), (other, {}), (waves, {"seed": 1})):
        train(data, tmp_path / "else", **SIZES | {"epochs": 1} | changed)
        shutil.copy(tmp_path / "else" / MODEL_FILE, out)
        with pytest.raises(UserError, match="is the model of another run"):
            train(waves, out, resume=True)
    (out / MODEL_FILE).write_bytes(good)
    (out / "metrics.csv").unlink()  # what is left by a kill just before it is written
    train(waves, out, resume=True)
    assert len((out / "metrics.csv").read_text().splitlines()) > 1
    tensors, header = use.FILES.read(out / RESUME_FILE)
    header["settings"]["horizon"] = "8"
    use.FILES.save(out / RESUME_FILE, tensors, header)
    with pytest.raises(UserError, match="`horizon` must be an integer, got '8'"):
        train(waves, out, resume=True)
    train(waves, out, **SIZES | {"epochs": 1})
    assert (out / "previous" / RESUME_FILE).exists()
    assert (out / "previous" / "forecasts.png").exists()


def test_errors_of_the_commands(waves, tmp_path):
    assert "--out" in one_line(ostinato("forecast", waves, "--model", tmp_path))
    message = one_line(ostinato("train", "forecast", waves, "--split", "a,b"))
    assert "`split` must be numbers with commas between, got 'a,b'" in message
    message = one_line(ostinato("train", "forecast", waves, "--horizon", 100))
    assert "`horizon` must be a multiple of segment = 24, got 100" in message
    message = one_line(ostinato("train", "forecast", waves, "--minutes", 0))
    assert "`minutes` must be a number above 0" in message
    short = write(tmp_path / "short.csv", waves.read_text().splitlines()[:4])
    message = one_line(ostinato("train", "forecast", short))
    assert "the table has too few rows, 3, for three parts" in message
    assert "`split`" not in message
    message = one_line(ostinato("train", "forecast", tmp_path / "no.csv"))
    assert "cannot read" in message


@pytest.fixture
def untrained(tmp_path):
    model = Forecaster(1, 4, 2, 2, 2, 0.0)
    scale = Scale(np.zeros(1), np.ones(1))
    made = use.Trained(model, model.init(jax.random.key(0)), ("a",), scale, {})
    use.save(tmp_path, made)
    return made


def test_a_model_of_another_command_and_a_file_are_told(untrained, tmp_path):
    for arguments in (["pronounce", "ab"], ["sample"]):
        message = one_line(ostinato(*arguments, "--model", tmp_path))
        assert "was written by `ostinato train forecast`; train one with" in message
    model = tmp_path / MODEL_FILE
    message = one_line(ostinato("pronounce", "ab", "--model", model))
    assert f"{model} is a file; give the folder that it is in: {tmp_path}" in message
    model = write(tmp_path / "other", [""])
    message = one_line(ostinato("pronounce", "ab", "--model", model))
    assert message.endswith(f"{model} is a file; give the folder of a training run\n")


def test_a_model_comes_back(untrained, tmp_path):
    got = use.load(tmp_path)
    assert got.model == untrained.model and got.names == ("a",)
    for a, b in zip(*map(jax.tree.leaves, (got.params, untrained.params)), strict=True):
        np.testing.assert_array_equal(a, b)
    given = table.Table([BEGIN], ("b",), np.zeros((1, 1)))
    with pytest.raises(UserError, match="must have the columns a, .* got b"):
        use.forecast(got, given)
    with pytest.raises(UserError, match="the file must have 4 rows at least, got 1"):
        use.forecast(got, given._replace(names=("a",)))


def test_forecasts_are_alone_in_what_they_are_written_to(tmp_path):
    model = Forecaster(1, 1, 1, 1, 2, 0.0)
    scale = Scale(np.zeros(1), np.ones(1))
    params = model.init(jax.random.key(0))
    use.save(tmp_path, use.Trained(model, params, ("a",), scale, {}))
    given = write(tmp_path / "given.csv", ["d,a", "2020-01-01,1", "2020-01-02,2"])
    out = write(tmp_path / "next.csv", ["kept"])
    with out.open("a") as file:
        target = f"/dev/fd/{file.fileno()}"
        result = ostinato("forecast", given, "--model", tmp_path, "--out", target)
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == f"wrote 1 row after 2020-01-02 00:00:00 to {target}\n"
    lines = out.read_text().splitlines()
    assert lines[:2] == ["kept", "d,a"] and lines[2].startswith("2020-01-03 00:00:00,")
    with given.open("a") as file:
        target = f"/dev/fd/{file.fileno()}"
        arguments = "--model", tmp_path, "--out", target
        message = one_line(ostinato("forecast", given, *arguments))
    assert f"another file than the given one, {given}, got {target};" in message
    result = ostinato("forecast", given, "--model", tmp_path, "--out", out)
    assert result.stdout.endswith(f"00:00:00 to {out}\n") and not result.stderr
    assert "kept" not in out.read_text()


@pytest.mark.parametrize(
    "names", [("time", "date"), ("", "date"), ("date", "a"), ('a,"b', "c\rd\ne")]
)
def test_what_is_written_can_be_read(untrained, tmp_path, names):
    head = ",".join('"{}"'.format(name.replace('"', '""')) for name in names)
    rows = [f"{BEGIN + timedelta(hours=hour)},{hour}" for hour in range(4)]
    given = table.read(write(tmp_path / "given.csv", [head, *rows]))
    use.write(tmp_path / "next.csv", untrained, given, np.arange(3.0)[:, None])
    again = table.read(tmp_path / "next.csv")
    assert (again.dated, *again.names) == names
    assert again.dates[0] == BEGIN + timedelta(hours=4)
    assert again.values.tolist() == [[0], [1], [2]]


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(model={"columns": 1}), "`Forecaster` must have columns, look_back"),
        (dict(names=["a", "b"]), "`names` must be 1, got"),
        (dict(names=[1]), "`names` must be texts, got"),
        (dict(names=None), "`names` must be .*, got None"),
        (dict(figures=0), "`figures` must be a mapping, got 0"),
    ],
)
def test_a_tampered_header_is_one_line(untrained, tmp_path, change, message):
    tensors, header = use.FILES.read(tmp_path / use.MODEL_FILE)
    use.FILES.save(tmp_path / use.MODEL_FILE, tensors, {**header, **change})
    with pytest.raises(UserError, match=f"is damaged or no file .*{message}"):
        use.load(tmp_path)


@pytest.mark.parametrize("value", [np.nan, 0.0])
def test_a_tampered_scale_is_one_line(untrained, tmp_path, value):
    tensors, header = use.FILES.read(tmp_path / use.MODEL_FILE)
    tensors["scale.deviation"] = np.array([value])
    use.FILES.save(tmp_path / use.MODEL_FILE, tensors, header)
    with pytest.raises(UserError, match="is damaged .*`scale` must be"):
        use.load(tmp_path)


@pytest.mark.usefixtures("plain_jax")
@pytest.mark.parametrize("members", [1, 2])
def test_the_last_value_of_constant_columns_is_repeated(members):
    model = Forecaster(3, 4, 6, 2, 4, 0.0, members, constant=(0, 2))
    params = model.init(jax.random.key(0))
    x = np.random.default_rng(0).standard_normal((5, 4, 3)).astype(np.float32)
    y = np.asarray(jax.jit(model.forecast)(params, x))
    last = np.broadcast_to(x[:, -1:], y.shape)
    np.testing.assert_array_equal(y[..., [0, 2]], last[..., [0, 2]])
    assert (y[..., 1] != last[..., 1]).all()


@pytest.mark.usefixtures("plain_jax")
def test_the_last_value_of_a_constant_column_is_written_without_rounding():
    model = Forecaster(2, 4, 2, 2, 4, 0.0, constant=(1,))
    scale = Scale(np.array([0.0, 1000.0]), np.ones(2))
    params = model.init(jax.random.key(0))
    trained = use.Trained(model, params, ("a", "b"), scale, {})
    dates = [datetime(2020, 1, 1) + timedelta(n) for n in range(4)]
    values = np.array([[0.0, 1000.0]] * 3 + [[0.5, 1000.1]])  # it changes at last
    got = use.forecast(trained, table.Table(dates, ("a", "b"), values))
    assert got[:, 1].tolist() == [1000.1, 1000.1]


@pytest.mark.parametrize("deviation", [1.0, 2.0, 9.0, 1e-3, 1e4])
def test_cells_show_a_ten_thousandth_of_a_deviation(deviation):
    values = np.random.default_rng(0).uniform(1e5, 1e6, (200, 1))
    trained = types.SimpleNamespace(
        scale=Scale(np.zeros(1), np.array([deviation])),
        model=types.SimpleNamespace(constant=()),
    )
    cells = [float(cell) for (cell,) in use._cells(trained, values)]
    assert np.abs(values[:, 0] - cells).max() <= 0.5e-4 * deviation


def job_of_days(values, names=("a", "b"), **options):
    """Return a small job to learn two columns, a row a day."""
    dates = [datetime(2020, 1, 1) + timedelta(n) for n in range(len(values))]
    sizes = {"look_back": 4, "horizon": 4, "segment": 2, "hidden": 4}
    settings = Settings.choose(epochs=1, **sizes, **options)
    return Job(settings, table.Table(dates, names, values))


def test_the_scale_is_that_of_the_rows_to_learn_from():
    values = np.random.default_rng(0).standard_normal((100, 2))
    values[60:] += 1000.0
    job = job_of_days(values, split="0.6,0.2,0.2")
    np.testing.assert_allclose(job.scale.mean, values[:60].mean(0), rtol=1e-12)
    np.testing.assert_allclose(job.scale.deviation, values[:60].std(0), rtol=1e-12)


@pytest.mark.usefixtures("plain_jax")
def test_arrays_of_parameters_do_not_share_values():
    params = Forecaster(2, 4, 4, 2, 4, 0.0).init(jax.random.key(0))
    place, column = params["place"], params["column"]
    assert place.shape == column.shape and not (place == column).any()


def test_the_names_of_columns_are_in_the_fingerprint():
    values = np.random.default_rng(0).standard_normal((100, 2))
    jobs = [job_of_days(values, names) for names in ("ab", "ac")]
    assert jobs[0].fingerprint() != jobs[1].fingerprint()


@pytest.mark.usefixtures("plain_jax")
def test_a_resumed_run_has_its_time_and_its_losses(tmp_path):
    job = job_of_days(np.random.default_rng(0).standard_normal((100, 2)))

    def new_run(seconds):
        shown = display.Display(Console(quiet=True))
        started = time.monotonic() - seconds
        return run.Run(job, tmp_path, shown, started, Devices(None))

    old = new_run(100.0)
    old.evaluation_seconds = 7.0
    for loss in (2.5, 1.5):
        old.pace.add(loss, 3)
    old._save()
    again = new_run(0.0)
    again.restore()
    assert again.elapsed >= 100 and again.now >= 100
    assert again.evaluation_seconds == 7
    assert (again.pace.losses, again.pace.updates, again.pace.loss) == (4, 2, 2)


def test_a_run_that_is_resumed_without_limits_keeps_its_own():
    old = Settings.choose(epochs=3)
    assert resumed(old, None, None, {}) == old
    other = resumed(old, 2.0, None, {})
    assert (other.minutes, other.epochs) == (2.0, None)
