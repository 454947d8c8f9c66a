"""interop.onnx: the numbers of ONNX Runtime, nodes in and models out."""

import itertools

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
    run,
    swaps,
    weights_of,
)

import ostinato as ost
from ostinato.interop import imported
from ostinato.interop import onnx as ours

pytestmark = pytest.mark.peers
onnx = pytest.importorskip("onnx", reason="needs the extra `peers`")
ort = pytest.importorskip("onnxruntime", reason="needs the extra `peers`")
helper = onnx.helper

X = draw(2, 5, 3)
GATE_COUNTS = {"LSTM": 4, "GRU": 3, "RNN": 1}


def session(model):
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def make(kind, *, direction="forward", bias=True, extra=(), consts=None, **attributes):
    """A model of one node, written by hand: x and y have time first."""
    gates, directions = GATE_COUNTS[kind], 2 if direction == "bidirectional" else 1
    tensors = {
        "W": draw(directions, gates * 4, 3),
        "R": draw(directions, gates * 4, 4),
        "B": draw(directions, 2 * gates * 4),
    }
    if not bias:
        del tensors["B"]
    tensors |= consts or {}
    names = ["X", "W", "R", "B" if bias else "", *extra]
    node = helper.make_node(
        kind, names, ["Y"], name="rnn", hidden_size=4, direction=direction, **attributes
    )
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        [node],
        "g",
        [info("X", 1, ["T", "N", 3])],
        [info("Y", 1, ["T", directions, "N", 4])],
        [onnx.numpy_helper.from_array(a, name) for name, a in tensors.items()],
    )
    opsets = [helper.make_opsetid("", 17)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def theirs(model):
    (y,) = session(model).run(None, {"X": X.swapaxes(0, 1)})
    return y.transpose(2, 0, 1, 3).reshape(2, 5, -1)


NODES = {
    "lstm": ("LSTM", {}),
    "lstm-no-bias": ("LSTM", {"bias": False}),
    "lstm-both": ("LSTM", {"direction": "bidirectional"}),
    "gru": ("GRU", {"linear_before_reset": 1}),
    "gru-before": ("GRU", {"direction": "bidirectional"}),
    "tanh": ("RNN", {}),
    "relu": ("RNN", {"activations": ["Relu"]}),
    "named": ("LSTM", {"activations": ["Sigmoid", "Tanh", "Tanh"]}),
}


@pytest.mark.parametrize("name", NODES)
def test_node_gives_the_same_numbers(name):
    kind, options = NODES[name]
    model = make(kind, **options)
    network = ours.from_model(model)["rnn"]
    assert distance(network, X, theirs(model)) <= LIMIT
    assert network.notes == ("layout=0: x is [T, N, I], so call with time_major=True",)


@pytest.mark.parametrize("name", ["lstm", "gru", "gru-before"])
def test_any_two_gates_swapped_show_on_the_way_in(name, monkeypatch):
    kind, options = NODES[name]
    model = make(kind, **options)
    want, mode = theirs(model), name.partition("-")[0]
    convert = lambda: ours.from_model(model)["rnn"]  # noqa: E731
    assert_swaps_show(monkeypatch, ours.GATES, mode, convert, X, want)


SPECS = [
    ost.RNNSpec(mode, 3, 4, layers, bidirectional, bias=bias, reset_after=after)
    for (mode, after), (layers, bidirectional), bias in itertools.product(
        [
            ("lstm", True),
            ("gru", True),
            ("gru", False),
            ("rnn_tanh", True),
            ("rnn_relu", True),
        ],
        [(1, False), (2, True)],
        ["double", "recurrent"],
    )
] + [ost.RNNSpec("lstm", 3, 4, bias="none"), ost.RNNSpec("gru", 3, 4, bias="input")]


def feeds(spec, lengths):
    rows, count = spec.num_layers * spec.num_directions, len(lengths)
    made = {
        "x": draw(count, 5, 3),
        "sequence_lens": np.array(lengths, np.int32),
        "h_0": draw(rows, count, 4, seed=1),
    }
    if spec.mode == "lstm":
        made["c_0"] = draw(rows, count, 4, seed=2)
    return made


def both(spec, weights, model, lengths):
    made = feeds(spec, lengths)
    got = session(model).run(None, made)
    state = tuple(jnp.asarray(made[n]) for n in ("h_0", "c_0") if n in made)
    state = state if spec.mode == "lstm" else state[0]
    y, last = run(
        spec, weights, jnp.asarray(made["x"]), state, seq_lengths=jnp.asarray(lengths)
    )
    return got, [y, *(last if spec.mode == "lstm" else [last])]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_model_computes_the_same_at_all_lengths(spec):
    weights = weights_of(spec)
    model = ours.to_model(spec, weights)
    for got, want in zip(*both(spec, weights, model, [3, 1, 5, 2, 4]), strict=True):
        want = np.asarray(want)
        assert got.shape == want.shape
        assert np.abs(got - want).max() <= LIMIT * max(1, np.abs(want).max())


@pytest.mark.parametrize("spec", SPECS[1::4], ids=str)
def test_exported_nodes_come_back(spec):
    weights = weights_of(spec)
    found = ours.from_model(ours.to_model(spec, weights))
    assert list(found) == [f"rnn_l{n}" for n in range(spec.num_layers)]
    whole = imported.stack([*found.values()])
    layers = ost.unpack_weights(whole.weights, whole.spec)
    for got, want in zip(layers, ost.unpack_weights(weights, spec), strict=True):
        for field in want._fields:
            value = getattr(want, field)
            if value is not None:
                np.testing.assert_array_equal(getattr(got, field), value)
    notes = " ".join(found[f"rnn_l{spec.num_layers - 1}"].notes)
    assert "seq_lengths" in notes and "initial state" in notes
    assert ("node 'rnn_l0'" in notes) == (spec.num_layers > 1)


@pytest.mark.parametrize("mode", ["lstm", "gru"])
def test_any_two_gates_swapped_show_on_the_way_out(mode, monkeypatch):
    spec = ost.RNNSpec(mode, 3, 4)
    weights = weights_of(spec)
    for wrong in swaps(ours.GATES[mode]):
        monkeypatch.setitem(ours.GATES, mode, wrong)
        got, want = both(spec, weights, ours.to_model(spec, weights), [5, 3])
        assert np.abs(got[0] - np.asarray(want[0])).max() > 1e-3


def test_dtypes_and_versions():
    spec = ost.RNNSpec("lstm", 3, 4)
    weights = weights_of(spec, dtype=np.float64)
    model = ours.to_model(spec, weights, opset=14)
    assert model.opset_import[0].version == 14
    # ONNX Runtime has no recurrent operators in float64, so the weights have to do.
    again = ours.from_model(model)["rnn_l0"]
    np.testing.assert_array_equal(again.weights, weights)
    half = weights.astype(jnp.bfloat16)
    with pytest.raises(ValueError, match="at least 22 for bfloat16, got 17"):
        ours.to_model(spec, half, opset=17)
    again = ours.from_model(ours.to_model(spec, half))["rnn_l0"]
    np.testing.assert_array_equal(again.weights, half)
    with pytest.raises(ValueError, match="`opset` must be at most"):
        ours.to_model(spec, weights, opset=1000)
    with pytest.raises(ValueError, match="`opset` must be at least 13"):
        ours.to_model(spec, weights, opset=7)


def test_time_first():
    spec = ost.RNNSpec("gru", 3, 4, bidirectional=True)
    weights = weights_of(spec)
    made = feeds(spec, [5, 3])
    y, h_n = session(ours.to_model(spec, weights)).run(None, made)
    made["x"] = made["x"].swapaxes(0, 1)
    turned = session(ours.to_model(spec, weights, time_major=True)).run(None, made)
    np.testing.assert_array_equal(turned[0].swapaxes(0, 1), y)
    np.testing.assert_array_equal(turned[1], h_n)


@pytest.mark.parametrize(
    "spec",
    [
        ost.RNNSpec("lstm", 3, 4, proj_size=2),
        ost.RNNSpec("lstm", 3, 4, cell_clip=1.0),
        ost.RNNSpec("gru", 4, 4, input_mode="skip"),
    ],
)
def test_what_onnx_lacks_is_an_error(spec):
    with pytest.raises(ValueError, match="`spec` must have .* for a model of ONNX"):
        ours.to_model(spec, weights_of(spec))


@pytest.mark.parametrize(
    ("kind", "options", "attribute"),
    [
        ("LSTM", {"clip": 3.0}, "clip"),
        ("LSTM", {"input_forget": 1}, "input_forget"),
        ("LSTM", {"activations": ["Sigmoid", "Tanh", "Relu"]}, "activations"),
        ("LSTM", {"activations": []}, "activations"),
        ("GRU", {"activations": ["HardSigmoid", "Tanh"]}, "activations"),
        ("RNN", {"activations": ["Affine"]}, "activations"),
        ("RNN", {"activations": ["Relu", "Tanh"]}, "activations"),
        ("LSTM", {"direction": "sideways"}, "direction"),
        ("LSTM", {"extra": ["", "", "", "P"], "consts": {"P": draw(1, 12)}}, "P"),
        ("LSTM", {"consts": {"W": draw(2, 16, 3)}}, "W"),
        ("LSTM", {"consts": {"W": draw(1, 12, 3)}}, r"rnn\.W\[0\]"),
        ("LSTM", {"consts": {"B": draw(1, 33)}}, "B"),
        ("LSTM", {"consts": {"R": draw(1, 20, 5)}}, "hidden_size"),
    ],
)
def test_other_equations_name_the_attribute(kind, options, attribute):
    with pytest.raises(ValueError, match=f"`{attribute}`"):
        ours.from_model(make(kind, **options))


def test_notes_on_what_nodes_say():
    (network,) = ours.from_model(make("GRU", direction="reverse")).values()
    assert "flip x" in network.notes[1]
    model = make("GRU", layout=1)
    (note,) = ours.from_model(model)["rnn"].notes
    assert note == "layout=1: its states are [N, D, H], those of a call [D, N, H]"
    del model.graph.initializer[0]
    with pytest.raises(ValueError, match="`W` of the node 'rnn' must be a constant"):
        ours.from_model(model)
    with pytest.raises(TypeError, match="must be a path or an onnx.ModelProto"):
        ours.from_model(X)


def upon(model, *nodes):
    """The model with nodes after its own one, and a second one that reads `Z`."""
    for n, (kind, made, *names) in enumerate(nodes):
        node = helper.make_node(kind, names, made.split(), name=f"n{n}")
        model.graph.node.append(node)
    names = ["Z", "W2", "R2"]
    model.graph.node.append(helper.make_node("RNN", names, ["V"], name="second"))
    for name in names[1:]:
        array = onnx.numpy_helper.from_array(draw(1, 4, 4), name)
        model.graph.initializer.append(array)
    return ours.from_model(model)["second"].notes[1:]


FROM_Y = "the output Y of the node 'rnn'"


@pytest.mark.parametrize(
    ("nodes", "note"),
    [
        ([("Squeeze", "Z", "Y")], f"x is {FROM_Y}, only laid out anew by Squeeze"),
        (
            [
                ("Transpose", "A", "Y"),
                ("Reshape", "B", "A", "C"),
                ("Identity", "Z", "B"),
            ],
            f"x is {FROM_Y}, only laid out anew by Transpose, Reshape, Identity",
        ),
        (
            [  # the shape is computed from x too
                ("Shape", "S", "Y"),
                ("Gather", "C", "S", "I"),
                ("Reshape", "Z", "Y", "C"),
            ],
            f"x is {FROM_Y}, only laid out anew by Reshape",
        ),
        (
            [
                ("Squeeze", "A", "Y"),
                ("Dropout", "B", "A"),
                ("MatMul", "C", "B", "M"),
                ("Relu", "Z", "C"),
            ],
            f"x is computed from {FROM_Y} by Squeeze, Dropout, MatMul, Relu; apply "
            "these between the calls",
        ),
        (
            [("Split", "A B", "Y"), ("Abs", "Z", "B")],
            f"x is computed from {FROM_Y} by Split, Abs; apply these between the calls",
        ),
        (
            [("MatMul", "Z", "M", "Y")],  # not the first input
            f"x is computed from {FROM_Y} by MatMul; apply these between the calls",
        ),
        (
            [("LSTM", "L", "Y", "W", "R"), ("Concat", "Z", "L", "Y")],
            f"x is computed from {FROM_Y} and the output Y of the node 'n0' by Concat; "
            "apply these between the calls",
        ),
        (
            [
                (kind, *names)
                for kind, names in zip(
                    ["Abs", "Neg", "Exp", "Log", "Sin", "Cos", "Tan", "Ceil", "Abs"],
                    ["AY", "BA", "CB", "DC", "ED", "FE", "GF", "HG", "ZH"],
                    strict=True,
                )
            ],
            f"x is computed from {FROM_Y} by Abs, Neg, Exp, Log, Sin, Cos and 2 more; "
            "apply these between the calls",
        ),
        ([("Relu", "Z", "X")], None),
        ([("Shape", "S", "Y"), ("ConstantOfShape", "Z", "S")], None),
    ],
)
def test_the_note_on_the_node_before_tells_what_stands_between(nodes, note):
    assert upon(make("LSTM"), *nodes) == (() if note is None else (note,))


def test_the_note_on_the_node_before_tells_its_output():
    model = make("LSTM")
    model.graph.node[0].output[:] = ["", "H"]
    wanted = "x is the output Y_h of the node 'rnn'"
    assert upon(model, ("Identity", "Z", "H"))[0].startswith(wanted)
    model = make("LSTM")
    model.graph.node[0].output[:] = ["", "H"]
    assert upon(model, ("Clip", "Z", "X", "")) == ()


def test_names_and_other_nodes(tmp_path):
    model = make("GRU")
    model.graph.node[0].name = ""
    model.graph.node.append(helper.make_node("Relu", ["Y"], ["Z"], name="relu"))
    model.graph.node.append(helper.make_node("LSTM", ["Z", "W"], ["V"], name="odd"))
    onnx.save(model, tmp_path / "m.onnx")
    found, others = ours.read_file(tmp_path / "m.onnx")
    assert found.keys() == {"Y"} and others.keys() == {"relu", "odd"}
    assert "`R` of the node 'odd'" in others["odd"]


def external(tmp_path, **changes):
    model = make("GRU")
    path = tmp_path / "m.onnx"
    onnx.save(
        model, path, save_as_external_data=True, location="data", size_threshold=0
    )
    model = onnx.load(path, load_external_data=False)
    for entry in model.graph.initializer[0].external_data:
        entry.value = str(changes.get(entry.key, entry.value))
    model.graph.initializer[0].dims[:] = changes.get("dims", [1, 12, 3])
    path.write_bytes(model.SerializeToString())
    return path


def test_each_node_has_a_name_of_its_own(tmp_path):
    model = make("GRU")
    nodes = model.graph.node
    for name in ("a (2)", "a", "a"):
        nodes.append(helper.make_node("Relu", ["Y"], [f"Z{len(nodes)}"], name=name))
    onnx.save(model, tmp_path / "m.onnx")
    found, others = ours.read_file(tmp_path / "m.onnx")
    assert len({*found, *others}) == len(nodes)


def test_data_in_the_same_folder_is_read(tmp_path):
    (got,) = ours.from_model(external(tmp_path)).values()
    (want,) = ours.from_model(make("GRU")).values()
    np.testing.assert_array_equal(got.weights, want.weights)
    with pytest.raises(ValueError, match="give the path of the model"):
        ours.from_model(onnx.load(tmp_path / "m.onnx", load_external_data=False))


def test_data_beside_a_link_to_the_model_is_read(tmp_path):
    """As in caches of models, where the data are a link, too."""
    model = external(tmp_path)
    (tmp_path / "blobs").mkdir()
    (tmp_path / "names").mkdir()
    for name, blob in (("m.onnx", "1234"), ("data", "5678")):
        (tmp_path / name).rename(tmp_path / "blobs" / blob)
        (tmp_path / "names" / name).symlink_to(tmp_path / "blobs" / blob)
    (got,) = ours.from_model(tmp_path / "names" / model.name).values()
    (want,) = ours.from_model(make("GRU")).values()
    np.testing.assert_array_equal(got.weights, want.weights)
    (tmp_path / "names" / "data").unlink()
    (tmp_path / "blobs" / "5678").rename(tmp_path / "names" / "data")
    (again,) = ours.from_model(tmp_path / "names" / model.name).values()
    np.testing.assert_array_equal(again.weights, want.weights)


def test_a_type_that_onnx_does_not_have_is_one_error(tmp_path):
    path = external(tmp_path)
    model = onnx.load(path, load_external_data=False)
    model.graph.initializer[0].data_type = 999
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ValueError, match="must have a type of ONNX, got 999"):
        ours.from_model(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"location": "../data"}, "must lie in a file of the model's folder"),
        ({"location": "/dev/zero"}, "must lie in a file of the model's folder"),
        ({"location": "none"}, "must lie in a file of the model's folder"),
        ({"location": "link"}, "must lie in a file of the model's folder"),
        ({"offset": 1 << 40}, "must fit in the file 'data'"),
        ({"offset": -5}, "must begin at 0 or above in 'data'"),
        ({"location": "a" * 300}, "must lie in a file of the model's folder"),
        ({"location": "a\0b"}, "must lie in a file of the model's folder"),
        ({"length": "many"}, "must have 144 bytes"),
        ({"length": 1 << 40, "dims": [1, 1 << 20, 1 << 18]}, "must fit in the file"),
    ],
)
def test_hostile_data_outside_is_one_error(tmp_path, changes, message):
    (tmp_path / "inner").mkdir()
    (tmp_path / "data").write_bytes(bytes(1000))
    (tmp_path / "inner" / "link").symlink_to(tmp_path / "data")
    with pytest.raises(ValueError, match=message):
        ours.from_model(external(tmp_path / "inner", **changes))


