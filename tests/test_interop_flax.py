"""interop.flax: the numbers of flax's own cells, nnx and linen, in and out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interop_cases import (
    LIMIT,
    assert_swaps_show,
    assert_weights_are_checked,
    distance,
    draw,
    lenient,
    redraw,
    weights_of,
)

import ostinato as ost
from ostinato.interop import flax as ours

pytestmark = pytest.mark.peers
pytest.importorskip("flax", reason="needs the extra `peers`")
import flax.linen as nn  # noqa: E402
from flax import nnx  # noqa: E402

X = draw(2, 5, 3)
NNX = {
    "LSTMCell": ("lstm", {}),
    "OptimizedLSTMCell": ("lstm", {}),
    "GRUCell": ("gru", {}),
    "SimpleCell": ("rnn_tanh", {}),
    "SimpleCell-relu": ("rnn_relu", {"activation_fn": nnx.relu}),
}
LINEN = {
    "lstm": nn.LSTMCell(4),
    "lstm-optimized": nn.OptimizedLSTMCell(4),
    "gru": nn.GRUCell(4),
    "rnn_tanh": nn.SimpleCell(4),
    "rnn_relu": nn.SimpleCell(4, activation_fn=nn.relu),
}


def nnx_cell(name, **options):
    kind = name.partition("-")[0]
    with lenient():
        cell = getattr(nnx, kind)(3, 4, rngs=nnx.Rngs(0), **options)
        nnx.update(cell, redraw(nnx.state(cell, nnx.Param)))
    return cell


def nnx_outputs(cell):
    with lenient():
        return nnx.RNN(cell, rngs=nnx.Rngs(0))(jnp.asarray(X))


def linen_params(name):
    with lenient():
        layer = nn.RNN(LINEN[name])
        variables = layer.init(jax.random.key(0), jnp.asarray(X))
        variables = redraw(variables)
        return variables, layer.apply(variables, jnp.asarray(X))


def leaves(cell):
    return nnx.to_pure_dict(nnx.state(cell, nnx.Param))


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("name", NNX)
def test_nnx_cell_gives_the_same_numbers_and_goes_back(name):
    mode, options = NNX[name]
    cell = nnx_cell(name, **options)
    imported = ours.from_cell(cell)
    assert imported.spec.mode == mode and imported.notes == ()
    assert distance(imported, X, nnx_outputs(cell)) <= LIMIT
    again = ours.to_cell(imported.spec, imported.weights, name.partition("-")[0])
    assert_same(leaves(again), leaves(cell))
    assert_same(nnx_outputs(again), nnx_outputs(cell))
    kind = mode if mode == "rnn_relu" else None
    for params in (nnx.state(cell), leaves(cell)):  # the same from the parameters
        assert ours.from_cell(params, kind).spec == imported.spec
        np.testing.assert_array_equal(
            ours.from_cell(params, kind).weights, imported.weights
        )


@pytest.mark.parametrize("name", LINEN)
def test_linen_parameters_give_the_same_numbers_and_go_back(name):
    variables, want = linen_params(name)
    mode = name.partition("-")[0]
    params = variables["params"]["cell"]
    for tree in (variables, {"params": params}, params):
        imported = ours.from_cell(tree, mode)
        assert imported.spec.mode == mode
        assert distance(imported, X, want) <= LIMIT
    assert_same(ours.to_cell(imported.spec, imported.weights, "linen"), params)


@pytest.mark.parametrize("name", ["OptimizedLSTMCell", "GRUCell"])
def test_any_two_gates_swapped_show_in_nnx(name, monkeypatch):
    cell = nnx_cell(name)
    mode, convert = NNX[name][0], lambda: ours.from_cell(cell)
    assert_swaps_show(monkeypatch, ours.GATES, mode, convert, X, nnx_outputs(cell))


@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_any_two_gates_swapped_show_in_linen(name, monkeypatch):
    variables, want = linen_params(name)
    convert = lambda: ours.from_cell(variables)  # noqa: E731
    assert_swaps_show(monkeypatch, ours.GATES, name, convert, X, want)


def test_only_notes_tell_relu_from_tanh():
    variables, _ = linen_params("rnn_relu")
    tanh = ours.from_cell(variables)
    assert tanh.spec.mode == "rnn_tanh" and "tanh from relu" in tanh.notes[0]
    assert "`residual`: taken as False" in tanh.notes[1]
    assert ours.from_cell(variables, "rnn_tanh").notes == ()
    for mode in ("lstm", "gru"):
        variables, _ = linen_params(mode)
        (note,) = ours.from_cell(variables).notes
        assert "`gate_fn` and `activation_fn`: taken as sigmoid and tanh" in note
        assert ours.from_cell(variables, mode).notes == ()
    variables, _ = linen_params("rnn_relu")
    with pytest.raises(ValueError, match="`kind` must be 'rnn_tanh' .* got 'gru'"):
        ours.from_cell(variables, "gru")
    cell = nnx_cell("GRUCell", dtype=jnp.bfloat16)
    assert "computes in bfloat16" in ours.from_cell(cell).notes[0]


@pytest.mark.parametrize("name", NNX)
def test_the_state_that_orbax_restores_without_a_target(name):
    mode, options = NNX[name]
    cell = nnx_cell(name, **options)
    restored = jax.tree.map(lambda leaf: {"value": leaf}, leaves(cell))
    network, want = ours.from_cell({"cell": restored}, mode), ours.from_cell(cell)
    assert network.spec == want.spec
    np.testing.assert_array_equal(network.weights, want.weights)


def test_conversion_can_be_traced():
    cell = nnx_cell("LSTMCell")
    graph, state = nnx.split(cell)
    weights = jax.jit(lambda s: ours.from_cell(nnx.merge(graph, s)).weights)(state)
    np.testing.assert_array_equal(weights, ours.from_cell(cell).weights)


@pytest.mark.parametrize(
    ("name", "options", "attribute"),
    [
        ("LSTMCell", {"gate_fn": jax.nn.hard_sigmoid}, "gate_fn"),
        ("OptimizedLSTMCell", {"activation_fn": jax.nn.relu}, "activation_fn"),
        ("GRUCell", {"gate_fn": jnp.tanh}, "gate_fn"),
        ("SimpleCell", {"activation_fn": jax.nn.gelu}, "activation_fn"),
        ("SimpleCell", {"residual": True}, "residual"),
    ],
)
def test_other_equations_name_the_attribute(name, options, attribute):
    with pytest.raises(ValueError, match=f"`{attribute}` of the {name} must be"):
        ours.from_cell(nnx_cell(name, **options))


class Other(nnx.LSTMCell):
    def __call__(self, carry, inputs):
        return super().__call__(carry, inputs * 2)


def test_what_is_no_cell_is_an_error():
    with lenient():
        other = Other(3, 4, rngs=nnx.Rngs(0))
    for value in (other, nn.LSTMCell(4), X):
        with pytest.raises(TypeError, match="must be an nnx.LSTMCell"):
            ours.from_cell(value)
    variables, _ = linen_params("gru")
    params = dict(variables["params"]["cell"])
    with pytest.raises(ValueError, match="must be the parameters of one"):
        ours.from_cell({k: v for k, v in params.items() if k != "hn"})
    with pytest.raises(
        ValueError, match=r"`cell_or_params\['hn'\]` must hold 'kernel'"
    ):
        ours.from_cell(params | {"hn": {"bias": params["hn"]["bias"]}})
    with pytest.raises(ValueError, match=r"\['hz'\]\['kernel'\]` must be a matrix"):
        ours.from_cell(params | {"hz": {"kernel": X}})
    with pytest.raises(ValueError, match=r"\['hn'\]\['bias'\]` must have shape"):
        ours.from_cell(params | {"hn": params["hn"] | {"bias": jnp.zeros(3)}})
    with pytest.raises(ValueError, match=r"\['iz'\]` must hold 'bias', as others"):
        ours.from_cell(params | {"iz": {"kernel": params["iz"]["kernel"]}})


SPECS = {
    "LSTMCell": ost.RNNSpec("lstm", 3, 4),
    "OptimizedLSTMCell": ost.RNNSpec("lstm", 3, 4, 2, True),
    "GRUCell": ost.RNNSpec("gru", 3, 4, bias="input"),
    "SimpleCell": ost.RNNSpec("rnn_relu", 3, 4),
    "linen": ost.RNNSpec("gru", 3, 4, 2),
}


@pytest.mark.parametrize("kind", SPECS)
def test_export_of_a_layer_computes_the_same(kind):
    spec = SPECS[kind]
    weights = weights_of(spec)
    for layer in range(spec.num_layers):
        for reverse in range(spec.num_directions):
            where = {"layer": layer, "reverse": bool(reverse)}
            cell = ours.to_cell(spec, weights, kind, fold=True, **where)
            p = layer * spec.num_directions + reverse
            one = ost.unpack_weights(weights, spec)[p]
            alone = ost.RNNSpec(spec.mode, one.w_ih.shape[1], 4, bias=spec.bias)
            x = draw(2, 5, one.w_ih.shape[1])
            want = ost.rnn(alone, ost.pack_weights([one], alone), jnp.asarray(x)).y
            imported = ours.from_cell(cell, spec.mode)
            assert distance(imported, x, want) <= LIMIT


def test_biases_are_not_lost_in_silence():
    spec = SPECS["LSTMCell"]
    weights = weights_of(spec)
    with pytest.raises(ValueError, match="values in both b_ih and b_hh.*fold=True"):
        ours.to_cell(spec, weights)
    with pytest.raises(ValueError, match="fold=True"):  # traced: who knows
        jax.jit(lambda w: ours.to_cell(spec, w, "linen"))(weights)
    (layer,) = ost.unpack_weights(weights, spec)
    zero = layer._replace(b_ih=jnp.zeros(16, jnp.float32))
    params = ours.to_cell(spec, ost.pack_weights([zero], spec), "linen")
    np.testing.assert_array_equal(params["hi"]["bias"], layer.b_hh[:4])
    gru = ost.RNNSpec("gru", 3, 4)
    with pytest.raises(ValueError, match="gate n of b_hh .* linen and equinox"):
        ours.to_cell(gru, weights_of(gru), fold=True)
    bare = ost.RNNSpec("gru", 3, 4, bias="none")
    assert not ours.to_cell(bare, weights_of(bare)).dense_i.bias[...].any()


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"proj_size": 2}, None, "proj_size=0"),
        ({"cell_clip": 1.0}, None, "cell_clip=None"),
        ({}, "GRUCell", "mode 'gru'"),
        ({}, "MGUCell", "`kind` must be one of"),
    ],
)
def test_what_flax_lacks_is_an_error(options, kind, message):
    spec = ost.RNNSpec("lstm", 3, 4, **options)
    with pytest.raises(ValueError, match=message):
        ours.to_cell(spec, weights_of(spec), kind)
    with pytest.raises(ValueError, match="`layer` must be less than num_layers=1"):
        ours.to_cell(ost.RNNSpec("lstm", 3, 4), weights_of(spec), layer=1)
    with pytest.raises(ValueError, match="`reverse` must be False"):
        ours.to_cell(ost.RNNSpec("lstm", 3, 4), weights_of(spec), reverse=True)


@pytest.mark.parametrize("kind", [None, "linen"])
def test_arguments_of_the_exporter_are_checked(kind):
    spec = ost.RNNSpec("lstm", 3, 4)
    assert_weights_are_checked(ours.to_cell, spec, traced=True, kind=kind, fold=True)
    with pytest.raises(TypeError, match="`fold` must be True or False, got str"):
        ours.to_cell(spec, weights_of(spec), kind, fold="no")
    with pytest.raises(ValueError, match="`kind` must be one of"):
        ours.to_cell(spec, weights_of(spec), [])


@pytest.mark.filterwarnings("ignore:keep_rngs argument is deprecated:UserWarning")
@pytest.mark.parametrize("kind", ["LSTMCell", "OptimizedLSTMCell", "GRUCell"])
def test_the_state_of_a_cell_that_keeps_its_random_numbers(kind):
    cell = nnx_cell(kind, keep_rngs=True)
    got = ours.from_cell(nnx.state(cell))
    np.testing.assert_array_equal(got.weights, ours.from_cell(cell).weights)
    of_rnn = nnx.state(nnx.RNN(cell, rngs=nnx.Rngs(0)))
    np.testing.assert_array_equal(ours.from_cell(of_rnn).weights, got.weights)
