import dataclasses

import jax
import numpy as np
import pytest
from g2p_words import plain_jax  # noqa: F401

from ostinato.apps import files, training
from ostinato.apps.errors import UserError
from ostinato.apps.g2p import attention, checkpoint, ctc, joint
from ostinato.apps.tensors import RESUME_FILE

SIZES = dict(hidden_size=4, num_layers=1, phonemes=("S", "T"), dropout=0.1)
CONFIG = ctc.Config(**SIZES)


def saved_model(folder, config=CONFIG):
    params = jax.jit(config.init)(jax.random.key(0))
    figures = {"best": {"per": 1.5}}
    weights = (0.3, 0.1)[: len(config.reader().opinions)]
    aligned = joint.align(["st", "t"], [[1, 2], [2]], config.num_labels)
    trained = checkpoint.Model(config, params, aligned, weights, figures)
    checkpoint.save_model(folder, trained)
    return trained


@pytest.mark.parametrize(
    "config", [CONFIG, attention.Config(**SIZES)], ids=["ctc", "attention"]
)
def test_model_round_trip(tmp_path, config):
    want = saved_model(tmp_path, config)
    got = checkpoint.load_model(tmp_path)
    assert got.config == want.config
    for array, wanted in zip(got.aligned, want.aligned, strict=True):
        np.testing.assert_array_equal(array, wanted, strict=True)
    assert type(got.config) is type(config)
    assert (got.rank_weights, got.figures) == (want.rank_weights, want.figures)
    assert jax.tree.structure(got.params) == jax.tree.structure(want.params)
    jax.tree.map(np.testing.assert_array_equal, got.params, want.params)


def test_the_header_tells_the_spec(tmp_path):
    saved_model(tmp_path)
    _, header = checkpoint.FILES.read(tmp_path / checkpoint.MODEL_FILE)
    assert header["model"] == "ctc"
    assert header["spec"]["mode"] == "lstm"
    assert header["spec"]["hidden_size"] == 4
    assert header["alphabet"].endswith("xyz")


def test_state_round_trip(tmp_path):
    want = training.init_state(3, CONFIG.init)._replace(step=7)
    checkpoint.FILES.save_state(tmp_path, want, {"elapsed": 1.5})
    got = checkpoint.FILES.load_state(tmp_path, CONFIG.init)
    assert got.step == 7
    assert checkpoint.FILES.read(tmp_path / RESUME_FILE)[1]["elapsed"] == 1.5
    jax.tree.map(np.testing.assert_array_equal, got[1:], want[1:])


def test_state_of_another_model_says_so(tmp_path):
    checkpoint.FILES.save_state(tmp_path, training.init_state(0, CONFIG.init), {})
    other = dataclasses.replace(CONFIG, hidden_size=5)
    with pytest.raises(UserError, match="is damaged or.*`001` must be float32"):
        checkpoint.FILES.load_state(tmp_path, other.init)


def test_missing_model_says_how_to_train_one(tmp_path):
    with pytest.raises(UserError, match="there is no .*ostinato train g2p --out"):
        checkpoint.load_model(tmp_path / "nowhere")


def damage_tail(content):
    return content[:-100] + bytes(100)


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:5],
        lambda content: content[: len(content) // 2],
        lambda content: b"\xff" * 64,
        lambda content: content.replace(b"ostinato-g2p-4", b"ostinato-g2p-9"),
        lambda content: content.replace(b"hidden_size", b"hodden_size"),
        lambda content: content.replace(b'phonemes\\":', b'phonemas\\":'),
        lambda content: content.replace(b'\\"ctc\\"', b'\\"cta\\"'),
        lambda content: content.replace(b'\\"S\\"', b'\\"Z\\"'),
        lambda content: content.replace(b"[0.3]", b"[4.3]"),
        damage_tail,
    ],
    ids="empty stub half noise format field names model phoneme figure tail".split(),
)
def test_damaged_model_is_one_clear_line(tmp_path, damage):
    saved_model(tmp_path)
    path = tmp_path / checkpoint.MODEL_FILE
    content = path.read_bytes()
    assert damage(content) != content
    path.write_bytes(damage(content))
    with pytest.raises(UserError, match="is damaged or") as error:
        checkpoint.load_model(tmp_path)
    assert "\n" not in str(error.value)


def test_a_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    files.write(path, b"old")

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(UserError, match="cannot write .*: No space left on device"):
        files.write(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_in_the_place_of_a_file_is_a_clear_line(tmp_path):
    (tmp_path / "out").write_text("a file")
    with pytest.raises(UserError, match="cannot make the folder .*: File exists"):
        files.make_folder(tmp_path / "out")
