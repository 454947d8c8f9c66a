"""Prepared weights: the same bits, wherever plain weights are taken."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from cases import BY_ID
from harness import arguments, assert_says, join, options_of, spec_of
from test_transforms import assert_trees_close
from tolerance import assert_same_bits

import ostinato as ost
from ostinato import _native

needs_library = pytest.mark.skipif(
    _native.status().library is None,
    reason=f"no native library: {_native.status().reason}",
)
IDS = [
    "lstm-everything",
    "lstm-proj-L2-bi-ragged",
    "lstm-bias-input",
    "gru-odd",
    "gru-resets",
    "tanh-skip",
    "relu-L2-bi-ragged",
]
SPEC = ost.RNNSpec("lstm", 3, 5, 2)


def same(got, want) -> None:
    got, want = jax.tree.leaves(got), jax.tree.leaves(want)
    for a, b in zip(got, want, strict=True):
        assert_same_bits(a, b)


def draw(spec=SPEC, dtype=jnp.float32, batch=2):
    weights = ost.init_weights(jax.random.key(0), spec, dtype)
    x = jax.random.normal(jax.random.key(1), (batch, 4, spec.input_size), dtype)
    return weights, x


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("id", [*IDS, "gru_before-L2-bi-ragged"])
def test_prepared_weights_give_the_same_bits(id, dtype):
    """Whether or not there is anything to prepare."""
    case = BY_ID[id]
    spec, made = spec_of(case), arguments(case, dtype)
    options = options_of(case, made, None)

    @jax.jit
    def run(weights):
        return ost.rnn(spec, weights, made.x, join(made.h_0, made.c_0), **options)

    prepared = ost.prepare(spec, made.weights)
    native = ost.explain(spec, made.x).backend == "cpu"
    assert (prepared.packed is not None) == native
    same(run(prepared), run(made.weights))


@pytest.mark.parametrize("mode", ["lstm", "gru", "rnn_tanh", "rnn_relu"])
@pytest.mark.parametrize("batch", [1, 3])
def test_steps_take_prepared_weights(mode, batch):
    """Short calls do not pack plain weights, and sum in another order then."""
    spec = ost.RNNSpec(mode, 3, 21, 2)
    weights, x = draw(spec, batch=batch)
    step = jax.jit(lambda w, state: ost.rnn_step(spec, w, x[:, 0], state))
    prepared, states = ost.prepare(spec, weights), [None, None]
    for _ in range(3):
        outs = [step(w, s) for w, s in zip((prepared, weights), states, strict=True)]
        assert_trees_close(*outs)
        states = [out.state for out in outs]


def test_passes_take_prepared_weights():
    weights, x = draw()
    prepared = ost.prepare(SPEC, weights)
    results = []
    for w in (prepared, weights):
        out, reserve = ost.rnn_forward(SPEC, w, x)
        results.append((out, reserve, ost.rnn_backward(SPEC, w, reserve, out.y)))
    same(*results)


def test_preparing_under_jit_and_vmap_equals_preparing_one_by_one():
    weights, x = draw()
    members = jnp.stack([weights, 2 * weights, -weights])
    one_by_one = [ost.prepare(SPEC, w) for w in members]
    many = jax.jit(jax.vmap(lambda w: ost.prepare(SPEC, w)))(members)
    for n, prepared in enumerate(one_by_one):
        same(jax.tree.map(lambda a, n=n: a[n], many), prepared)
    run = jax.jit(jax.vmap(lambda w: ost.rnn(SPEC, w, x), in_axes=0))
    same(run(many), run(members))
    twice = jax.vmap(jax.vmap(lambda w: ost.prepare(SPEC, w), 1), 0)(
        members[:, :, None]
    )
    same(jax.tree.map(lambda a: a[:, 0], twice), many)


def test_preparing_no_members_as_vmap_of_the_operator():
    none = jnp.ones((0, SPEC.num_params), jnp.float32)
    prepared = jax.vmap(lambda w: ost.prepare(SPEC, w))(none)
    assert prepared.packed.shape[0] == 0
    x = jnp.ones((2, 4, SPEC.input_size), jnp.float32)
    run = jax.vmap(lambda w: ost.rnn(SPEC, w, x).y)
    assert run(prepared).shape == run(none).shape


def test_gradients_reach_the_flat_vector_alone():
    weights, x = draw()
    prepared = ost.prepare(SPEC, weights)

    def loss(weights):
        return jnp.sum(ost.rnn(SPEC, weights, x).y ** 2)

    want = jax.jit(jax.grad(loss))(weights)
    got = jax.jit(jax.grad(loss, allow_int=True))(prepared)
    assert_same_bits(got.weights, want)
    if prepared.packed is not None:
        assert got.packed.dtype == jax.dtypes.float0
    inside = jax.jit(jax.grad(lambda w: loss(ost.prepare(SPEC, w))))(weights)
    assert_same_bits(inside, want)
    tangents = [
        jax.jvp(f, (weights,), (weights,))[1]
        for f in (loss, lambda w: loss(ost.prepare(SPEC, w)))
    ]
    same(*tangents)


@needs_library
def test_what_was_packed_for_another_machine_is_packed_again(configure):
    weights, x = draw()
    run = jax.jit(lambda w: ost.rnn(SPEC, w, x))
    prepared, want = ost.prepare(SPEC, weights), run(weights)
    assert prepared.packed is not None
    for strange in (jnp.zeros_like(prepared.packed), prepared.packed[:7]):
        same(run(prepared._replace(packed=strange)), want)
    configure("portable", 1)
    same(run(prepared), run(weights))


def test_other_backends_read_the_flat_vector():
    weights, x = draw()
    prepared = ost.prepare(SPEC, weights)
    run = jax.jit(lambda w: ost.rnn(SPEC, w, x, backend="xla"))
    same(run(prepared), run(weights))


BAD = {
    "spec": (lambda w: ost.prepare("lstm", w), TypeError, "`spec` RNNSpec 'lstm'"),
    "list": (lambda w: ost.prepare(SPEC, list(w)), TypeError, "`weights` array list"),
    "packed": (
        lambda w: ost.rnn(
            SPEC, ost.PreparedWeights(w, [1]), jnp.ones((1, 1, 3), w.dtype)
        ),
        TypeError,
        "`weights.packed` array list",
    ),
    "dtype": (
        lambda w: ost.prepare(SPEC, w.astype(int)),
        TypeError,
        "`weights` float32 int64",
    ),
    "length": (
        lambda w: ost.prepare(SPEC, w[1:]),
        ValueError,
        f"`weights` [{SPEC.num_params}] [{SPEC.num_params - 1}]",
    ),
    "of-another-spec": (
        lambda w: ost.rnn(
            ost.RNNSpec("gru", 3, 5), ost.prepare(SPEC, w), jnp.ones((1, 1, 3), w.dtype)
        ),
        ValueError,
        f"`weights` mode='gru' [{SPEC.num_params}]",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_argument_raises_with_name_want_and_got(name):
    run, error, words = BAD[name]
    with pytest.raises(error) as info:
        run(draw()[0])
    assert_says(info, words)


@needs_library
def test_what_was_packed_for_biases_of_another_place_is_packed_again():
    """Of a GRU, r scales the one that the state's product has, and not the other."""
    spec = ost.RNNSpec("gru", 3, 5, bias="input")
    other = dataclasses.replace(spec, bias="recurrent")
    weights, x = draw(spec)
    weights = weights + 0.5
    prepared = ost.prepare(other, weights)
    run = jax.jit(lambda w: ost.rnn(spec, w, x))
    same(run(ost.prepare(spec, weights)._replace(packed=prepared.packed)), run(weights))
