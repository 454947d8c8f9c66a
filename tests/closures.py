"""Pure functions, the library's and a plain scan, for the tests of transformations.

Both are functions of one `Primal`, and close over the other arrays of the case.
"""

import functools
from typing import Any, NamedTuple

import compile_options
import jax
import jax.numpy as jnp
import numpy as np
from cases import Case, make_inputs
from harness import dropout_masks, join, key_of, options_of, rounded, spec_of, split
from jaxprs import equations_in
from oracles import scan_jax
from oracles.loop64 import Spec

import ostinato as ost


class Primal(NamedTuple):
    """The differentiable arguments; c_0 is None if the mode has no cell state."""

    weights: Any
    x: Any
    h_0: Any
    c_0: Any


RAGGED = (2, 0, 4)  # unsorted; past the end, x is NaN and must not be read
CASES = [
    Case("lstm", Spec("lstm", 2, 3, 2, True, proj_size=2), 4, 3, RAGGED),
    Case("gru", Spec("gru", 2, 3, 2), 4, 3, RAGGED, resets=True, seed=6),
    Case("gru_before", Spec("gru", 3, 3, reset_after=False), 4, 3, RAGGED),
    Case("tanh", Spec("rnn_tanh", 2, 3, 2, True, bias="input"), 3, 2),
    Case("dropout", Spec("lstm", 2, 3, 2, dropout=0.5, cell_clip=0.6), 4, 3, RAGGED),
    Case("heads", Spec("gru", 2, 4, num_heads=2), 4, 3, RAGGED),
    Case("slstm", Spec("slstm", 2, 4, num_heads=2), 4, 3, RAGGED, resets=True),
]
BY_ID = {case.id: case for case in CASES}
# These tests compare derivatives, not generated code: compile quickly.
fast_jit = functools.partial(jax.jit, compiler_options=compile_options.QUICK)
PRIMITIVES = ("ostinato_rnn", "ostinato_rnn_tangent", "ostinato_rnn_bwd")


def compiled_together(function):
    """Return a function of a list of argument tuples to what each of them gives.

    This takes less time to compile than one by one, or every operation alone.
    """
    return fast_jit(lambda rows: [function(*row) for row in rows])


def without_jit(function):
    """Return a function that runs over a mesh operation by operation."""
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    no_axis = jax.sharding.PartitionSpec()
    return jax.shard_map(function, mesh=mesh, in_specs=no_axis, out_specs=no_axis)


def one_by_one(function, *columns):
    """Return what the function gives for each element; all are compiled together."""
    return compiled_together(function)(list(zip(*columns, strict=True)))


class CountedJit:
    """A function under `fast_jit` that counts in `traces` how often JAX traces it.

    The size of JAX's own cache says less: it shrinks when a long run has filled it.
    """

    def __init__(self, function):
        def counted(*args):
            self.traces += 1
            return function(*args)

        self.traces = 0
        self._run = fast_jit(counted)

    def __call__(self, *args):
        return self._run(*args)


def primal_of(case: Case) -> Primal:
    made = rounded(make_inputs(case), "float64")
    return Primal(made.weights, made.x, made.h_0, made.c_0)


def direction_of(case: Case, seed: int = 5) -> Primal:
    """Draw a tangent, with NaN in the padding of x, which must not be read either."""
    rng, primal = np.random.default_rng(seed), primal_of(case)
    drawn = jax.tree.map(lambda a: jnp.asarray(rng.standard_normal(a.shape)), primal)
    return drawn._replace(x=jnp.where(jnp.isnan(primal.x), jnp.nan, drawn.x))


def ours(case: Case, backend: str | None = None, **changes):
    """Return the library's function: Primal -> (y, h_n, c_n or None)."""
    made = rounded(make_inputs(case), "float64")
    options = options_of(case, made, backend) | changes
    spec = spec_of(case)

    def operator(p: Primal):
        out = ost.rnn(spec, p.weights, p.x, join(p.h_0, p.c_0), **options)
        return out.y, *split(out.state)

    return operator


def plain(case: Case):
    """Return the same function from one ``lax.scan`` per layer and direction."""
    made = rounded(make_inputs(case), "float64")
    masks = jnp.asarray(dropout_masks(case, key_of(case))) if case.keyed else None

    def operator(p: Primal):
        return tuple(
            scan_jax.run(
                case.spec, *p, seq_lengths=made.seq_lengths, resets=made.resets,
                dropout_masks=masks,
            )
        )  # fmt: skip

    return operator


def clean(tree):
    return jax.tree.map(np.nan_to_num, tree)


def weights_of(case: Case) -> list[np.ndarray]:
    """Return the weights of a loss, one for each output, with NaN in the padding."""
    made = make_inputs(case)
    return [w for w in (made.dy, made.dh_n, made.dc_n) if w is not None]


def weighed(operator, weights, curved=True):
    """Return a loss that, if `curved`, has second derivatives in every output."""

    def loss(p: Primal):
        outs = [o for o in operator(p) if o is not None]
        bent = [jnp.where(curved, jnp.sin(2.0 * o), o) for o in outs]
        return sum(jnp.sum(w * o) for w, o in zip(weights, bent, strict=True))

    return loss


def loss_of(case: Case, operator):
    """Return a scalar loss that has second derivatives in every output."""
    return weighed(operator, clean(weights_of(case)))


@functools.cache
def gradient_of(case: Case):
    """Return a function to value and gradient of the loss, compiled only once."""
    return fast_jit(jax.value_and_grad(loss_of(case, ours(case))))


def primitives_in(jaxpr) -> list[str]:
    """Return the names of all primitives, including those of inner jaxprs."""
    return [eqn.primitive.name for eqn in equations_in(jaxpr)]


def ours_in(fn, *args) -> list[str]:
    """Return our primitives and all loops in the jaxpr of ``fn(*args)``, in order."""
    names = primitives_in(jax.make_jaxpr(fn)(*args).jaxpr)
    return [n for n in names if n in (*PRIMITIVES, "scan", "while")]


class Variable:
    """An array in an object that JAX takes for one, such as an `nnx.Param`."""

    def __init__(self, array):
        self.array = array

    def __jax_array__(self):
        return self.array
