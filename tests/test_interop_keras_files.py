"""interop.keras_files: arrays go to their own layer, or to none with the reason.

Files are written here as versions of Keras write them, all arrays of a layer filled
with a number of its own.
"""

import io
import json
import sys
import zipfile

import numpy as np
import pytest

from ostinato.interop import keras as ours

pytestmark = pytest.mark.peers
h5py = pytest.importorskip("h5py", reason="needs the extra `peers`")

SHAPES = {"kernel": (3, 12), "recurrent_kernel": (3, 12), "bias": (12,)}
UNCLEAR = "Keras 2 numbers those of a class without the layers that it stored elsewhere"
ELSEWHERE = "the file has no arrays in its place"
UNNAMED = "no names of arrays fit this layer alone"


def layer(name, kind="LSTM", shared=None, **config):
    about = {"module": "keras.layers", "class_name": kind, "config": {"name": name}}
    about["config"] |= {"units": 3, "use_bias": True, **config}
    return about if shared is None else about | {"shared_object_id": shared}


def model(name, *layers, kind="Functional"):
    config = {"name": name, "layers": list(layers)}
    return {"module": "keras", "class_name": kind, "config": config}


def current(path, layers, numbers, version="2.15.0"):
    """Write a `.keras` file; `numbers` are those in the arrays of its groups."""
    buffer = io.BytesIO()
    with h5py.File(buffer, "w") as file:
        for group, number in numbers.items():
            for n, shape in enumerate(SHAPES.values()):
                file[f"{group}/cell/vars/{n}"] = np.full(shape, number, "f4")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("config.json", json.dumps(model("all", *layers)))
        archive.writestr("model.weights.h5", buffer.getvalue())
        if version:
            about = json.dumps({"keras_version": version})
            archive.writestr("metadata.json", about)
    return path


def legacy(path, layers, numbers):
    """Write an `.h5` file; `numbers` are those in the arrays of its cells."""
    with h5py.File(path, "w") as file:
        file.attrs["model_config"] = json.dumps(model("all", *layers))
        for cell, number in numbers.items():
            for name, shape in SHAPES.items():
                at = f"model_weights/{cell}/{name}:0"
                file[at] = np.full(shape, number, "f4")
    return path


def assert_read(path, numbers, reasons):
    """These layers have arrays with these numbers, others the reasons for none."""
    found, others = ours.read_file(path)
    got = {name: set(np.unique(one.weights)) for name, one in found.items()}
    assert got == {name: {number} for name, number in numbers.items()}
    assert others.keys() == reasons.keys()
    for name, reason in reasons.items():
        assert f"the layer {name!r}: " in others[name] and reason in others[name]


LAYERS = [layer("l1"), layer("l2"), layer("l3")]


@pytest.mark.parametrize("version", ["2.15.0", "2.13.1", None, "new"])
def test_numbers_are_trusted_only_with_all_layers(tmp_path, version):
    both = layer("both", "Bidirectional", layer=layer("l"), merge_mode="concat")
    sides = {f"layers/bidirectional/{s}_layer": 9 for s in ("forward", "backward")}
    whole = {"layers/lstm": 1, "layers/lstm_1": 2, "layers/lstm_2": 3} | sides
    path = current(tmp_path / "m.keras", [*LAYERS, both], whole, version)
    assert_read(path, {"l1": 1, "l2": 2, "l3": 3, "both": 9}, {})
    part = {"layers/lstm": 1, "parts/lstm": 2, "layers/lstm_1": 3} | sides
    path = current(tmp_path / "m.keras", [*LAYERS, both], part, version)
    assert_read(path, {"both": 9}, dict.fromkeys(("l1", "l2", "l3"), UNCLEAR))


def test_keras_3_counts_layers_that_it_stored_elsewhere(tmp_path):
    numbers = {"layers/lstm": 1, "parts/lstm": 2, "layers/lstm_2": 3}
    path = current(tmp_path / "m.keras", LAYERS, numbers, "3.0.0")
    assert_read(path, {"l1": 1, "l3": 3}, {"l2": ELSEWHERE})
    numbers = {"layers/lstm": 1, "layers/lstm_1": 2, "special/lstm": 3}
    path = current(tmp_path / "m.keras", LAYERS, numbers, "3.15.1")
    assert_read(path, {"l1": 1, "l2": 2}, {"l3": ELSEWHERE})


