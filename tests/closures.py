"""Functions of arrays alone, ours and a plain scan, for the tests of transformations.

Both are functions of one `Primal`; everything else of the case is closed over.
"""

import functools
from typing import Any, NamedTuple

import compile_options
import jax
import jax.numpy as jnp
import numpy as np
from cases import Case, make_inputs
from harness import join, keep_masks, key_of, options_of, rounded, spec_of, split
from oracles import scan_jax
from oracles.loop64 import Spec

import ostinato as ost


class Primal(NamedTuple):
    """What is differentiated; c_0 is None where the mode has no cells."""

    weights: Any
    x: Any
    h_0: Any
    c_0: Any


RAGGED = (2, 0, 4)  # unsorted; no x is read past the end, where NaN stands
CASES = [
    Case("lstm", Spec("lstm", 2, 3, 2, True, proj_size=2), 4, 3, RAGGED),
    Case("gru", Spec("gru", 2, 3, 2), 4, 3, RAGGED, resets=True, seed=6),
    Case("gru_before", Spec("gru", 3, 3, reset_after=False), 4, 3, RAGGED),
    Case("tanh", Spec("rnn_tanh", 2, 3, 2, True, bias="input"), 3, 2),
    Case("dropout", Spec("lstm", 2, 3, 2, dropout=0.5, cell_clip=0.6), 4, 3, RAGGED),
]
BY_ID = {case.id: case for case in CASES}
# These tests compare derivatives, not generated code: compile quickly.
fast_jit = functools.partial(jax.jit, compiler_options=compile_options.QUICK)
PRIMITIVES = ("ostinato_rnn", "ostinato_rnn_tangent", "ostinato_rnn_bwd")


def primal_of(case: Case) -> Primal:
    made = rounded(make_inputs(case), "float64")
    return Primal(made.weights, made.x, made.h_0, made.c_0)


def direction_of(case: Case, seed: int = 5) -> Primal:
    """A random tangent; NaN in the padding of x, where it may not be read either."""
    rng, primal = np.random.default_rng(seed), primal_of(case)
    drawn = jax.tree.map(lambda a: jnp.asarray(rng.standard_normal(a.shape)), primal)
    return drawn._replace(x=jnp.where(jnp.isnan(primal.x), jnp.nan, drawn.x))


def ours(case: Case, backend: str | None = None, **changes):
    """Primal -> (y, h_n, c_n or None)."""
    made = rounded(make_inputs(case), "float64")
    options = options_of(case, made, backend) | changes
    spec = spec_of(case)

    def operator(p: Primal):
        out = ost.rnn(spec, p.weights, p.x, join(p.h_0, p.c_0), **options)
        return out.y, *split(out.state)

    return operator


def plain(case: Case):
    """The same from one ``lax.scan`` per layer and direction."""
    made = rounded(make_inputs(case), "float64")
    keep = jnp.asarray(keep_masks(case, key_of(case))) if case.keyed else None

    def operator(p: Primal):
        return tuple(
            scan_jax.run(
                case.spec, *p, seq_lengths=made.seq_lengths, resets=made.resets,
                keep=keep,
            )
        )  # fmt: skip

    return operator


def loss_of(case: Case, operator):
    """A scalar that bends in every output, so that second derivatives see it."""
    made = rounded(make_inputs(case), "float64")
    dy = jnp.nan_to_num(made.dy)
    weights = [dy, made.dh_n] + ([made.dc_n] if case.lstm else [])

    def loss(p: Primal):
        outs = [o for o in operator(p) if o is not None]
        terms = [
            jnp.sum(w * jnp.sin(2.0 * o)) for w, o in zip(weights, outs, strict=True)
        ]
        return sum(terms[1:], terms[0])

    return loss


@functools.cache
def gradient_of(case: Case):
    """Value and gradient of the loss, compiled once: that takes longest."""
    return fast_jit(jax.value_and_grad(loss_of(case, ours(case))))


def primitives_in(jaxpr) -> list[str]:
    """Names of all primitives, those of inner jaxprs included."""
    names = []
    for eqn in jaxpr.eqns:
        names.append(eqn.primitive.name)
        for value in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda v: hasattr(v, "eqns")
        ):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                names += primitives_in(inner)
    return names


def ours_in(fn, *args) -> list[str]:
    """Our primitives in the jaxpr of ``fn(*args)``, in order, and any loop."""
    names = primitives_in(jax.make_jaxpr(fn)(*args).jaxpr)
    return [n for n in names if n in (*PRIMITIVES, "scan", "while")]
