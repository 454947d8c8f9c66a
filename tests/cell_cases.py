"""Cells, their oracles and awkward inputs for the tests of cells."""

import functools as ft
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from closures import fast_jit
from oracles import cells64, net64
from tolerance import assert_close

import ostinato as ost
from ostinato import cells
from ostinato._step import primitive as loops

STEPS, LENGTHS = 5, (3, 0, 5)
BATCH, INPUTS, HIDDEN = len(LENGTHS), 3, 5


@dataclass(frozen=True)
class CellCase:
    """A cell, and an oracle that computes one step of one sequence in numpy."""

    cell: Any
    oracle: Any
    shape: tuple = (INPUTS,)  # of the input of one sequence at one step


_C, _O = cells, cells64
CASES = {
    "rnn-tanh": CellCase(_C.RNN(INPUTS, HIDDEN), _O.rnn),
    "rnn-relu": CellCase(
        _C.RNN(INPUTS, HIDDEN, "relu"), ft.partial(_O.rnn, activation="relu")
    ),
    "lstm": CellCase(_C.LSTM(INPUTS, HIDDEN), _O.lstm),
    "lstm-forget": CellCase(
        _C.LSTM(INPUTS, HIDDEN, forget_bias=1.5), ft.partial(_O.lstm, forget_bias=1.5)
    ),
    "lstmp": CellCase(
        _C.LSTMP(INPUTS, HIDDEN, forget_bias=-0.5, proj_size=2),
        ft.partial(_O.lstmp, forget_bias=-0.5),
    ),
    "gru-after": CellCase(_C.GRU(INPUTS, HIDDEN), _O.gru),
    "gru-before": CellCase(
        _C.GRU(INPUTS, HIDDEN, reset_after=False), ft.partial(_O.gru, reset_after=False)
    ),
    "peephole": CellCase(
        _C.PeepholeLSTM(INPUTS, HIDDEN, 0.5),
        ft.partial(_O.peephole_lstm, forget_bias=0.5),
    ),
    "milstm": CellCase(
        _C.MILSTM(INPUTS, HIDDEN, 0.5), ft.partial(_O.milstm, forget_bias=0.5)
    ),
    "norm-lstm": CellCase(
        _C.LayerNormLSTM(INPUTS, HIDDEN, 0.5, epsilon=1e-2),
        ft.partial(_O.layer_norm_lstm, forget_bias=0.5, epsilon=1e-2),
    ),
    "norm-milstm": CellCase(
        _C.LayerNormMILSTM(INPUTS, HIDDEN, 0.5),
        ft.partial(_O.layer_norm_milstm, forget_bias=0.5),
    ),
    "norm-gru": CellCase(_C.LayerNormGRU(INPUTS, HIDDEN), _O.layer_norm_gru),
    "indrnn-relu": CellCase(_C.IndRNN(INPUTS, HIDDEN), _O.ind_rnn),
    "indrnn-tanh": CellCase(
        _C.IndRNN(INPUTS, HIDDEN, "tanh"), ft.partial(_O.ind_rnn, activation="tanh")
    ),
    "para-gru": CellCase(_C.ParaGRU(INPUTS, HIDDEN), _O.para_gru),
    "para-lstm": CellCase(_C.ParaLSTM(INPUTS, HIDDEN), _O.para_lstm),
    "min-gru": CellCase(_C.MinGRU(INPUTS, HIDDEN), _O.min_gru),
    "min-lstm": CellCase(_C.MinLSTM(INPUTS, HIDDEN), _O.min_lstm),
    "rg-lru": CellCase(_C.RGLRU(4, num_heads=2), _O.rg_lru, (4,)),
    "conv-lstm-1d": CellCase(
        _C.ConvLSTM(2, 3, (4,), (3,), 0.5),
        ft.partial(_O.conv_lstm, forget_bias=0.5),
        (4, 2),
    ),
    "conv-lstm-2d": CellCase(
        _C.ConvLSTM(2, 1, (3, 4), (3, 2)), _O.conv_lstm, (3, 4, 2)
    ),
}
FUSED = [
    "rnn-tanh",
    "rnn-relu",
    "lstm",
    "lstm-forget",
    "lstmp",
    "gru-after",
    "gru-before",
]


def put(a, dtype):
    """Return a JAX array of another dtype, for which nothing is compiled."""
    return jax.device_put(np.asarray(a).astype(jnp.dtype(dtype)))


