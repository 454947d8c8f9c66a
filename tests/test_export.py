"""`jax.export` of nets for every size, and of functions of batches."""

import pickle
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cell_cases import CASES, make
from closures import fast_jit
from jax.experimental import serialize_executable
from test_linear_transforms import assert_trees_close

import ostinato as ost
from ostinato import ragged

NAMES = ["lstm", "peephole", "milstm", "norm-gru", "para-lstm", "conv-lstm-1d", "raw"]


def dense(params, h, x, t):
    h = jnp.tanh(x @ params["w"] + h @ params["u"])
    return h, h


def net(name):
    if name != "raw":
        return CASES[name].cell, *jax.tree.map(jnp.asarray, make(CASES[name]))
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape)) * 0.3  # noqa: E731
    return dense, {"w": draw(2, 40), "u": draw(40, 40)}, draw(3, 5, 2), draw(3, 40)


@pytest.mark.parametrize("fixed", ["time", "batch", "neither"])
@pytest.mark.parametrize("name", NAMES)
def test_sizes_may_be_symbols(name, fixed):
    step, params, x, states = net(name)
    lengths = jnp.array([2, x.shape[1], 0][: x.shape[0]], jnp.int32)

    def loss(params, x, states, lengths):
        out = ost.recurrent_net(step, x, states, params=params, seq_lengths=lengths)
        return jnp.sum(out.outputs**2)

    b, t = jax.export.symbolic_shape("b, t")
    b, t = (b, x.shape[1]) if fixed == "time" else (b, t)
    b = x.shape[0] if fixed == "batch" else b

    def shape_of(a, *sizes):
        return jax.ShapeDtypeStruct((*sizes, *a.shape[len(sizes) :]), a.dtype)

    arguments = params, x, states, lengths
    shapes = (
        params,
        shape_of(x, b, t),
        jax.tree.map(lambda a: shape_of(a, b), states),
        shape_of(lengths, b),
    )
    function = fast_jit(jax.value_and_grad(loss, (0, 1, 2)))
    leaves = jax.tree.leaves(jax.export.export(function)(*shapes).call(*arguments))
    assert_trees_close(leaves, jax.tree.leaves(function(*arguments)))


@pytest.mark.parametrize("options", [{"backend": "scan"}, {"segment_length": 2}])
def test_linear_cells_run_step_by_step_for_batches_of_any_size(options):
    cell = ost.cells.Stack((ost.cells.MinGRU(3, 4), ost.cells.LRU(4, 5)))
    params = cell.init(jax.random.key(0))

    def run(x):
        states = cell.initial_state(x.shape[0], x.dtype)
        return ost.recurrent_net(cell, x, states, params=params, **options).outputs

    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5, 3)), jnp.float32)
    shape = jax.ShapeDtypeStruct((*jax.export.symbolic_shape("b"), 5, 3), x.dtype)
    got = jax.export.export(jax.jit(run))(shape).call(x)
    np.testing.assert_allclose(got, run(x), rtol=1e-5, atol=1e-6)


def test_layers_run_for_batches_of_any_size():
    layer = pytest.importorskip("ostinato.nn.equinox")
    cell, key = ost.cells.GRU(3, 4), jax.random.key(0)
    dropped, lstm = ost.cells.Dropout(cell, 0.3), layer.LSTM(3, 4, key=key)
    recurrent, random = (layer.Recurrent(c, key=key) for c in (cell, dropped))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5, 3)), jnp.float32)

    def run(x):
        first = ost.cells.repeat_state(jnp.ones(4, x.dtype), x.shape[0])
        return (
            (recurrent(x).y, recurrent.step(x[:, 0]).y, recurrent.freeze()(x).y),
            (recurrent(x, recurrent.initial_state(x.shape[0])).y, recurrent(x, first)),
            (lstm(x, lstm.freeze().initial_state(x.shape[0])).y, lstm(x).y),
            random(x, first, key=key).y,
        )

    shape = jax.ShapeDtypeStruct((*jax.export.symbolic_shape("b, t"), 3), x.dtype)
    got = jax.export.export(jax.jit(run))(shape).call(x)
    assert_trees_close(jax.tree.leaves(got), jax.tree.leaves(run(x)))


def test_batches_are_serialized():
    rows = np.random.default_rng(0).normal(size=(8, 2))
    batch = ragged.RaggedArray.from_list([rows[:5], rows[5:7], rows[7:]], dim="words")

    def run(batch):
        function = lambda x: (jnp.cumsum(x, 0), x @ x.T, jnp.roll(x, 1, 0))  # noqa: E731
        return batch, ragged.vmap(function)(batch)

    blob = jax.export.export(jax.jit(run))(batch).serialize()
    got, want = jax.export.deserialize(blob).call(batch), run(batch)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    assert got[1][1].dims == want[1][1].dims and got[0].dim == "words"
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)


SECTIONS = np.array([[1.0, 0.2, 0.3, 1.0, 0.1, 0.2]] * 2)
OF_SIGNALS = {
    "lfilter": lambda x: ost.lfilter([1.0], [1.0, 0.5], x),
    "state": lambda x: ost.lfilter([1.0], [1.0, 0.5, 0.1], x, zi=x[:, :2] * 2)[1],
    "sosfilt": lambda x: ost.sosfilt(SECTIONS, x),
    "mapped": jax.vmap(lambda x: ost.lfilter([1.0], [1.0, 0.5], x)),
    "each": jax.vmap(lambda x: ost.lfilter(x[:2], jnp.array([1.0, 0.5]), x)),
    "gae": jax.vmap(lambda x: ost.gae(x, x, x[0], discounts=0.9, lambda_=0.9)),
    "returns": lambda x: ost.discounted_returns(x, discounts=0.9),
}