def test_paths_that_import_passes_over(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path])  # no string
    sides = {f"layers/lstm{n}": i for i, n in enumerate(("", "_1", "_2"), 1)}
    path = current(tmp_path / "m.keras", LAYERS, sides, "3.9.0")
    assert_read(path, {"l1": 1, "l2": 2, "l3": 3}, {})


def test_other_layers_of_a_file_stay_readable(tmp_path):
    numbers = {"layers/lstm": 1, "parts/lstm": 2, "layers/lstm_2": 3}
    path = current(tmp_path / "m.keras", LAYERS, numbers, "3.9.0")
    with pytest.warns(UserWarning, match=f"read without\nthe layer 'l2': {ELSEWHERE}"):
        networks = ours.from_file(path)
    assert networks.keys() == {"l1", "l3"}
    with pytest.raises(KeyError, match=f"the layer 'l2': {ELSEWHERE}"):
        networks["l2"]
    with pytest.raises(KeyError, match="^'none'$"):
        networks["none"]


def test_a_model_in_a_file_of_keras_2_is_trusted_like_a_layer(tmp_path):
    shared, own = layer("shared"), layer("own")
    two = [model("a", shared), model("b", shared, own), layer("top")]
    numbers = {
        "layers/functional/layers/lstm": 1,
        "layers/functional_1/layers/lstm": 2,  # of `own`: the other one is not counted
        "layers/lstm": 3,
    }
    path = current(tmp_path / "m.keras", two, numbers)
    unclear = {"b/shared": UNCLEAR, "b/own": UNCLEAR}
    assert_read(path, {"a/shared": 1, "top": 3}, unclear)

    two = [model("a", shared), model("b", own), model("c", layer("d", "Dense"))]
    numbers = {"special/layers/lstm": 1, "layers/functional/layers/lstm": 2}
    path = current(tmp_path / "m.keras", two, numbers)
    found, others = ours.read_file(path)
    assert not found and UNCLEAR in others["a/shared"] and UNCLEAR in others["b/own"]
    numbers = {
        "layers/functional/layers/lstm": 1,
        "layers/functional_1/layers/lstm": 2,
    }
    found, others = ours.read_file(current(tmp_path / "m.keras", two, numbers))
    assert found.keys() == {"a/shared", "b/own"} and others.keys() == {"c/d"}


def test_keras_3_marks_layers_that_occur_again(tmp_path):
    again = [model("enc", layer("s")), layer("s", shared=7), layer("top")]
    numbers = {"layers/functional/layers/lstm": 1, "layers/lstm_1": 2}
    path = current(tmp_path / "m.keras", again, numbers, "3.15.1")
    assert_read(path, {"enc/s": 1, "s": 1, "top": 2}, {})
    again.insert(1, model("dec", layer("s")))  # one of the two is the same layer
    numbers["layers/functional_1/layers/lstm"] = 3
    path = current(tmp_path / "m.keras", again, numbers, "3.15.1")
    assert_read(path, {"enc/s": 1, "dec/s": 3, "top": 2}, {"s": ELSEWHERE})
    again[1] = layer("each", "TimeDistributed", layer=layer("s"))  # as this may be
    path = current(tmp_path / "m.keras", again, numbers, "3.15.1")
    found, others = ours.read_file(path)
    assert found.keys() == {"enc/s", "top"} and ELSEWHERE in others["s"]


def test_names_may_have_slashes_or_begin_alike(tmp_path):
    inner = model("x/y", layer("p/q"), layer("q"))
    layers = [inner, layer("q"), layer("enc/l1"), layer("enc")]
    numbers = {
        "x/y/p/q/lstm_cell": 1,
        "x/y/q/lstm_cell": 2,
        "q/q/lstm_cell": 3,
        "enc/l1/enc/l1/lstm_cell": 4,
        "enc/enc/lstm_cell": 5,
    }
    wanted = {"x/y/p/q": 1, "x/y/q": 2, "q": 3, "enc/l1": 4, "enc": 5}
    assert_read(legacy(tmp_path / "m.h5", layers, numbers), wanted, {})
    del numbers["x/y/p/q/lstm_cell"], wanted["x/y/p/q"]
    path = legacy(tmp_path / "m.h5", layers, numbers)
    assert_read(path, wanted, {"x/y/p/q": UNNAMED})
    layers[3] = model("enc", layer("l1"))
    found, others = ours.read_file(legacy(tmp_path / "m.h5", layers, numbers))
    assert "enc/l1" not in found
    assert "several layers of the file have its name" in others["enc/l1"]


