"""Functions of one example from lists of numbers: random programs for `ragged.vmap`.

No gradient is taken of a greatest value: where XLA computes values twice and rounds
them differently, none equals the greatest, and the gradient of JAX itself is NaN.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from ragged_programs.program import Program

MOST_AXES = 3


class Typed(NamedTuple):
    """A value and its sizes.

    Attributes:
        array: the value.
        sizes: by axis a number, or a name: sizes of one name are equal.
        below: of integers, the size that all of them are below; else None.
    """

    array: Any
    sizes: tuple[int | str, ...]
    below: int | str | None = None


class NothingFits(Exception):
    """No value is what an operation needs."""


class Values:
    """The values of a program so far, the newest last."""

    def __init__(self, least: int, values: Sequence[Typed]) -> None:
        self.least, self.values = least, list(values)

    def pick(
        self,
        i: int,
        fits: Callable[[Typed], Any] = lambda v: True,
        integers: bool = False,
    ) -> Typed:
        """Return one of the values that fit; raise NothingFits if none does."""
        kind = [v for v in self.values if (v.below is not None) == integers]
        fitting = [v for v in kind if fits(v)]
        if not fitting:
            raise NothingFits
        return fitting[-1 - i % len(fitting)]

    def at_least(self, size: int | str) -> int:
        """Return the least that a size can be."""
        if isinstance(size, int):
            return size
        return self.least if size == "n" else min(self.least, 1)


def without(sizes: tuple, axis: int) -> tuple:
    return sizes[:axis] + sizes[axis + 1 :]


def replaced(sizes: tuple, axis: int, *to: int | str) -> tuple:
    return sizes[:axis] + to + sizes[axis + 1 :]


def with_axes(v: Values, i: int, axes: int = 1) -> Typed:
    return v.pick(i, lambda a: len(a.sizes) >= axes)


POINTWISE: list[Callable] = [
    jnp.tanh,
    jnp.sin,
    jax.nn.sigmoid,
    lambda a: jnp.exp(jnp.tanh(a)),
    lambda a: 0.7 * a + 0.31,
    lambda a: jnp.where(a > 0.0137, a, 0.2 * a),
    lambda a: jnp.clip(a, -0.813, 0.777),
    lambda a: jnp.log(1.1 + a * a),
    jax.checkpoint(lambda a: jnp.sin(jnp.sin(a))),
    lax.stop_gradient,
]


def pointwise(v, i, j, k):
    a = v.pick(i)
    return a._replace(array=POINTWISE[j % len(POINTWISE)](a.array))


TOGETHER: list[Callable] = [
    lambda a, b: a + b,
    lambda a, b: a * b,
    jnp.maximum,
    lambda a, b: jnp.arctan2(a, 1.2 + b * b),
    lambda a, b: jnp.where(a > b + 0.0211, b, a),
    lambda a, b: b / (1.5 + jnp.cos(a)),
]


def together(v, i, j, k):
    """Two values; the axes of the second are some of the first, in their order."""
    a = v.pick(i)

    def places(b):
        return [
            axes
            for axes in itertools.combinations(range(len(a.sizes)), len(b.sizes))
            if tuple(a.sizes[axis] for axis in axes) == b.sizes
        ]

    b = v.pick(j, places)
    axes = places(b)[k % len(places(b))]
    if k % 2:
        other = lax.broadcast_in_dim(b.array, a.array.shape, axes)
    else:
        missing = [axis for axis in range(len(a.sizes)) if axis not in axes]
        other = jnp.expand_dims(b.array, missing)
    return a._replace(array=TOGETHER[(i + j) % len(TOGETHER)](a.array, other))


def outer(v, i, j, k):
    a = v.pick(i, lambda a: 1 <= len(a.sizes) < MOST_AXES)
    b = v.pick(j, lambda b: 1 <= len(b.sizes) <= MOST_AXES - len(a.sizes))
    count = len(a.sizes)
    first = jnp.expand_dims(a.array, [count + axis for axis in range(len(b.sizes))])
    second = jnp.expand_dims(b.array, [*range(count)])
    return Typed(jnp.sin(first + 0.8 * second), a.sizes + b.sizes)


REDUCE: list[tuple[int, Callable]] = [
    (0, lambda a, **axes: 0.5 * jnp.sum(a, **axes)),
    (0, lambda a, **axes: jnp.prod(jnp.tanh(a) + 0.55, **axes)),
    (0, lambda a, **axes: jnp.sqrt(jnp.sum(a * a, **axes) + 0.1)),
    (0, lambda a, **axes: lax.stop_gradient(jnp.max(a, initial=-1.5, **axes))),
    (1, jnp.mean),
    (1, lambda a, **axes: jnp.mean(a, **axes) + lax.stop_gradient(jnp.max(a, **axes))),
    (1, jax.nn.logsumexp),
    (1, lambda a, **axes: jnp.sqrt(jnp.var(a, **axes) + 0.01)),
]


def reduced(v, i, j, k):
    a = with_axes(v, i)
    choices = [f for least, f in REDUCE if v.least >= least]
    axes = (j % len(a.sizes),) if k % 4 else tuple(range(len(a.sizes)))[:2]
    array = choices[k % len(choices)](a.array, axis=axes, keepdims=j % 3 == 0)
    kept = [s for axis, s in enumerate(a.sizes) if axis not in axes]
    if j % 3 == 0:
        kept = [1 if axis in axes else s for axis, s in enumerate(a.sizes)]
    return Typed(array, tuple(kept))


def running(v, i, j, k):
    a = with_axes(v, i)
    axis, reverse = j % len(a.sizes), k % 2 == 1
    functions = [
        lambda a: 0.4 * lax.cumsum(a, axis, reverse),
        lambda a: lax.cumprod(jnp.tanh(a) + 0.6, axis, reverse),
        lambda a: a + lax.stop_gradient(lax.cummax(a, axis, reverse)),
        lambda a: lax.cumlogsumexp(a, axis, reverse),
    ]
    return a._replace(array=functions[k // 2 % len(functions)](a.array))


def reordered(v, i, j, k):
    a = with_axes(v, i)
    axis = j % len(a.sizes)
    functions = [lambda a: jnp.flip(a, axis), lambda a: jnp.sort(a, axis)]
    if v.at_least(a.sizes[axis]):
        functions.append(lambda a: jnp.roll(a, k - 4, axis))
    return a._replace(array=functions[k % len(functions)](a.array))


def transposed(v, i, j, k):
    a = with_axes(v, i, 2)
    orders = list(itertools.permutations(range(len(a.sizes))))[1:]
    order = orders[j % len(orders)]
    return Typed(jnp.transpose(a.array, order), tuple(a.sizes[axis] for axis in order))


def expanded(v, i, j, k):
    a = v.pick(i, lambda a: len(a.sizes) < MOST_AXES)
    axis = j % (len(a.sizes) + 1)
    sizes = (*a.sizes[:axis], 1, *a.sizes[axis:])
    return Typed(jnp.expand_dims(a.array, axis), sizes)


def joined(v, i, j, k):
    a = v.pick(i, lambda a: 1 <= len(a.sizes) < MOST_AXES)
    b = v.pick(j, lambda b: b.sizes == a.sizes)
    axis = k % len(a.sizes)
    if k < 5:
        stacked = jnp.stack([a.array, b.array], axis)
        return Typed(stacked, (*a.sizes[:axis], 2, *a.sizes[axis:]))
    size = a.sizes[axis]
    size = 2 * size if isinstance(size, int) else f"2 {size}"
    both = jnp.concatenate([a.array, b.array], axis)
    return Typed(both, replaced(a.sizes, axis, size))


def part(v, i, j, k):
    a = v.pick(i, lambda a: a.sizes and v.at_least(a.sizes[0]) >= 1)
    size = a.sizes[0]
    rest = f"{size} - 1" if isinstance(size, str) else size - 1
    window, to = [
        (0, ()),
        (-1, ()),
        (slice(0, 1), (1,)),
        (slice(None, None, -1), (size,)),
        (slice(1, None), (rest,)),
        (slice(None, -1), (rest,)),
    ][k % (6 if v.at_least(size) >= 2 else 4)]
    return Typed(a.array[window], replaced(a.sizes, 0, *to))


def padded(v, i, j, k):
    a = with_axes(v, i)
    axis = j % len(a.sizes)
    width = [(0, 0)] * len(a.sizes)
    width[axis] = [(1, 0), (0, 2), (1, 1)][k % 3]
    mode = ["constant", "edge"][k % 2 if v.least else 0]
    size, more = a.sizes[axis], sum(width[axis])
    size = size + more if isinstance(size, int) else f"{size} + {more}"
    return Typed(jnp.pad(a.array, width, mode), replaced(a.sizes, axis, size))


def best(v, i, j, k):
    a = v.pick(i, lambda a: a.sizes and v.at_least(a.sizes[j % len(a.sizes)]))
    axis = j % len(a.sizes)
    if k % 2:
        order = jnp.argsort(a.array, axis).astype(jnp.int32)
        return Typed(order, a.sizes, a.sizes[axis])
    place = jnp.argmax(a.array, axis).astype(jnp.int32)
    return Typed(place, without(a.sizes, axis), a.sizes[axis])


def taken(v, i, j, k):
    at = v.pick(j, integers=True)
    room = MOST_AXES + 1 - len(at.sizes)
    a = v.pick(i, lambda a: at.below in a.sizes and len(a.sizes) <= room)
    axis = a.sizes.index(at.below)
    array = [
        lambda: jnp.take(a.array, at.array, axis),
        lambda: a.array[(slice(None),) * axis + (at.array,)],
        lambda: jnp.take(a.array, at.array + 1, axis, mode="clip"),
        lambda: jnp.take(a.array, at.array + 1, axis, mode="fill", fill_value=0.3),
    ][k % 4]()
    return Typed(array, replaced(a.sizes, axis, *at.sizes))


def scattered(v, i, j, k):
    at = v.pick(j, integers=True)
    a = v.pick(i, lambda a: a.sizes[:1] == (at.below,))
    b = v.pick(k, lambda b: b.sizes == at.sizes + a.sizes[1:])
    to = a.array.at[at.array]
    if k % 3 == 0:
        return a._replace(array=to.add(b.array))
    extreme = [to.max, to.min][k % 2](b.array)
    return a._replace(array=a.array + lax.stop_gradient(extreme))


def contracted(v, i, j, k):
    a = with_axes(v, i)
    b = v.pick(j, lambda b: {*b.sizes} & {*a.sizes})
    names, sizes = "abc"[: len(a.sizes)], dict(zip("abc", a.sizes, strict=False))
    others = ""
    for new, size in zip("xyz", b.sizes, strict=False):
        same = [n for n in names if sizes[n] == size and n not in others]
        others += same[k % len(same)] if same else new
        sizes[others[-1]] = size
    both = [n for n in names if n in others]
    summed = both if k % 3 else both[:1]
    kept = [n for n in sizes if n not in summed]
    if len(kept) > MOST_AXES:
        raise NothingFits
    kept = kept[k % len(kept) :] + kept[: k % len(kept)] if kept else kept
    product = jnp.einsum(f"{names},{others}->{''.join(kept)}", a.array, b.array)
    return Typed(jnp.tanh(0.5 * product), tuple(sizes[n] for n in kept))


def normalised(v, i, j, k):
    a = v.pick(i, lambda a: a.sizes and v.at_least(a.sizes[j % len(a.sizes)]))
    axis = j % len(a.sizes)
    array = [
        lambda a: jax.nn.softmax(a, axis),
        lambda a: jax.nn.log_softmax(a, axis),
        lambda a: jax.nn.standardize(a, axis, epsilon=0.1),
    ][k % 3](a.array)
    return a._replace(array=array)


def masked(v, i, j, k):
    a = with_axes(v, i, 2)
    rows, columns = (jnp.arange(size) for size in a.array.shape[-2:])
    mask = [
        rows[:, None] < columns[None],
        jnp.abs(rows[:, None] - columns[None]) < 2,
        (2 * rows[:, None] + columns[None]) % 3 == 0,
    ][k % 3]
    mask = jnp.broadcast_to(mask, a.array.shape)
    return a._replace(array=jnp.where(mask, a.array, -0.7))


def counted(v, i, j, k):
    """The places of an axis: as integers, or as numbers."""
    a = v.pick(i, lambda a: any(isinstance(size, str) for size in a.sizes))
    axis = [isinstance(size, str) for size in a.sizes].index(True)
    places = jnp.arange(a.array.shape[axis], dtype=jnp.int32)
    if k % 2:
        return Typed(places, (a.sizes[axis],), a.sizes[axis])
    return Typed(jnp.sin(places.astype(float)), (a.sizes[axis],))


def scanned(v, i, j, k):
    a = with_axes(v, i)
    start = v.pick(j, lambda b: b.sizes == a.sizes[1:]) if k % 2 else None
    start = jnp.zeros(a.array.shape[1:]) if start is None else start.array

    def step(state, x):
        state = jnp.tanh(0.6 * state + x)
        return state, jnp.sin(state)

    last, every = lax.scan(step, start, a.array, reverse=k % 3 == 0)
    return Typed(last, a.sizes[1:]) if k > 6 else a._replace(array=every)


def carried(v, i, j, k):
    """A loop over the rows of one value that carries another one whole."""
    a, b, c = with_axes(v, i), v.pick(j), v.pick(k)
    other = c.array if c.sizes == b.sizes else b.array

    def step(state, x):
        state = jnp.tanh(0.6 * state + 0.2 * jnp.sum(x) * other)
        return state, jnp.sum(state)

    step = jax.checkpoint(step) if k % 4 == 3 else step
    last, every = lax.scan(step, b.array, a.array, reverse=k % 2 == 0)
    return b._replace(array=last) if k > 4 else Typed(every, a.sizes[:1])


INNER: list[Callable] = [
    lambda row: 0.4 * jnp.cumsum(row, 0),
    lambda row: row / (1 + jnp.sum(row * row)),
    lambda row: lax.cond(row.sum() > 0.0123, lambda r: 2 * r, jnp.sin, row),
    lambda row: lax.fori_loop(0, 3, lambda t, r: jnp.sin(r) + 0.1 * t, row),
    lambda row: row + lax.while_loop(
        lambda s: (jnp.abs(s[1]).sum() > 0.5) & (s[0] < 5),
        lambda s: (s[0] + 1, 0.7 * s[1]),
        (0, lax.stop_gradient(row)),
    )[1],
    jax.grad(lambda row: jnp.sum(jnp.sin(row) * jnp.cumsum(row, 0))),
]  # fmt: skip


def inner(v, i, j, k):
    """A function of a value, or of each of its parts along an axis."""
    a = with_axes(v, i)
    function = INNER[k % len(INNER)]
    if len(a.sizes) > 1 and j < 7:
        axis = j % len(a.sizes)
        function = jax.vmap(function, axis, axis)
    return a._replace(array=function(a.array))


def reshaped(v, i, j, k):
    a = with_axes(v, i, 2)
    if k % 2:
        return a._replace(array=jnp.sin(a.array.reshape(-1)).reshape(a.array.shape))
    if not all(size == "n" or isinstance(size, int) for size in a.sizes[:2]):
        raise NothingFits
    numbers = all(isinstance(size, int) for size in a.sizes[:2])
    size = a.sizes[0] * a.sizes[1] if numbers else "{} x {}".format(*a.sizes[:2])
    shape = a.array.shape
    array = a.array.reshape(shape[0] * shape[1], *shape[2:])
    return Typed(array, (size, *a.sizes[2:]))


FOR_ALL = [
    pointwise, together, outer, reduced, running, reordered, transposed, expanded,
    joined, part, padded, contracted, normalised, masked, counted, scanned, carried,
    inner, reshaped,
]  # fmt: skip
OPERATIONS = {f.__name__: f for f in [*FOR_ALL, best, taken, scattered]}
"""Each makes a value of those before; three numbers choose which ones, and how."""


def program(operations: Sequence[tuple[str, int, int, int]], least: int) -> Program:
    """Return the program of these operations; the ones that no value fits do nothing.

    Args:
        operations: each a name of `OPERATIONS` and its numbers.
        least: the shortest length that the program is for.
    """

    def fn(x, s, x2, d, w, pick):
        v = Values(
            least,
            [
                Typed(x, ("n", 3)),
                Typed(s, ("n",)),
                Typed(x2, ("n", 3)),
                Typed(d, (3,)),
                Typed(w, (3, 3)),
                Typed(pick, ("n",), 3),
            ],
        )
        given = len(v.values)
        for name, *numbers in operations:
            if least == 0 and OPERATIONS[name] not in FOR_ALL:
                continue  # empty examples have no index
            try:
                made = OPERATIONS[name](v, *numbers)
            except NothingFits:
                continue
            if len(made.sizes) <= MOST_AXES:
                v.values.append(made)
        return [value.array for value in v.values[given:]] or [x]

    name = " ".join(f"{name}{i}{j}{k}" for name, i, j, k in operations)
    return Program(name, fn, at_least=least)
