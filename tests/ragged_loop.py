"""The oracle of `ragged.vmap`: a Python loop that calls a program for each example.

Neither it nor the comparison knows how ragged batches are run. Results are compared as
lists with one array per example; gradients are those of a loss that weighs every place
of every result differently.
"""

import collections
import functools
import zlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closures import CountedJit, compiled_together
from jax import lax
from ragged_programs.program import Input, Program
from tolerance import assert_close

from ostinato import ragged

BATCH = 4
LENGTHS = {"n": (1, 2, 3, 5, 7), "m": (1, 2, 4)}
MAX_LENGTH = {"n": 7, "m": 5}  # no example of m is that long
DISTINCT = 2  # lengths of a program, besides 0: the loop is compiled for each
TERMS = 10_000  # of the longest accumulations, with room for what cancels
FREQUENCIES = (1.3, 0.7, 2.1, 0.9)  # of the loss, by axis

Lengths = dict[str, tuple[int, ...]]


class Run(NamedTuple):
    """What one batch gives.

    Attributes:
        results: for each leaf a list over the examples.
        gradients: by input; of a shared one an array, else a list over the examples.
    """

    results: list[list[np.ndarray]]
    gradients: dict[str, Any]


def length_sets(program: Program) -> list[Lengths]:
    """Return random lengths; if examples may be empty, some are, and once all are.

    No two sets have the same sum, so that tokens are left over in some.
    """
    rng = np.random.default_rng(zlib.crc32(program.name.encode()))
    allowed = [k for k in LENGTHS["n"] if k >= program.at_least]
    of_n = sorted(rng.choice(allowed, DISTINCT, replace=False))
    if program.shortest:
        of_n[0] = program.at_least
    of_m = sorted(rng.choice(LENGTHS["m"], DISTINCT, replace=False))
    # Pairs, so that two dims come in as few combinations as one.
    pairs = [(int(n), int(m)) for n, m in zip(of_n, rng.permutation(of_m), strict=True)]
    counts = [(0, 0, 1, 1), (0, 0, 0, 1)]
    drawn = [[pairs[k] for k in rng.permutation(which)] for which in counts]
    if program.at_least == 0:
        drawn[1] = [(0, 0), *drawn[1][1:3], (0, 0)]
        drawn.append([(0, 0)] * BATCH)
    by_dim = [dict(zip("nm", zip(*pairs, strict=True), strict=True)) for pairs in drawn]
    return [{dim: sizes[dim] for dim in program.dims} for sizes in by_dim]


def draw_inputs(program: Program, lengths: Lengths, seed: int) -> dict[str, Any]:
    """Return by name an array for a shared input, else one for each example."""
    rng = np.random.default_rng(seed)

    def one(wanted: Input, example: int) -> Any:
        tokens = () if wanted.dim is None else (lengths[wanted.dim][example],)
        shape = tokens + wanted.shape
        if wanted.key:
            return jax.random.key(seed + 17 * example)
        if wanted.below is None:
            return jnp.asarray(rng.standard_normal(shape))
        below = wanted.below
        if isinstance(below, str):
            below = max(1, lengths[below][example])
        return jnp.asarray(rng.integers(0, below, shape), jnp.int32)

    return {
        name: one(wanted, 0)
        if wanted.shared
        else [one(wanted, k) for k in range(BATCH)]
        for name, wanted in program.inputs.items()
    }


def split_inputs(program: Program, inputs: dict[str, Any]) -> tuple[dict, dict]:
    """Return the inputs that are differentiated, and the others."""
    varied = {n: a for n, a in inputs.items() if program.inputs[n].differentiable}
    return varied, {n: a for n, a in inputs.items() if n not in varied}


def differentiable(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating)


# ---------------------------------------------------------------------------- the loop


def loss_weights(example: Any, shape: tuple[int, ...]) -> Any:
    """Return weights of one example's result, all different, in all examples."""
    return _cos(shape, jnp.asarray(2.3 * example))


