"""interop.torch: the numbers of torch's own layers, state dicts in and out, files."""

import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interop_cases import (
    LIMIT,
    assert_damage_is_one_error,
    assert_swaps_show,
    assert_weights_are_checked,
    distance,
    draw,
    weights_of,
)

import ostinato as ost
from ostinato.interop import imported
from ostinato.interop import torch as ours

pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning"),
]
torch = pytest.importorskip("torch", reason="needs the extra `peers`")
nn = torch.nn
parametrize = pytest.importorskip("torch.nn.utils.parametrize")
prune = pytest.importorskip("torch.nn.utils.prune")

X = draw(2, 5, 3)
LAYERS = {
    "lstm": nn.LSTM(3, 4, batch_first=True),
    "lstm-stack": nn.LSTM(3, 4, 2, bidirectional=True, batch_first=True),
    "lstm-proj": nn.LSTM(3, 4, 2, proj_size=2, bidirectional=True, batch_first=True),
    "lstm-no-bias": nn.LSTM(3, 4, bias=False, batch_first=True),
    "gru": nn.GRU(3, 4, bidirectional=True, batch_first=True),
    "tanh": nn.RNN(3, 4, 2, batch_first=True),
    "relu": nn.RNN(3, 4, nonlinearity="relu", batch_first=True),
}
CELLS = {
    "lstm": nn.LSTMCell(3, 4),
    "gru": nn.GRUCell(3, 4),
    "rnn_tanh": nn.RNNCell(3, 4),
    "rnn_relu": nn.RNNCell(3, 4, nonlinearity="relu"),
}


def redrawn(module, seed=0):
    with torch.no_grad():
        for n, p in enumerate(module.parameters()):
            p.copy_(torch.tensor(draw(*p.shape, seed=seed + n)))
    return module


def theirs(layer):
    with torch.no_grad():
        return redrawn(layer)(torch.tensor(X))[0].numpy()


def assert_same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


@pytest.mark.parametrize("name", LAYERS)
def test_layer_gives_the_same_numbers_and_goes_back(name):
    layer = LAYERS[name]
    want = theirs(layer)
    imported = ours.from_module(layer)
    assert distance(imported, X, want) <= LIMIT
    assert imported.notes == ()
    sd = ours.to_state_dict(imported.spec, imported.weights)
    assert_same(sd, dict(layer.state_dict()))


@pytest.mark.parametrize("mode", CELLS)
def test_cell_is_its_layer(mode):
    spec, weights, _ = ours.from_module(redrawn(CELLS[mode]))
    assert spec == ost.RNNSpec(mode, 3, 4)
    want = {name + "_l0": p for name, p in CELLS[mode].state_dict().items()}
    assert_same(ours.to_state_dict(spec, weights), want)


@pytest.mark.parametrize("mode", ["lstm", "gru"])
def test_any_two_gates_swapped_show(mode, monkeypatch):
    layer = LAYERS[mode]
    want = theirs(layer)
    convert = lambda: ours.from_module(layer)  # noqa: E731
    assert_swaps_show(monkeypatch, ours.GATES, mode, convert, X, want)


def test_notes_say_what_the_weights_do_not():
    layer = nn.LSTM(3, 4, 2, dropout=0.25)
    spec, _, notes = ours.from_module(layer)
    assert spec.dropout == 0.25
    assert "time_major=True" in notes[0] and "`key`" in notes[1]


def test_part_of_a_model_is_found_by_its_prefix():
    model = nn.ModuleDict({"encoder": nn.GRU(3, 4), "head": nn.Linear(4, 2)})
    sd = redrawn(model).state_dict()
    assert ours.find(sd) == {"encoder.": ost.RNNSpec("gru", 3, 4)}
    arrays = {name: tensor.numpy() for name, tensor in sd.items()} | {7: X}
    assert ours.find(arrays).keys() == {"encoder."}
    spec, weights, _ = ours.from_state_dict(arrays, "encoder.")
    _, want, _ = ours.from_module(model["encoder"])
    np.testing.assert_array_equal(weights, want)
    again = ours.to_state_dict(spec, weights, "encoder.")
    model.load_state_dict(again, strict=False)
    with pytest.raises(ValueError, match=r"prefix 'decoder\.'"):
        ours.from_state_dict(sd, "decoder.")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_dtype_stays(dtype):
    layer = redrawn(nn.GRU(3, 4)).to(dtype)
    spec, weights, _ = ours.from_module(layer)
    assert str(weights.dtype) == str(dtype).removeprefix("torch.")
    assert_same(ours.to_state_dict(spec, weights), dict(layer.state_dict()))


