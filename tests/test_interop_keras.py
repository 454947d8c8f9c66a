"""interop.keras: the numbers of Keras's own layers, in and out, and its files."""

import functools as ft
import json
import os
import pathlib
import tempfile
import zipfile

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
    lenient,
    weights_of,
)

import ostinato as ost
from ostinato.interop import imported
from ostinato.interop import keras as ours
from ostinato.interop.keras_layers import Stored

os.environ.setdefault("KERAS_BACKEND", "jax")
pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5"),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]
keras = pytest.importorskip("keras", reason="needs the extra `peers`")
h5py = pytest.importorskip("h5py", reason="needs the extra `peers`")
kl = keras.layers

X = draw(2, 5, 3)
LAYERS = {
    "lstm": (kl.LSTM, {}),
    "lstm-no-bias": (kl.LSTM, {"use_bias": False}),
    "gru": (kl.GRU, {}),
    "gru-before": (kl.GRU, {"reset_after": False}),
    "gru-no-bias": (kl.GRU, {"use_bias": False}),
    "gru-before-no-bias": (kl.GRU, {"use_bias": False, "reset_after": False}),
    "tanh": (kl.SimpleRNN, {}),
    "relu": (kl.SimpleRNN, {"activation": "relu"}),
}


def redrawn(layer, size=3, seed=0):
    layer.build((None, None, size))
    shapes = [w.shape for w in layer.get_weights()]
    layer.set_weights([draw(*s, seed=seed + n) for n, s in enumerate(shapes)])
    return layer


def make(case, wrap=False, /, size=3, seed=0, return_sequences=True, **more):
    kind, options = LAYERS[case]
    with lenient():
        layer = kind(4, return_sequences=return_sequences, **options, **more)
        return redrawn(kl.Bidirectional(layer) if wrap else layer, size, seed)


def outputs(layer, x=X):
    with lenient():
        return np.asarray(layer(x))


