"""Faulty step programs: the check finds them, and XLA runs the step instead.

All other tests make programs too; a warning that one of them is faulty fails the test.
"""

import jax.numpy as jnp
import numpy as np
import pytest
from test_step_hunt import T, assert_same, both, draw, gradient_of

import ostinato as ost
from ostinato._step.programs import lower
from ostinato._step.programs.check import check
from ostinato._step.programs.program import (
    PRODUCT,
    Buffer,
    Factor,
    Gradient,
    Instruction,
    Local,
    Phase,
    Place,
    View,
    Weight,
)
from ostinato._step.programs.values import Unsupported

X = Buffer(Place.INPUT, True, 4, 0)
TABLE = Buffer(Place.INVARIANT, False, 4, 1)
A, B = (Buffer(Place.LOCAL, True, 4) for _ in range(2))
SHARED = Buffer(Place.LOCAL, False, 4)
WIDE = Buffer(Place.LOCAL, True, 32)
CHUNK = Buffer(Place.CHUNK, True, 4)
Y = Buffer(Place.OUTPUT, True, 4, 0)
MATRIX = Weight(Buffer(Place.INVARIANT, False, 12, 2), 0, 4, 3, 3, False, False)
APART = {A: 0, B: 16, WIDE: 32, SHARED: 0}


def part(buffer, offset=0, strides=(0, 1)):
    return View(buffer, offset, strides)


def do(operation, result, *operands, inner=1, width=4, rows=True, **more):
    views = (v if isinstance(v, View) else part(v) for v in (result, *operands))
    result, *operands = views
    return Instruction(operation, rows, inner, width, result, tuple(operands), **more)


def run(*instructions, offsets=APART, gradients=()):
    check(instructions, gradients, [Y], offsets)


def multiply(result, **more):
    return do(PRODUCT, result, X, width=3, weight=MATRIX, **more)


def test_programs_that_write_what_they_read_pass():
    first = do("copy", A, X)
    run(first, do("tanh", Y, A))
    run(first, do("tanh", B, A), do("exp", Y, B), offsets={A: 0, B: 0})
    run(first, multiply(WIDE), do("add", Y, A, part(WIDE, strides=(0, 0))))
    halves = [do("copy", part(A, k), part(X, k), width=2) for k in (0, 2)]
    run(*halves, do("copy", Y, A))
    turned = do("copy", part(Y, 0, (2, 1)), part(X, 0, (2, 1)), inner=2, width=2)
    run(turned)
    run(do("copy", CHUNK, X), do("copy", Y, X), gradients=[gradient(CHUNK)])


def gradient(buffer):
    return Gradient(Factor(buffer, 0, 4), Factor(X, 0, 4), 1)