@pytest.mark.parametrize("bias", ["input", "recurrent"])
def test_one_bias_leaves_zeros_for_the_other(bias):
    spec = ost.RNNSpec("gru", 3, 4, bias=bias)
    weights = weights_of(spec)
    sd = ours.to_state_dict(spec, weights)
    layer = nn.GRU(3, 4, batch_first=True)
    layer.load_state_dict(sd)
    with torch.no_grad():
        want = layer(torch.tensor(X))[0].numpy()
    assert distance(ours.Imported(spec, weights), X, want) <= LIMIT


@pytest.mark.parametrize(
    "spec",
    [
        ost.RNNSpec("gru", 3, 4, reset_after=False),
        ost.RNNSpec("lstm", 3, 4, cell_clip=1.0),
        ost.RNNSpec("lstm", 4, 4, input_mode="skip"),
    ],
)
def test_no_layer_of_torch_is_an_error(spec):
    with pytest.raises(ValueError, match="`spec` must have .* for a layer of torch"):
        ours.to_state_dict(spec, weights_of(spec))


class Quantized(nn.Module):
    """As those of torch, which have the modes of others and packed weights."""

    mode = "LSTM"


def test_wrong_tensors_are_named():
    sd = dict(nn.LSTM(3, 4, 2).state_dict())
    missing = {k: v for k, v in sd.items() if k != "weight_hh_l1"}
    with pytest.raises(ValueError, match=r"`sd\['weight_hh_l1'\]`.* missing"):
        ours.from_state_dict(missing)
    for name in ("bias_hh_l1", "bias_ih_l0"):  # torch has all biases or none
        missing = {k: v for k, v in sd.items() if k != name}
        with pytest.raises(ValueError, match=rf"`sd\['{name}'\]`.* missing"):
            ours.from_state_dict(missing)
        assert ours.find(missing) == {}
    with pytest.raises(ValueError, match=r"`sd\['bias_hh_l0'\]` must have shape"):
        ours.from_state_dict(sd | {"bias_hh_l0": torch.zeros(3)})
    with pytest.raises(ValueError, match="G = 1, 3 or 4 gates"):
        ours.from_state_dict(sd | {"weight_hh_l0": torch.zeros(8, 4)})
    with pytest.raises(TypeError, match="dtype"):
        ours.from_state_dict(sd | {"bias_hh_l0": torch.zeros(16).double()})
    with pytest.raises(TypeError, match="must be a dense tensor"):
        ours.from_state_dict(sd | {"bias_hh_l0": torch.zeros(16, device="meta")})
    small = torch.zeros(16).to(torch.float8_e4m3fn)
    with pytest.raises(TypeError, match="`bias_hh_l0` must be a dense tensor of a"):
        ours.from_state_dict(sd | {"bias_hh_l0": small})
    with pytest.raises(TypeError, match="must be an array"):
        ours.from_state_dict(sd | {"bias_hh_l0": [0.0]})
    with pytest.raises(TypeError, match="`module` must be a torch.nn.LSTM"):
        ours.from_module(Quantized())
    with pytest.raises(TypeError, match="`module` must be a torch.nn.LSTM"):
        ours.from_module(nn.Linear(3, 4))
    huge = sd | {f"weight_ih_l{'9' * 30}": torch.zeros(4, 3)}
    with pytest.raises(ValueError, match="missing"):
        ours.from_state_dict(huge)


