"""interop.imported and interop.exported: the steps that all converters share."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interop_cases import LIMIT, distance, draw, run, weights_of

import ostinato as ost
from ostinato.interop import exported, imported
from ostinato.interop.imported import Imported

X = draw(2, 5, 3)


def make(mode, inputs=3, seed=0, **options):
    spec = ost.RNNSpec(mode, inputs, 4, **options)
    return Imported(spec, weights_of(spec, seed), (f"note {seed}",))


def outputs(network, x):
    return run(network.spec, network.weights, jnp.asarray(x)).y


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "lstm", "proj_size": 2},
        {"mode": "gru", "reset_after": False, "bias": "input"},
        {"mode": "rnn_relu", "bidirectional": True},
    ],
)
def test_stack_is_one_after_the_other(options):
    first = make(**options)
    width = first.spec.num_directions * first.spec.output_size
    second = make(**options, inputs=width, seed=1, num_layers=2)
    both = imported.stack([first, second])
    assert both.spec.num_layers == 3 and both.notes == ("note 0", "note 1")
    want = outputs(second, outputs(first, X))
    assert distance(both, X, want) <= LIMIT * max(1, float(jnp.abs(want).max()))


def test_stack_of_other_biases_and_traced_weights():
    first, second = make("gru", bias="input"), make("gru", 4, 1, bias="recurrent")
    both = imported.stack([first, second])
    assert both.spec.bias == "double"
    assert distance(both, X, outputs(second, outputs(first, X))) <= LIMIT

    def weights(a, b):
        parts = [first._replace(weights=a), second._replace(weights=b)]
        return imported.stack(parts).weights

    traced = jax.jit(weights)(first.weights, second.weights)
    np.testing.assert_array_equal(traced, both.weights)


@pytest.mark.parametrize("mode", ["lstm", "gru", "rnn_tanh"])
def test_both_directions_of_one_layer(mode):
    forward, backward = make(mode), make(mode, seed=1)
    both = imported.bidirectional(forward, backward)
    turned = outputs(backward, X[:, ::-1])[:, ::-1]
    want = jnp.concatenate([outputs(forward, X), turned], axis=-1)
    assert distance(both, X, want) <= LIMIT


def test_networks_that_do_not_fit_are_an_error():
    lstm, gru = make("lstm"), make("gru")
    with pytest.raises(ValueError, match="at least one network"):
        imported.stack([])
    with pytest.raises(ValueError, match=r"`networks\[1\].spec` must have mode='lstm'"):
        imported.stack([lstm, gru])
    with pytest.raises(ValueError, match=r"`networks\[1\].spec` must have reset_after"):
        imported.stack([gru, make("gru", 4, reset_after=False)])
    with pytest.raises(ValueError, match=r"`networks\[1\], layer 1, w_ih` must have"):
        imported.stack([lstm, lstm])
    with pytest.raises(ValueError, match="`backward` must have one layer"):
        imported.bidirectional(lstm, make("lstm", num_layers=2))
    skip = Imported(
        spec := ost.RNNSpec("gru", 4, 4, input_mode="skip"), weights_of(spec)
    )
    with pytest.raises(ValueError, match="input_mode='linear' for a part of a network"):
        imported.stack([skip, skip])
    half = lstm._replace(weights=lstm.weights.astype(jnp.bfloat16))
    with pytest.raises(TypeError, match="must have the dtype of"):
        imported.bidirectional(lstm, half)


def test_gates_are_put_in_order():
    a = jnp.arange(8).reshape(4, 2)
    got = imported.reorder_gates(a, "i o f g", "i f g o")
    np.testing.assert_array_equal(got, a[jnp.array([0, 2, 3, 1])])
    back = imported.reorder_gates(got.T, "i f g o", "i o f g", axis=1)
    np.testing.assert_array_equal(back.T, a)
    assert imported.reorder_gates(a, "i f", "i f") is a


class Variable:
    """An object that stands for an array, as parameters of libraries do."""

    def __init__(self, array):
        self.array = array

    def __jax_array__(self):
        return self.array


def test_arrays_of_all_kinds():
    x = draw(2, 3)
    for value in (x, jnp.asarray(x), Variable(jnp.asarray(x))):
        got = imported.as_array("w", value)
        assert isinstance(got, jax.Array) and got.dtype == np.float32
        np.testing.assert_array_equal(got, x)
    for value in ([1.0], 2.0, None):
        with pytest.raises(TypeError, match="`w` must be an array"):
            imported.as_array("w", value)
    with pytest.raises(TypeError, match="`w` must have one of the dtypes"):
        imported.as_array("w", np.arange(3))


def test_biases_are_joined_without_loss():
    spec = ost.RNNSpec("gru", 3, 4)
    (layer,) = ost.unpack_weights(weights_of(spec), spec)
    with pytest.raises(ValueError, match="both b_ih and b_hh for a thing"):
        exported.join_biases(spec, layer, "a thing", False)
    b, b_n = exported.join_biases(spec, layer, "a thing", True)
    np.testing.assert_array_equal(b[:8], layer.b_ih[:8] + layer.b_hh[:8])
    np.testing.assert_array_equal(b[8:], layer.b_ih[8:])
    np.testing.assert_array_equal(b_n, layer.b_hh[8:])
    with pytest.raises(ValueError, match="gate n of b_hh for a thing"):
        exported.refuse_candidate_bias(b_n, "a thing", "elsewhere")
    exported.refuse_candidate_bias(jnp.zeros(4), "a thing", "elsewhere")
    bare = layer._replace(b_ih=None, b_hh=None)
    assert exported.join_biases(spec, bare, "a thing", False) == (None, None)


def test_masks_of_numpy_are_not_dropped():
    masked = np.ma.masked_array(draw(2, 3), mask=np.eye(2, 3, dtype=bool))
    with pytest.raises(ValueError, match="`w`: numpy masked arrays are not supported"):
        imported.as_array("w", masked)


BACK = "direction=reverse: flip x along time, and y back"
TOO = "a: go_backwards=True: flip x along time; y is flipped too"


@pytest.mark.parametrize("note", [BACK, TOO, BACK.replace(":", " with lengths:", 1)])
def test_what_runs_both_directions_flips_nothing(note):
    forward = make("gru")._replace(notes=("layout", "lengths"))
    backward = make("gru", seed=1)._replace(notes=("layout", note))
    both = imported.bidirectional(forward, backward)
    assert both.notes == ("layout", "lengths")
    with pytest.raises(ValueError, match="`forward` must read .* first step on, got"):
        imported.bidirectional(backward, forward)


@pytest.mark.parametrize(
    "notes",
    [([], [TOO]), ([TOO], [TOO]), ([], [BACK]), ([BACK], []), ([BACK], [TOO])],
)
def test_no_stack_flips_time_between_its_layers(notes):
    parts = [make("gru", n + 3, n)._replace(notes=notes[n]) for n in range(2)]
    with pytest.raises(
        ValueError, match=r"`networks\[1\]` must read time in the order"
    ):
        imported.stack(parts)


def test_a_stack_in_which_all_flip_time_flips_it_once():
    first, second = make("gru"), make("gru", 4, 1)
    parts = [network._replace(notes=(BACK,)) for network in (first, second)]
    both = imported.stack(parts)
    assert both.notes == (BACK,)
    turned = outputs(first, X[:, ::-1])[:, ::-1]
    want = outputs(second, turned[:, ::-1])[:, ::-1]
    got = outputs(both, X[:, ::-1])[:, ::-1]
    assert np.abs(got - want).max() <= LIMIT
    begins = imported.stack([first._replace(notes=(TOO,)), second])
    assert begins.notes == (TOO, "note 1")


def test_modes_that_are_not_joined_are_not_told_to_save():
    slstm = make("slstm", 4)
    with pytest.raises(ValueError, match="got 'slstm'; call the networks one after"):
        imported.stack([slstm, slstm])
    with pytest.raises(ValueError, match="got 'slstm'; save it with `ostinato.save`"):
        exported.require(slstm.spec, "a thing")


def test_parts_are_what_converters_return():
    spec = ost.RNNSpec("gru", 3, 4)
    one = Imported(spec, ost.init_weights(jax.random.key(0), spec), ())
    with pytest.raises(TypeError, match="`backward` must be an Imported"):
        imported.bidirectional(one, (spec, one.weights))
    inner = ost.RNNSpec("gru", 4, 4)
    two = Imported(inner, ost.init_weights(jax.random.key(1), inner), ())
    assert imported.stack(network for network in (one, two)).spec.num_layers == 2


def test_joined_networks_keep_every_option():
    """Options that change nothing for most inputs are fields that all have."""
    options = {"cell_clip": 0.1, "clip_nan": True, "batch_invariant": True}
    first = make("lstm", dropout=0.5, **options)
    second = make("lstm", 4, 1, dropout=0.5, **options)
    stacked = imported.stack([first, second])
    both = imported.bidirectional(first, first)
    for network in (stacked, both):
        for name, value in {"dropout": 0.5, **options}.items():
            assert getattr(network.spec, name) == value
    x = np.array(X)
    x[0, 2] = np.nan  # which clipped cells forget
    want = outputs(second, outputs(first, x))
    np.testing.assert_allclose(outputs(stacked, x), want, rtol=1e-5, atol=1e-6)
