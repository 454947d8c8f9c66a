"""Which steps `lax.scan` runs as quickly: the rule, and what it was measured by.

XLA compiles a loop over very few numbers into code that keeps them in registers. Time
of `lax.scan` over that of the native loop, for 100 steps in float32 on two threads of a
processor with AVX-512 (`work` is what `work_of` counts):

| step | N, H | work | forward | training |
|---|---|---|---|---|
| `0.9 h + 0.1 tanh(x W + h U)` | 1, 2 | 22 | 0.56 | 0.35 |
| | 1, 4 | 60 | 0.49 | 0.33 |
| | 1, 8 | 184 | 0.98 | 2.7 |
| | 8, 4 | 480 | 3.9 | 4.1 |
| `tanh(x W + h U)` | 4, 2 | 64 | 0.29 | 0.27 |
| | 2, 4 | 96 | 0.42 | 5.4 |
| | 1, 6 | 96 | 1.1 | 2.2 |
| LSTM | 1, 4 | 300 | 2.0 | 3.2 |
| `a h + (1 - a) x`, without a product | 1, 8 | 24 | 0.62 | 0.48 |
| | 1, 64 | 192 | 1.2 | 0.97 |
| | 8, 8 | 192 | 0.95 | 0.78 |
| | 8, 64 | 1536 | 3.4 | 1.1 |

So a step runs as `lax.scan` up to a work of 64, or of 256 if it has no product.

A step that the native loop does not run gains in XLA's loop by the gradients of its
matrices, and loses by what is computed again and, in branches that are written out,
by work that is left out otherwise. Time of `lax.scan` over that of XLA's loop, H = 64:

| step | N = 1, forward | training | N = 8, forward | training |
|---|---|---|---|---|
| with a convolution | | | 1.0 | 1.9 |
| with `sort` | 0.9 | 0.96 | 1.0 | 1.0 |
| with `cumlogsumexp` | 0.94 | 0.88 | 1.0 | 0.86 |
| with a `cond`, written out | 0.51 | 3.1 | 0.6 | 1.2 |

So it runs there if it has a product with an invariant matrix and, but for such
products, only operations that programs have or that take each element by itself.
Otherwise it runs as `lax.scan`.

The native loop begins with memory and an order of its own for some sequences at a
time. `dense` is `tanh(x W + h U)`, `work` that of one sequence at T steps:

| step | N, H | T | work | forward | training |
|---|---|---|---|---|---|
| dense | 20000, 64 | 1 | 8500 | 0.71 | 0.78 |
| | 256, 64 | 1 | 8500 | 0.70 | 0.86 |
| | 20000, 64 | 2 | 17000 | 1.0 | 1.6 |
| | 20000, 8 | 1 | 160 | 0.38 | 0.24 |
| | 20000, 8 | 4 | 640 | 0.80 | 0.88 |
| | 20000, 8 | 8 | 1300 | 1.0 | 0.97 |
| | 2000, 16 | 16 | 9000 | 1.4 | 1.7 |
| `a h + (1 - a) tanh(x)` | 2000, 64 | 1 | 250 | 0.50 | 0.37 |
| | 2000, 64 | 4 | 1000 | 0.88 | 1.4 |

So 256 sequences and more run as `lax.scan` if they have one step, or a work of up to
1024 each.

Where rows are short, XLA makes one kernel of a whole loop without gradients, and few
numbers stay in registers. The native loop begins each instruction anew, and runs those
that read or write a column row by row. 500 steps, forward by the number of elements of
a state, with and without lengths of the sequences:

| step | H | elements | forward | with lengths |
|---|---|---|---|---|
| GARCH | 1 | 4 | 0.43 | 0.91 |
| | 1 | 8 | 0.59 | 0.93 |
| | 1 | 64 | 1.0 | 0.75 |
| | 1 | 256 | 0.96 | 0.95 |
| Hodgkin and Huxley | 1 | 4 | 0.24 | 0.25 |
| | 1 | 16 | 0.94 | 1.1 |
| | 1 | 256 | 1.4 | 1.1 |
| three gates | 1 | 8 | 0.31 | 0.43 |
| | 1 | 16 | 0.37 | 1.5 |
| | 4 | 32 | 0.50 | 1.2 |
| | 4 | 64 | 0.83 | 1.0 |
| | 4 | 128 | 1.2 | 1.7 |
| | 7 | 56 | 0.78 | 1.3 |
| | 7 | 224 | 1.1 | 1.7 |
| level and trend, smoothed | 3 | 6 | 0.39 | 0.74 |
| | 3 | 24 | 0.92 | 1.1 |
| | 3 | 192 | 1.3 | 1.1 |

So with rows of fewer than 8 elements, XLA runs the passes without gradients if a state
has up to 64 elements, with lengths up to 8. The native loop trains faster, except steps
that put rows together of columns, those of up to three operations, and those that
multiply by matrices of one number: the native loop runs the latter row by row.

| step | N, H | forward | training | with lengths | training |
|---|---|---|---|---|---|
| GARCH | 64, 1 | 0.9 | 2.0 | 0.75 | 1.4 |
| | 2000, 1 | 1.4 | 1.8 | | |
| Hodgkin and Huxley | 64, 1 | 1.3 | 1.9 | 1.1 | 1.6 |
| | 2000, 1 | 2.0 | 2.4 | | |
| three gates | 64, 4 | 1.2 | 1.7 | 2.0 | 1.6 |
| | 2000, 4 | 1.3 | 1.9 | | |
| level and trend, smoothed | 64, 3 | 0.9 | 1.6 | | |
| | 2000, 3 | 1.3 | 1.0 | | |
| `a h + b tanh(x)` | 64, 3 | 0.9 | 1.4 | | |
| | 2000, 3 | 1.4 | 0.84 | | |
| `a h + b x` | 64, 3 | 0.8 | 0.76 | 0.90 | 0.74 |
| | 256, 3 | 0.9 | 0.57 | 0.93 | 0.52 |
| | 2000, 3 | 1.2 | 0.35 | | |
| van der Pol, of columns | 16, 2 | | | 0.75 | 1.0 |
| | 64, 2 | 0.13 | 0.41 | 0.62 | 0.80 |
| Lorenz, of columns | 8, 3 | | | 0.46 | 1.4 |
| | 64, 3 | 0.25 | 0.41 | 0.57 | 0.73 |
| product of quaternions, of columns | 16, 4 | | | 0.34 | 0.86 |
| | 64, 4 | 0.20 | 0.31 | 0.44 | 0.70 |
| `tanh(x W + h U)` | 64, 1 | 0.35 | 0.53 | 0.52 | 1.0 |
| | 2000, 1 | 0.28 | 0.17 | 0.36 | 0.32 |
| LSTM | 64, 1 | 0.88 | 0.94 | 0.83 | 1.3 |
| | 2000, 1 | 0.64 | 0.80 | 0.68 | 0.79 |
| level and trend, `[3]` parameters | 2000, 3 | 1.1 | 1.6 | 1.2 | 1.0 |

So the first run as `lax.scan`, with lengths of their own from 16 sequences on, and the
others from 64 sequences on, those of one unit with lengths from 256 on.

Matrices of rows of up to 8 run as `lax.scan`, of any number of sequences. `hmm` is
`logsumexp(a[:, :, None] + A, 1) + x`, 100 steps of N:

| step | H | N = 4, forward | training | N = 16, forward | training |
|---|---|---|---|---|---|
| hmm | 4 | 0.62 | 0.63 | 0.62 | 0.45 |
| | 8 | 0.75 | 0.62 | 0.88 | 0.63 |
| | 12 | 0.88 | 1.2 | 1.2 | 1.9 |
| | 32 | 1.7 | 2.3 | 1.5 | 2.1 |
| with `max` | 8 | 0.95 | 0.35 | 0.90 | 0.36 |
| | 16 | 0.98 | 0.74 | 1.1 | 2.2 |
| covariance of a filter, `F P F'` | 2 | 0.12 | 1.1 | 0.37 | 0.64 |
| | 3 | 0.31 | 1.0 | 0.48 | 0.69 |
| | 4 | 4.6 | 6.2 | 8.0 | 8.0 |
| | 8 | 1.1 | 2.4 | 0.77 | 0.70 |

XLA writes a part of an array that is a state into its place. So does the native loop
where the part is an entry along one axis; it writes the array anew at each step where
the part is another one, and so does `lax.scan` where sequences have lengths of their
own. The table is for a dense step that writes a row of an array `[N, M, H]` by masks,
as the native loop did for all parts; `ratio` is that of the elements of the array to
the other work:

| place of the row | N, H, M | ratio | forward | training |
|---|---|---|---|---|
| of all sequences | 8, 32, 16 | 0.4 | 1.1 | 1.1 |
| , and `x` by a matrix | 8, 32, 64 | 0.9 | 0.59 | 0.83 |
| | 8, 32, 64 | 1.7 | 0.51 | 0.8 |
| | 4, 64, 256 | 4 | 0.36 | 0.83 |
| | 16, 64, 500 | 8 | 0.13 | 0.40 |
| of each (XLA's loop), and `x` by a matrix | 8, 32, 16 | 0.2 | 1.0 | 0.8 |
| | 8, 32, 64 | 0.9 | 1.0 | 0.68 |
| of each (XLA's loop) | 4, 64, 256 | 3 | 1.2 | 0.3 |
| , with lengths | 4, 64, 256 | 3 | 1.1 | 0.45 |

So a step that writes into arrays of more elements than two thirds of its other work,
and would copy them, runs as `lax.scan`, with lengths only if the native loop does not
run it. Where the native loop writes single entries, it is quicker at all sizes:
`benchmarks.extremes` has these.
"""

