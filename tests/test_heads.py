"""Tests of several heads: what they mean, derivatives, layers, converters, errors."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closures import fast_jit
from harness import assert_says
from tolerance import assert_close, assert_same_bits

import ostinato as ost
from ostinato import ragged
from ostinato.interop import caffe2

B, T, I, H, K = 3, 4, 2, 6, 3  # noqa: E741
KINDS: dict[str, dict[str, Any]] = {
    "rnn_tanh": {},
    "lstm": {"proj_size": 3},
    "gru": {},
    "gru-before": {"reset_after": False},
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def spec_of(kind, heads=K, **fields):
    mode = kind.removesuffix("-before")
    return ost.RNNSpec(mode, I, H, num_heads=heads, **KINDS[kind], **fields)


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape))


def weights_of(spec, seed=0):
    return draw(spec.num_params, seed=seed) / 2


def of_head(spec, layer, head):
    """Return the weights of one head, as a network of its own has them."""
    size = spec.hidden_size // spec.num_heads

    def rows(a):
        parts = a.reshape(-1, spec.num_heads, size, *a.shape[1:])
        return parts[:, head].reshape(-1, *a.shape[1:])

    w_hr = layer.w_hr
    if w_hr is not None:
        w_hr = jnp.split(w_hr, spec.num_heads)[head]
    return ost.LayerWeights(*map(rows, layer[:4]), w_hr=w_hr)


@every_kind
def test_every_head_is_a_network_of_its_own(kind):
    spec = spec_of(kind)
    weights, x = weights_of(spec), draw(B, T, I)
    own = dataclasses.replace(
        spec,
        hidden_size=H // K,
        proj_size=spec.proj_size // K,
        num_heads=1,
    )
    (layer,) = ost.unpack_weights(weights, spec)
    whole = ost.rnn(spec, weights, x)
    for head, y in enumerate(jnp.split(whole.y, K, axis=-1)):
        alone = ost.rnn(own, ost.pack_weights([of_head(spec, layer, head)], own), x)
        assert_close(y, alone.y, terms=50)


@every_kind
def test_tangents_and_second_derivatives_are_those_of_a_dense_network(kind):
    """Check against w_hh with a column for every head, and 0 in most of them."""
    spec = spec_of(kind)
    dense = dataclasses.replace(spec, num_heads=1)

    def spread(w, size):
        if w is None:
            return None
        parts = w.reshape(-1, K, size // K, w.shape[1])
        own = jnp.eye(K)[None, :, None, :, None]
        return (parts[:, :, :, None] * own).reshape(len(w), -1)

    def run(spec, weights, x):
        return jnp.sum(jnp.sin(ost.rnn(spec, weights, x).y))

    def by_dense(weights, x):
        (layer,) = ost.unpack_weights(weights, spec)
        w_hh, w_hr = spread(layer.w_hh, H), spread(layer.w_hr, spec.proj_size)
        layer = layer._replace(w_hh=w_hh, w_hr=w_hr)
        return run(dense, ost.pack_weights([layer], dense), x)

    given = weights_of(spec), draw(B, T, I)
    step = weights_of(spec, 1), draw(B, T, I, seed=1)

    def second(loss):
        slope = lambda *a: jax.jvp(loss, a, step)[1]  # noqa: E731
        return fast_jit(jax.value_and_grad(slope, (0, 1)))(*given)

    got, want = second(lambda *a: run(spec, *a)), second(by_dense)
    jax.tree.map(lambda g, w: assert_close(g, w, terms=200), got, want)


@every_kind
def test_steps_an_ensemble_prepared_weights_and_ragged_sequences(kind):
    spec = spec_of(kind, num_layers=2)
    x, members = draw(B, T, I), jnp.stack([weights_of(spec, s) for s in (0, 1)])
    whole = jax.vmap(lambda w: ost.rnn(spec, w, x))(members)
    for weights, y in zip(members, whole.y, strict=True):
        prepared, state, steps = ost.prepare(spec, weights), None, []
        for t in range(T):
            y_t, state = ost.rnn_step(spec, prepared, x[:, t], state)
            steps.append(y_t)
        assert_close(y, jnp.stack(steps, 1), terms=50)
    lengths = (4, 1, 3)
    batch = ragged.RaggedArray.from_list(
        [s[:n] for s, n in zip(x, lengths, strict=True)]
    )
    got = ragged.vmap(lambda s: ost.rnn(spec, members[1], s).y)(batch).to_list()
    for y, alone, n in zip(whole.y[1], got, lengths, strict=True):
        assert_close(alone, y[:n], terms=50)


def test_shapes_and_laws_of_new_weights():
    spec = ost.RNNSpec("lstm", 3, 64, proj_size=32, num_heads=4)
    assert ost.param_shapes(spec)[0].w_hh == (256, 8)
    assert ost.param_shapes(spec)[0].w_hr == (32, 16)
    uniform = ost.unpack_weights(ost.init_weights(jax.random.key(0), spec), spec)[0]
    for name, units in (("w_ih", 64), ("w_hh", 16), ("w_hr", 16), ("b_ih", 64)):
        most = np.abs(getattr(uniform, name)).max()
        assert 0.9 * units**-0.5 < most <= units**-0.5, name
    key, square = jax.random.key(1), ost.RNNSpec("gru", 3, 8, num_heads=2)
    weights = ost.init_weights(key, square, scheme="glorot_orthogonal")
    for block in ost.unpack_weights(weights, square)[0].w_hh.reshape(6, 4, 4):
        assert_close(block @ block.T, np.eye(4), dtype="float32")


def test_files_hold_heads(tmp_path):
    spec = spec_of("gru")
    weights = weights_of(spec)
    ost.save(tmp_path / "a.safetensors", {"net": (spec, weights)})
    loaded = ost.load(tmp_path / "a.safetensors")["net"]
    assert loaded.spec == spec
    assert_same_bits(loaded.weights, weights)


@pytest.mark.parametrize("name", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("library", ["flax", "equinox"])
def test_layers_take_heads(library, name):
    module = pytest.importorskip(f"ostinato.nn.{library}")
    if library == "flax":
        from flax import nnx

        options = {"rngs": nnx.Rngs(0)}
    else:
        options = {"key": jax.random.key(0)}
    layer = getattr(module, name)(I, H, num_heads=2, **options)
    assert layer.spec.num_heads == 2 and layer.weight_hh_l0.shape[1] == H // 2
    x = jnp.ones((B, T, I), jnp.float32)
    assert_same_bits(layer(x).y, ost.rnn(layer.spec, layer.weights, x).y)


@pytest.mark.parametrize(
    "library, export",
    [
        ("torch", "to_state_dict"),
        ("keras", "to_weights"),
        ("flax", "to_cell"),
        ("equinox", "to_cell"),
        ("onnx", "to_model"),
    ],
)
def test_libraries_without_heads_refuse_them(library, export):
    if library != "keras":
        pytest.importorskip(library)
    module = pytest.importorskip(f"ostinato.interop.{library}")
    for mode, words in (("lstm", "num_heads=1 2"), ("slstm", "mode 'gru' 'slstm'")):
        spec = ost.RNNSpec(mode, I, H, num_heads=2)
        with pytest.raises(ValueError) as info:
            getattr(module, export)(spec, weights_of(spec))
        assert_says(info, f"`spec` {words}")


def test_caffe2_has_no_heads():
    spec = ost.RNNSpec("lstm", I, H, num_heads=2)
    with pytest.raises(ValueError, match="one head"):
        caffe2.gates_from_weights(weights_of(spec), spec)