def draw(rng, tree, dtype="float64"):
    """Draw normal values in the shapes of `tree`, so that no parameter is 0 or 1."""
    return jax.tree.map(lambda a: put(rng.standard_normal(a.shape) * 0.6, dtype), tree)


def shapes_of(cell, dtype="float64"):
    """Return the shapes of parameters and initial states, without making them."""
    key, dtype = jax.eval_shape(lambda: jax.random.key(0)), jnp.dtype(dtype)
    params = jax.eval_shape(lambda key: cell.init(key, dtype), key)
    return params, jax.eval_shape(lambda: cell.initial_state(BATCH, dtype))


def make(case: CellCase, dtype="float64", lengths=None, seed=0):
    """Return parameters, inputs `[B, T, ...]` with NaN in the padding, and states."""
    rng = np.random.default_rng(seed)
    params, states = shapes_of(case.cell, dtype)
    params = draw(rng, params, dtype)
    x = rng.standard_normal((BATCH, STEPS, *case.shape))
    for b, n in enumerate(lengths or ()):
        x[b, n:] = np.nan
    states = draw(rng, states, dtype)
    return params, put(x, dtype), states


def numpy_tree(tree):
    return jax.tree.map(lambda a: np.asarray(a, np.float64), tree)


def oracle(case: CellCase, params, x, states, **options):
    """Run the numpy step and return its `net64.Result`."""
    step = lambda p, s, x, t: case.oracle(p, s, x)  # noqa: E731
    args = numpy_tree((x, states))
    return net64.run(step, *args, params=numpy_tree(params), **options)


def net(cell, params, x, states, lengths=None, **options):
    lengths = None if lengths is None else put(lengths, "int32")
    return ost.recurrent_net(
        cell, x, states, params=params, seq_lengths=lengths, **options
    )


def compiled_net(cell, params, x, states, lengths=None, **options):
    """Run `net`, compiled as a whole, which is faster than operation by operation."""
    run = fast_jit(lambda *args: net(cell, *args, lengths, **options))
    return run(params, x, states)


def weigh(rng, result):
    """Return a loss, in numpy or JAX: a random weighted sum of outputs and states."""
    parts = [result.outputs, result.states]
    factors = jax.tree.map(lambda a: rng.standard_normal(a.shape), parts)

    def loss(result):
        terms = jax.tree.map(
            lambda f, a: (f * a).sum(), factors, [result.outputs, result.states]
        )
        return sum(jax.tree.leaves(terms))

    return loss


def assert_gradients(loss, reference, args, rng, tol=1e-7):
    """Compare value and gradients of `loss(*args)` with differences of `reference`.

    `reference` uses only numpy. NaN in the arguments stays NaN.
    """
    value, grads = fast_jit(jax.value_and_grad(loss, tuple(range(len(args)))))(*args)
    base, grads = numpy_tree((args, grads))
    np.testing.assert_allclose(value, reference(*base), rtol=1e-10, atol=1e-10)
    finite = jax.tree.map(lambda g: bool(np.isfinite(g).all()), grads)
    assert all(jax.tree.leaves(finite)), finite
    for leaf in range(len(jax.tree.leaves(base))):
        leaves, tree = jax.tree.flatten(base)
        direction = rng.standard_normal(leaves[leaf].shape)
        h = 1e-5

        def shifted(by, leaf=leaf, leaves=leaves, tree=tree, direction=direction):
            new = list(leaves)
            new[leaf] = leaves[leaf] + by * direction
            return float(reference(*jax.tree.unflatten(tree, new)))

        want = (shifted(h) - shifted(-h)) / (2 * h)
        got = float((jax.tree.leaves(grads)[leaf] * direction).sum())
        np.testing.assert_allclose(got, want, rtol=tol, atol=tol, err_msg=f"{leaf}")


def count(primitive: str, jaxpr, inside: str | None = None) -> int:
    """Count equations of that name at any depth, or only inside equations `inside`."""
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == primitive and inside is None:
            total += 1
        within = None if eqn.primitive.name == inside else inside
        for inner in inner_jaxprs(eqn):
            total += count(primitive, inner, within)
    return total


def inner_jaxprs(eqn):
    """Return the jaxprs inside of an equation; those of a loop are what it runs."""
    if eqn.primitive in loops.IMPLEMENTATIONS:
        return [loops.implementation(eqn).jaxpr]
    return list(jax.extend.core.jaxprs_in_params(eqn.params))


def assert_trees_close(got, want, *, dtype=np.float64, terms=100):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_close(a, b, dtype=dtype, terms=terms)