from __future__ import annotations

from typing import Any

from jax.export import is_symbolic_dim
from jax.extend.core import Jaxpr, JaxprEqn, jaxprs_in_params

from .._compat import ELEMENTWISE
from .jaxprs import known_product, type_of, variables
from .programs.lower import PRIMITIVES
from .split import PRODUCTS, Step

_WITH_PRODUCTS, _WITHOUT = 64, 256
_MANY_SEQUENCES, _FEW = 256, 1024
_SEVERAL_SEQUENCES, _SOME_SEQUENCES, _NARROW = 64, 16, 8
_OF_A_KERNEL, _OF_A_MASKED_KERNEL = 64, 8
_BRIEF_STEP = 3
"""Operations of a step which takes less time than reading and writing its values."""
_ENTERING = 2**18
"""Multiply-adds that take about as long as it takes XLA to enter a branch."""
_WRITTEN_OUT = 3
"""Terms of a sum that XLA writes out in products of several pairs of matrices."""
_LARGE = 2**15
"""Elements of a matrix: [256, 256] is multiplied before the loop, [64, 256] is not."""
_JOINS = frozenset({"concatenate", "stack"})
CUSTOM = frozenset({"custom_jvp_call", "custom_vjp_call"})


def is_small(jaxpr: Jaxpr) -> bool:
    """Return whether `lax.scan` is as quick for a step as the native loop."""
    return work_of(jaxpr) <= (_WITH_PRODUCTS if _has_products(jaxpr) else _WITHOUT)