def assert_same_arrays(a, b):
    for x, y in zip(a, b, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_layer_gives_the_same_numbers_and_goes_back(name, wrap):
    layer = make(name, wrap)
    network = ours.from_layer(layer)
    assert network.notes == ()
    assert distance(network, X, outputs(layer)) <= LIMIT
    arrays = ours.to_weights(network.spec, network.weights)
    assert_same_arrays(arrays, layer.get_weights())
    assert [a.dtype for a in arrays] == [w.dtype for w in layer.get_weights()]


@pytest.mark.parametrize("name", ["lstm", "gru", "gru-before"])
def test_any_two_gates_swapped_show(name, monkeypatch):
    layer = make(name)
    want, mode = outputs(layer), name.partition("-")[0]
    convert = lambda: ours.from_layer(layer)  # noqa: E731
    assert_swaps_show(monkeypatch, ours.GATES, mode, convert, X, want)


def test_stack_of_layers():
    first, second = make("lstm", True), make("lstm", True, size=8, seed=9)
    network = ours.from_layer([first, second])
    assert network.spec == ost.RNNSpec("lstm", 3, 4, 2, True, bias="input")
    assert distance(network, X, outputs(second, outputs(first))) <= LIMIT
    arrays = ours.to_weights(network.spec, network.weights, layer=1)
    assert_same_arrays(arrays, second.get_weights())
    with pytest.raises(ValueError, match="must hold layers of one kind"):
        ours.from_layer([first, make("lstm")])
    with pytest.raises(ValueError, match="kernel` must have shape"):
        ours.from_layer([first, first])
    with pytest.raises(ValueError, match="at least one layer"):
        ours.from_layer([])


def test_a_stack_that_begins_backwards_reads_flipped_inputs():
    first, second = make("lstm", go_backwards=True), make("lstm", size=4, seed=9)
    network = ours.from_layer([first, second])
    assert network.notes[0].endswith("flip x along time; y is flipped too")
    want = outputs(second, outputs(first))
    assert distance(network, X[:, ::-1], want) <= LIMIT
    last = make("lstm", size=4, seed=9, return_sequences=False)
    network = ours.from_layer([first, last])
    y = ost.rnn(network.spec, network.weights, jnp.asarray(X[:, ::-1])).y
    assert np.abs(y[:, -1] - outputs(last, outputs(first))).max() <= LIMIT


@pytest.mark.parametrize("first", [False, True])
def test_no_stack_turns_around_after_its_first_layer(first):
    layers = [
        make("gru", go_backwards=first),
        make("gru", size=4, seed=9, go_backwards=True, name="turned"),
    ]
    parts = [ours.from_layer(layer) for layer in layers]
    joined = imported.build(
        "gru",
        [ost.unpack_weights(part.weights, part.spec)[0] for part in parts],
        lambda p, field: field,
    )
    want = outputs(layers[1], outputs(layers[0]))
    for x in (X, X[:, ::-1]):  # so no call gives the numbers of Keras
        y = ost.rnn(joined.spec, joined.weights, jnp.asarray(x)).y
        assert np.abs(y - want).max() > 1e-2 and np.abs(y[:, ::-1] - want).max() > 1e-2
    with pytest.raises(ValueError, match="`go_backwards` of the layer 'turned' must"):
        ours.from_layer(layers)
    with pytest.raises(
        ValueError, match=r"`networks\[1\]` must read time in the order"
    ):
        imported.stack(parts)


def test_a_layer_of_a_stack_returns_all_steps():
    for wrap, size in ((False, 4), (True, 8)):
        early = make("lstm", wrap, return_sequences=False)
        last = make("lstm", wrap, size=size, return_sequences=False)
        wanted = f"`return_sequences` of the layer '{early.name}' must be True"
        with pytest.raises(ValueError, match=wanted):
            ours.from_layer([early, last])
        assert ours.from_layer([make("lstm", wrap), last]).spec.num_layers == 2


def test_both_directions_of_a_wrapper_are_joined_without_notes_on_time():
    layer = make("gru", True)
    parts = [
        ours.from_layer(one) for one in (layer.forward_layer, layer.backward_layer)
    ]
    both = imported.bidirectional(*parts)
    assert "flip x" in parts[1].notes[0] and both.notes == ()
    assert distance(both, X, outputs(layer)) <= LIMIT


def test_export_keeps_all_biases_or_says_what_to_fold():
    gru = ost.RNNSpec("gru", 3, 4)
    arrays = ours.to_weights(gru, weights_of(gru))
    assert arrays[2].shape == (2, 12)
    for bias in ("input", "recurrent"):
        spec = ost.RNNSpec("gru", 3, 4, bias=bias)
        layer, weights = make("gru"), weights_of(spec)
        layer.set_weights(ours.to_weights(spec, weights))
        assert distance(ours.Imported(spec, weights), X, outputs(layer)) <= LIMIT
    for name, spec in {
        "lstm": ost.RNNSpec("lstm", 3, 4),
        "gru-before": ost.RNNSpec("gru", 3, 4, reset_after=False),
        "relu": ost.RNNSpec("rnn_relu", 3, 4),
    }.items():
        layer, weights = make(name), weights_of(spec)
        with pytest.raises(ValueError, match="both b_ih and b_hh.*fold=True"):
            ours.to_weights(spec, weights)
        layer.set_weights(ours.to_weights(spec, weights, fold=True))
        assert distance(ours.Imported(spec, weights), X, outputs(layer)) <= LIMIT
    proj = ost.RNNSpec("lstm", 3, 4, proj_size=2)
    with pytest.raises(ValueError, match="proj_size=0 for a layer of Keras"):
        ours.to_weights(proj, weights_of(proj), fold=True)


def test_notes_say_what_a_spec_does_not():
    with lenient():
        layer = kl.LSTM(
            4, dropout=0.1, go_backwards=True, stateful=True, dtype="mixed_bfloat16"
        )
        layer.build((2, None, 3))
    notes = " ".join(ours.from_layer(layer).notes)
    config = layer.get_config() | {"time_major": True}  # as Keras 2 wrote it
    arrays = [np.asarray(w) for w in layer.get_weights()]
    notes += " ".join(ours._convert([Stored("a", "LSTM", config, arrays)]).notes)
    for word in (
        "dropout=0.1",
        "time_major",
        "go_backwards",
        "stateful",
        "bfloat16",
        "final h",
    ):
        assert word in notes


class Halved(kl.LSTM):
    def call(self, *args, **options):
        return super().call(*args, **options) / 2


class HalvedInside(kl.LSTM):
    def inner_loop(self, sequences, *args, **options):
        return super().inner_loop(sequences / 2, *args, **options)


class HalvedBoth(kl.Bidirectional):
    def call(self, *args, **options):
        return super().call(*args, **options) / 2


class HalvedCell(kl.GRUCell):
    def call(self, *args, **options):
        y, states = super().call(*args, **options)
        return y / 2, states


def with_cell(layer, cell):
    layer.cell = cell
    return layer


def called(name):
    """Return a function that has the name of one of Keras."""

    def function(x):
        return 2 * x

    function.__name__ = name
    return function


@pytest.mark.parametrize(
    ("layer", "attribute"),
    [
        (lambda: kl.LSTM(4, activation="relu"), "activation"),
        (
            lambda: kl.GRU(4, recurrent_activation="hard_sigmoid"),
            "recurrent_activation",
        ),
        (lambda: kl.SimpleRNN(4, activation="linear"), "activation"),
        (lambda: kl.SimpleRNN(4, activation=lambda x: x), "activation"),
        (lambda: kl.SimpleRNN(4, activation=called("relu")), "the relu of Keras"),
        (lambda: Halved(4), "`call` of the layer"),
        (lambda: HalvedInside(4), "`inner_loop` of the layer"),
        (lambda: HalvedBoth(kl.LSTM(4)), "`call` of the layer"),
        (lambda: with_cell(kl.GRU(4), HalvedCell(4)), "`call` of the layer"),
        (lambda: kl.LSTM(4, activation=called("tanh")), "the tanh of Keras"),
        (
            lambda: kl.GRU(4, recurrent_activation=called("sigmoid")),
            "the sigmoid of Keras",
        ),
        (lambda: kl.Bidirectional(kl.GRU(4), merge_mode="sum"), "merge_mode"),
        (
            lambda: kl.Bidirectional(
                kl.GRU(4, go_backwards=True), backward_layer=kl.GRU(4)
            ),
            "go_backwards",
        ),
        (
            lambda: kl.Bidirectional(
                kl.LSTM(4), backward_layer=kl.GRU(4, go_backwards=True)
            ),
            "must hold layers of one kind",
        ),
    ],
)
def test_other_layers_name_the_attribute(layer, attribute):
    with lenient():
        made = layer()
        made.build((None, None, 3))
    with pytest.raises(ValueError, match=attribute):
        ours.from_layer(made)


def test_what_is_no_layer_is_an_error():
    with lenient():
        with pytest.raises(ValueError, match="`built` of the layer 'new' must be True"):
            ours.from_layer(kl.LSTM(4, name="new"))
        with pytest.raises(TypeError, match="must be a keras.layers.LSTM"):
            ours.from_layer(kl.Dense(4))


@ft.cache
def saved(suffix):
    """A file of a model with a model inside, and its recurrent layers by name."""
    with lenient(), tempfile.TemporaryDirectory() as folder:
        inner = keras.Sequential(
            [make("gru-before", size=8), make("tanh", size=4, name="last")],
            name="inner",
        )
        recurrent = [make("lstm", name="first"), make("gru", True, size=4, name="one")]
        layers = [keras.Input((5, 3)), *recurrent, inner, kl.Dense(2, name="head")]
        path = pathlib.Path(folder, f"model{suffix}")
        keras.Sequential(layers).save(path)
        named = {layer.name: layer for layer in recurrent}
        named |= {f"inner/{layer.name}": layer for layer in inner.layers}
        return path.read_bytes(), named


def save(path):
    path.write_bytes(saved(path.suffix)[0])


@pytest.mark.parametrize("suffix", [".keras", ".h5"])
def test_file_gives_the_same_numbers(tmp_path, suffix):
    path = tmp_path / f"model{suffix}"
    save(path)
    found, others = ours.read_file(path)
    layers = saved(suffix)[1]
    assert found.keys() == layers.keys() and others.keys() == {"head"}
    for name, layer in layers.items():
        want = ours.from_layer(layer)
        assert found[name].spec == want.spec
        np.testing.assert_array_equal(found[name].weights, want.weights)
    assert ours.from_file(path).keys() == found.keys()


def test_bfloat16_file(tmp_path):
    with lenient():
        layer = redrawn(kl.GRU(4, dtype="bfloat16", recurrent_initializer="zeros"))
        keras.Sequential([keras.Input((5, 3)), layer]).save(tmp_path / "m.keras")
    (found,) = ours.from_file(tmp_path / "m.keras").values()
    assert found.weights.dtype == jnp.bfloat16
    assert_same_arrays(ours.to_weights(found.spec, found.weights), layer.get_weights())


def test_layers_that_cannot_be_converted_are_said(tmp_path):
    with lenient():
        model = keras.Sequential(
            [
                keras.Input((5, 3)),
                kl.LSTM(4, activation="relu", name="odd", return_sequences=True),
                kl.RNN(kl.LSTMCell(4), name="cell"),
            ]
        )
        model.save(tmp_path / "m.keras")
    found, others = ours.read_file(tmp_path / "m.keras")
    assert found == {} and others.keys() == {"odd", "cell"}
    assert "`activation` of the layer 'odd'" in others["odd"]
    with pytest.raises(ValueError, match="`activation` of the layer 'odd'"):
        ours.from_file(tmp_path / "m.keras")


def rewrite(path, config=None, change=None):
    """Change the configuration or the arrays of a `.keras` file."""
    with zipfile.ZipFile(path) as archive:
        parts = {n: archive.read(n) for n in archive.namelist()}
    if config:
        parts["config.json"] = config(parts["config.json"])
    if change:
        weights = path.with_suffix(".weights")
        weights.write_bytes(parts["model.weights.h5"])
        with h5py.File(weights, "r+") as file:
            change(file)
        parts["model.weights.h5"] = weights.read_bytes()
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in parts.items():
            archive.writestr(name, data)


KERNEL = "layers/lstm/cell/vars/0"


def external_link(file):
    del file[KERNEL]
    file[KERNEL] = h5py.ExternalLink("/etc/hostname", "/")


def soft_link(file):
    del file[KERNEL]
    file[KERNEL] = h5py.SoftLink("/layers/lstm/cell/vars/1")


def external_data(file):
    del file[KERNEL]
    where = [("/dev/zero", 0, h5py.h5f.UNLIMITED)]
    file.create_dataset(KERNEL, (3, 16), "f4", external=where)


def vast(file):
    del file[KERNEL]
    file.create_dataset(KERNEL, (1 << 30, 1 << 20), "f4", chunks=(1, 16))


def objects(file):
    del file[KERNEL]
    file.create_dataset(KERNEL, data=["a"])


def integers(file):
    del file[KERNEL]
    file.create_dataset(KERNEL, (3, 16), "i1")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (external_link, "links to other places are not read"),
        (soft_link, "links to other places are not read"),
        (external_data, "arrays in other files are not read"),
        (vast, "arrays must fit in its"),
        (objects, "`first.kernel` must hold numbers"),
        (integers, "`first.kernel` must have one of the dtypes .* got int8"),
    ],
)
def test_hostile_arrays_are_one_error(tmp_path, change, message):
    path = tmp_path / "bad.keras"
    save(path)
    rewrite(path, change=change)
    with pytest.raises((TypeError, ValueError), match=message):
        ours.from_file(path)