def test_damaged_files_are_one_error(tmp_path):
    path = tmp_path / "m.onnx"
    data = make("LSTM", direction="bidirectional").SerializeToString()
    assert_damage_is_one_error(ours.from_model, path, data)
    path.write_bytes(data[:-20])
    with pytest.raises(ValueError, match="`path` must be a model of ONNX"):
        ours.from_model(path)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="`path` must be a model of ONNX"):
        ours.from_model(path)


@pytest.mark.parametrize("kind", ["GRU", "LSTM"])
def test_the_note_on_lengths_in_reverse_is_right(kind):
    model = make(kind, direction="reverse", extra=["lengths"])
    info = helper.make_tensor_value_info
    model.graph.input.append(info("lengths", onnx.TensorProto.INT32, ["N"]))
    model.graph.node[0].output.append("H")
    model.graph.output.append(info("H", 1, [1, "N", 4]))
    x, lengths = draw(6, 3, 3), np.array([6, 2, 4], np.int32)
    y, h = session(model).run(None, {"X": x, "lengths": lengths})
    spec, weights, notes = ours.from_model(model)["rnn"]
    assert notes[1:] == (
        "direction=reverse with sequence_lens: flip x along time, and y back; instead "
        "of seq_lengths, call with a mask, True at the steps below sequence_lens, and "
        "flip it as x",
    )
    mask = np.arange(6)[:, None] < lengths
    got, last = ost.rnn(spec, weights, x[::-1], mask=mask[::-1], time_major=True)
    assert np.abs(got[::-1] - y[:, 0]).max() <= LIMIT
    last = last[0] if kind == "LSTM" else last
    assert np.abs(last - h).max() <= LIMIT