def _cos(shape: Any, angle: Any) -> Any:
    """Return the cosine of angles that grow along the axes of `shape` from `angle`."""
    here = np.full(shape, 0.4)
    for frequency, place in zip(FREQUENCIES, np.indices(shape, float), strict=False):
        here = here + frequency * place
    if angle.ndim > here.ndim:
        here = here[None]
    return jnp.cos(here + angle)


def one_example(program: Program):
    """Return `(varied, fixed, example) -> gradients, leaves` of the program."""
    fn = program.reference or program.fn

    def loss(varied, fixed, example):
        leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(fn(**varied, **fixed))]
        weighted = [
            jnp.sum(loss_weights(example, leaf.shape) * leaf)
            for leaf in leaves
            if differentiable(leaf)
        ]
        return sum(weighted, jnp.zeros(())), leaves

    if program.gradients:
        return jax.grad(loss, has_aux=True)
    return lambda *args: ({}, loss(*args)[1])


def run_each(program: Program, arguments: list[Any]) -> list[Any]:
    """Run the program for every element of `arguments`, and return what each gives.

    One of every length is compiled together.
    """
    one = one_example(program)
    alike = collections.defaultdict(list)
    for place, each in enumerate(arguments):
        alike[tuple(leaf.shape for leaf in jax.tree.leaves(each[:2]))].append(place)
    run = compiled_together(one)
    given: dict[int, Any] = {}
    for turn in range(max(map(len, alike.values()))):
        places = [those[min(turn, len(those) - 1)] for those in alike.values()]
        results = run([arguments[place] for place in places])
        given |= dict(zip(places, results, strict=True))
    return [given[place] for place in range(len(arguments))]


def loop(program: Program, batches: list[dict[str, Any]]) -> list[Run]:
    """Run the program for one example after the other of every batch."""
    shared = {n for n, a in program.inputs.items() if a.shared}
    arguments = []
    for inputs in batches:
        for example in range(BATCH):
            own = {n: a if n in shared else a[example] for n, a in inputs.items()}
            arguments.append((*split_inputs(program, own), float(example)))
    given = run_each(program, arguments)
    runs = []
    for first in range(0, len(given), BATCH):
        gradients, results = zip(*given[first : first + BATCH], strict=True)
        by_name = {
            n: sum(np.asarray(g[n]) for g in gradients)
            if n in shared
            else [np.asarray(g[n]) for g in gradients]
            for n in gradients[0]
        }
        leaves = zip(*results, strict=True)
        runs.append(Run([[np.asarray(x) for x in leaf] for leaf in leaves], by_name))
    return runs


@functools.cache
def all_expected(program: Program) -> list[tuple[dict[str, Any], Lengths, Run]]:
    """Return inputs, lengths and the loop's results for every length set."""
    sets = length_sets(program)
    batches = [draw_inputs(program, each, seed) for seed, each in enumerate(sets)]
    return list(zip(batches, sets, loop(program, batches), strict=True))


def expected(program: Program, number: int) -> tuple[dict[str, Any], Lengths, Run]:
    """Return inputs, lengths and the loop's results for one of the length sets."""
    return all_expected(program)[number]


# ----------------------------------------------------------------------- ragged.vmap