@pytest.mark.parametrize("suffix", [".keras", ".h5"])
def test_other_layers_may_hold_anything(tmp_path, suffix):
    path = tmp_path / f"model{suffix}"
    with lenient():
        given, dense = keras.Input((5, 8)), kl.Dense(4)
        kept = kl.LSTM(4, return_sequences=True, name="kept")(given)
        model = keras.Model(given, dense(kept))
        dense.quantize("int8")
        model.save(path)
    assert ours.from_file(path).keys() == {"kept"}


def test_reading_many_layers_takes_its_time(tmp_path):
    path = tmp_path / "many.h5"
    with h5py.File(path, "w") as file:
        file.attrs["model_config"] = json.dumps({"config": {"layers": []}})
        for n in range(1500):
            group = file.create_group(f"model_weights/dense_{n}/dense_{n}")
            group["kernel:0"] = np.zeros((1, 1), "f4")
            group["bias:0"] = np.zeros(1, "f4")
    assert ours.from_file(path) == {}


def test_hostile_configurations_are_one_error(tmp_path):
    path = tmp_path / "bad.keras"
    save(path)
    whole, wanted = path.read_bytes(), "`path` must be a model that Keras saved"
    for config in (b"[" * 100_000, b"7", b"{", b"\xff"):
        path.write_bytes(whole)
        rewrite(path, config=lambda _, c=config: c)
        with pytest.raises(ValueError, match=wanted):
            ours.from_file(path)
    deep = {"class_name": "Sequential", "config": {"layers": []}}
    for _ in range(30):
        deep = {"class_name": "Sequential", "config": {"name": "a", "layers": [deep]}}
    path.write_bytes(whole)
    rewrite(path, config=lambda _: json.dumps(deep).encode())
    with pytest.raises(ValueError, match="more than 20 deep"):
        ours.from_file(path)
    path.write_bytes(whole)
    stranger = whole_config = None
    with zipfile.ZipFile(path) as archive:
        whole_config = archive.read("config.json")
    stranger = whole_config.replace(b'"keras.layers"', b'"their.layers"')
    rewrite(path, config=lambda _: stranger)
    assert ours.from_file(path) == {}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("config.json", bytes(1 << 26))
    with pytest.raises(ValueError, match="too large for a file of its size"):
        ours.from_file(path)
    with pytest.raises(FileNotFoundError):
        ours.from_file(tmp_path / "none.keras")