@pytest.mark.parametrize("name", ["weight_hh_l0", "weight_hh_l1", "bias_ih_l1_reverse"])
def test_what_torch_makes_at_each_call_is_an_error(name, tmp_path):
    def layer():
        return nn.GRU(3, 4, 2, bidirectional=True)

    class Half(nn.Module):
        def forward(self, w):
            return w / 2

    pruned, halved = layer(), layer()
    prune.random_unstructured(pruned, name, amount=0.5)
    parametrize.register_parametrization(halved, name, Half())
    for module in (pruned, halved):
        with pytest.raises(ValueError, match="must hold the weights themselves"):
            ours.from_module(module)
        inside = nn.ModuleDict({"enc": module})
        assert ours.find(inside.state_dict()) == {}
        torch.save(inside.state_dict(), tmp_path / "model.pt")
        assert ours.from_file(tmp_path / "model.pt") == {}
        with pytest.raises(ValueError, match="the weights themselves"):
            ours.from_state_dict(inside.state_dict(), "enc.")
    prune.remove(pruned, name)
    parametrize.remove_parametrizations(halved, name)
    for module in (pruned, halved):
        spec, weights, _ = ours.from_module(module)
        assert (spec.num_layers, spec.bidirectional) == (2, True)


def test_hooks_are_an_error():
    hooked, replaced = nn.GRU(3, 4), nn.GRU(3, 4)
    hook = hooked.register_forward_pre_hook(lambda module, given: (given[0] * 2,))
    replaced.forward = lambda x: x
    for module in (hooked, replaced):
        with pytest.raises(TypeError, match="no hooks and no `forward`"):
            ours.from_module(module)
    hook.remove()
    assert ours.from_module(hooked).spec.mode == "gru"


@pytest.mark.parametrize("inside", ["", "module."])
def test_the_weights_of_weight_drop_are_an_error(tmp_path, inside):
    """What lies under the name of the weight is the last call's, with zeros."""
    sd = {f"rnn.{inside}{n}": t for n, t in nn.LSTM(3, 4).state_dict().items()}
    sd["rnn.weight_hh_l0_raw"] = sd[f"rnn.{inside}weight_hh_l0"] * 2
    sd |= {f"other.{n}": t for n, t in nn.GRU(3, 4).state_dict().items()}
    with pytest.raises(ValueError, match="weight_hh_l0_raw.*name of the weight"):
        ours.from_state_dict(sd, f"rnn.{inside}")
    torch.save(sd, tmp_path / "m.pt")
    found, others = ours.read_file(tmp_path / "m.pt")
    assert found.keys() == {"other."}
    assert "weight_hh_l0_raw" in others[f"rnn.{inside}weight_hh_l0"]
    assert "weight_hh_l0_raw" in others["rnn.weight_hh_l0_raw"]


def test_names_may_have_several_lines():
    sd = {f"a\nb.{n}": t for n, t in nn.GRU(3, 4).state_dict().items()}
    assert ours.find(sd).keys() == {"a\nb."}


def test_a_weight_with_two_names_is_an_error():
    sd = dict(nn.GRU(3, 4).state_dict())
    for name in ("weight_hh", "weight_hh_l00"):
        with pytest.raises(ValueError, match="each weight once"):
            ours.from_state_dict(sd | {name: torch.zeros(12, 4)})


def test_file_with_nested_mappings(tmp_path):
    model = redrawn(nn.ModuleDict({"rnn": nn.RNN(3, 4), "head": nn.Linear(4, 2)}))
    tree = {"epoch": 3, "state": model.state_dict()}
    tree["again"] = tree  # mappings may hold themselves
    torch.save(tree, tmp_path / "model.pt")
    found = ours.from_file(tmp_path / "model.pt")
    assert found.keys() == {"state.rnn."}
    assert "tanh from relu" in found["state.rnn."].notes[0]
    relu = ours.from_file(tmp_path / "model.pt", nonlinearity="relu")
    assert relu["state.rnn."].spec.mode == "rnn_relu"
    others = ours.read_file(tmp_path / "model.pt").others
    assert others.keys() == {"state.head.weight", "state.head.bias"}


class Bad:
    """Code that a careless reader of pickles runs."""

    def __reduce__(self):
        return pytest.fail, ("code of the file was run",)


