"""`ostinato convert`: files of other libraries in, files out, and what it says."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interop_cases import LIMIT, distance, draw, weights_of
from typer.testing import CliRunner

import ostinato as ost
from ostinato import cli
from ostinato.interop import convert as ours

safetensors = pytest.importorskip("safetensors.numpy", reason="needs `safetensors`")
RUNNER = CliRunner()
X = draw(2, 5, 3)
GRU = ost.RNNSpec("gru", 3, 4)
LSTM = ost.RNNSpec("lstm", 3, 4, 2, True)


def ostinato(*arguments):
    return RUNNER.invoke(cli.app, ["convert", *map(str, arguments)])


def one_line(result):
    assert result.exit_code == 2
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert result.stderr.startswith("ostinato: ") and result.stderr.count("\n") == 1
    return result.stderr


def stored(tmp_path, **networks):
    path = tmp_path / "in.safetensors"
    made = {name: (spec, weights_of(spec)) for name, spec in networks.items()}
    ost.save(path, made)
    return path


def test_tensors_of_a_model_of_torch_by_name(tmp_path):
    path, out = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    tensors = {f"enc.{n}_l0": draw(12, k) for n, k in (("weight_ih", 3),)}
    tensors |= {"enc.weight_hh_l0": draw(12, 4), "head.weight": draw(2, 4)}
    safetensors.save_file(tensors, path)
    result = ostinato(path, out)
    assert result.exit_code == 0, result.output
    for word in ("yes", "enc", "gru, 3 -> 4", "no", "head.weight", "not of a rec"):
        assert word in result.stdout
    spec, weights = ost.load(out)["enc"]
    (layer,) = ost.unpack_weights(weights, spec)
    np.testing.assert_array_equal(layer.w_hh, tensors["enc.weight_hh_l0"])


def test_a_file_keeps_its_dtype_whatever_jax_has(tmp_path):
    path, out = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    tensors = {"weight_ih_l0": draw(12, 3), "weight_hh_l0": draw(12, 4)}
    tensors = {name: value.astype("float64") / 3 for name, value in tensors.items()}
    safetensors.save_file(tensors, path)
    with jax.enable_x64(False):
        assert ostinato(path, out).exit_code == 0
    spec, weights = ost.load(out)["rnn"]
    assert weights.dtype == "float64"
    (layer,) = ost.unpack_weights(weights, spec)
    np.testing.assert_array_equal(layer.w_hh, tensors["weight_hh_l0"])


def test_what_was_converted_runs_whatever_jax_has(tmp_path):
    path, out = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    tensors = {"weight_ih_l0": draw(12, 3), "weight_hh_l0": draw(12, 4)}
    tensors = {name: value.astype("float64") for name, value in tensors.items()}
    safetensors.save_file(tensors, path)
    for x64, dtype in ((False, "float32"), (True, "float64")):
        with jax.enable_x64(x64):
            spec, weights, _ = ours.convert(path, out).found["rnn"]
            assert weights.dtype == dtype
            assert ost.rnn(spec, weights, X.astype(dtype)).y.dtype == dtype
    assert ost.load(out)["rnn"].weights.dtype == "float64"


def test_torch_is_told_of_relu(tmp_path):
    pytest.importorskip("torch")
    path = stored(tmp_path, a=ost.RNNSpec("rnn_relu", 3, 4))
    result = ostinato(path, tmp_path / "out.pt")
    assert "nonlinearity='relu'" in " ".join(result.stdout.split())


@pytest.mark.parametrize(
    "lstm, gru, wanted",
    [
        ("", "rnn.", {"rnn": "gru", "rnn_1": "lstm"}),  # one without a name
        ("enc", "enc.", {"enc": "lstm", "enc.": "gru"}),  # without and with a dot
    ],
)
def test_no_network_takes_the_name_of_another(lstm, gru, wanted, tmp_path):
    path, out = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    gates = {lstm: 16, gru: 12}
    safetensors.save_file(
        {
            f"{prefix}weight_{side}_l0": draw(rows, size)
            for prefix, rows in gates.items()
            for side, size in (("ih", 3), ("hh", 4))
        },
        path,
    )
    assert ostinato(path, out).exit_code == 0
    modes = {name: network.spec.mode for name, network in ost.load(out).items()}
    assert modes == wanted


@pytest.mark.parametrize("name", ["bias_hh_l0", "weight_hh_l1", "head.weight"])
@pytest.mark.parametrize("dtype", ["int8", "bool", "complex64", "float8_e4m3fn"])
def test_no_tensor_is_passed_over_for_its_dtype(tmp_path, name, dtype):
    path, out = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    tensors = {"head.weight": draw(4, 4)}
    for layer, size in enumerate((3, 4)):
        shapes = {"weight_ih": (12, size), "weight_hh": (12, 4)}
        shapes |= {"bias_ih": (12,), "bias_hh": (12,)}
        tensors |= {f"{n}_l{layer}": draw(*shape) for n, shape in shapes.items()}
    safetensors.save_file(tensors | {name: tensors[name].astype(dtype)}, path)
    result = ostinato(path, out)
    if name == "head.weight":
        assert result.exit_code == 0 and ost.load(out)["rnn"].spec.num_layers == 2
    else:
        assert not out.exists() and name in result.output


def test_names_of_a_file_reach_no_terminal_as_codes(tmp_path):
    path, out = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    tensors = {
        f"\x1b[31mx.weight_{n}_l0": draw(12, k) for n, k in (("ih", 3), ("hh", 4))
    }
    safetensors.save_file(tensors, path)
    result = ostinato(path, out)
    assert result.exit_code == 0 and "\x1b" not in result.stdout
    assert r"\x1b[31mx" in result.stdout


def test_json_says_the_same(tmp_path):
    path = stored(tmp_path, a=GRU, b=LSTM)
    result = ostinato(path, tmp_path / "out.safetensors", "--name", "b", "--json")
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert [one["name"] for one in said["mapped"]] == ["b"]
    assert ost.RNNSpec(**said["mapped"][0]["spec"]) == LSTM
    assert said["unmapped"] == [{"name": "a", "reason": "another name was asked for"}]
    assert ost.load(tmp_path / "out.safetensors").keys() == {"b"}


def test_mistakes_are_one_line(tmp_path):
    path, out = stored(tmp_path, a=GRU, b=LSTM), tmp_path / "out.safetensors"
    assert "`target` must end in one of" in one_line(ostinato(path, tmp_path / "o.txt"))
    assert "`source` must end in one of" in one_line(ostinato(tmp_path / "i.txt", out))
    none = tmp_path / "none.safetensors"
    said = one_line(ostinato(none, out))
    assert said == f"ostinato: cannot read {none}: No such file or directory\n"
    said = one_line(ostinato(path, out, "--name", "c"))
    assert "'a', 'b', got 'c'" in said
    path.write_bytes(path.read_bytes()[:-9])
    assert "must be a safetensors file" in one_line(ostinato(path, out))
    safetensors.save_file({"a": X}, path)
    result = ostinato(path, out)
    assert "no recurrent network of" in one_line(result) and "a" in result.stdout
    assert not out.exists()


def test_the_file_that_is_read_is_not_written(tmp_path, monkeypatch):
    path = tmp_path / "in.safetensors"
    weights = {
        f"enc.weight_{kind}_l0": draw(12, k) for kind, k in (("ih", 3), ("hh", 4))
    }
    safetensors.save_file({**weights, "head.weight": draw(2, 4)}, path)
    before = path.read_bytes()
    (tmp_path / "soft.safetensors").symlink_to(path)
    (tmp_path / "hard.safetensors").hardlink_to(path)
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    others = "in soft hard link/in folder/../in".split()
    for target in [path, *(f"{name}.safetensors" for name in others)]:
        said = one_line(ostinato(path, target))
        assert "`target` must be another file than `source`" in said
        assert path.read_bytes() == before
    assert "must be another file" in one_line(ostinato("soft.safetensors", path))
    assert path.read_bytes() == before


def test_missing_packages_are_one_line(tmp_path, monkeypatch):
    path, out = stored(tmp_path, a=GRU), tmp_path / "out.safetensors"
    monkeypatch.setitem(sys.modules, "torch", None)
    assert "pip install 'ostinato[torch]'" in one_line(
        ostinato(path, tmp_path / "o.pt")
    )
    monkeypatch.setitem(sys.modules, "safetensors", None)
    assert "pip install 'ostinato[store]'" in one_line(ostinato(path, out))


@pytest.mark.peers
def test_there_and_back_through_torch(tmp_path):
    torch = pytest.importorskip("torch", reason="needs the extra `peers`")
    path, middle = stored(tmp_path, a=GRU, b=LSTM), tmp_path / "out.pt"
    assert ostinato(path, middle).exit_code == 0
    assert "a.weight_ih_l0" in torch.load(middle, weights_only=True)
    back = tmp_path / "back.safetensors"
    assert ostinato(middle, back).exit_code == 0
    want, got = ost.load(path), ost.load(back)
    assert got.keys() == want.keys()
    for name in want:
        assert got[name].spec == want[name].spec
        np.testing.assert_array_equal(got[name].weights, want[name].weights)
    assert ostinato(path, middle, "--name", "b").exit_code == 0
    layer = torch.nn.LSTM(3, 4, 2, bidirectional=True, batch_first=True)
    layer.load_state_dict(torch.load(middle, weights_only=True))
    with torch.no_grad():
        y = layer(torch.tensor(X))[0].numpy()
    assert distance(ours.Imported(*want["b"]), X, y) <= LIMIT
    assert ostinato(middle, back).exit_code == 0
    assert ost.load(back).keys() == {"rnn"}


@pytest.mark.peers
def test_there_and_back_through_onnx(tmp_path):
    pytest.importorskip("onnx", reason="needs the extra `peers`")
    path, middle = stored(tmp_path, a=GRU, b=LSTM), tmp_path / "out.onnx"
    assert "`name` must say which" in one_line(ostinato(path, middle))
    assert ostinato(path, middle, "--name", "a").exit_code == 0
    back = tmp_path / "back.safetensors"
    result = ostinato(middle, back)
    assert result.exit_code == 0 and "Transpose is no recurrent node" in result.stdout
    got = ost.load(back)["rnn_l0"]
    assert got.spec == GRU
    np.testing.assert_array_equal(got.weights, ost.load(path)["a"].weights)


@pytest.mark.peers
def test_what_the_target_lacks_is_said(tmp_path):
    pytest.importorskip("torch", reason="needs the extra `peers`")
    before = ost.RNNSpec("gru", 3, 4, reset_after=False)
    path = stored(tmp_path, a=GRU, b=before)
    result = ostinato(path, tmp_path / "out.pt")
    assert result.exit_code == 0 and "reset_after=True for a layer" in result.stdout
    path = stored(tmp_path, b=before)
    one_line(ostinato(path, tmp_path / "none.pt"))
    clip = stored(tmp_path, b=ost.RNNSpec("lstm", 3, 4, cell_clip=1.0))
    one_line(ostinato(clip, tmp_path / "none.onnx"))
    assert not list(tmp_path.glob("none.*"))


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5")
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize("suffix", [".keras", ".h5"])
def test_files_of_keras(tmp_path, suffix):
    keras_tests = pytest.importorskip("test_interop_keras", reason="needs `keras`")
    path, out = tmp_path / f"in{suffix}", tmp_path / "out.safetensors"
    keras_tests.save(path)
    result = ostinato(path, out)
    assert result.exit_code == 0 and "Dense is no recurrent layer" in result.stdout
    layer = keras_tests.saved(suffix)[1]["first"]
    y = keras_tests.outputs(layer)
    spec, weights = ost.load(out)["first"]
    assert np.abs(ost.rnn(spec, weights, jnp.asarray(X)).y - y).max() <= LIMIT


def test_whole_modules_and_missing_folders_are_one_line(tmp_path):
    torch = pytest.importorskip("torch")
    path = tmp_path / "module.pth"
    torch.save(torch.nn.LSTM(2, 3), path)
    said = one_line(ostinato(path, tmp_path / "o.safetensors"))
    assert "save module.state_dict() instead" in said
    torch.save(torch.nn.LSTM(2, 3).state_dict(), path)
    said = one_line(ostinato(path, tmp_path / "none" / "o.safetensors"))
    target = tmp_path / "none" / "o.safetensors"
    assert said == f"ostinato: cannot write {target}: No such folder\n"


@pytest.mark.peers
def test_data_of_the_model_that_is_read_are_not_written(tmp_path):
    onnx = pytest.importorskip("onnx", reason="needs the extra `peers`")
    folder = tmp_path / "model"
    folder.mkdir()
    path, data = folder / "m.onnx", folder / "w.pt"
    model = ours.onnx.to_model(GRU, weights_of(GRU))
    onnx.save(
        model, path, save_as_external_data=True, location="w.pt", size_threshold=0
    )
    before = data.read_bytes()
    (tmp_path / "link.pt").symlink_to(data)
    for target in (data, tmp_path / "link.pt"):
        said = one_line(ostinato(path, target))
        assert "`target` must be another file than `source`" in said
        assert data.read_bytes() == before
    (tmp_path / "w.pt").touch()  # of the same name, elsewhere
    pytest.importorskip("torch", reason="needs the extra `peers`")
    assert ostinato(path, tmp_path / "w.pt").exit_code == 0


def test_what_is_no_path_is_an_error(tmp_path):
    for arguments, name in (((None, "o.pt"), "source"), (("i.pt", b"o.pt"), "target")):
        wanted = f"`{name}` must be a str or an os.PathLike"
        with pytest.raises(TypeError, match=wanted):
            ours.convert(*arguments)
    with pytest.raises(TypeError, match="`path` must be a str or an os.PathLike"):
        ours.read(None)
    with pytest.raises(ValueError, match="`path` must end in one of"):
        ours.read(tmp_path / "model.txt")


def test_the_sizes_of_networks_are_told(tmp_path):
    both = ost.RNNSpec("lstm", 3, 4, 2, True, proj_size=2)
    path = stored(tmp_path, a=GRU, b=LSTM, c=both)
    result = ostinato(path, tmp_path / "out.safetensors")
    rows = [
        [cell.strip() for cell in row.split("│")] for row in result.stdout.split("\n")
    ]
    told = {row[2]: row[3] for row in rows if len(row) == 5}
    assert told == {
        "a": "gru, 3 -> 4",
        "b": "lstm, 3 -> 4, 2 layers, bidirectional",
        "c": "lstm, 3 -> 4 -> 2, 2 layers, bidirectional",
    }


def test_notes_are_in_the_json_too(tmp_path):
    pytest.importorskip("torch")
    path = stored(tmp_path, a=ost.RNNSpec("rnn_relu", 3, 4))
    result = ostinato(path, tmp_path / "out.pt", "--json")
    (one,) = json.loads(result.stdout)["mapped"]
    assert "nonlinearity='relu'" in " ".join(one["notes"])
