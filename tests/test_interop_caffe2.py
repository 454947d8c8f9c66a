"""Tests of interop.caffe2 against Caffe2's equations, written out in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import assert_says
from tolerance import assert_close, assert_same_bits

import ostinato as ost
from ostinato import cells
from ostinato.interop import caffe2

BATCH, STEPS, INPUTS, HIDDEN = 2, 4, 3, 5
NAMES = ("input_gate", "forget_gate", "output_gate", "cell")


def make_gates(seed=0, inputs=INPUTS, dtype="float64"):
    rng = np.random.default_rng(seed)
    columns = {"input": inputs, "recurrent": HIDDEN}
    return {
        part: {
            f"{name}_{kind}": rng.standard_normal(
                (HIDDEN, size) if kind == "w" else HIDDEN
            ).astype(dtype)
            for name in NAMES
            for kind in "wb"
        }
        for part, size in columns.items()
    }


def sigmoid(a):
    return 1 / (1 + np.exp(-a))


def caffe2_lstm(i2h_w, i2h_b, gates_t_w, gates_t_b, x, h, c, forget_bias):
    """Run a step of Caffe2's LSTM on its blobs, whose gates are in order i, f, o, g."""
    outputs = []
    for t in range(x.shape[1]):
        gates = x[:, t] @ i2h_w.T + i2h_b + h @ gates_t_w.T + gates_t_b
        i, f, o, g = np.split(gates, 4, axis=1)
        c = sigmoid(f + forget_bias) * c + sigmoid(i) * np.tanh(g)
        h = sigmoid(o) * np.tanh(c)
        outputs.append(h)
    return np.stack(outputs, axis=1), h, c


def blobs_of(gates):
    """Join gates as `InitFromLSTMParams` does: i, f, o, g on axis 0."""
    return [
        np.concatenate([gates[part][f"{name}_{kind}"] for name in NAMES])
        for part in ("input", "recurrent")
        for kind in "wb"
    ]


BLOBS = ("i2h_w", "i2h_b", "gates_t_w", "gates_t_b")


@pytest.mark.parametrize("source", ["gates", "blobs", "scoped blobs"])
def test_cell_runs_as_caffe2_does(source):
    gates = make_gates()
    blobs = blobs_of(gates)
    if source == "gates":
        params = caffe2.params_from_gates(gates)
    else:
        scope = "net/lstm" if source == "scoped blobs" else ""
        names = [f"{scope}/{name}" if scope else name for name in BLOBS]
        named = dict(zip(names, blobs, strict=True)) | {"another": None}
        params = caffe2.params_from_blobs(named, scope)
    rng = np.random.default_rng(1)
    x = rng.standard_normal((BATCH, STEPS, INPUTS))
    h, c = rng.standard_normal((2, BATCH, HIDDEN))
    cell = cells.LSTM(INPUTS, HIDDEN, forget_bias=1.0)
    states = (jnp.asarray(h), jnp.asarray(c))
    out = ost.recurrent_net(cell, x, states, params=params)
    for a, b in zip(
        (out.outputs, *out.states),
        caffe2_lstm(*blobs, x, h, c, 1.0),
        strict=True,
    ):
        assert_close(a, b, terms=200)