def test_hostile_files_are_one_error(tmp_path):
    path = tmp_path / "bad.pt"
    wanted = "`path` must be a file of tensors"
    torch.save({"weight_ih_l0": Bad()}, path)
    with pytest.raises(ValueError, match=wanted):
        ours.from_file(path)
    torch.save(nn.LSTM(3, 4), path)
    with pytest.raises(ValueError, match=wanted):
        ours.from_file(path)
    vast = torch.zeros(1).expand(1 << 40, 1 << 20)
    torch.save({"weight_hh_l0": vast}, path)
    _, others = ours.read_file(path)
    assert "too large for its file" in others["weight_hh_l0"]
    each = torch.zeros(1).expand(1 << 12, 1 << 2)  # many of them are too much
    torch.save({f"mask{i}": each for i in range(100)}, path)
    assert "too large for its file" in ours.read_file(path)[1]["mask99"]
    rnn = nn.LSTM(3, 4).state_dict()
    torch.save(rnn | {"mask": torch.ones(1).expand(1 << 10, 1 << 10)}, path)
    (network,) = ours.from_file(path).values()
    assert network.spec.hidden_size == 4
    path.write_bytes(b"")
    with pytest.raises(ValueError, match=wanted):
        ours.from_file(path)


@pytest.mark.parametrize("new_format", [True, False])
def test_damaged_files_are_one_error(tmp_path, new_format):
    buffer = io.BytesIO()
    sd = nn.GRU(3, 4).state_dict()
    torch.save(sd, buffer, _use_new_zipfile_serialization=new_format)
    path = tmp_path / "damaged.pt"
    assert_damage_is_one_error(ours.from_file, path, buffer.getvalue())


def test_tensors_are_copies():
    layer = nn.GRU(3, 4)
    _, weights, _ = ours.from_module(layer)
    before = np.asarray(weights)
    with torch.no_grad():
        layer.weight_ih_l0.zero_()
    np.testing.assert_array_equal(weights, before)
    sd = ours.to_state_dict(ost.RNNSpec("gru", 3, 4), weights)
    sd["weight_ih_l0"].zero_()
    assert jnp.any(weights[:12] != 0)


@pytest.mark.parametrize(
    "make", [torch.tensor, lambda x: nn.Parameter(torch.tensor(x))]
)
def test_tensors_in_place_of_arrays_are_told_how_to_convert(make):
    spec = ost.RNNSpec("lstm", 3, 5)
    weights = ost.init_weights(jax.random.key(0), spec)
    message = r"`x` must be an array, got a torch.Tensor of torch.float32\[2, 4, 3\]; "
    with pytest.raises(TypeError, match=message + r"give x.numpy\(\)"):
        ost.rnn(spec, weights, make(np.ones((2, 4, 3), np.float32)))


def test_subclasses_that_compute_something_else_are_an_error():
    class Own(nn.LSTM):
        def forward(self, x):
            return super().forward(-x)

    class Named(nn.LSTM):
        """A subclass that computes the same."""

    class OwnCell(nn.LSTMCell):
        def forward(self, x):
            return super().forward(-x)

    class NamedCell(nn.LSTMCell):
        """A subclass that computes the same."""

    class NamedRNNCell(nn.RNNCell):
        """A subclass that computes the same."""

    for own in (Own, OwnCell):
        with pytest.raises(TypeError, match=rf"\.{own.__name__}; `find` and `from_st"):
            ours.from_module(own(3, 4))
    assert ours.from_module(Named(3, 4)).spec.mode == "lstm"
    cell, relu = NamedCell(3, 4), NamedRNNCell(3, 4, nonlinearity="relu")
    spec, weights, _ = ours.from_module(cell)
    want = ours.from_state_dict(cell.state_dict())
    assert spec == want.spec
    np.testing.assert_array_equal(weights, want.weights)
    assert ours.from_module(relu).spec.mode == "rnn_relu"


@pytest.mark.filterwarnings("ignore:.*(quantiz|deprecated).*")
def test_layers_of_other_packages_are_told_by_their_place():
    model = nn.Sequential(nn.LSTM(3, 4))
    kinds = {nn.LSTM}
    small = torch.ao.quantization.quantize_dynamic(model, kinds, dtype=torch.qint8)[0]
    where = r"got torch\.ao\.nn\.quantized\.dynamic\.modules\.rnn\.LSTM; `find`"
    with pytest.raises(TypeError, match=where):
        ours.from_module(small)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_module_of_torchscript_is_told_what_to_save(tmp_path):
    path = tmp_path / "script.pt"
    torch.jit.script(nn.LSTM(3, 4)).save(path)
    wanted = r"TorchScript: save torch\.jit\.load\(path\)\.state_dict\(\) instead$"
    with pytest.raises(ValueError, match=wanted):
        ours.from_file(path)
    torch.save(torch.jit.load(path).state_dict(), path)
    assert ours.from_file(path)[""].spec.mode == "lstm"


