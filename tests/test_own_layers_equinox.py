"""Our own layers of `nn.equinox` against torch, and under Equinox's transformations."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ostinato as ost

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")
eqx = pytest.importorskip("equinox")
pytest.importorskip("torch")
import own_layers  # noqa: E402
from own_layers import IN, LENGTHS, B, H, X, close  # noqa: E402

from ostinato.nn import equinox as ours  # noqa: E402

KEY = jax.random.key(0)


def new(kind="LSTM", key=KEY, **options):
    return getattr(ours, kind)(IN, H, key=key, **options)


def load(layer, named):
    where = lambda layer: [getattr(layer, name) for name in named]  # noqa: E731
    return eqx.tree_at(where, layer, [*named.values()])


@pytest.mark.parametrize("case", ["lstm-proj", "gru", "relu"])
def test_the_numbers_of_torch(case):
    kind, options = own_layers.CASES[case]
    layer, theirs = new(kind, **options), own_layers.module(kind, options)
    named = own_layers.numbers(theirs)
    assert [*layer.params] == [*named]
    state = own_layers.states_of(layer.spec)
    wanted = own_layers.run_torch(theirs, state)

    @eqx.filter_jit
    def run(layer):
        return tuple(layer(X, state, seq_lengths=LENGTHS))

    close(run(load(layer, named)), wanted)
    for wrong in own_layers.swapped(kind, named):
        assert np.abs(run(load(layer, wrong))[0] - wanted[0]).max() > 1e-3


def test_parameters_are_drawn_as_in_torch():
    layer = ours.LSTM(8, 16, 2, bidirectional=True, key=KEY)
    own_layers.assert_uniform(layer, layer.params, 0.25)
    assert copy.deepcopy(layer).weight_hh_l1_reverse.shape == (64, 16)
    with pytest.raises(AttributeError, match="LSTM has no attribute 'weight_ih_l2'"):
        _ = layer.weight_ih_l2


def test_gradients_and_updates():
    layer = new("GRU", num_layers=2, bias="recurrent", recompute=True)
    loss = lambda layer: jnp.sum(jnp.sin(layer(X).y))  # noqa: E731
    gradient = eqx.filter_jit(eqx.filter_grad(loss))(layer)
    of_flat = jax.grad(lambda w: jnp.sum(jnp.sin(ost.rnn(layer.spec, w, X).y)))
    close(gradient.weights, of_flat(layer.weights), 5e-6)
    # Without dropout every leaf is an array, so that JAX's own functions do as well.
    close(jax.jit(jax.grad(loss))(layer), gradient, 5e-6)
    stepped = jax.tree.map(lambda p, g: p - 0.1 * g, layer, gradient)
    assert loss(stepped) < loss(layer)
    assert str(jax.make_jaxpr(lambda x: layer(x).y)(X)).count("ostinato_rnn") == 1


def test_files_and_ensembles(tmp_path):
    layer = new(num_layers=2, dropout=0.5)
    path = tmp_path / "layer.eqx"
    eqx.tree_serialise_leaves(path, layer)
    blank = eqx.filter_eval_shape(lambda: new(num_layers=2, dropout=0.5))
    again = eqx.tree_deserialise_leaves(path, blank)
    assert own_layers.same_bits(again.params, layer.params)
    keys = jax.random.split(KEY, 3)
    layers = eqx.filter_vmap(lambda key: new("RNN", key=key))(keys)
    ys = eqx.filter_vmap(lambda layer, x: layer(x).y, in_axes=(0, None))(layers, X)
    for n in range(3):
        close(new("RNN", key=keys[n])(X).y, ys[n])
    with pytest.raises(ValueError, match="under vmap"):
        layers(X)


def test_dropout_follows_inference_mode():
    layer = new("GRU", num_layers=2, dropout=0.5)
    plain = ost.rnn(layer.spec, layer.weights, X)
    evaluated = eqx.nn.inference_mode(layer)
    close(evaluated(X, key=KEY), plain, 0)
    again = eqx.nn.inference_mode(evaluated, False)
    run = eqx.filter_jit(lambda layer: layer(X, key=KEY))
    close(run(again), ost.rnn(layer.spec, layer.weights, X, key=KEY))
    close(layer.freeze()(X), plain)
    with pytest.raises(ValueError, match="`key` must be given"):
        layer(X)
    assert jax.tree.leaves(eqx.nn.inference_mode(new("GRU", dropout=0.5)).dropout) == []


def test_streams_have_the_bits_of_whole_sequences():
    layer = new("LSTM", num_layers=2)
    own_layers.assert_streams_are_whole_sequences(layer)
    own_layers.assert_streams_are_whole_sequences(layer.freeze())


def test_one_sequence_in_the_manner_of_equinox():
    layer = new("LSTM", proj_size=2)
    ys = jax.jit(jax.vmap(lambda x: layer(x, layer.initial_state()).y))(X)
    close(ys, layer(X).y)
    close(eqx.filter_jit(layer.step)(X[0, 0]).y, ys[0, 0])
    half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), layer)
    assert half(jnp.asarray(X, jnp.bfloat16)).y.dtype == jnp.bfloat16
    assert new(dtype=jnp.bfloat16).initial_state(B)[0].dtype == jnp.bfloat16


def test_a_layer_of_weights_from_elsewhere():
    spec = ost.RNNSpec("gru", IN, H, reset_after=False, bias="input")
    assert new("GRU", reset_after=False, bias="input").spec == spec
    weights = ost.init_weights(KEY, spec)
    layer = ours.Layer(spec, weights)
    close(layer(X), ost.rnn(spec, weights, X), 0)
    with pytest.raises(ValueError, match="`key` must be None"):
        ours.Layer(spec, weights, key=KEY)
    with pytest.raises(TypeError, match="`key` must be one PRNG key"):
        ours.Layer(spec)


def test_recurrent_holds_a_cell():
    inner = ost.cells.Residual(ost.cells.LayerNormLSTM(IN, IN))
    cell = ost.cells.Dropout(inner, inputs=0.5)
    layer = ours.Recurrent(cell, recompute=["gates"], key=KEY)
    state = jax.tree.map(lambda a: a + 0.5, layer.initial_state(B))
    run = eqx.filter_jit(lambda layer: layer(X, state, seq_lengths=LENGTHS, key=KEY))
    wanted = ost.recurrent_net(
        cell,
        jnp.asarray(X),
        state,
        params=layer.params,
        seq_lengths=LENGTHS,
        padding="zero",
    )
    close(tuple(run(eqx.nn.inference_mode(layer))), (wanted.outputs, wanted.states))
    assert np.abs(run(layer).y - wanted.outputs).max() > 0.01
    with pytest.raises(ValueError, match="`key` must be given"):
        layer(X)
    gradient = eqx.filter_grad(lambda layer: jnp.sum(run(layer).y))(layer)
    assert np.abs(gradient.params.w_ih).max() > 0
    y, _ = layer.freeze().step(X[:, 0], state)
    close(y, wanted.outputs[:, 0])


def test_a_cell_with_random_choices_for_one_call_asks_for_a_key():
    cell = ost.cells.LSTM(IN, H)
    dropped = ost.cells.Dropout(cell, inputs=0.5)
    layer = ours.Recurrent(cell, key=KEY)
    with pytest.raises(ValueError, match="`key` must be given.*a cell without it"):
        layer(X, cell=dropped)
    assert np.abs(layer(X, cell=dropped, key=KEY).y - layer(X).y).max() > 0.01
    random = ours.Recurrent(dropped, key=KEY)
    close(random(X, cell=cell).y, layer(X).y)


class Leaky(ost.cells.SizedCell):
    """A cell of a user, with numbers among its parameters that are no floats."""

    input_size = output_size = IN

    def init(self, key, dtype=jnp.float32):
        return {"number": jnp.arange(3), "rate": 0.5, "scale": jnp.ones(IN, dtype)}

    def initial_state(self, batch, dtype=jnp.float32):
        return jnp.zeros((batch, IN), dtype)

    def step(self, params, states, inputs_t, t):
        states = params["rate"] * states + params["scale"][None] * inputs_t
        return states, states


def test_states_have_the_dtype_of_the_first_floats_among_parameters():
    layer = ours.Recurrent(Leaky(), key=KEY)
    assert layer.initial_state(2).dtype == jnp.float32
    want = ost.recurrent_net(Leaky(), X, jnp.zeros_like(X[:, 0]), params=layer.params)
    close(layer(X).y, want.outputs)
