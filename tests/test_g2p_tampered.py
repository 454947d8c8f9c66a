"""Tests of changed model folders: they load, or fail with a message of one line."""

import contextlib
import copy
import dataclasses
import os
import random

import g2p_words
import jax
import numpy as np
import pytest
from g2p_words import plain_jax  # noqa: F401

from ostinato.apps import header, training
from ostinato.apps.errors import UserError
from ostinato.apps.g2p import attention, checkpoint, ctc, joint
from ostinato.apps.g2p.report import Row
from ostinato.apps.g2p.settings import Settings
from ostinato.apps.tensors import RESUME_FILE

SIZES = dict(hidden_size=4, num_layers=1, phonemes=("S", "T"))
CONFIGS = {"ctc": ctc.Config(**SIZES), "attention": attention.Config(**SIZES)}
MODEL, RESUME = checkpoint.MODEL_FILE, RESUME_FILE


@pytest.fixture(scope="module", params=CONFIGS)
def contents(request, tmp_path_factory):
    """Return arrays and headers of a run's two files, by name."""
    folder = tmp_path_factory.mktemp("run")
    config = CONFIGS[request.param]
    with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"):
        state = training.init_state(0, config.init)
    weights = (0.2,) * len(config.reader().opinions)
    aligned = joint.align(["st", "t"], [[1, 2], [2]], config.num_labels)
    model = checkpoint.Model(config, state.params, aligned, weights, {"best": 1})
    checkpoint.save_model(folder, model)
    row = Row(1.0, 2, 3.0, 4.0, 5.0, 0.1, 6.0, 7.0)
    settings = Settings.choose(model=request.param, hidden=4, layers=1)
    of_run = header.Header(
        settings=dataclasses.asdict(settings),
        split="words",
        elapsed=9.0,
        evaluation_seconds=1.0,
        losses=7.5,
        updates=3,
        rows=[row],
        best=row,
    )
    checkpoint.FILES.save_state(folder, state, vars(of_run))
    return config, {
        name: checkpoint.FILES.read(folder / name) for name in (MODEL, RESUME)
    }


def save(folder, name, tensors, fields):
    checkpoint.FILES.save(folder / name, tensors, fields)


def load(folder, name, config):
    if name == MODEL:
        return checkpoint.load_model(folder)
    found = header.read(folder, checkpoint.FILES, Settings, Row)
    return found, checkpoint.FILES.load_state(folder, config.init)


def one_line(error):
    message = str(error.value)
    assert "\n" not in message and len(message) < 1000
    return message


def test_what_is_not_tampered_with_loads(contents, tmp_path):
    config, files = contents
    for name, content in files.items():
        save(tmp_path, name, *content)
        load(tmp_path, name, config)


def put(path, value):
    """Return a change of a header that sets the value at a path."""

    def change(tensors, fields):
        *parents, last = path.split(".")
        for parent in parents:
            fields = fields[parent]
        if value is ...:
            del fields[last]
        else:
            fields[last] = value

    return change


def replace(name, value):
    """Return a change that replaces an array, or removes it for None."""

    def change(tensors, fields):
        if value is None:
            del tensors[name]
        else:
            tensors[name] = np.array(value(tensors.get(name)))

    return change


def with_nan(array):
    array = array.copy()
    array.flat[0] = np.nan
    return array