def ragged_inputs(program: Program, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the inputs of `ragged.vmap`, with NaN or nonsense in unused capacity.

    The capacity is that of the fullest batch, which has no unused capacity.
    """

    def one(wanted: Input, value: Any) -> Any:
        if wanted.shared:
            return value
        if wanted.dim is None:
            return jnp.stack(value)
        capacity = max(sum(sizes[wanted.dim]) for sizes in length_sets(program))
        tokens = np.concatenate(value)
        unused = 10**6 if wanted.below is not None else np.nan
        filled = np.full((capacity, *tokens.shape[1:]), unused, tokens.dtype)
        filled[: len(tokens)] = tokens
        lengths = jnp.asarray([len(v) for v in value], jnp.int32)
        return ragged.RaggedArray(
            jnp.asarray(filled),
            lengths,
            dim=wanted.dim,
            max_length=MAX_LENGTH[wanted.dim],
        )

    return {n: one(program.inputs[n], a) for n, a in inputs.items()}


def is_ragged(leaf: Any) -> bool:
    return isinstance(leaf, (ragged.RaggedArray, ragged.PaddedRagged))


def batch_weights(leaf: Any) -> Any:
    """Return `loss_weights` for all examples of a result, 0 outside of them."""
    if isinstance(leaf, ragged.RaggedArray):
        ends = jnp.cumsum(leaf.lengths)
        token = jnp.arange(leaf.capacity, dtype=jnp.int32)
        before = token[:, None] >= ends[None]  # examples before that of the token
        example = jnp.sum(before, 1, dtype=jnp.int32)
        start = before.astype(jnp.int32) @ leaf.lengths
        place = (token - start).astype(float)
        shape = list(leaf.data.shape)
        size, shape[leaf.axis] = shape[leaf.axis], 1
        own = [1] * len(shape)
        own[leaf.axis] = size
        angle = FREQUENCIES[leaf.axis] * place + 2.3 * example.astype(float)
        angle, there = angle.reshape(own), (token < ends[-1]).reshape(own)
        return jnp.where(there, _cos(shape, angle), 0)
    dense = not isinstance(leaf, ragged.PaddedRagged)
    data = leaf if dense else leaf.data
    example = np.arange(data.shape[0], dtype=float)
    angle = 2.3 * example.reshape(-1, *[1] * (data.ndim - 1))
    weights = _cos(data.shape[1:], angle)
    if not dense:
        for (axis, _), lengths in zip(leaf.dims, leaf.lengths, strict=True):
            shape = [1] * data.ndim
            shape[0], shape[axis + 1] = data.shape[0], data.shape[axis + 1]
            there = np.arange(shape[axis + 1], dtype=np.int32)[None] < lengths[:, None]
            weights = jnp.where(there.reshape(shape), weights, 0)
    return weights


def mapped(program: Program, options: Any):
    """Return `(varied, fixed) -> gradients, leaves` of `ragged.vmap` of the program."""
    names = list(program.inputs)
    axes = tuple(None if a.shared else 0 for a in program.inputs.values())
    run = ragged.vmap(
        lambda *args: program.fn(**dict(zip(names, args, strict=True))),
        in_axes=axes,
        min_length=program.at_least,
        **options,
    )

    def loss(data, varied, fixed):
        given = fixed | {
            n: a.with_data(data[n]) if is_ragged(a) else data[n]
            for n, a in varied.items()
        }
        out = run(*(given[n] for n in names))
        leaves = jax.tree.leaves(out, is_leaf=is_ragged)
        total = jnp.zeros(())
        for leaf in leaves:
            values = leaf.data if is_ragged(leaf) else leaf
            if differentiable(values):
                weights = batch_weights(leaf)
                values = jnp.where(weights == 0, 0, values)
                total = total + jnp.sum(weights * values)
        return total, leaves

    def both(varied, fixed):
        data = {n: a.data if is_ragged(a) else a for n, a in varied.items()}
        if not program.gradients:
            return {}, loss(data, varied, fixed)[1]
        return jax.grad(loss, has_aux=True)(data, varied, fixed)

    return both


def to_run(
    program: Program, inputs: dict[str, Any], gradients: Any, leaves: Any
) -> Run:
    """Return results and gradients as the loop does; check those of unused capacity."""
    results = []
    for leaf in leaves:
        examples = leaf.to_list() if is_ragged(leaf) else leaf
        results.append([np.asarray(x) for x in examples])
    by_name = {}
    for name, gradient in gradients.items():
        gradient, value = np.asarray(gradient), inputs[name]
        if is_ragged(value):
            ends = np.cumsum(value.lengths)
            *parts, unused = np.split(gradient, ends)
            np.testing.assert_array_equal(
                unused, 0, f"{name}: gradient of the unused capacity"
            )
            gradient = parts
        elif not program.inputs[name].shared:
            gradient = list(gradient)
        by_name[name] = gradient
    return Run(results, by_name)


# ---------------------------------------------------------------------------- padding


def other_tokens_in_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill padding and unused capacity with tokens of all examples, not copies of one.

    They are finite where the data are, as rules may expect, and give away a rule that
    reads them: the greatest of some tokens, say, is also that of the tokens and a copy.
    """
    tokens, unused = ragged.Context.padded_tokens, ragged.Context.fill_unused

    def padded_tokens(ctx, dim):
        kept = tokens(ctx, dim)
        position = jnp.arange(kept.shape[1], dtype=jnp.int32)[None]
        inside = position < ctx.lengths(dim)[:, None]
        tokens_there_are = ctx.segments(dim).last + 1
        other = lax.rem(kept + 2 * position + 1, jnp.full_like(kept, tokens_there_are))
        return jnp.where(inside, kept, other)

    def fill_unused(ctx, x, dim, axis):
        filled, segments = unused(ctx, x, dim, axis), ctx.segments(dim)
        token = jnp.arange(filled.shape[axis], dtype=jnp.int32)
        other = lax.rem(3 * token + 1, jnp.full_like(token, segments.last + 1))
        others = jnp.take(lax.stop_gradient(filled), other, axis, mode="clip")
        valid = segments.valid.reshape([-1 if a == axis else 1 for a in range(x.ndim)])
        return jnp.where(valid | ~segments.valid[0], filled, others)

    monkeypatch.setattr(ragged.Context, "padded_tokens", padded_tokens)
    monkeypatch.setattr(ragged.Context, "fill_unused", fill_unused)


# ------------------------------------------------------------------------- comparison


def check(program: Program, options: Any, numbers: Any = None) -> None:
    """Raise AssertionError unless `ragged.vmap` returns what the loop returns."""
    run = CountedJit(mapped(program, options))
    sets = length_sets(program)
    kinds = kinds_of_results(program)
    for number in range(len(sets)) if numbers is None else numbers:
        inputs, _, want = expected(program, number)
        batch = ragged_inputs(program, inputs)
        gradients, leaves = run(*split_inputs(program, batch))
        assert [type_of(leaf) for leaf in leaves] == kinds
        got = to_run(program, batch, gradients, leaves)
        compare(program, got, want, f"lengths {sets[number]}")
    assert run.traces == 1


def compare(program: Program, got: Run, want: Run, what: str) -> None:
    assert len(got.results) == len(want.results)
    for leaf, (ours, theirs) in enumerate(zip(got.results, want.results, strict=True)):
        assert len(ours) == len(theirs)
        for example, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            where = f"{what}: result {leaf} of example {example}"
            assert a.dtype == b.dtype, f"{where}: {a.dtype}, want {b.dtype}"
            close(program, a, b, where)
    assert got.gradients.keys() == want.gradients.keys()
    for name, theirs in want.gradients.items():
        ours, where = got.gradients[name], f"{what}: gradient of {name}"
        if isinstance(theirs, list):
            for example, (a, b) in enumerate(zip(ours, theirs, strict=True)):
                close(program, a, b, f"{where} in example {example}")
        else:
            close(program, ours, theirs, where)


def close(program: Program, got: np.ndarray, want: np.ndarray, what: str) -> None:
    """Check that `got` is close where `want` is finite, and the same elsewhere."""
    if not np.issubdtype(want.dtype, np.inexact):
        np.testing.assert_array_equal(got, want, what)
        return
    assert got.shape == want.shape, f"{what}: shape {got.shape}, want {want.shape}"
    odd = ~np.isfinite(want)
    np.testing.assert_array_equal(got[odd], want[odd], what)
    got, want = np.where(odd, 0, got), np.where(odd, 0, want)
    assert_close(got, want, dtype=program.dtype, terms=TERMS, what=what)


def kinds_of_results(program: Program) -> list[type]:
    """Return the kinds of results, by the axes that differ between examples."""
    results = expected(program, 0)[2].results
    kinds = (jax.Array, ragged.RaggedArray, ragged.PaddedRagged)
    shapes = [np.array([x.shape for x in leaf]) for leaf in results]
    ragged_axes = [np.any(s != s[:1], axis=0).sum() for s in shapes]
    return [kinds[min(count, 2)] for count in ragged_axes]


def type_of(leaf: Any) -> type:
    return type(leaf) if is_ragged(leaf) else jax.Array