def test_peepholes_are_told_where_there_are_some():
    model = make("LSTM", extra=["", "", "", "P"], consts={"P": draw(1, 12)})
    with pytest.raises(ValueError, match=r"`ostinato\.cells\.PeepholeLSTM` has them"):
        ours.from_model(model)


def test_arguments_of_the_exporter_are_checked():
    spec = ost.RNNSpec("lstm", 3, 4)
    weights = weights_of(spec)
    assert_weights_are_checked(ours.to_model, spec)
    with pytest.raises(TypeError, match="`time_major` must be True or False"):
        ours.to_model(spec, weights, time_major="no")
    want = ours.to_model(spec, weights)
    assert ours.to_model(spec, ost.prepare(spec, weights)) == want


def computed(model, *kinds):
    """The model, with `R` made from its constant by nodes, one after the other."""
    names = ["R", *[f"R_{n}" for n, _ in enumerate(kinds)]]
    for n, kind in enumerate(kinds):
        node = helper.make_node(kind, [names[n]], [names[n + 1]])
        model.graph.node.insert(n, node)
    model.graph.node[-1].input[2] = names[-1]
    return model


def test_constants_that_nodes_compute_are_told_to_be_folded():
    model = computed(make("GRU"), "Identity", "Identity")
    assert distance(ours.from_model(model)["rnn"], X, theirs(model)) <= LIMIT
    with pytest.raises(ValueError, match="got R_1, which nodes .* fold .* onnxsim or"):
        ours.from_model(computed(make("GRU"), "Neg", "Neg"))
    model = make("GRU")
    model.graph.node[0].input[2] = "given"
    with pytest.raises(ValueError, match="must be a constant of the model, got given$"):
        ours.from_model(model)


def test_what_nodes_and_functions_hold_is_said_not_to_be_read(tmp_path):
    model, inner = make("GRU"), make("LSTM").graph.node[0]
    branch = helper.make_graph([inner], "branch", [], [])
    model.graph.node.extend(
        [
            helper.make_node(
                "If", ["c"], ["V"], then_branch=branch, else_branch=branch
            ),
            helper.make_node("Own", ["X"], ["U"], domain="their"),
            helper.make_node("Relu", ["X"], ["Z"]),
        ]
    )
    opsets = [helper.make_opsetid("", 17)]
    model.functions.append(
        helper.make_function("their", "Own", ["X"], ["Y"], [inner], opsets)
    )
    onnx.save(model, tmp_path / "m.onnx")
    found, others = ours.read_file(tmp_path / "m.onnx")
    assert found.keys() == {"rnn"}
    for name, kind in (("V", "If"), ("U", "Own")):
        wanted = f"{kind} is no recurrent node; what is inside of it is not read"
        assert others[name] == wanted
    assert others["Z"] == "Relu is no recurrent node"