COPY, LAST = do("copy", A, X), do("copy", Y, X)
STATE = Buffer(Place.STATE, True, 4, 3, in_place=True)
NEXT = Buffer(Place.NEXT, True, 4, 1, STATE)
TURNED = do("tanh", part(B, 0, (2, 1)), part(A, 2, (-2, 1)), inner=2, width=2)
FAULTS = {
    "nobody writes": ([do("tanh", Y, A)], "reads a LOCAL before"),
    "later": ([do("tanh", Y, A), COPY], "reads a LOCAL before"),
    "a part": ([do("copy", A, X, width=3), do("tanh", Y, A)], "reads a LOCAL before"),
    "a part of a result": ([do("copy", Y, X, width=3)], "reads a OUTPUT before"),
    "no result": ([COPY], "reads a OUTPUT before"),
    "past the end": ([do("copy", Y, part(X, 1))], "past the end of a INPUT"),
    "before the start": ([do("copy", Y, part(X, -1))], "past the end of a INPUT"),
    "past the end of a result": ([do("copy", part(Y, 1), X)], "past the end"),
    "other strides": ([do("copy", Y, part(X, 0, (0, 2)), width=2)], "strides are"),
    "rows of a row": (
        [do("copy", Y, part(X, 0, (3, 1)), inner=2, width=2)],
        "past the end of a INPUT",
    ),
    "twice": (
        [do("copy", part(Y, 0, (0, 1)), part(X, 0, (2, 1)), inner=2, width=2), LAST],
        "writes elements twice",
    ),
    "an input": ([do("copy", X, TABLE), LAST], "writes a INPUT"),
    "all in place of each": (
        [do("copy", SHARED, X, rows=False), LAST],
        "what all sequences share needs",
    ),
    "each in place of all": ([do("copy", SHARED, TABLE), LAST], "or the reverse"),
    "whole vectors": (
        [do("copy", part(WIDE, 4), X), multiply(WIDE), do("copy", Y, part(WIDE, 4))],
        "reads a LOCAL before",
    ),
    "whole vectors past the end": ([multiply(part(WIDE, 17)), LAST], "past the end"),
    "a product of nothing": (
        [multiply(WIDE, continues=True), LAST],
        "reads a LOCAL before",
    ),
    "a step ahead": (
        [COPY, do("copy", Y, A, phase=Phase.AHEAD)],
        "needs what one step has",
    ),
    "ahead of its input": (
        [do("copy", CHUNK, X), do("copy", Y, CHUNK, phase=Phase.AHEAD)],
        "reads a CHUNK before",
    ),
    "a state that is gone": (
        [do("tanh", NEXT, X), do("copy", Y, STATE)],
        "the next one is written over",
    ),
    "an unwritten vector": (
        [do("product", WIDE, X, SHARED, width=3, weight=multiply(WIDE).weight), LAST],
        "reads a LOCAL before",
    ),
    "a row of nothing": (
        [do("set_row", A, X, part(X, 0, (0, 0))), LAST],
        "reads a LOCAL before",
    ),
    "more rows than one": (
        [
            do("copy", A, X, inner=1),
            do(
                "product", part(WIDE, 0, (16, 1)), part(A, 0, (4, 1)), inner=2,
                width=3, weight=multiply(WIDE).weight,
            ),
            LAST,
        ],
        "past the end of a LOCAL",
    ),
    "a state ahead": ([do("copy", CHUNK, STATE, phase=Phase.AHEAD), LAST], "one step"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_found(name):
    instructions, message = FAULTS[name]
    with pytest.warns(RuntimeWarning, match=message), pytest.raises(Unsupported):
        run(*instructions)


def test_places_that_are_shared_too_early_are_found():
    two = do("negate", B, X)
    last = do("add", Y, A, B)
    run(COPY, two, last)
    for place in (0, 8, 10):
        with pytest.warns(RuntimeWarning), pytest.raises(Unsupported, match="reads a"):
            run(COPY, two, last, offsets={A: 8, B: place})
    total = do("row_sum", part(B, 0, (0, 0)), A)
    with pytest.warns(RuntimeWarning), pytest.raises(Unsupported, match="over what"):
        run(COPY, total, LAST, offsets={A: 0, B: 0})


def test_factors_of_gradients_are_written():
    with pytest.warns(RuntimeWarning), pytest.raises(Unsupported, match="a CHUNK"):
        run(LAST, gradients=[gradient(CHUNK)])


def test_xla_runs_a_step_with_a_faulty_program(monkeypatch):
    def at_one_place(instructions):
        buffers = {v.buffer for i in instructions for v in (i.result, *i.operands)}
        local = [b for b in buffers if b.place is Place.LOCAL]
        return Local(dict.fromkeys(local, 0), (256, 256))

    def step(params, h, x, t):
        h = jnp.tanh(h + x) * jnp.exp(x) - jnp.cos(h)
        return h, jnp.sin(h) + jnp.tanh(x)

    def loop(backend):
        return ost.recurrent_net(step, x, jnp.ones((16, 40)), backend=backend)

    x = jnp.asarray(np.random.default_rng(0).normal(size=(16, 9, 40)))
    want = loop("xla")
    monkeypatch.setattr(lower, "allocate", at_one_place)
    with pytest.warns(RuntimeWarning, match="please report"):
        got = loop(None)
    np.testing.assert_array_equal(got.outputs, want.outputs)
    np.testing.assert_array_equal(got.states, want.states)
    with (
        pytest.warns(RuntimeWarning),
        pytest.raises(NotImplementedError, match="its program is at fault"),
    ):
        loop("cpu")


def test_an_element_is_not_written_over_where_another_one_is_read():
    offsets = APART | {A: 0, B: 0}
    run(COPY, do("tanh", B, A), do("copy", Y, B), offsets=offsets)
    with pytest.warns(RuntimeWarning), pytest.raises(Unsupported, match="over what"):
        run(COPY, TURNED, do("copy", Y, B), offsets=offsets)


def test_what_is_read_from_its_end_is_there():
    run(COPY, TURNED, do("copy", Y, B))


def test_both_factors_of_a_gradient_are_written():
    for factors in ((CHUNK, X), (X, CHUNK)):
        gradient = Gradient(*(Factor(buffer, 0, 4) for buffer in factors), 1)
        with pytest.warns(RuntimeWarning), pytest.raises(Unsupported, match="a CHUNK"):
            check([LAST], [gradient], [Y], APART)


def test_a_product_starts_from_no_vector_of_each_sequence():
    """The native loop reads the same one for all of them."""
    product = do("product", WIDE, X, A, width=3, weight=MATRIX)
    with pytest.warns(RuntimeWarning), pytest.raises(Unsupported, match="all sequ"):
        run(COPY, product, LAST)


@pytest.mark.parametrize(
    "total",
    [
        do("column_sum", A, part(X, 0, (4, 1)), inner=0),
        do("row_sum", part(A, 0, (1, 0)), part(X, 0, (0, 1)), inner=4, width=0),
    ],
    ids=["rows", "elements"],
)
def test_a_sum_over_nothing_writes_what_it_is(total):
    run(total, do("copy", Y, A))


def beside_what_all_share(p, h, x, t):
    """Write a row for each sequence while another one, and a shared one, are read."""
    kept, shared = jnp.sin(x), jnp.cos(p * t.astype(x.dtype))
    return (
        jnp.tanh(h)
        + jnp.maximum(kept, jnp.arctan2(x, jnp.broadcast_to(shared, x.shape))) * kept
    )


def minus_its_first_row(p, h, x, t):
    rows = jnp.sin(x + h).reshape(-1, 4, 8)
    return jnp.tanh(rows - rows[:, :1]).reshape(x.shape)


@pytest.mark.skipif(not ost.backends()["cpu"], reason="no native library")
@pytest.mark.parametrize("function", [beside_what_all_share, minus_its_first_row])
@pytest.mark.parametrize("batch", [1, 3])
def test_places_of_values_that_are_read_together_pass(function, batch):
    def step(p, h, x, t):
        h = function(p, h, x, t)
        return h, h

    given = draw(0, 32), draw(1, batch, T, 32), draw(2, batch, 32)
    assert_same(*both(gradient_of(step), *given))
