"""ostinato.save and ostinato.load: what is written is read, and nothing else is."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interop_cases import assert_damage_is_one_error, draw, weights_of

import ostinato as ost
from ostinato import store

safetensors = pytest.importorskip("safetensors.numpy", reason="needs `safetensors`")

SPECS = {
    "encoder": ost.RNNSpec("lstm", 3, 4, 2, True, proj_size=2, dropout=0.5),
    "deep/decoder": ost.RNNSpec("gru", 3, 4, bias="input", reset_after=False),
    "skip": ost.RNNSpec("rnn_relu", 4, 4, 2, bias="none", input_mode="skip"),
    "clip": ost.RNNSpec("lstm", 3, 4, cell_clip=1.5, clip_nan=True),
}
DTYPES = [jnp.float32, jnp.float64, jnp.float16, jnp.bfloat16]


def stored(**changes):
    """The bytes of a file with one GRU."""
    spec = ost.RNNSpec("gru", 3, 4, bidirectional=True)
    layers = ost.unpack_weights(weights_of(spec), spec)
    tensors = store._named("rnn", spec, layers)
    fields = {"mode": "gru", "input_size": 3, "hidden_size": 4, "bidirectional": True}
    written = {"format": 1, "networks": {"rnn": fields}} | changes
    named = {k: np.asarray(v) for k, v in tensors.items()}
    return safetensors.save(named, {"ostinato": json.dumps(written)})


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_saved_is_loaded(tmp_path, dtype):
    path = tmp_path / "model.safetensors"
    networks = {
        name: (spec, weights_of(spec, seed=n).astype(dtype))
        for n, (name, spec) in enumerate(SPECS.items())
    }
    ost.save(path, networks, {"by": "me"})
    loaded = ost.load(path)
    assert loaded.keys() == networks.keys()
    for name, (spec, weights) in networks.items():
        assert loaded[name].spec == spec
        assert loaded[name].weights.dtype == dtype
        np.testing.assert_array_equal(loaded[name].weights, weights)
    assert store.read_tensors(path)[1]["by"] == "me"
    assert list(tmp_path.iterdir()) == [path]


def test_numbers_of_8_bits_are_those_of_their_kind(tmp_path):
    """One is 0 0111 000 with four bits of exponent, and 0 01111 00 with five."""
    path = tmp_path / "model.safetensors"
    for kind, bits in (("F8_E4M3", 0x38), ("F8_E5M2", 0x3C)):
        header = {"a": {"dtype": kind, "shape": [2], "data_offsets": [0, 2]}}
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + bytes([bits, 0]))
        (one,) = store.read_tensors(path)[0].values()
        np.testing.assert_array_equal(np.asarray(one, np.float32), [1, 0])


def test_other_readers_find_each_matrix(tmp_path):
    path = tmp_path / "model.safetensors"
    spec = SPECS["encoder"]
    weights = weights_of(spec)
    ost.save(path, {"encoder": ost.Saved(spec, ost.prepare(spec, weights))})
    tensors = safetensors.load_file(path)
    layers = ost.unpack_weights(weights, spec)
    assert len(tensors) == 4 * 5
    np.testing.assert_array_equal(tensors["encoder/l0.w_ih"], layers[0].w_ih)
    np.testing.assert_array_equal(tensors["encoder/l1_reverse.w_hr"], layers[3].w_hr)


def test_what_cannot_be_saved_leaves_the_file_alone(tmp_path):
    path = tmp_path / "model.safetensors"
    spec = ost.RNNSpec("gru", 3, 4)
    ost.save(path, {"rnn": (spec, weights_of(spec))})
    before = path.read_bytes()
    first, second, lone = (
        r"`networks\['rnn'\]\[0\]`",
        r"`networks\['rnn'\]\[1\]`",
        "\ud800",
    )
    for networks, metadata, error, message in [
        ({"rnn": (spec, jnp.zeros(3))}, None, ValueError, f"{second} must have shape"),
        (
            {"rnn": ("gru", weights_of(spec))},
            None,
            TypeError,
            f"{first} must be an RNN",
        ),
        ({"rnn": (weights_of(spec), spec)}, None, TypeError, f"{first} must be an RNN"),
        ({"rnn": (spec, [0.0])}, None, TypeError, f"{second} must be an array"),
        (
            {"rnn": (spec, ost.unpack_weights(weights_of(spec), spec))},
            None,
            TypeError,
            rf"{second} must be the flat .* 1 layers; ost\.pack_weights\(weights, spec",
        ),
        ({7: (spec, weights_of(spec))}, None, TypeError, "in `networks` .* got int 7"),
        ({lone: (spec, weights_of(spec))}, None, ValueError, r"`networks` .*'\\ud800'"),
        ({}, {"a": 3}, TypeError, r"`metadata\['a'\]` must be a string, got int 3"),
        ({}, {3: "a"}, TypeError, "a name in `metadata` must be a string, got int 3"),
        ({}, {"a": lone}, ValueError, r"`metadata\['a'\]` .*surrogates"),
        ({}, {"ostinato": ""}, ValueError, "`metadata` must not have 'ostinato'"),
        ({}, jnp.zeros(3), TypeError, r"`metadata` must be text .* got float\d+\[3\]"),
        (spec, weights_of(spec), TypeError, "`networks` must map names to .* RNNSpec"),
        ({"rnn": weights_of(spec)}, None, TypeError, r"`networks\['rnn'\]` must be \("),
    ]:
        with pytest.raises(error, match=message):
            ost.save(path, networks, metadata)
    assert path.read_bytes() == before
    with pytest.raises(OSError):
        ost.save(tmp_path / "none" / "model.safetensors", {})
    assert list(tmp_path.iterdir()) == [path]


def test_traced_weights_are_an_error(tmp_path):
    spec = ost.RNNSpec("gru", 3, 4)
    save = lambda w: ost.save(tmp_path / "a", {"rnn": (spec, w)})  # noqa: E731
    weights = weights_of(spec)
    for call in (jax.jit(save), lambda w: jax.vmap(save)(w[None])):
        with pytest.raises(TypeError, match=r"\['rnn'\]\[1\]` must not be traced"):
            call(weights)


@pytest.mark.parametrize("path", [None, b"x", 3])
def test_what_is_no_path_is_an_error(path):
    for call in (ost.load, lambda path: ost.save(path, {})):
        with pytest.raises(TypeError, match="`path` must be a str or an os.PathLike"):
            call(path)


def test_an_empty_path_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "inner").mkdir()
    monkeypatch.chdir(tmp_path / "inner")
    for call in (ost.load, lambda path: ost.save(path, {})):
        with pytest.raises(ValueError, match="`path` must name a file, got ''"):
            call("")
    assert [*tmp_path.rglob("*")] == [tmp_path / "inner"]


def test_a_full_disk_leaves_the_file_alone(tmp_path, monkeypatch):
    path = tmp_path / "model.safetensors"
    ost.save(path, {})
    before = path.read_bytes()

    def fail(_):
        raise OSError("no space left")

    monkeypatch.setattr("os.fsync", fail)
    spec = ost.RNNSpec("gru", 3, 4)
    with pytest.raises(OSError, match="no space left"):
        ost.save(path, {"rnn": (spec, weights_of(spec))})
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


GRU = {"mode": "gru", "input_size": 3, "hidden_size": 4, "bidirectional": True}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 2}, "unknown format 2"),
        ({"networks": {"rnn": GRU | {"color": 1}}}, "unknown fields: color"),
        ({"networks": {"rnn": GRU | {"num_layers": 1 << 60}}}, "more layers than"),
        ({"networks": {"rnn": GRU | {"num_layers": 2}}}, "'rnn/l1.w_ih' must have"),
        ({"networks": {"rnn": GRU | {"hidden_size": 1 << 40}}}, "must have the shape"),
        ({"networks": {"rnn": GRU | {"bias": "input"}}}, "shape None, got"),
        ({"networks": {"rnn": GRU | {"mode": "tpu"}}}, "`mode` must be one of"),
        ({"networks": {"rnn": GRU | {"hidden_size": 4.0}}}, "`hidden_size` must be"),
        ({"networks": {"rnn": {}}}, "cannot be read as one"),
        ({"networks": {"rnn": 7}}, "cannot be read as one"),
        ({"networks": []}, "cannot be read as one"),
    ],
)
def test_hostile_headers_are_one_error(tmp_path, changes, message):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(stored())
    assert ost.load(path)["rnn"].spec == ost.RNNSpec(**GRU)
    path.write_bytes(stored(**changes))
    with pytest.raises(ValueError, match=message):
        ost.load(path)


def test_files_of_others_are_one_error(tmp_path):
    path = tmp_path / "other.safetensors"
    safetensors.save_file({"a": draw(3), "n": np.arange(3)}, path)
    with pytest.raises(ValueError, match="its header has no specs"):
        ost.load(path)
    assert store.read_tensors(path)[0].keys() == {"a", "n"}
    for data in (b"", b"\xff" * 100, (1 << 62).to_bytes(8, "little")):
        path.write_bytes(data)
        with pytest.raises(ValueError, match="`path` must be a safetensors file"):
            ost.load(path)
    with pytest.raises(FileNotFoundError):
        ost.load(tmp_path / "none")


def test_damaged_files_are_one_error(tmp_path):
    assert_damage_is_one_error(ost.load, tmp_path / "bad.safetensors", stored())


def test_a_missing_package_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match=r"pip install 'ostinato\[store\]'"):
        ost.save(tmp_path / "a", {})
    with pytest.raises(ImportError, match="`safetensors`"):
        ost.load(tmp_path / "a")


@pytest.mark.parametrize("dtype", ["int32", "uint8", "complex64", "bool"])
def test_tensors_without_floats_are_no_network(dtype, tmp_path):
    path, spec = tmp_path / "model.safetensors", ost.RNNSpec("gru", 2, 3)
    ost.save(path, {"rnn": (spec, ost.init_weights(jax.random.key(0), spec))})
    found = safetensors.load_file(path)
    tensors = {name: np.ones(array.shape, dtype) for name, array in found.items()}
    content = path.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    path.write_bytes(safetensors.save(tensors, header["__metadata__"]))
    with pytest.raises(ValueError, match=f"'rnn/l0.w_ih' holds {dtype}"):
        ost.load(path)


def test_tensors_of_other_dtypes_are_vectors_of_their_bytes(tmp_path):
    path = tmp_path / "model.safetensors"
    header = {"a": {"dtype": "F8_E8M0", "shape": [2, 2], "data_offsets": [0, 4]}}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes([1, 2, 3, 4]))
    (one,) = store.read_tensors(path)[0].values()
    assert one.dtype == np.uint8 and one.tolist() == [1, 2, 3, 4]
