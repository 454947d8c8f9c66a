"""`nn.sequence_layers` against `sequence_layers.jax`: the same variables, numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interop_cases import LIMIT, draw, lenient, redraw

pytestmark = pytest.mark.peers
sl = pytest.importorskip("sequence_layers.jax", reason="needs sequence-layers")
from ostinato.nn.sequence_layers import GRU, LSTM  # noqa: E402

MASK = np.array([[1, 1, 1, 1, 1, 1], [0, 1, 0, 1, 1, 0], [0, 0, 0, 0, 0, 0]], bool)


@pytest.fixture(autouse=True)
def as_they_expect():
    with lenient():
        yield


def sequence(steps=6):
    return sl.Sequence(
        jnp.asarray(draw(3, 6, 4)[:, :steps]), jnp.asarray(MASK[:, :steps])
    )


def pair(**options):
    """Both layers, and variables that differ from gate to gate."""
    layers = [c.Config(units=5, **options).make() for c in (LSTM, sl.LSTM)]
    key, x = jax.random.key(0), sequence()
    variables = [m.init(key, x, training=False, method="layer") for m in layers]
    close(*variables, 0)
    return *layers, redraw(variables[0])


def close(a, b, tolerance=LIMIT):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance)


@pytest.mark.parametrize("options", [{}, {"use_bias": False}])
def test_outputs_and_gradients(options):
    layer, theirs, variables = pair(**options)
    x = sequence()
    assert layer.apply(variables, x, method="explain").backend in ("cpu", "xla")

    def loss(variables, values, layer):
        x = sl.Sequence(values, MASK)
        y = layer.apply(variables, x, training=True, method="layer").mask_invalid()
        return jnp.sum(jnp.sin(y.values)), y

    gradients = jax.grad(loss, (0, 1), has_aux=True)
    close(gradients(variables, x.values, layer), gradients(variables, x.values, theirs))


def test_blocks_of_steps_equal_the_layer():
    layer, theirs, variables = pair()
    x = sequence()
    options = {"training": False, "method": "step"}
    state = wanted = layer.get_initial_state(3, x.channel_spec, training=False)
    blocks = []
    for start, stop in ((0, 2), (2, 3), (3, 6)):
        y, state = layer.apply(variables, x[:, start:stop], state, **options)
        _, wanted = theirs.apply(variables, x[:, start:stop], wanted, **options)
        close(state, wanted)
        blocks.append(y.mask_invalid())
    whole = layer.apply(variables, x, training=False, method="layer")
    close(sl.Sequence.concatenate_sequences(blocks).values, whole.values)


def test_inside_of_a_model():
    def model(kind):
        return sl.Serial.Config(
            [
                sl.Dense.Config(4, name="in"),
                kind.Config(5, name="a"),
                kind.Config(5, name="b"),
            ]
        ).make()

    x, key = sequence(), jax.random.key(0)
    ours, theirs = model(LSTM), model(sl.LSTM)
    variables = redraw(ours.init(key, x, training=False, method="layer"))
    y, wanted = (
        m.apply(variables, x, training=False, method="layer").mask_invalid()
        for m in (ours, theirs)
    )
    close(y, wanted)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"activation": jax.nn.relu}, "activation"),
        ({"recurrent_activation": jax.nn.hard_sigmoid}, "recurrent_activation"),
        ({"precision": jax.lax.Precision.HIGHEST}, "precision"),
    ],
)
def test_other_layers_run_as_in_theirs(options, words):
    layer, theirs, variables = pair(**options)
    said = layer.apply(variables, sequence(), method="explain")
    assert said.backend == "sequence_layers" and words in said.rejected["cpu"]
    run = {"training": False, "method": "layer"}
    close(
        layer.apply(variables, sequence(), **run),
        theirs.apply(variables, sequence(), **run),
        0,
    )
    single = layer.apply(variables, sequence(1), method="explain")
    assert "single step" in single.rejected["cpu"]


def test_dtypes():
    layer, theirs, variables = pair(compute_dtype=jnp.bfloat16)
    run = {"training": False, "method": "layer"}
    y, wanted = (
        m.apply(variables, sequence(), **run).mask_invalid().values
        for m in (layer, theirs)
    )
    assert y.dtype == wanted.dtype == jnp.bfloat16
    assert jnp.abs(y - wanted).max() < 0.03


def gru_loop(params, x, mask, reset_after):
    """A GRU in float64, one step after the other."""
    sigmoid = lambda a: 1 / (1 + np.exp(-a))  # noqa: E731
    kernel, recurrent, bias = (
        np.asarray(params[n], "f8") for n in ("kernel", "recurrent_kernel", "bias")
    )
    b_x, b_h = bias if reset_after else (bias, np.zeros_like(bias))
    h, n = np.zeros((len(x), 5)), 5
    ys = []
    for t in range(x.shape[1]):
        a, b = x[:, t] @ kernel + b_x, h @ recurrent + b_h
        z, r = sigmoid((a + b)[:, :n]), sigmoid((a + b)[:, n : 2 * n])
        inner = r * b[:, 2 * n :] if reset_after else (r * h) @ recurrent[:, 2 * n :]
        new = z * h + (1 - z) * np.tanh(a[:, 2 * n :] + inner)
        h = np.where(mask[:, t, None], new, h)
        ys.append(np.where(mask[:, t, None], new, 0))
    return np.stack(ys, 1), h


@pytest.mark.parametrize("reset_after", [True, False])
def test_gru(reset_after):
    layer, x = GRU.Config(5, reset_after=reset_after).make(), sequence()
    run = {"training": False}
    variables = layer.init(jax.random.key(0), x, **run, method="layer")
    variables = redraw(variables)
    y = layer.apply(variables, x, **run, method="layer")
    wanted, final = gru_loop(
        variables["params"], np.asarray(x.values, "f8"), MASK, reset_after
    )
    np.testing.assert_allclose(y.values, wanted, rtol=0, atol=LIMIT)
    state, blocks = layer.get_initial_state(3, x.channel_spec, **run), []
    for start, stop in ((0, 1), (1, 4), (4, 6)):
        part, state = layer.apply(
            variables, x[:, start:stop], state, **run, method="step"
        )
        blocks.append(part)
    close(sl.Sequence.concatenate_sequences(blocks), y)
    np.testing.assert_allclose(state[:, 0], final, rtol=0, atol=LIMIT)


def test_gru_of_other_configurations():
    x, key = sequence(), jax.random.key(0)
    layer = GRU.Config(5, use_bias=False, compute_dtype=jnp.bfloat16, name="g").make()
    assert layer.name == "g" and layer.receptive_field[1] == 0
    y, variables = layer.init_with_output(key, x, training=False, method="layer")
    assert variables["params"].keys() == {"kernel", "recurrent_kernel"}
    assert y.dtype == layer.get_output_spec(x.channel_spec).dtype == jnp.bfloat16
    wide = sl.Sequence(jnp.zeros((3, 6, 2, 2)), x.mask)
    with pytest.raises(ValueError, match="`input_shape` must be"):
        layer.init(key, wide, training=False, method="layer")


@pytest.mark.parametrize("units, error", [(0, ValueError), (2.0, TypeError)])
def test_units_are_checked(units, error):
    with pytest.raises(error, match="`units` must be"):
        GRU.Config(units).make()
