"""Our own layers of `nn.flax` against torch, and under the transformations of nnx."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ostinato as ost

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")
nnx = pytest.importorskip("flax.nnx")
pytest.importorskip("torch")
import own_layers  # noqa: E402
from own_layers import IN, LENGTHS, B, H, T, X, close  # noqa: E402

from ostinato.nn import flax as ours  # noqa: E402


def new(kind="LSTM", seed=0, **options):
    return getattr(ours, kind)(IN, H, rngs=nnx.Rngs(seed), **options)


def load(layer, named):
    for name, value in named.items():
        getattr(layer, name)[...] = value
    return layer


@pytest.mark.parametrize(
    ("kind", "options"), own_layers.CASES.values(), ids=own_layers.CASES
)
def test_the_numbers_of_torch(kind, options):
    layer, theirs = new(kind, **options), own_layers.module(kind, options)
    named = own_layers.numbers(theirs)
    assert {*nnx.state(layer, nnx.Param)} == {*named}
    state = own_layers.states_of(layer.spec)
    wanted = own_layers.run_torch(theirs, state)

    @nnx.jit
    def run(layer):
        return tuple(layer(X, state, seq_lengths=LENGTHS))

    close(run(load(layer, named)), wanted)
    for wrong in own_layers.swapped(kind, named):
        assert np.abs(run(load(layer, wrong))[0] - wanted[0]).max() > 1e-3


def test_parameters_are_drawn_as_in_torch():
    layer = ours.LSTM(8, 16, 2, bidirectional=True, rngs=nnx.Rngs(0))
    own_layers.assert_uniform(layer, nnx.state(layer, nnx.Param), 0.25)
    assert not own_layers.same_bits(new(seed=1).weights, new(seed=2).weights)


def test_rnn_is_a_layer_of_a_cell_or_of_sizes():
    over_cell = ours.RNN(nnx.SimpleCell(IN, H, rngs=nnx.Rngs(0)))
    assert type(over_cell) is ours.RNN and over_cell(X).shape == (B, T, H)
    layer = new("RNN", nonlinearity="relu")
    assert type(layer) is ours.PlainRNN and isinstance(layer, ours.RNN)
    assert not isinstance(new("GRU"), ours.RNN)
    same = ours.PlainRNN(IN, H, nonlinearity="relu", rngs=nnx.Rngs(0))
    by_name = ours.RNN(
        input_size=np.int64(IN), hidden_size=H, nonlinearity="relu", rngs=nnx.Rngs(0)
    )
    for other in (same, by_name, copy.deepcopy(layer)):
        assert nnx.graphdef(other) == nnx.graphdef(layer)
        close(tuple(other(X)), tuple(layer(X)), 0)
    again = pickle.loads(pickle.dumps(layer))
    assert type(again) is ours.PlainRNN
    close(tuple(again(X)), tuple(layer(X)), 0)
    for kept in (over_cell, layer):
        merged = nnx.merge(*nnx.split(kept))
        close(jax.tree.leaves(merged(X)), jax.tree.leaves(kept(X)), 0)


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_gradients_are_those_of_the_operator(kind):
    layer = new(kind, num_layers=2, bias="recurrent", recompute=True)
    loss = lambda layer: jnp.sum(jnp.sin(layer(X).y))  # noqa: E731
    gradient = nnx.jit(nnx.grad(loss))(layer)
    of_flat = jax.grad(lambda w: jnp.sum(jnp.sin(ost.rnn(layer.spec, w, X).y)))
    named = ours.Layer(layer.spec, of_flat(layer.weights))
    close(
        nnx.to_pure_dict(gradient),
        nnx.to_pure_dict(nnx.state(named, nnx.Param)),
        5e-6,
    )
    nnx.update(layer, jax.tree.map(lambda p, g: p - g, nnx.state(layer), gradient))
    text = str(jax.make_jaxpr(lambda x: layer(x).y)(X))
    assert text.count("ostinato_rnn") == 1


def test_an_ensemble():
    make = nnx.vmap(lambda key: ours.GRU(IN, H, rngs=nnx.Rngs(key)))
    layers = make(jax.random.split(jax.random.key(0), 3))
    assert layers.weight_ih_l0.shape == (3, 3 * H, IN)
    ys = nnx.vmap(lambda layer, x: layer(x).y, in_axes=(0, None))(layers, X)
    graph, state = nnx.split(layers)
    for n in range(3):
        one = nnx.merge(graph, jax.tree.map(lambda a, n=n: a[n], state))
        close(one(X).y, ys[n])
    with pytest.raises(ValueError, match="under vmap"):
        layers(X)


def test_a_checkpoint_of_orbax(tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    layer, other = new(num_layers=2), new(num_layers=2, seed=1)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "layer", nnx.state(layer, nnx.Param))
        checkpointer.wait_until_finished()
        blank = nnx.state(other, nnx.Param)
        nnx.update(other, checkpointer.restore(tmp_path / "layer", blank))
    close(tuple(other(X)), tuple(layer(X)), 0)


def test_dropout_follows_eval_and_the_stream():
    layer = new("GRU", num_layers=2, dropout=0.5)
    layer.eval()
    plain = ost.rnn(layer.spec, layer.weights, X)
    key = jax.random.key(7)
    close(tuple(layer(X, key=key)), tuple(plain), 0)
    layer.train()
    run = nnx.jit(lambda layer: layer(X).y)
    first, second = run(layer), run(layer)
    assert min(np.abs(first - second).max(), np.abs(first - plain.y).max()) > 0.01
    wanted = ost.rnn(layer.spec, layer.weights, X, key=key)
    close(tuple(layer(X, key=key)), tuple(wanted), 0)
    close(tuple(nnx.view(layer, deterministic=True)(X)), tuple(plain), 0)
    close(tuple(layer.freeze()(X)), tuple(plain))
    alone = ours.GRU(IN, H, 2, dropout=0.5, rngs=nnx.Rngs(params=0))
    assert alone(X, key=key).y.shape == (B, T, H)
    with pytest.raises(ValueError, match="`key` must be given"):
        alone(X)


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_streams_have_the_bits_of_whole_sequences(kind):
    layer = new(kind, num_layers=2)
    own_layers.assert_streams_are_whole_sequences(layer)
    own_layers.assert_streams_are_whole_sequences(layer.freeze())


def test_a_module_can_hold_a_frozen_layer():
    class Server(nnx.Module):
        def __init__(self):
            self.layer = new("GRU").freeze()

    server = Server()
    again = nnx.merge(*nnx.split(server))
    run = nnx.jit(lambda server: server.layer.step(X[:, 0]).y)
    close(run(again), server.layer(X[:, :1]).y[:, 0])


def test_options_of_a_call():
    layer = new("GRU", reset_after=False)
    assert layer.spec.reset_after is False
    mask = jnp.asarray(np.random.default_rng(4).random((T, B)) < 0.5)
    resets = jnp.asarray(np.random.default_rng(5).random((T, B)) < 0.3)
    x = jnp.swapaxes(jnp.asarray(X), 0, 1)
    options = {"resets": resets, "padding": "hold", "time_major": True, "mask": mask}
    wanted = jax.jit(lambda w: ost.rnn(layer.spec, w, x, **options))(layer.weights)
    close(nnx.jit(lambda layer: layer(x, **options))(layer), wanted)
    one = layer(X[0], layer.initial_state())
    close(one.y, layer(X).y[0])


def test_dtypes():
    layer = new(dtype=jnp.bfloat16)
    state = layer.initial_state(B)
    y, (h, c) = layer(jnp.asarray(X, jnp.bfloat16), state)
    assert {a.dtype for a in (y, h, c, *state)} == {jnp.dtype(jnp.bfloat16)}
    wide = new()
    cast = lambda a: a.astype(jnp.bfloat16)  # noqa: E731
    nnx.update(wide, jax.tree.map(cast, nnx.state(wide, nnx.Param)))
    assert wide(cast(X)).y.dtype == jnp.bfloat16
    with pytest.raises(TypeError, match="`weights` must have the dtype of `x`"):
        layer(X)


def test_partitioned_parameters():
    mesh = jax.make_mesh((2, 2), ("data", "model"), (jax.sharding.AxisType.Auto,) * 2)
    metadata = {"weight_hh": {"out_sharding": (None, "model"), "mesh": mesh}}
    layer = ours.GRU(IN, 4, rngs=nnx.Rngs(0), metadata=metadata)
    specs = nnx.get_partition_spec(nnx.state(layer))
    P = jax.sharding.PartitionSpec
    assert specs["weight_hh_l0"].get_value() == P(None, "model")
    assert specs["weight_ih_l0"].get_value() == P()
    assert layer.weight_hh_l0.sharding.spec == P(None, "model")
    plain = ours.GRU(IN, 4, rngs=nnx.Rngs(0))
    close(tuple(nnx.jit(lambda m: m(X))(layer)), tuple(plain(X)))
    with pytest.raises(ValueError, match="`metadata` must be one of 'weight_ih'"):
        ours.GRU(IN, 4, rngs=nnx.Rngs(0), metadata={"weight": {}})


def test_a_layer_of_weights_from_elsewhere():
    spec = ost.RNNSpec("lstm", IN, H, cell_clip=0.5, bias="input")
    weights = ost.init_weights(jax.random.key(0), spec)
    layer = ours.Layer(spec, weights)
    close(layer.weights, weights, 0)
    close(tuple(layer(X)), tuple(ost.rnn(spec, weights, X)), 0)
    assert ours.Layer(spec, weights, dtype=jnp.bfloat16).weights.dtype == jnp.bfloat16
    with pytest.raises(ValueError, match="`weights` must have shape"):
        ours.Layer(spec, weights[1:])
    with pytest.raises(TypeError, match="`rngs` must be an nnx.Rngs"):
        ours.Layer(spec)
    with pytest.raises(ValueError, match="`nonlinearity` must be one of"):
        new("RNN", nonlinearity="sigmoid")


@pytest.mark.parametrize(
    "cell",
    [
        ost.cells.LSTM(IN, H),
        ost.cells.Stack((ost.cells.GRU(IN, H), ost.cells.IndRNN(H, H))),
    ],
    ids=["fused", "stack"],
)
def test_recurrent_holds_any_cell(cell):
    layer = ours.Recurrent(cell, recompute=True, rngs=nnx.Rngs(0))
    arrays = layer.freeze().params
    assert jax.tree.structure(arrays) == jax.tree.structure(
        cell.init(jax.random.key(0))
    )
    state = jax.tree.map(lambda a: a + 0.5, layer.initial_state(B))
    wanted = ost.recurrent_net(
        cell, jnp.asarray(X), state, params=arrays, seq_lengths=LENGTHS, padding="zero"
    )
    run = nnx.jit(lambda layer: tuple(layer(X, state, seq_lengths=LENGTHS)))
    close(run(layer), (wanted.outputs, wanted.states))
    close(run(nnx.merge(*nnx.split(layer))), run(layer), 0)
    close(run(pickle.loads(pickle.dumps(layer))), run(layer), 0)
    gradient = nnx.grad(lambda layer: jnp.sum(run(layer)[0]))(layer)
    assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(gradient))


def test_random_choices_of_a_cell_follow_eval_and_the_stream():
    cell = ost.cells.Zoneout(ost.cells.GRU(IN, H), h_rate=0.5)
    layer = ours.Recurrent(cell, rngs=nnx.Rngs(0))
    run = nnx.jit(lambda layer, key=None: layer(X, key=key).y)
    assert np.abs(run(layer) - run(layer)).max() > 0.01
    key = jax.random.key(1)
    close(run(layer, key), run(layer, key), 0)
    layer.eval()
    close(run(layer), jax.jit(layer.freeze())(X).y)
    with pytest.raises(ValueError, match="`key` must be given"):
        ours.Recurrent(cell, rngs=nnx.Rngs(params=0))(X)


def test_a_memory_is_given_to_a_call():
    cell = ost.cells.Attention(ost.cells.GRU(IN + 2, H), memory_size=2)
    layer = ours.Recurrent(cell, rngs=nnx.Rngs(0))
    memory = jnp.asarray(np.random.default_rng(6).standard_normal((B, 4, 2)), "f4")
    run = nnx.jit(lambda layer, m: layer(X, cell=layer.cell.attend(m)))
    y, _ = run(layer, memory)
    assert y.shape == (B, T, H + 2)
    step = jax.jit(lambda x, m: layer.freeze().step(x, cell=cell.attend(m)))
    close(step(X[:, 0], memory).y, y[:, 0])
    with pytest.raises(ValueError, match="attend"):
        layer(X)


@pytest.mark.parametrize("padding", ["zero", "hold"])
def test_a_mask_of_no_steps(padding):
    none, mask = jnp.zeros((B, 0, IN), "f4"), jnp.zeros((B, 0), bool)
    for layer in (new(), ours.Recurrent(ost.cells.GRU(IN, H), rngs=nnx.Rngs(0))):
        assert layer(none, mask=mask, padding=padding).y.shape == (B, 0, H)