@pytest.mark.parametrize("what", OF_SIGNALS)
def test_filters_are_written_for_every_size(what):
    def both(x):
        def loss(x):
            return sum(map(jnp.sum, jax.tree.leaves(OF_SIGNALS[what](jnp.sin(x)))))

        return OF_SIGNALS[what](x), jax.grad(loss)(x)

    sizes = jax.export.symbolic_shape("b, t", constraints=["t>=2"])
    shape = jax.ShapeDtypeStruct(sizes, np.float64)
    written = jax.export.export(jax.jit(both))(shape)
    for steps in (2, 7):
        x = jnp.sin(jnp.arange(3.0 * steps)).reshape(3, steps)
        got, want = jax.tree.leaves(written.call(x)), jax.tree.leaves(both(x))
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


OF_TOKENS = {
    "cumsum": lambda x: jnp.cumsum(x, 0),
    "mean": lambda x: x * x.mean(0, keepdims=True),
    "cummax": lambda x: jax.lax.cummax(x, 0, reverse=True),
    "associative": lambda x: ragged.associative_scan(jnp.multiply, x, reverse=True),
    "scan": lambda x: jax.lax.scan(lambda c, t: (jnp.tanh(c + t), c), x[0] * 0, x)[1],
    "concatenate": lambda x: jnp.concatenate([x, x[:1], x])[1:],
    "repeat": lambda x: jnp.repeat(x, 3, axis=0),
    "rnn": lambda x: ost.linear_recurrence(jnp.tanh(x)[None], x[None]).h[0],
    "attention": lambda x: jax.nn.softmax(x @ x.T) @ x,
}


@pytest.mark.parametrize(
    ("what", "tiers"),
    [
        *((what, None) for what in OF_TOKENS),
        *(("attention", tiers) for tiers in (2, "auto", ((1, 4), (2, 2)))),
    ],
)
def test_ragged_programs_are_written_for_every_capacity(what, tiers):
    (capacity,) = jax.export.symbolic_shape("capacity", constraints=["capacity>=4"])

    def run(data, lengths):
        batch = ragged.RaggedArray(data, lengths, max_length=4)
        return ragged.vmap(OF_TOKENS[what], tiers=tiers)(batch).to_padded()[0]

    def both(data, lengths):
        loss = lambda data: jnp.sum(jnp.sin(run(data, lengths)))  # noqa: E731
        return run(data, lengths), jax.grad(loss)(data)

    shapes = ((capacity, 2), np.float64), ((3,), np.int32)
    written = jax.export.export(jax.jit(both))(
        *(jax.ShapeDtypeStruct(*shape) for shape in shapes)
    )
    data = np.random.default_rng(0).normal(size=(9, 2))
    lengths = np.array([4, 1, 3], np.int32)  # one slot is free
    got, want = written.call(data, lengths), jax.jit(both)(data, lengths)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("what", ["rnn", "linear_recurrence"])
def test_programs_over_a_sharded_batch_are_written(what):
    mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:4]), ("d",))
    split, whole = (
        jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*names))
        for names in (("d",), ())
    )
    x = jax.random.normal(jax.random.key(0), (8, 5, 3))
    if what == "rnn":
        spec = ost.RNNSpec("lstm", 3, 4)
        w = ost.init_weights(jax.random.key(1), spec, x.dtype)
        run = lambda w, x: ost.rnn(spec, w, x).y  # noqa: E731
    else:
        w, run = jnp.full(3, 0.5, x.dtype), lambda a, x: ost.linear_recurrence(a, x).h
    jitted = jax.jit(run, in_shardings=(whole, split))
    written = jax.export.export(jitted)(w, x)
    read = jax.export.deserialize(written.serialize())
    given = jax.device_put(w, whole), jax.device_put(x, split)
    got = jax.jit(read.call)(*given)
    np.testing.assert_allclose(got, run(w, x), rtol=1e-6, atol=1e-6)


LOAD = """
import pickle, sys
import jax
from jax.experimental import serialize_executable
import ostinato
ostinato.backends()
stored, x = pickle.load(sys.stdin.buffer)
one = jax.devices()[:1]
run = serialize_executable.deserialize_and_load(*stored, execution_devices=one)
sys.stdout.buffer.write(pickle.dumps(run(x)))
"""


def test_another_process_runs_what_was_compiled():
    """It has traced nothing; `backends` registers the kernels."""
    spec = ost.RNNSpec("gru", 3, 4)
    weights = ost.init_weights(jax.random.key(0), spec)
    x = jnp.ones((2, 5, 3), weights.dtype)
    run = jax.jit(lambda x: ost.rnn(spec, weights, x).y).lower(x).compile()
    stored = pickle.dumps((serialize_executable.serialize(run), x))
    done = subprocess.run(
        [sys.executable, "-c", LOAD], input=stored, capture_output=True
    )
    assert not done.returncode, done.stderr.decode()[-2000:]
    np.testing.assert_array_equal(pickle.loads(done.stdout), run(x))