TAMPERED = {
    "units in a table": (
        replace("aligned_units", lambda a: a.reshape(1, -1)),
        "`aligned_units` must be int32 in one row",
    ),
    "units of floats": (
        replace("aligned_units", lambda a: a.astype(np.float32)),
        "`aligned_units` must be int32",
    ),
    "units without an end": (
        replace("aligned_units", lambda a: a[:-1]),
        "the last one 0",
    ),
    "no such unit": (
        replace("aligned_units", lambda a: np.where(a > 0, 29 * 3**2, 0).astype("i4")),
        "numbers from 0 to 260",
    ),
    "a unit below 0": (
        replace("aligned_units", lambda a: np.where(a > 0, -1, 0).astype("i4")),
        "numbers from 0 to 260",
    ),
    "no units": (
        replace("aligned_units", lambda a: a[:0]),
        "`aligned_units` must be int32 in one row",
    ),
    "units are missing": (replace("aligned_units", None), "lacks 'aligned_units'"),
    "fewer probabilities": (
        replace("aligned_probs", lambda a: a[1:]),
        "`aligned_probs` must be float32 (261,)",
    ),
    "a probability of 0": (
        replace("aligned_probs", lambda a: a * (a < a.max())),
        "`aligned_probs` must be above 0, and 1 at most",
    ),
    "a probability above 1": (
        replace("aligned_probs", lambda a: a + 1),
        "`aligned_probs` must be above 0, and 1 at most",
    ),
    "one array more": (replace("extra", lambda _: [1.0]), "`arrays` must be "),
    "size as text": (put("config.hidden_size", "4"), "`hidden_size` must be an int"),
    "size as bool": (put("config.num_layers", True), "`num_layers` must be an int"),
    "no layers": (put("config.num_layers", 0), "`num_layers` must be from 1 to 64"),
    "too large": (put("config.hidden_size", 10**9), "must be from 1 to 8192"),
    "too many": (put("config.hidden_size", 8192), "`parameters` must be at most"),
    "another size": (put("config.hidden_size", 5), "is damaged"),
    "dropout": (put("config.dropout", 1e999), "`dropout` must be a finite number"),
    "phonemes as text": (put("config.phonemes", "ST"), "`phonemes` must be a list"),
    "phonemes": (put("config.phonemes", ["S", "S"]), "different names"),
    "surrogate": (put("config.phonemes", ["S", "\ud800"]), "different names"),
    "config": (put("config", [1]), "`config` must be a mapping"),
    "model": (put("model", ["ctc"]), "`model` must be a text"),
    "spec of another size": (put("spec.hidden_size", 5), "`spec` must be that of its"),
    "spec of another mode": (put("spec.mode", "gru"), "`spec` must be that of its"),
    "spec of no mode": (put("spec.mode", "lstn"), "mode"),
    "spec as text": (put("spec", "lstm"), "`spec` must be a mapping"),
    "no spec": (put("spec", ...), "lacks 'spec'"),
    "alphabet": (put("alphabet", "abc"), "`alphabet` must be"),
    "weights as text": (put("rank_weights", "12"), "`rank_weights` must be"),
    "weights": (put("rank_weights", [0.1] * 3), "`rank_weights` must be"),
    "no weight": (put("rank_weights", [float("nan")]), "must be a finite number"),
    "figures": (put("figures", [1]), "`figures` must be a mapping"),
}


@pytest.mark.parametrize("change, message", TAMPERED.values(), ids=TAMPERED.keys())
def test_a_tampered_model_is_one_clear_line(contents, tmp_path, change, message):
    tensors, fields = copy.deepcopy(contents[1][MODEL])
    change(tensors, fields)
    save(tmp_path, MODEL, tensors, fields)
    with pytest.raises(UserError) as error:
        checkpoint.load_model(tmp_path)
    assert message in one_line(error)


@pytest.mark.parametrize("file", [MODEL, RESUME])
def test_arrays_that_do_not_fit_are_one_clear_line(contents, tmp_path, file):
    config, files = contents
    names = sorted(files[file][0].keys() - {"aligned_units", "aligned_probs"})
    names = [name for name in names if files[file][0][name].dtype == np.float32]
    assert len(names) >= 4
    for name in names:
        for value, message in (
            (with_nan, f"`{name}` must be finite"),
            (lambda a: a[None], f"`{name}` must be float32"),
            (lambda a: a.astype(np.float16), f"`{name}` must be float32"),
            (None, "`arrays` must be"),
        ):
            tensors, fields = copy.deepcopy(files[file])
            replace(name, value)(tensors, fields)
            save(tmp_path, file, tensors, fields)
            with pytest.raises(UserError) as error:
                load(tmp_path, file, config)
            assert message in one_line(error)


@pytest.mark.parametrize(
    "path, value, message",
    [
        ("settings", [1], "`Settings` must have minutes, epochs"),
        ("settings.hidden", "4", "`hidden` must be an integer"),
        ("settings.batch", 0, "`batch` must be at least 1"),
        ("settings.other", 1, "`Settings` must have"),
        ("settings", ..., "lacks 'settings'"),
        ("rows", [[1, 2]], "`Row` must have epoch"),
        ("rows", 5, "`rows` must be a list"),
        ("best", [1, "2", 3, 4, 5, 6, 7, 8], "`updates` must be an integer"),
        ("elapsed", float("nan"), "`elapsed` must be a finite number"),
        ("elapsed", 1e300, "`elapsed` must be at least 0, and 100 years in seconds at"),
        ("evaluation_seconds", 1e10, "`evaluation_seconds` must be at least 0, and 10"),
        ("rows", [[1, 2, 1e300, 4, 5, 6, 7, 8]], "`rows` must be at least 0, and 100"),
        ("best", [1, 2, -1, 4, 5, 6, 7, 8], "`best` must be at least 0, and 100 years"),
        ("settings.lr", 1e39, "`lr` must be at most 1e+06"),
        ("evaluation_seconds", -1, "`evaluation_seconds` must be at least 0"),
        ("updates", -1, "`updates` must be at least 0"),
        ("losses", None, "`losses` must be a finite number"),
        ("split", 3, "`split` must be a text"),
        ("step", 1.5, "`step` must be an integer"),
        ("step", 2**40, "`step` must be 0 to 2147483646, got 1099511627776"),
        ("rows", [[1, 10**400, 3, 4, 5, 6, 7, 8]], "`updates` must be an integer of"),
        ("more", 1, "`Header` must have"),
    ],
)
def test_a_tampered_run_is_one_clear_line(contents, tmp_path, path, value, message):
    config, files = contents
    tensors, fields = copy.deepcopy(files[RESUME])
    put(path, value)(tensors, fields)
    save(tmp_path, RESUME, tensors, fields)
    with pytest.raises(UserError) as error:
        load(tmp_path, RESUME, config)
    assert message in one_line(error)