@pytest.mark.parametrize("suffix", [".keras", ".h5"])
def test_damaged_files_are_one_error(tmp_path, suffix):
    path = tmp_path / f"model{suffix}"
    save(path)
    assert_damage_is_one_error(ours.from_file, path, path.read_bytes())


@pytest.mark.parametrize("suffix", [".keras", ".h5"])
def test_layers_of_ours_are_found_in_files_too(tmp_path, suffix):
    from ostinato.nn import keras as own

    layers = [own.LSTM(4, return_sequences=True, name="a"), own.GRU(2, name="b")]
    with lenient():
        keras.Sequential([keras.Input((5, 3)), *layers]).save(tmp_path / f"m{suffix}")
    found, others = ours.read_file(tmp_path / f"m{suffix}")
    assert not others
    for layer in layers:
        want = ours.from_layer(layer)
        assert found[layer.name].spec == want.spec
        np.testing.assert_array_equal(found[layer.name].weights, want.weights)


def wrapped(case="lstm", name="both", /, **more):
    kind, options = LAYERS[case]
    inner = kind(2, return_sequences=True, **options)
    return kl.Bidirectional(inner, name=name, **more)


def model_of(*layers, name=None):
    return keras.Sequential([keras.Input((5, 2)), *layers], name=name)


def nested(*names, inside=None):
    """Return a model with a layer `lstm` in each inner one, and the layers."""
    layers = [kl.LSTM(2, return_sequences=True, name="lstm") for _ in names]
    inner = [
        model_of(layer, name=name) for name, layer in zip(names, layers, strict=True)
    ]
    paths = [f"{inside}/{name}/lstm" if inside else f"{name}/lstm" for name in names]
    inner = [model_of(*inner, name=inside)] if inside else inner
    return model_of(*inner), dict(zip(paths, layers, strict=True))


