"""The native library's errors for calls whose arrays do not fit the network.

`cpu.py` makes none of these calls; handlers check before they read all the same.
"""

import jax
import jax.numpy as jnp
import pytest

import ostinato as ost
from ostinato import _native
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