def is_brief(jaxpr: Jaxpr, batch: Any, steps: Any) -> bool:
    """Return whether many sequences end before the native loop has begun well."""
    if is_symbolic_dim(batch) or is_symbolic_dim(steps) or batch < _MANY_SEQUENCES:
        return False
    return steps == 1 or steps * work_of(jaxpr) <= _FEW * batch


def is_narrow(jaxpr: Jaxpr, batch: Any, has_lengths: bool) -> bool:
    """Return whether rows fill no vector of a processor, and are many."""
    if is_symbolic_dim(batch) or _has_products(jaxpr):
        return False
    made = _shapes_made(jaxpr)
    most = max(map(known_product, made), default=0)
    if not made or most < _NARROW * batch:
        if any(e.primitive.name in _JOINS for e in equations_of(jaxpr)):
            return not has_lengths or batch >= _SOME_SEQUENCES
        several = batch >= _SEVERAL_SEQUENCES
        if several and work_of(jaxpr) <= _BRIEF_STEP * most:
            return True
        if several and any(e.primitive.name in PRODUCTS for e in equations_of(jaxpr)):
            return not has_lengths or batch >= _MANY_SEQUENCES
    if has_lengths:
        return False
    row = max((known_product(s[-1:]) for s in made if len(s) > 1), default=0)
    return 0 < row <= _NARROW and most > row * batch