def own_backward(forward_trained=True):
    """Return a layer whose backward one keeps its own name."""
    backward = kl.LSTM(2, return_sequences=True, go_backwards=True, name="another")
    layer = wrapped(backward_layer=backward)
    layer.forward_layer.trainable = forward_trained
    return layer


def misleading_files():
    """Yield models whose names look like those of directions, cells or other layers."""
    for name in ("forward_net", "backward_net", "forward_", "lstm_cell", "kernel"):
        for case in ("lstm", "gru-no-bias"):
            layer = wrapped(case, name)
            yield model_of(layer), {name: layer}
    for name in ("forward_model", "backward_model"):
        layer = wrapped()
        yield model_of(layer, name=name), {"both": layer}
        layer = wrapped()
        yield model_of(model_of(layer, name=name)), {f"{name}/both": layer}
    for layer in own_backward(), own_backward(forward_trained=False):
        yield model_of(layer), {"both": layer}
    yield nested("a", "b")
    yield nested("a", "b", inside="enc")
    yield nested("lstm", "b", inside="lstm")
    inner, layers = siblings()
    yield model_of(inner), {f"inner/{name}": layer for name, layer in layers.items()}
    inner, layers = siblings()
    yield inner, layers


def siblings():
    """Return a model with layers called as a direction and as a cell of others."""
    layers = {
        "forward_lstm": kl.LSTM(2, return_sequences=True, name="forward_lstm"),
        "both": kl.Bidirectional(
            kl.LSTM(2, return_sequences=True, name="lstm"), name="both"
        ),
        "lstm_cell": kl.LSTM(4, return_sequences=True, name="lstm_cell"),
    }
    return model_of(*layers.values(), name="inner"), layers


