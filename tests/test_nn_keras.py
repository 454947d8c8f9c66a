"""`nn.keras` against `keras.layers`: the same variables, numbers, losses and files."""

import importlib.util
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interop_cases import LIMIT, draw, lenient

os.environ.setdefault("KERAS_BACKEND", "jax")
pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]
keras = pytest.importorskip("keras", reason="needs the extra `peers`")
import ostinato.nn.keras as ours  # noqa: E402
from ostinato.interop import keras as interop  # noqa: E402

X = draw(6, 5, 3)
MASK = np.array(
    [
        [1, 1, 1, 1, 1],
        [1, 0, 1, 1, 0],  # gaps
        [0, 0, 1, 0, 1],  # begins later
        [1, 1, 1, 0, 0],  # ends earlier
        [0, 0, 0, 0, 0],
        [0, 1, 0, 0, 0],
    ],
    bool,
)
KINDS = {
    "lstm": ("LSTM", {}),
    "gru": ("GRU", {}),
    "gru-before": ("GRU", {"reset_after": False}),
    "tanh": ("SimpleRNN", {}),
    "relu": ("SimpleRNN", {"activation": "relu"}),
}
ALL = {"return_sequences": True, "return_state": True}
kinds = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(autouse=True)
def as_keras_expects():
    with lenient():
        yield


def pair(kind, seed=0, **options):
    """Both layers, with the same weights, which differ from gate to gate."""
    name, own = KINDS[kind]
    layers = [
        getattr(module, name)(4, **own, **options) for module in (ours, keras.layers)
    ]
    return [redrawn(layer, seed) for layer in layers]


def redrawn(layer, seed=0):
    layer.build(X.shape)
    shapes = [w.shape for w in layer.get_weights()]
    layer.set_weights([draw(*s, seed=seed + n) for n, s in enumerate(shapes)])
    return layer


def states_of(layer, seed=7):
    return [draw(6, n, seed=seed + i) for i, n in enumerate(layer.state_size)]