def test_what_is_no_file_is_one_clear_line(tmp_path):
    path = tmp_path / MODEL
    path.mkdir()
    with pytest.raises(UserError, match="it is no file"):
        checkpoint.load_model(tmp_path)
    path.rmdir()
    os.mkfifo(path)  # reading it would wait forever
    with pytest.raises(UserError, match="it is no file"):
        checkpoint.load_model(tmp_path)
    path.unlink()
    with path.open("wb") as file:
        file.truncate(1 << 40)  # a sparse file
    with pytest.raises(UserError, match="it is too large, of 1,099,511,627,776 bytes"):
        checkpoint.load_model(tmp_path)


VALUES = (None, True, -1, 0, 10**30, 0.5, float("nan"), "", "lstm", [], [[]], {}, ...)


def tamper(rng, tensors, fields):
    """Change one value of a header, at any depth, or one array."""
    if rng.random() < 0.3:
        name = rng.choice(sorted(tensors))
        array = tensors[name]
        changes = (
            None,
            np.ravel,
            with_nan,
            lambda a: a.ravel()[:-1],
            lambda a: a[None],
        )
        change = rng.choice(changes)
        if change is not with_nan or array.dtype.kind == "f":
            replace(name, change)(tensors, fields)
        return
    place = fields
    while True:
        key = rng.choice(range(len(place)) if isinstance(place, list) else [*place])
        if not isinstance(place[key], dict | list) or not place[key]:
            break
        if rng.random() < 0.3:
            break
        place = place[key]
    value = rng.choice(VALUES)
    if value is ...:
        del place[key]
    else:
        place[key] = value


@pytest.mark.parametrize("file", [MODEL, RESUME])
def test_any_change_of_a_value_loads_or_is_one_clear_line(contents, tmp_path, file):
    config, files = contents
    rng, refused = random.Random(0), 0
    for _ in range(100):
        tensors, fields = copy.deepcopy(files[file])
        tamper(rng, tensors, fields)
        save(tmp_path, file, tensors, fields)
        try:
            load(tmp_path, file, config)
        except UserError as error:
            assert "\n" not in str(error)
            refused += 1
    assert refused > 50


def test_a_dtype_that_numpy_lacks_is_named(contents, tmp_path):
    config, files = contents
    save(tmp_path, MODEL, *files[MODEL])
    path = tmp_path / MODEL
    path.write_bytes(path.read_bytes().replace(b'"F32"', b'"F99"', 1))
    with pytest.raises(UserError, match="F99"):
        load(tmp_path, MODEL, config)
    one = b'{"a":{"dtype":"BF16","shape":[1],"data_offsets":[0,2]}}'
    path.write_bytes(len(one).to_bytes(8, "little") + one + bytes(2))
    with pytest.raises(UserError, match="it has an array of 'BF16', a dtype that Num"):
        load(tmp_path, MODEL, config)


def test_any_change_of_bytes_loads_or_is_one_clear_line(contents, tmp_path):
    config, files = contents
    save(tmp_path, MODEL, *files[MODEL])
    path = tmp_path / MODEL
    content, rng = path.read_bytes(), random.Random(1)
    end = content.index(b"}") + 2000  # of the header, approximately
    for _ in range(200):
        changed = bytearray(content)
        for _ in range(rng.randint(1, 3)):
            changed[rng.randrange(rng.choice((8, end, len(changed))))] = rng.randrange(
                256
            )
        if rng.random() < 0.3:
            place = rng.randrange(len(changed))
            del changed[place : place + rng.choice((1, 8, len(changed)))]
        path.write_bytes(changed)
        with contextlib.suppress(UserError):
            checkpoint.load_model(tmp_path)


def test_resuming_a_tampered_run_keeps_its_files(contents, tmp_path):
    tensors, fields = copy.deepcopy(contents[1][RESUME])
    put("settings.batch", "many")(tensors, fields)
    save(tmp_path, RESUME, tensors, fields)
    before = (tmp_path / RESUME).read_bytes()
    with pytest.raises(UserError, match="`batch` must be an integer"):
        g2p_words.train_tiny(tmp_path, resume=True)
    assert (tmp_path / RESUME).read_bytes() == before


def test_an_array_of_another_name_is_told(tmp_path):
    path = tmp_path / MODEL
    checkpoint.FILES.save(path, {"first": np.zeros(3, np.float32)}, {})
    assert checkpoint.FILES.read(path)[0].keys() == {"first"}
    content = path.read_bytes()
    assert content.count(b'"first"') == 1
    path.write_bytes(content.replace(b'"first"', b'"other"'))
    with pytest.raises(UserError, match="checksum"):
        checkpoint.FILES.read(path)