def is_one_kernel(step: Step, has_lengths: bool) -> bool:
    """Return whether XLA makes one quick kernel of a loop without gradients."""
    *_, states = step.parts([type_of(v).shape for v in step.jaxpr.invars])
    batch = next((shape[0] for shape in states if shape), 0)
    if is_symbolic_dim(batch) or _has_products(step.jaxpr):
        return False
    sizes = [known_product(shape) for shape in (*states, *_shapes_made(step.jaxpr))]
    most = _OF_A_MASKED_KERNEL if has_lengths else _OF_A_KERNEL
    return max(sizes, default=0) <= min(most, _NARROW * batch - 1)


def _shapes_made(jaxpr: Jaxpr) -> list[tuple[Any, ...]]:
    """Return the shapes of results, but for arrays of which a part is written."""
    equations = [eqn for eqn in equations_of(jaxpr) if not _writes_part(eqn)]
    return [type_of(v).shape for eqn in equations for v in eqn.outvars]


def writes_in_place(jaxpr: Jaxpr) -> bool:
    """Return whether arrays of which a step writes a part are most of its work."""
    written = sum(
        known_product(type_of(eqn.outvars[0]).shape)
        for eqn in equations_of(jaxpr)
        if _writes_part(eqn)
    )
    return 5 * written > 2 * work_of(jaxpr)


def _writes_part(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name.startswith(("dynamic_update_slice", "scatter"))


def dominating(jaxpr: Jaxpr) -> JaxprEqn | None:
    """Return an operation beside which products of a step weigh little, or None."""
    quick = PRIMITIVES | PRODUCTS | ELEMENTWISE
    equations = equations_of(jaxpr)
    return next((e for e in equations if e.primitive.name not in quick), None)


def pays_hoisting(step: Step) -> bool:
    """Return whether products of inputs are quicker before a loop without gradients.

    They are for one sequence and a large matrix, which a product of all steps reads
    once; else XLA multiplies as fast in the loop and need not store the results.
    """
    products = [
        e for e in step.hoisted.products.jaxpr.eqns if e.primitive.name in PRODUCTS
    ]
    return any(
        e.outvars[0].aval.shape[:1] == (1,)
        and max(known_product(type_of(v).shape) for v in variables(e)) >= _LARGE
        for e in products
    )


def leaves_out_much(branches: list[Jaxpr]) -> bool:
    """Return whether one of several branches takes far less time than all of them."""
    work = list(map(work_of, branches))
    return sum(work) > 2 * min(work) + _ENTERING


def work_of(jaxpr: Jaxpr) -> int:
    """Return the number of elements of all results, and of multiply-adds."""
    total = 0
    for eqn in equations_of(jaxpr):
        sizes = [known_product(type_of(v).shape) for v in eqn.outvars]
        total += sum(sizes)
        if eqn.primitive.name == "dot_general":
            total += sizes[0] * _terms_of(eqn)
    return total


def _has_products(jaxpr: Jaxpr) -> bool:
    """Return whether a step has products with sums of several terms.

    Those of the matrices of each sequence have few if XLA writes them out.
    """
    return any(
        eqn.primitive.name == "conv_general_dilated"
        or (
            eqn.primitive.name == "dot_general"
            and _terms_of(eqn) > (_WRITTEN_OUT if _is_batched(eqn) else 1)
        )
        for eqn in equations_of(jaxpr)
    )


def _is_batched(product: JaxprEqn) -> bool:
    """Return whether a `dot_general` multiplies several pairs of matrices."""
    _, (batch, _) = product.params["dimension_numbers"]
    return bool(batch)


def _terms_of(product: JaxprEqn) -> int:
    """Return the number of terms in each sum of a `dot_general`."""
    (over, _), _ = product.params["dimension_numbers"]
    shape = type_of(product.invars[0]).shape
    return known_product([shape[i] for i in over])


def equations_of(jaxpr: Jaxpr) -> list[JaxprEqn]:
    """Return the equations of a jaxpr, without those inside of custom derivatives."""
    found = []
    for eqn in jaxpr.eqns:
        found.append(eqn)
        if eqn.primitive.name not in CUSTOM:
            for inner in jaxprs_in_params(eqn.params):
                found += equations_of(inner)
    return found