def close(a, b, tolerance=LIMIT):
    """Check arrays whose values go up to about 1, or the tolerance with them."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype
        scale = max(1, np.abs(y).max(initial=0))
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * scale)


def results(layer, mask=None, states=None, training=False, x=X):
    """Outputs, and gradients of weights, inputs and initial states."""
    others = [v.value for v in layer.non_trainable_variables]

    def loss(weights, x, states):
        out, _ = layer.stateless_call(
            weights, others, x, mask=mask, initial_state=states, training=training
        )
        total = sum(jnp.sum(jnp.sin(a * 1.3)) for a in jax.tree.leaves(out))
        return total, out

    weights = [v.value for v in layer.trainable_variables]
    gradient, out = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(weights, x, states)
    return out, gradient


def fused(layer, **call):
    return layer.explain(X, **call).backend != "keras"


@kinds
@pytest.mark.parametrize("masked", [False, True])
def test_outputs_states_and_gradients(kind, masked):
    layer, theirs = pair(kind, go_backwards=masked, **ALL)
    mask = MASK if masked else None
    assert fused(layer, mask=mask)
    states = states_of(layer)
    close(results(layer, mask, states), results(theirs, mask, states))


@pytest.mark.parametrize(
    "options",
    [
        ALL | {"unroll": True, "zero_output_for_mask": True, "go_backwards": True},
        ALL | {"zero_output_for_mask": True},
        {"zero_output_for_mask": True},
        {"use_bias": False, "implementation": 1, "go_backwards": True},
    ],
    ids=lambda o: "-".join(o),
)
def test_other_options_with_masks(options):
    layer, theirs = pair("gru", **options)
    assert fused(layer, mask=MASK)
    states = states_of(layer)
    close(results(layer, MASK, states), results(theirs, MASK, states))


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_inside_of_bidirectional(kind):
    both = [redrawn(keras.layers.Bidirectional(layer)) for layer in pair(kind, **ALL)]
    assert type(both[0].backward_layer) is type(both[0].forward_layer)
    assert fused(both[0].backward_layer, mask=MASK)
    close(*(results(layer, MASK) for layer in both))


def test_stateful():
    layers = pair("lstm", stateful=True, **ALL)
    for _ in range(2):
        close(*([np.asarray(a) for a in layer(X, mask=MASK)] for layer in layers))
    close(*([np.asarray(a) for a in layer.states] for layer in layers))
    layers[0].reset_state()
    assert not np.asarray(layers[0].states[0]).any()


@pytest.mark.parametrize("kind", ["lstm", "gru", "tanh"])
def test_dropout(kind):
    for options, runs in [
        ({"dropout": 0.4}, True),
        ({"recurrent_dropout": 0.4}, False),
    ]:
        layer, theirs = pair(kind, seed=3, return_sequences=True, **options)
        for one in (layer, theirs):
            one.cell.seed_generator.state.assign(jnp.array([1, 2], "uint32"))
        assert fused(layer, training=True) is runs and fused(layer)
        got = np.asarray(layer(X, mask=MASK, training=True))
        close(got, np.asarray(theirs(X, mask=MASK, training=True)))
        assert np.abs(got - np.asarray(layer(X, mask=MASK))).max() > 1e-2


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "float64"])
def test_dtype_policies(policy):
    with jax.enable_x64(policy == "float64"):
        layer, theirs = pair("lstm", dtype=policy, recurrent_initializer="zeros", **ALL)
        assert fused(layer)
        assert [v.dtype for v in layer.variables] == [v.dtype for v in theirs.variables]
        got = [np.asarray(a) for a in layer(X, mask=MASK)]
        want = [np.asarray(a) for a in theirs(X, mask=MASK)]
        digits = max(jnp.finfo(layer.compute_dtype).eps, 1e-7)  # Keras rounds float64
        assert got[0].dtype == jnp.dtype(layer.compute_dtype)
        for a, b in zip(got, want, strict=True):
            assert np.abs(a.astype("f8") - b.astype("f8")).max() < 8 * digits


@pytest.mark.parametrize(
    ("name", "options", "call", "words"),
    [
        ("LSTM", {"activation": "relu"}, {}, "activation"),
        ("GRU", {"recurrent_activation": "hard_sigmoid"}, {}, "recurrent_activation"),
        ("SimpleRNN", {"activation": None}, {}, "activation"),
        ("GRU", {"use_cudnn": True}, {}, "use_cudnn"),
        ("LSTM", {"autocast": False, "dtype": "mixed_bfloat16"}, {}, "float32"),
        ("LSTM", {}, {"mask": MASK[..., None]}, "mask"),
        (
            "LSTM",
            {"dropout": 0.5, "implementation": 1, "use_cudnn": False},
            {"training": True},
            "implementation",
        ),
        ("LSTM", {"dropout": 1.0}, {"training": True}, "dropout"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_other_layers_run_as_in_keras(name, options, call, words):
    layer = redrawn(getattr(ours, name)(4, seed=0, **options))
    theirs = redrawn(getattr(keras.layers, name)(4, seed=0, **options))
    said = layer.explain(X, **call)
    assert said.backend == "keras" and words in said.rejected["cpu"]
    assert f"keras.layers.{name}" in said.why
    close(np.asarray(layer(X, **call)), np.asarray(theirs(X, **call)), 0)


def test_a_gpu_leaves_cudnn_to_keras(monkeypatch):
    layer, _ = pair("lstm")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert "cuDNN" in layer.explain(X).rejected["xla"]
    assert "cuDNN" not in str(layer.explain(X, mask=MASK))
    assert "cuDNN" not in str(pair("gru")[0].explain(X))


def test_explain_builds_the_layer():
    layer = ours.LSTM(4)
    assert layer.explain(X).backend in ("cpu", "xla")
    assert layer.built and layer.cell.kernel.shape == (3, 16)


def test_explain_names_what_is_no_array():
    layer = ours.LSTM(4)
    for wrong in ([[1.0]], None):
        with pytest.raises(TypeError, match="`inputs` must be an array"):
            layer.explain(wrong)
    with pytest.raises(ValueError, match=r"`inputs` must have shape \[B, T, I\]"):
        layer.explain(X[0])
    with pytest.raises(TypeError, match="`mask` must be an array, got list"):
        layer.explain(X, mask=MASK.tolist())
    assert not layer.built
    assert layer.explain(X, mask=[MASK, None]).backend in ("cpu", "xla")


def model_of(module, seed=0):
    """A model with masks from its embedding, and a layer inside of `Bidirectional`."""
    keras.utils.clear_session()  # which begins names anew
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [
            keras.Input((5,), dtype="int32"),
            keras.layers.Embedding(7, 3, mask_zero=True),
            keras.layers.Bidirectional(
                module.GRU(4, return_sequences=True), name="two"
            ),
            module.SimpleRNN(4, return_sequences=True, name="middle"),
            module.LSTM(4, name="last"),
            keras.layers.Dense(2),
        ]
    )


TOKENS = np.random.default_rng(0).integers(0, 7, (6, 5)).astype("i4")


def test_fit_gives_the_same_losses():
    trained = []
    for module in (ours, keras.layers):
        model = model_of(module)
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(True))
        history = model.fit(
            TOKENS, TOKENS[:, 0] % 2, batch_size=3, epochs=3, shuffle=False, verbose=0
        )
        trained.append((history.history["loss"], model.get_weights()))
    np.testing.assert_allclose(trained[0][0], trained[1][0], rtol=2e-6)
    close(trained[0][1], trained[1][1], 1e-5)


def test_files(tmp_path):
    mine, theirs = model_of(ours), model_of(keras.layers, 1)
    assert [v.path for v in mine.variables] == [v.path for v in theirs.variables]

    mine.save(tmp_path / "mine.keras")
    loaded = keras.models.load_model(tmp_path / "mine.keras")
    assert [type(layer) for layer in loaded.layers] == [
        type(layer) for layer in mine.layers
    ]
    assert type(loaded.layers[1].forward_layer) is ours.GRU
    close(np.asarray(loaded(TOKENS)), np.asarray(mine(TOKENS)), 0)

    theirs.load_weights(tmp_path / "mine.keras")
    close(theirs.get_weights(), mine.get_weights(), 0)
    other = model_of(keras.layers, 2)
    other.save(tmp_path / "theirs.keras")
    mine.load_weights(tmp_path / "theirs.keras")
    close(mine.get_weights(), other.get_weights(), 0)

    found = interop.from_file(tmp_path / "mine.keras")
    assert found.keys() == {"two", "middle", "last"}
    assert found.keys() == interop.from_file(tmp_path / "theirs.keras").keys()


def test_another_backend_is_an_error(monkeypatch):
    monkeypatch.setattr(keras.config, "backend", lambda: "torch")
    spec = importlib.util.find_spec("ostinato.nn.keras")
    with pytest.raises(ImportError, match="JAX backend of Keras, got 'torch'.*KERAS_B"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_a_backend_that_is_not_installed_is_no_advice_to_install_it(
    tmp_path, monkeypatch
):
    (tmp_path / "keras.py").write_text("import tensorflow.python\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "keras")
    monkeypatch.setitem(sys.modules, "tensorflow", None)  # as if there were none
    spec = importlib.util.find_spec("ostinato.nn.keras")
    with pytest.raises(ImportError, match="got 'tensorflow'; set .* KERAS_BACKEND=jax"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    monkeypatch.setitem(sys.modules, "keras", None)
    with pytest.raises(ModuleNotFoundError, match="pip install 'ostinato\\[keras\\]'"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