@pytest.mark.parametrize("suffix", [".keras", ".h5"])
def test_names_do_not_mislead_in_files(tmp_path, suffix):
    with lenient():
        for model, layers in misleading_files():
            for seed, array in enumerate(model.weights):
                array.assign(draw(*array.shape, seed=seed))
            model.save(tmp_path / f"m{suffix}")
            found = ours.from_file(tmp_path / f"m{suffix}")
            assert found.keys() == layers.keys()
            for name, layer in layers.items():
                want = ours.from_layer(layer)
                assert found[name].spec == want.spec
                np.testing.assert_array_equal(found[name].weights, want.weights)


def test_arguments_of_the_exporter_are_checked():
    for spec in (ost.RNNSpec("lstm", 3, 4), ost.RNNSpec("gru", 3, 4)):
        assert_weights_are_checked(ours.to_weights, spec, fold=True)
        with pytest.raises(TypeError, match="`fold` must be True or False, got str"):
            ours.to_weights(spec, weights_of(spec), fold="no")


def test_what_is_no_path_is_an_error():
    with pytest.raises(TypeError, match="`path` must be a str or an os.PathLike"):
        ours.from_file(None)


@pytest.mark.parametrize("name", ["model_weights", "model_weights/both"])
def test_an_h5_file_is_not_followed_into_another_one(tmp_path, name):
    with lenient():
        model_of(wrapped()).save(tmp_path / "m.h5")
    other = tmp_path / "other.h5"
    other.write_bytes((tmp_path / "m.h5").read_bytes())
    with h5py.File(tmp_path / "m.h5", "r+") as file:
        del file[name]
        file[name] = h5py.ExternalLink(str(other), f"/{name}")
    with pytest.warns(UserWarning, match="the layer 'both': the file does not tell"):
        assert ours.from_file(tmp_path / "m.h5") == {}
