"""The native library's errors for calls whose arrays do not fit the network.

`cpu.py` makes none of these calls; handlers check before they read all the same.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ostinato as ost
from ostinato import _native
from ostinato._linear.call import Recurrence, numbers
from ostinato._rnn import cpu
from ostinato._rnn.call import Differentiable, Operands, Outputs, Residuals, RNNCall

pytestmark = pytest.mark.skipif(
    _native.status().library is None,
    reason=f"no native library: {_native.status().reason}",
)
SPEC = ost.RNNSpec("gru", 2, 3, 2)
CALL = RNNCall(SPEC)
OPERANDS = Operands(
    weights=jnp.zeros(SPEC.num_params, jnp.float32),
    x=jnp.zeros((2, 4, 2), jnp.float32),
    states=(jnp.zeros((2, 2, 3), jnp.float32),),
)
NO_ENSEMBLE = (False,) * 3


def forward(results=None, ensemble=NO_ENSEMBLE, **changes):
    if results is None:
        results = jax.tree.leaves(CALL.output_shapes(OPERANDS))
    run = jax.jit(lambda operands: cpu.forward(CALL, results, ensemble, operands))
    return jax.block_until_ready(run(OPERANDS._replace(**changes)))


def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def floats(*sizes):
    return jnp.zeros(sizes, jnp.float32)


def backward_without_gates():
    wrt = Differentiable(True, True, (True,))
    residuals = Residuals(floats(2, 4, 3), CALL.output_shapes(OPERANDS)[1])
    bar = Outputs(floats(2, 4, 3), (floats(2, 2, 3),))
    results = jax.tree.leaves(CALL.gradient_shapes(OPERANDS, wrt))

    def run(operands, bar):
        ensemble = (False,) * 6
        return cpu.backward(CALL, results, ensemble, operands, residuals, bar, wrt)

    return jax.jit(run)(OPERANDS, bar)


WRONG = {
    "weights": (
        lambda: forward(weights=floats(9)),
        f"weights has 9 elements, want {SPEC.num_params}",
    ),
    "state": (
        lambda: forward(states=(floats(2, 2, 2),)),
        r"operands\.states has 8 elements, want 12",
    ),
    "result": (
        lambda: forward([shape(2, 4, 4), shape(2, 2, 3)]),
        "y has 32 elements, want 24",
    ),
    "missing-result": (
        lambda: forward([shape(2, 4, 3)]),
        "the call has 1 results, want 2",
    ),
    "another-result": (
        lambda: forward([shape(2, 4, 3), shape(2, 2, 3), shape(1)]),
        "the call has 3 results, want 2",
    ),
    "another-argument": (
        lambda: forward(states=(floats(2, 2, 3),) * 2, ensemble=(False,) * 4),
        r"operands\.states has too many arrays",
    ),
    "ensemble": (
        lambda: forward(ensemble=(False,) * 4),
        "ensemble has 4 entries, want 3",
    ),
    "dtype": (
        lambda: forward(weights=jnp.zeros(SPEC.num_params, jnp.float16)),
        "weights must be float32, float64 or bfloat16",
    ),
    "reserve": (backward_without_gates, "no counts are left for outputs"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_call_that_does_not_add_up_is_an_error(name):
    run, message = WRONG[name]
    with pytest.raises(RuntimeError, match="ostinato_rnn_.*" + message):
        jax.block_until_ready(run())


def test_a_call_that_does_is_none():
    y, h_n = forward()
    assert not y.any() and not h_n.any()


def called(target, results, *operands, **attributes):
    """Run a handler and wait for what it makes."""
    run = jax.ffi.ffi_call(target, results)
    return jax.block_until_ready(jax.jit(lambda *x: run(*x, **attributes))(*operands))


X, STATE, PAIR = floats(2, 4, 3), floats(2, 3), (shape(2, 4, 3), shape(2, 3))


def linear(*operands, cut=None):
    sizes = numbers(Recurrence(), X, X)[:cut]
    return called("ostinato_linear_fwd", PAIR, *operands, numbers=sizes)


def linear_backward(*operands):
    sizes = numbers(Recurrence(), X, X)
    results = (shape(2, 4, 3), *PAIR)
    return called("ostinato_linear_bwd", results, *operands, numbers=sizes)


def filtered(b, a, x):
    result = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return called("ostinato_filter", result, b, a, x, reverse=False)


def advantages(masks=(0, 0, 0), dtype="float32"):
    operands = [jnp.zeros(s, dtype) for s in ((2, 4), (2, 4), (2,), (), ())]
    result = jax.ShapeDtypeStruct((2, 4), dtype)
    masks = np.array(masks, np.int64)
    return called(
        "ostinato_gae", (result,) * 2, *operands, time_major=False, masks=masks
    )


def steps(operand, program=(0,) * 6, result=1, **changes):
    options = dict(
        program=np.array(program, np.int64), constants=np.zeros(0), steps=np.int64(3),
        batch=np.int64(2), capacity=np.int64(-1), reverse=False, lengths=True,
        wide=False, elements=np.int64(1),
    )  # fmt: skip
    return called("ostinato_step", shape(result), operand, **(options | changes))


def joined(*blocks, size=6, matrix=None, target="ostinato_join", cut=None):
    """Run a plan of blocks of a matrix [3, 2]; by default, all of it as it lies."""
    matrix = floats(3, 2) if matrix is None else matrix
    plan = np.array(blocks or [(0, 0, 0, 3, 2, 0, 0)], np.int64).ravel()[:cut]
    operands = (matrix, shape(size)) if target == "ostinato_join" else None
    operand, result = operands or (floats(size), shape(*matrix.shape))
    return called(target, result, operand, blocks=plan, ensemble=False)


def test_calls_that_add_up_are_none():
    linear(X, X, STATE)
    linear_backward(X, X, STATE, X, STATE)
    filtered(floats(1, 3), floats(1, 2), floats(2, 5))
    advantages()
    steps(jnp.zeros(2, jnp.int32))
    steps(jnp.zeros(2, jnp.int32), result=0)  # of no members
    for target in ("ostinato_join", "ostinato_split"):
        joined(target=target)
        joined((0, 0, 3, 3, 2, 0, 1), target=target)


half = lambda x: x.astype(jnp.float16)  # noqa: E731


OTHERS = {
    "linear-argument": (
        lambda: linear(X, X, STATE, STATE),
        "the call has 4 arguments, want 3",
    ),
    "linear-missing": (lambda: linear(X, X), "the call has 2 arguments, want 3"),
    "linear-gradient": (
        lambda: linear_backward(X, X, STATE, X),
        "the call has 4 arguments, want 5",
    ),
    "linear-dtypes": (
        lambda: linear(X, X, STATE.astype(jnp.float64)),
        "dtypes differ",
    ),
    "linear-numbers": (lambda: linear(X, X, STATE, cut=-1), "`numbers` has another"),
    "linear-half": (
        lambda: linear(*map(half, (X, X, STATE))),
        "no kernels for this dtype",
    ),
    "filter-orders": (
        lambda: filtered(floats(1, 3), floats(1, 3), floats(2, 5)),
        "orders differ",
    ),
    "filter-order": (
        lambda: filtered(floats(1, 10), floats(1, 9), floats(2, 5)),
        "no kernel for a filter of this order",
    ),
    "filter-half": (
        lambda: filtered(*map(half, (floats(1, 3), floats(1, 2), floats(2, 5)))),
        "must be float32 or float64",
    ),
    "advantages-masks": (lambda: advantages((0, 0)), "`masks` has another size"),
    "advantages-half": (lambda: advantages(dtype="float16"), "float32 or float64"),
    "step-lengths": (
        lambda: steps(jnp.zeros(3, jnp.int32)),
        r"lengths must be int32 \[2\]",
    ),
    "step-long-lengths": (
        lambda: steps(jnp.zeros(2, jnp.int64)),
        r"lengths must be int32 \[2\]",
    ),
    "step-program": (
        lambda: steps(jnp.zeros(2, jnp.int32), (0,) * 7),
        "the step program is too long",
    ),
    "step-members": (
        lambda: steps(jnp.zeros(2, jnp.int32), elements=np.int64(2)),
        "results have 1 elements, want a multiple of 2",
    ),
    "step-no-results": (
        lambda: steps(jnp.zeros(2, jnp.int32), elements=np.int64(0)),
        "want a multiple of 0",
    ),
    "step-tokens": (
        lambda: steps(jnp.zeros(2, jnp.int32), lengths=False, capacity=np.int64(3)),
        "need lengths",
    ),
    "blocks-cut": (lambda: joined(cut=-1), "`blocks` is cut"),
    "blocks-negative": (
        lambda: joined((0, -1, 0, 3, 2, 0, 0)),
        "`blocks` has a negative number",
    ),
    "blocks-vector": (lambda: joined(size=5), "block 0 does not fit its arrays"),
    "blocks-place": (
        lambda: joined((0, 0, 0, 1, 2, 0, 0), (0, 0, 0, 3, 2, 1, 0)),
        "block 1 does not fit its arrays",
    ),
    "blocks-matrix": (
        lambda: joined((0, 1, 0, 3, 2, 0, 0)),
        "block 0 does not fit its arrays",
    ),
    "blocks-columns": (  # of which the last one ends past the matrix
        lambda: joined((0, 0, 4, 3, 2, 0, 1)),
        "block 0 does not fit its arrays",
    ),
    "blocks-dtype": (
        lambda: joined(matrix=jnp.zeros((3, 2), jnp.float64)),
        "block 0 does not fit its arrays",
    ),
    "blocks-split": (
        lambda: joined(target="ostinato_split", size=5),
        "block 0 does not fit its arrays",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_call_that_does_not_add_up_is_an_error(name):
    run, message = OTHERS[name]
    with pytest.raises(RuntimeError, match="ostinato_.*" + message):
        run()