@pytest.mark.parametrize("units", [3, 4])
def test_a_file_written_in_part_gives_no_layer_the_arrays_of_another(tmp_path, units):
    mid = model("mid", model("deep", layer("rnn")), layer("rnn", units=units))
    layers = [layer("first"), mid, layer("top")]
    first = {"first/first/lstm_cell": 1}
    both = {"mid/deep/rnn": UNNAMED, "mid/rnn": UNNAMED}
    # Keras 2 names arrays after their layer, Keras 3 after a Sequential model too.
    path = legacy(tmp_path / "m.h5", layers, first | {"mid/rnn/lstm_cell": 2})
    assert_read(path, {"first": 1}, both | {"top": UNNAMED})
    path = legacy(tmp_path / "m.h5", layers, first | {"mid/deep/rnn/lstm_cell": 2})
    reasons = {"mid/rnn": UNNAMED, "top": UNNAMED}
    assert_read(path, {"first": 1, "mid/deep/rnn": 2}, reasons)
    path = legacy(tmp_path / "m.h5", layers, first | {"mid/old/deep/rnn/lstm_cell": 2})
    assert_read(path, {"first": 1, "mid/deep/rnn": 2}, reasons)
    with h5py.File(path, "r+") as file:
        del file["model_weights/first/first/lstm_cell/recurrent_kernel:0"]
    assert_read(path, {"mid/deep/rnn": 2}, reasons | {"first": UNNAMED})


def test_renamed_layers_in_a_model_say_so(tmp_path):
    inner = model("inner", layer("renamed"), layer("kept"))
    numbers = {"inner/old/lstm_cell": 1, "inner/kept/lstm_cell": 2}
    numbers["top/before/lstm_cell"] = 3  # it alone is in its group
    path = legacy(tmp_path / "m.h5", [inner, layer("top")], numbers)
    assert_read(path, {"inner/kept": 2, "top": 3}, {"inner/renamed": UNNAMED})
    numbers["top/another/lstm_cell"] = 4
    path = legacy(tmp_path / "m.h5", [inner, layer("top")], numbers)
    assert_read(path, {"inner/kept": 2}, {"inner/renamed": UNNAMED, "top": UNNAMED})


def test_cells_inside_of_other_layers_are_not_mistaken(tmp_path):
    both = layer("both", "Bidirectional", layer=layer("l"), merge_mode="concat")
    inner = model("inner", layer("forward_lstm"), both, layer("rnn"))
    numbers = {
        "inner/forward_lstm/lstm_cell": 1,
        "inner/both/forward_lstm/lstm_cell": 2,
        "inner/both/backward_lstm/lstm_cell": 2,
        "inner/rnn/lstm_cell": 3,
        "inner/own/rnn/lstm_cell": 4,  # in a layer of the user's
    }
    path = legacy(tmp_path / "m.h5", [inner], numbers)
    wanted = {"inner/forward_lstm": 1, "inner/both": 2, "inner/rnn": 3}
    assert_read(path, wanted, {})


def test_a_layer_of_two_models_in_a_model_is_read_where_it_is_marked(tmp_path):
    def layers(mark):
        second = model("im2", layer("shared", shared=mark), layer("own"))
        return [model("big", model("im", layer("shared")), second)]

    numbers = {"big/shared/lstm_cell": 1, "big/own/lstm_cell": 2}
    wanted = {"big/im/shared": 1, "big/im2/shared": 1, "big/im2/own": 2}
    assert_read(legacy(tmp_path / "m.h5", layers(3), numbers), wanted, {})
    reasons = dict.fromkeys(("big/im/shared", "big/im2/shared"), UNNAMED)
    path = legacy(tmp_path / "m.h5", layers(None), numbers)
    assert_read(path, {"big/im2/own": 2}, reasons)
    outside = [*layers(3), layer("shared", shared=3)]  # not one with that of `im`
    path = legacy(tmp_path / "m.h5", outside, numbers)
    assert_read(path, {"big/im2/own": 2}, reasons | {"shared": UNNAMED})


@pytest.mark.parametrize(("field", "value"), [("units", 5), ("use_bias", False)])
def test_arrays_fit_the_configuration(tmp_path, field, value):
    layers = [layer("odd", **{field: value})]
    path = current(tmp_path / "m.keras", layers, {"layers/lstm": 1})
    with pytest.raises(ValueError, match=f"`{field}` of the layer 'odd' must be"):
        ours.from_file(path)
