import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.export import symbolic_shape

from ostinato import ragged
from ostinato.ragged.core import sizes

MOST, TOTAL, BATCH = {"n": 7, "m": 5}, {"n": 11, "m": 9}, 3


def expressions():
    n, m = symbolic_shape("n, m")
    largest, smallest = jax.core.max_dim, jax.core.min_dim
    return {
        n: lambda n, m: n,
        n + 3: lambda n, m: n + 3,
        n - 1: lambda n, m: n - 1,
        2 * n - 3: lambda n, m: 2 * n - 3,
        n * n: lambda n, m: n * n,
        n**3 - 2: lambda n, m: n**3 - 2,
        (n + 1) // 2: lambda n, m: (n + 1) // 2,
        n % 3: lambda n, m: n % 3,
        n - (-2 % n): lambda n, m: n - (-2 % max(n, 1)),
        largest(n - 3, 0): lambda n, m: max(n - 3, 0),
        smallest(n, 4): lambda n, m: min(n, 4),
        smallest(n, 5) - smallest(n, 2): lambda n, m: min(n, 5) - min(n, 2),
        n + m: lambda n, m: n + m,
        n // 2 + 2 * m - 1: lambda n, m: n // 2 + 2 * m - 1,
        n * m: lambda n, m: n * m,
        2 * n * m - m // 2: lambda n, m: 2 * n * m - m // 2,
        largest(n, m): lambda n, m: max(n, m),
        (n * m) // (n + m): lambda n, m: (n * m) // max(n + m, 1),
    }


EXPRESSIONS = expressions()


def pairs():
    return itertools.product(range(MOST["n"] + 1), range(MOST["m"] + 1))


@pytest.mark.parametrize("dim", EXPRESSIONS, ids=str)
def test_sizes_equal_python(dim):
    function = EXPRESSIONS[dim]
    n, m = (np.array(values) for values in zip(*pairs(), strict=True))
    want = [function(int(a), int(b)) for a, b in zip(n, m, strict=True)]
    for make in (np.asarray, jax.numpy.asarray):
        got = sizes.evaluate(dim, {"n": make(n), "m": make(m)})
        np.testing.assert_array_equal(got, want)
    assert sizes.evaluate(dim, {"n": 6, "m": 4}) == function(6, 4)


@pytest.mark.parametrize("dim", EXPRESSIONS, ids=str)
def test_bounds_hold_and_are_close(dim):
    function = EXPRESSIONS[dim]
    values = np.zeros((MOST["n"] + 1, MOST["m"] + 1), int)
    for n, m in pairs():
        values[n, m] = max(function(n, m), 0)
    ranges = {name: sizes.Range(0, most) for name, most in MOST.items()}
    largest = sizes.largest(dim, ranges)
    names = sizes.symbol_names(dim)
    assert largest >= values.max()
    if len(names) == 1:
        assert largest == values.max()

    # The most tokens that three examples can have, by trying them all.
    most = 0
    counts = [range(MOST[k] + 1) if k in names else range(1) for k in ("n", "m")]
    every = list(itertools.product(*counts))
    for batch in itertools.combinations_with_replacement(every, BATCH):
        if all(sum(e[i] for e in batch) <= TOTAL[k] for i, k in enumerate("nm")):
            most = max(most, sum(values[e] for e in batch))
    bound = sizes.most_tokens(dim, ranges, TOTAL, BATCH)
    assert most <= bound <= largest * BATCH
    if str(dim) in ("n", "n + 3", "n + m"):
        assert bound == min(most, largest * BATCH)


def test_constraints():
    n = np.array([1, 4, 6])
    assert sizes.holds("n >= 4", {"n": n}).tolist() == [False, True, True]
    assert sizes.holds("mod(n, 2) == 0", {"n": n}).tolist() == [False, True, True]
    assert sizes.holds("n <= 2*m", {"n": n, "m": n // 2}).tolist() == [
        False,
        True,
        True,
    ]
    with pytest.raises(ValueError, match="must hold comparisons"):
        sizes.holds("n", {"n": n})


@pytest.mark.parametrize(
    "constraint", ["0 == mod(n, 2)", "2 == n", "2 == 1 + floordiv(n, 2)", "0 == 0"]
)
def test_constraints_with_a_number_on_the_left(constraint):
    x = ragged.RaggedArray(jnp.arange(4.0), [2, 2])
    got = ragged.vmap(lambda x: x.sum(), constraints=(constraint,))(x)
    np.testing.assert_array_equal(got, [1, 5])


@pytest.mark.parametrize("dim", ["µ", "xₙ", "two words"])
def test_names_that_python_reads_as_others(dim):
    x = ragged.RaggedArray(jnp.arange(4.0), [3, 1], dim=dim)
    np.testing.assert_array_equal(ragged.vmap(lambda x: x[1:].sum())(x), [3, 0])
    with pytest.raises(ValueError, match="`constraints` (must|names)"):
        ragged.vmap(lambda x: x, constraints=(f"{dim} >= 1",))(x)


def test_names():
    assert (
        sizes.rename("max(n, nn) - n", {"n": "(k + 1)"}) == "max((k + 1), nn) - (k + 1)"
    )
    assert sizes.symbol_names("- mod(- 1, n) + m") == ["m", "n"]


def test_a_second_call_outside_of_jit_traces_nothing_that_jax_keeps():
    """JAX traces a function of its own for each scope, and keeps the trace."""
    calls = []

    @jax.jit
    def half(x):
        calls.append(x.shape)
        return x / 2

    x = ragged.RaggedArray.from_list([jnp.ones(3), jnp.ones(1)])
    for _ in range(3):
        ragged.vmap(lambda x: half(x).sum())(x)
        ragged.vmap(lambda x: half(x)[:2].sum(), min_length=2)(
            ragged.RaggedArray.from_list([jnp.ones(3), jnp.ones(2)])
        )
    assert len(calls) == 2


@pytest.mark.parametrize(
    "term", ["n", "2*n - 3", "-n + 5", "n*3 - (n - 4)*2", "7 - 3*n"]
)
def test_bounds_of_an_affine_size_are_those_of_all_values(term):
    """They are computed from its ends, since there may be millions of values."""
    for low, high in ((0, 0), (0, 1), (1, 9), (3, 4)):
        values = [sizes.evaluate(term, {"n": n}) for n in range(low, high + 1)]
        ranges = {"n": sizes.Range(low, high)}
        assert sizes.largest(term, ranges) == max(0, *values)
        assert sizes.smallest(term, ranges) == min(values)
        for lengths in itertools.product(range(low, high + 1), repeat=2):
            total = sum(lengths)
            used = sum(max(0, sizes.evaluate(term, {"n": n})) for n in lengths)
            assert used <= sizes.most_tokens(term, ranges, {"n": total}, 2)
    a_billion = {"n": sizes.Range(0, 10**9)}
    assert sizes.most_tokens("n + 1", a_billion, {"n": 100}, 3) == 103
