"""Calls of `linear_recurrence`, their arrays and what numpy makes of them."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from closures import fast_jit
from oracles import linear64
from tolerance import assert_close

import ostinato as ost

LENGTHS = (4, 0, 7, 1, 6)
# Shapes of one step's factors and inputs; factors that change have [B, T] in front.
KINDS = {
    "each": ((3, 5), (3, 5)),
    "one": ((), ()),
    "shared": ((3, 1), (3, 11)),
    "all": ((1,), (19,)),
    "matrix": ((3, 2, 2), (3, 2)),
}


@dataclass(frozen=True)
class Case:
    """One call; `constant` factors are the same at every step."""

    kind: str
    constant: bool = False
    dtype: str = "float64"
    reverse: bool = False
    ragged: bool = False
    resets: bool = False
    time_major: bool = False
    steps: int = 7
    batch: int = len(LENGTHS)
    shapes: tuple | None = None  # instead of those of the kind

    @property
    def id(self):
        words = [self.kind, self.dtype]
        flags = ("constant", "reverse", "ragged", "resets", "time_major")
        words += [f for f in flags if getattr(self, f)]
        words += [f"T{self.steps}"] * (self.steps != 7) + [f"B{self.batch}"] * (
            self.batch != 5
        )
        return "-".join(words) + ("-wide" if self.shapes else "")

    @property
    def matrices(self):
        return self.kind == "matrix"


EVERYTHING = dict(reverse=True, ragged=True, resets=True)
CASES = [
    Case(kind, constant, dtype, **options)
    for kind in KINDS
    for constant in (False, True)
    for dtype, options in (
        ("float64", {}),
        ("float64", dict(ragged=True, resets=True, time_major=True)),
        ("complex128", EVERYTHING),
    )
]
CASES += [
    Case("each", dtype=dtype, ragged=True, resets=True)
    for dtype in ("float32", "complex64", "bfloat16")
]
CASES += [
    Case("shared", dtype="bfloat16", constant=True),
    Case("shared", dtype="complex64", time_major=True),
    Case("matrix", dtype="bfloat16"),
    Case("each", dtype="bfloat16", constant=True, reverse=True),
    Case("each", reverse=True),
    Case("each", reverse=True, ragged=True, time_major=True),
]
SIZES = [  # wider than the registers of a kernel, and odd
    Case("each", dtype="float32", shapes=((389,), (389,)), steps=3),
    Case("each", dtype="complex64", shapes=((197,), (197,)), steps=3, resets=True),
    Case("each", constant=True, dtype="float32", shapes=((389,), (389,)), steps=3),
    Case("shared", dtype="float32", shapes=((2, 1), (2, 277)), steps=3),
    Case("each", steps=0),
    Case("shared", steps=0, constant=True),
    Case("each", steps=1, time_major=True),
    Case("each", batch=0),
    Case("matrix", batch=0, constant=True),
    Case("each", constant=True, batch=1, steps=600, shapes=((70,), (70,))),
    # So many sequences that an item of work has several of them.
    Case("each", dtype="float32", batch=300, steps=40, shapes=((2,), (2,))),
]


@dataclass(frozen=True)
class Arrays:
    a: np.ndarray
    b: np.ndarray
    h_0: np.ndarray
    dh: np.ndarray
    dh_n: np.ndarray
    lengths: np.ndarray
    resets: np.ndarray


def draw(case: Case) -> Arrays:
    """Return arrays `[B, T, ...]` in the widest dtype, rounded to that of the case."""
    rng = np.random.default_rng(7)
    complex_ = case.dtype.startswith("complex")

    def normal(*shape, scale=1.0):
        x = rng.standard_normal(shape) * scale
        if complex_:
            x = x + 1j * rng.standard_normal(shape) * scale
        wide = np.complex128 if complex_ else np.float64
        return x.astype(jnp.dtype(case.dtype)).astype(wide)

    factors, units = case.shapes or KINDS[case.kind]
    batch, steps = case.batch, case.steps
    lengths = np.full(batch, steps)
    if case.ragged:
        lengths = np.array(LENGTHS)
    resets = np.zeros((batch, steps), bool)
    if case.resets:
        resets = rng.random((batch, steps)) < 0.4
    lead = () if case.constant else (batch, steps)
    return Arrays(
        normal(*lead, *factors, scale=0.7 if case.kind != "matrix" else 0.5),
        normal(batch, steps, *units),
        normal(batch, *units),
        normal(batch, steps, *units),
        normal(batch, *units),
        lengths.astype(np.int32),
        resets,
    )


def spread(case: Case, arrays: Arrays) -> np.ndarray:
    """Return the factors of every unit at every step."""
    shape = arrays.b.shape + (2,) * case.matrices
    return np.broadcast_to(arrays.a, shape)


def oracle(case: Case, arrays: Arrays):
    """Return the results, and the gradients of a, b and h_0."""
    a = spread(case, arrays)
    given = (a, arrays.b, arrays.h_0, arrays.lengths, arrays.resets)
    options = dict(reverse=case.reverse, matrices=case.matrices)
    results = linear64.run(*given, **options)
    da, db, dh_0 = linear64.gradients(*given, arrays.dh, arrays.dh_n, **options)
    lost = da.ndim - arrays.a.ndim
    da = da.sum(tuple(range(lost)))
    for axis, size in enumerate(arrays.a.shape):
        if size == 1 and da.shape[axis] != 1:
            da = da.sum(axis, keepdims=True)
    return results, (da, db, dh_0)


def swapped(case: Case, x):
    return x.swapaxes(0, 1) if case.time_major else x


def given_arrays(case: Case, arrays: Arrays, hole=np.nan):
    """Return a, b, h_0, dh and dh_n for the operator, with holes in the padding."""
    past = np.arange(case.steps) >= arrays.lengths[:, None]

    def to(x, timed=True):
        if timed:
            x = x.copy()
            x[past] = hole
        x = x.astype(jnp.dtype(case.dtype))
        return jax.device_put(swapped(case, x) if timed else x)

    return (
        to(arrays.a, not case.constant),
        to(arrays.b),
        to(arrays.h_0, False),
        to(arrays.dh),
        to(arrays.dh_n, False),
    )


def options_of(case: Case, arrays: Arrays) -> dict:
    options: dict = dict(reverse=case.reverse, time_major=case.time_major)
    if case.ragged:
        options["seq_lengths"] = jax.device_put(arrays.lengths)
    if case.resets:
        options["resets"] = jax.device_put(swapped(case, arrays.resets))
    return options


def check(case: Case, backend=None, jit=fast_jit) -> None:
    """Compare results and gradients with numpy's."""
    arrays = draw(case)
    a, b, h_0, dh, dh_n = given_arrays(case, arrays)
    options = options_of(case, arrays) | dict(backend=backend)

    def both(a, b, h_0, dh, dh_n):
        run = lambda *args: tuple(ost.linear_recurrence(*args, **options))  # noqa: E731
        out, pull_back = jax.vjp(run, a, b, h_0)
        return out, pull_back((dh, dh_n))

    out, grads = jit(both)(a, b, h_0, dh, dh_n)
    want, want_grads = oracle(case, arrays)
    terms = max(1, case.steps) ** 2
    compare = dict(dtype=jnp.dtype(case.dtype), terms=terms)
    assert_close(swapped(case, out[0]), want.h, what="h", **compare)
    assert_close(out[1], want.h_n, what="h_n", **compare)
    da, db, dh_0 = grads
    da = da if case.constant else swapped(case, da)
    terms *= max(1, case.batch) * 32
    if case.dtype == "bfloat16":  # gradients read rounded states
        compare["terms"] = 2**6
    for name, got, exact in zip(
        ("da", "db", "dh_0"), (da, swapped(case, db), dh_0), want_grads, strict=True
    ):
        assert_close(got, exact, what=name, **compare)


def with_dtype(case: Case, dtype: str) -> Case:
    return replace(case, dtype=dtype)
