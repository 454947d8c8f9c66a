"""The trial of a kernel of the operator: known cases, compared with XLA.

It is a program of its own, `python -m ostinato._rnn.cuda_trial DEFINITION ...`, and
prints its verdict: what is wrong, or "".
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._cuda import check, device, kernels, plan
from . import api, cuda, init, layout
from .spec import RNNSpec

_STEPS, _INPUTS = 13, 5
# Of the largest value. Rounded factors make less than a tenth of it, as states here
# forget fast, and a wrong one makes more.
_LARGEST_ERROR = 0.05


def main(definitions: list[str]) -> str:
    """Try the kernel of one text; return what is wrong, or ""."""
    (taken,) = (
        taken
        for text, taken in kernels.RECURRENT_TEXTS.items()
        if list(text.definitions) == definitions
    )
    cases = [_case(taken, both) for both in (False, True)]
    wanted = [_compiled(*case, "xla")() for case in cases]
    runs = [_compiled(*case, "cuda") for case in cases]
    jax.block_until_ready(wanted)
    check.ready()
    for (spec, _), run, want in zip(cases, runs, wanted, strict=True):
        problem = _difference(run(), want)
        if problem:
            return f"{problem}, for {spec}"
    return ""


def _case(taken: plan.RnnPlan, both: bool) -> tuple[RNNSpec, dict[str, Any]]:
    """Return a network of two heads and directions, or one with resets; its arrays."""
    heads = 2 if both else 1
    hidden = heads * (taken.units - 3)  # not a multiple of anything
    spec = RNNSpec(
        taken.mode,  # pyright: ignore[reportArgumentType]
        _INPUTS,
        hidden,
        bidirectional=both,
        num_heads=heads,
    )
    batch = _batch(taken, spec)
    random = np.random.default_rng(7)
    lengths = random.integers(0, _STEPS + 1, batch)
    x = random.standard_normal((batch, _STEPS, _INPUTS))
    x[np.arange(_STEPS) >= lengths[:, None]] = np.nan
    made: dict[str, Any] = dict(
        weights=init.init_weights(jax.random.key(1), spec, dtype=taken.dtype),
        x=jnp.asarray(x, taken.dtype),
        seq_lengths=jnp.asarray(lengths, jnp.int32),
    )
    if spec.mode == "rnn_relu":
        made["weights"] = _away_from_0(spec, made["weights"])
    if not both:
        made["resets"] = jnp.asarray(random.random((batch, _STEPS)) < 0.2)
    return spec, made


def _away_from_0(spec: RNNSpec, weights: Any) -> Any:
    """Make units of a relu be 0 or near 1, as rounding must not change its slope."""
    sign = 1.0 - 2.0 * (np.arange(spec.hidden_size) % 2)
    layers = [
        jax.tree.map(lambda w: 0.1 * w, layer)._replace(b_ih=sign.astype(weights.dtype))
        for layer in layout.unpack_weights(weights, spec)
    ]
    return layout.pack_weights(layers, spec)


def _batch(taken: plan.RnnPlan, spec: RNNSpec) -> int:
    """Return a number of sequences that takes the layout."""
    gpu, reason = device.status()
    assert gpu is not None, reason
    text = kernels.recurrent(taken)
    for batch in range(3, 16 * gpu.processors, 6):
        found = cuda.plan_of(spec, np.dtype(taken.dtype), batch, gpu)
        assert isinstance(found, plan.RnnPlan), found
        if kernels.recurrent(found) == text:
            return batch
    raise AssertionError(f"no batch takes {taken}")


def _compiled(
    spec: RNNSpec, made: dict[str, Any], backend: Any
) -> Callable[[], list[Any]]:
    """Compile values and gradients, which read what the kernel saved.

    Beside these, whole sequences run without gradients, so that nothing is saved.
    """

    @jax.jit
    def both(made: dict[str, Any]) -> Any:
        def run(weights: Any, x: Any) -> Any:
            given = made | dict(weights=weights, x=x)
            return api.rnn(spec, **given, backend=backend)

        def member(weights: Any) -> Any:
            out, pull_back = jax.vjp(run, weights, made["x"])
            whole = jnp.nan_to_num(made["x"])
            alone = api.rnn(spec, weights, whole, backend=backend)
            return out, pull_back(out), alone

        weights = made["weights"]
        return jax.vmap(member)(jnp.stack([weights, weights / 2]))

    program = both.lower(made).compile()
    return lambda: jax.tree.leaves(program(made))


def _difference(got: list[Any], want: list[Any]) -> str:
    """Say which result differs by more than rounding; "" if none does."""
    for i, (x, y) in enumerate(zip(got, want, strict=True)):
        x, y = (np.asarray(each).astype(np.float64) for each in (x, y))
        error = float(np.max(np.abs(x - y))) / max(1e-3, float(np.max(np.abs(y))))
        if not error <= _LARGEST_ERROR:  # also where it is NaN
            return f"a wrong result: array {i} differs by {error:.1e} of its size"
    return ""


if __name__ == "__main__":
    check.report(main, sys.argv[1:])