def assert_same_trees(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(assert_same_bits, got, want)


def test_there_and_back_keeps_every_bit():
    gates = make_gates()
    params = caffe2.params_from_gates(gates)
    assert_same_trees(caffe2.gates_from_params(params), gates)
    for scope in ("", "a/b"):
        blobs = caffe2.blobs_from_params(params, scope)
        assert_same_trees(caffe2.params_from_blobs(blobs, scope), params)
    wanted = dict(zip([f"a/b/{name}" for name in BLOBS], blobs_of(gates), strict=True))
    assert_same_trees(blobs, wanted)


def test_cudnn_vector_there_and_back():
    spec = ost.RNNSpec("lstm", INPUTS, HIDDEN, num_layers=2)
    layers = [make_gates(0), make_gates(1, HIDDEN)]
    weights = caffe2.weights_from_gates(layers, spec)
    assert_same_trees(caffe2.gates_from_weights(weights, spec), layers)
    # cuDNN's ids: 0..3 = i, f, g, o of the input, 4..7 of the recurrence.
    order = ("input_gate", "forget_gate", "cell", "output_gate")
    want = [
        gates[part][f"{name}_{kind}"].ravel()
        for kind in "wb"
        for gates in layers
        for part in ("input", "recurrent")
        for name in order
    ]
    assert_same_bits(weights, np.concatenate(want))


def test_gradients_flow_through():
    params = jax.grad(
        lambda p: sum(
            jnp.sum(a**2) for a in jax.tree.leaves(caffe2.blobs_from_params(p))
        )
    )(caffe2.params_from_gates(make_gates()))
    want = jax.tree.map(lambda a: 2 * a, caffe2.params_from_gates(make_gates()))
    assert_same_trees(params, want)


def change(part, name, value):
    gates = make_gates()
    gates[part] = {k: v for k, v in gates[part].items() if k != name}
    if value is not None:
        gates[part][name] = value
    return gates


PARAMS = caffe2.params_from_gates(make_gates())
LSTM = ost.RNNSpec("lstm", INPUTS, HIDDEN)


def with_blob(name, value):
    return {**dict(zip(BLOBS, blobs_of(make_gates()), strict=True)), name: value}


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        *[
            (
                lambda f=f, name=name: f(PARAMS._replace(**{name: PARAMS.w_hh[:8]})),
                ValueError,
                f"`params.{name}` 20 [8, 5]",
            )
            for f in (caffe2.gates_from_params, caffe2.blobs_from_params)
            for name in ("w_ih", "b_ih", "b_hh")
        ],
        (
            lambda: caffe2.gates_from_params(PARAMS._replace(b_ih=[1.0])),
            TypeError,
            "`params.b_ih` array",
        ),
        (
            lambda: caffe2.gates_from_params(
                PARAMS._replace(b_ih=PARAMS.b_ih.astype(int))
            ),
            TypeError,
            "`params.b_ih` float32 int",
        ),
        (
            lambda: caffe2.params_from_blobs(with_blob("gates_t_b", np.zeros(24))),
            ValueError,
            "`blobs['gates_t_b']` [20] [24]",
        ),
        (
            lambda: caffe2.params_from_blobs(with_blob("i2h_w", np.zeros((24, 3)))),
            ValueError,
            "`blobs['i2h_w']` [20, I] [24, 3]",
        ),
        (
            lambda: caffe2.params_from_blobs(with_blob("gates_t_w", np.zeros((8, 3)))),
            ValueError,
            "`blobs['gates_t_w']` [4H, H] [8, 3]",
        ),
        (
            lambda: caffe2.params_from_blobs(
                with_blob("i2h_b", np.zeros(20, np.float32))
            ),
            TypeError,
            "`blobs['i2h_b']` float64 float32",
        ),
        (
            lambda: caffe2.params_from_blobs(with_blob("i2h_b", np.zeros(20, int))),
            TypeError,
            "`blobs['i2h_b']` float32 int",
        ),
        (
            lambda: caffe2.params_from_gates(change("input", "cell_b", np.arange(5))),
            TypeError,
            "`gates['input']['cell_b']` float32 int",
        ),
        (
            lambda: caffe2.params_from_gates(change("input", "cell_b", np.float32(1))),
            ValueError,
            "`gates['input']['cell_b']` [H] []",
        ),
        (lambda: caffe2.params_from_blobs(None), TypeError, "`blobs` mapping None"),
        (lambda: caffe2.params_from_blobs({}, 5), TypeError, "`scope` string 5"),
        (
            lambda: caffe2.blobs_from_params(PARAMS, 5),
            TypeError,
            "`scope` string 5",
        ),
        (lambda: caffe2.weights_from_gates(3, LSTM), TypeError, "`layers` list int"),
        (
            lambda: caffe2.weights_from_gates(make_gates(), LSTM),
            TypeError,
            "`layers` list dict",
        ),
        (
            lambda: caffe2.weights_from_gates([{}], LSTM),
            ValueError,
            "`layers[0]` 'input'",
        ),
        (
            lambda: caffe2.gates_from_weights(jnp.zeros(LSTM.num_params, int), LSTM),
            TypeError,
            "`weights` float32 int",
        ),
        (
            lambda: caffe2.params_from_gates(change("input", "cell_w", None)),
            ValueError,
            "`gates['input']` 'cell_w'",
        ),
        (
            lambda: caffe2.params_from_gates(change("input", "cell_x", 1)),
            ValueError,
            "`gates['input']` alone 'cell_x'",
        ),
        (
            lambda: caffe2.params_from_gates({"input": {}}),
            ValueError,
            "`gates` 'recurrent'",
        ),
        (lambda: caffe2.params_from_gates([]), TypeError, "`gates` mapping"),
        (
            lambda: caffe2.params_from_gates(
                change("recurrent", "cell_w", np.zeros((5, 4)))
            ),
            ValueError,
            "`gates['recurrent']['cell_w']` (5, 5) (5, 4)",
        ),
        (
            lambda: caffe2.params_from_gates(
                change("recurrent", "cell_b", np.zeros(5, np.float32))
            ),
            TypeError,
            "`gates['recurrent']['cell_b']` float32",
        ),
        (
            lambda: caffe2.params_from_blobs({"i2h_w": np.zeros((8, 3))}),
            ValueError,
            "`blobs` 'i2h_b'",
        ),
        (
            lambda: caffe2.params_from_blobs({"i2h_w": np.zeros((6, 3))}),
            ValueError,
            "`blobs['i2h_w']` [4H, ...] [6, 3]",
        ),
        (lambda: caffe2.gates_from_params(None), TypeError, "`params` LayerWeights"),
        (
            lambda: caffe2.gates_from_params(
                cells.GRU(2, 3).init(jax.random.key(0), jnp.float32)
            ),
            ValueError,
            "`params` LSTM (9, 3)",
        ),
        (
            lambda: caffe2.blobs_from_params(
                cells.LSTMP(2, 3, proj_size=1).init(jax.random.key(0), jnp.float32)
            ),
            ValueError,
            "`params` projection w_hr",
        ),
        (
            lambda: caffe2.weights_from_gates([], ost.RNNSpec("gru", 2, 3)),
            ValueError,
            "`spec` 'lstm' 'gru'",
        ),
        (
            lambda: caffe2.weights_from_gates([], ost.RNNSpec("lstm", 3, 5)),
            ValueError,
            "`layers` 1 0",
        ),
    ],
)
def test_bad_input_is_refused(call, error, words):
    with pytest.raises(error) as info:
        call()
    assert_says(info, words)