def test_masks_of_numpy_are_not_dropped():
    sd = {n: t.numpy() for n, t in nn.GRU(3, 4).state_dict().items()}
    masked = np.ma.masked_array(sd["bias_hh_l0"], mask=True)
    with pytest.raises(ValueError, match="`bias_hh_l0`: numpy masked arrays are not"):
        ours.from_state_dict(sd | {"bias_hh_l0": masked})


def test_what_is_no_prefix_and_no_network_is_an_error():
    state = LAYERS["lstm"].state_dict()
    with pytest.raises(TypeError, match="`prefix` must be a string, got int 3"):
        ours.from_state_dict(state, 3)
    one = ours.from_state_dict(state)
    with pytest.raises(TypeError, match=r"`networks\[1\]` must be an Imported"):
        imported.stack([one, (one.spec, one.weights)])


def test_arguments_of_the_exporter_are_checked():
    spec = ost.RNNSpec("lstm", 3, 4)
    assert_weights_are_checked(ours.to_state_dict, spec)
    with pytest.raises(TypeError, match="`prefix` must be a string, got int 5"):
        ours.to_state_dict(spec, weights_of(spec), 5)


def test_what_is_no_state_dict_is_an_error():
    with pytest.raises(TypeError, match="`sd` must be a mapping, got NoneType None$"):
        ours.find(None)
    wanted = "`sd` must be a mapping, .* its state_dict.. is one; `from_module` conv"
    for call in (ours.find, ours.from_state_dict):
        with pytest.raises(TypeError, match=wanted):
            call(nn.LSTM(3, 4))


def test_networks_in_lists_are_found(tmp_path):
    path = tmp_path / "model.pt"
    first, second = (redrawn(nn.GRU(3, 4), n).state_dict() for n in (0, 1))
    more = {"epochs": [1, 2], "norms": (torch.zeros(2),), "best": first}
    torch.save({"models": [first, {"ema": second}], **more}, path)
    found, others = ours.read_file(path)
    assert found.keys() == {"models.0.", "models.1.ema."}
    np.testing.assert_array_equal(
        found["models.1.ema."].weights, ours.from_state_dict(second).weights
    )
    assert others == {
        "norms.0": "not of a recurrent layer",
        "best": "the same object as 'models.0'",
    }
    torch.save([first, second], path)
    assert ours.from_file(path).keys() == {"0.", "1."}


def test_what_is_nested_too_deeply_is_said(tmp_path):
    path, tree = tmp_path / "model.pt", nn.GRU(3, 4).state_dict()
    for _ in range(200):
        tree = [tree]
    many = {n: {"m": torch.zeros(1)} for n in range(1000)}  # as optimizers have them
    torch.save({"a": tree, "many": many, "rnn": nn.GRU(3, 4).state_dict()}, path)
    found, others = ours.read_file(path)
    assert found.keys() == {"rnn."} and "many.999.m" in others
    (deep,) = [name for name in others if name.startswith("a")]
    assert others[deep] == "nested more than 100 deep"


def test_two_tensors_of_one_name_are_an_error(tmp_path):
    torch.save({1: torch.ones(2), "1": torch.zeros(2)}, path := tmp_path / "a.pt")
    with pytest.raises(ValueError, match="one tensor called '1', got several"):
        ours.from_file(path)


@pytest.mark.parametrize("tree", [[1, 2], 3, None, torch.zeros(3), [[]]], ids=str)
def test_a_file_without_names_is_an_error(tmp_path, tree):
    torch.save(tree, tmp_path / "model.pt")
    with pytest.raises(ValueError, match=r"`path` must be a file of tensors .* holds"):
        ours.from_file(tmp_path / "model.pt")


def test_what_is_no_path_is_an_error():
    for path in (None, b"model.pt"):
        with pytest.raises(TypeError, match="`path` must be a str or an os.PathLike"):
            ours.from_file(path)


def test_attributes_of_a_cell_of_a_user_are_its_own():
    class Named(nn.GRUCell):
        mode, dropout, batch_first = "train", 0.3, False

    got = ours.from_module(Named(3, 4))
    assert got.spec.dropout == 0 and got.notes == ()
