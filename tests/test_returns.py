"""Returns and advantages against loops in numpy, as rlax and brax define them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closures import fast_jit
from tolerance import assert_close, assert_same_bits

import ostinato as ost
from ostinato import ragged

BATCH, STEPS = 4, 6
LENGTHS = np.array([6, 3, 0, 1])


def draw(*shape, seed=0, low=None):
    rng = np.random.default_rng([seed, *shape])
    return rng.random(shape) if low is not None else rng.standard_normal(shape)


REWARDS, VALUES, NEXT = (draw(BATCH, STEPS, seed=n) for n in range(3))
DISCOUNTS, LAMBDAS = (draw(BATCH, STEPS, seed=n, low=0) for n in (3, 4))
BOOTSTRAP = draw(BATCH, seed=5)
ENDS, CUTS = (draw(BATCH, STEPS, seed=n, low=0) < 0.3 for n in (6, 7))


def lambda_loop(r, d, v, lam, lengths):
    out = np.zeros_like(r)
    for i, n in enumerate(lengths):
        g = v[i, n - 1] if n else 0.0
        for t in range(n - 1, -1, -1):
            mixed = (1 - lam[i, t]) * v[i, t] + lam[i, t] * g
            g = out[i, t] = r[i, t] + d[i, t] * mixed
    return out


def gae_loop(r, v, last, d, lam, ends, cuts, lengths):
    """The equations of brax: `vs - values`; those of rlax without the masks."""
    out = np.zeros_like(r)
    for i, n in enumerate(lengths):
        a = 0.0
        for t in range(n - 1, -1, -1):
            after = v[i, t + 1] if t + 1 < n else last[i]
            kept, alive = 1.0 - cuts[i, t], 1.0 - ends[i, t]
            delta = (r[i, t] + d[i, t] * alive * after - v[i, t]) * kept
            a = out[i, t] = delta + d[i, t] * alive * kept * lam[i, t] * a
    return out


def holes(x, lengths):
    x = x.astype(float) if x.dtype != bool else x
    past = np.arange(STEPS) >= lengths[:, None]
    return np.where(past, np.nan if x.dtype != bool else True, x)


every_layout = pytest.mark.parametrize("time_major", [False, True])
every_length = pytest.mark.parametrize(
    "lengths", [None, LENGTHS], ids=["whole", "mixed"]
)


def call(function, *arrays, time_major, lengths, **named):
    def layout(x):
        if np.ndim(x) != 2:
            return jnp.asarray(x)
        x = x if lengths is None else holes(x, lengths)
        return jnp.asarray(x.T if time_major else x)

    options = dict(time_major=time_major)
    if lengths is not None:
        options["seq_lengths"] = jnp.asarray(lengths)
    named = {name: layout(x) for name, x in named.items()}
    run = lambda arrays, named: function(*arrays, **named, **options)  # noqa: E731
    out = fast_jit(run)([layout(x) for x in arrays], named)
    return jax.tree.map(lambda x: x.T if time_major else x, out)


@every_layout
@every_length
def test_discounted_returns(time_major, lengths):
    whole = np.full(BATCH, STEPS) if lengths is None else lengths
    v = np.zeros_like(REWARDS)
    v[np.arange(BATCH), np.maximum(whole - 1, 0)] = BOOTSTRAP
    want = lambda_loop(REWARDS, DISCOUNTS, v, np.ones_like(v), whole)
    got = call(
        ost.discounted_returns, REWARDS, DISCOUNTS, BOOTSTRAP,
        time_major=time_major, lengths=lengths,
    )  # fmt: skip
    assert_close(got, want, terms=100)


@every_layout
@every_length
def test_lambda_returns(time_major, lengths):
    whole = np.full(BATCH, STEPS) if lengths is None else lengths
    want = lambda_loop(REWARDS, DISCOUNTS, NEXT, LAMBDAS, whole)
    got = call(
        ost.lambda_returns, REWARDS, DISCOUNTS, NEXT, LAMBDAS,
        time_major=time_major, lengths=lengths,
    )  # fmt: skip
    assert_close(got, want, terms=100)


@every_layout
@every_length
@pytest.mark.parametrize("masks", [False, True])
def test_gae(time_major, lengths, masks):
    whole = np.full(BATCH, STEPS) if lengths is None else lengths
    ends, cuts = (x & masks for x in (ENDS, CUTS))
    want = gae_loop(REWARDS, VALUES, BOOTSTRAP, DISCOUNTS, LAMBDAS, ends, cuts, whole)
    named = dict(terminations=ENDS, truncations=CUTS) if masks else {}
    got = call(
        ost.gae, REWARDS, VALUES, BOOTSTRAP, discounts=DISCOUNTS, lambda_=LAMBDAS,
        time_major=time_major, lengths=lengths, **named,
    )  # fmt: skip
    assert_close(got.advantages, want, terms=100)
    valid = np.arange(STEPS) < whole[:, None]
    assert_close(got.returns, np.where(valid, want + VALUES, 0.0), terms=100)


def test_numbers_and_one_sequence():
    r, v = jnp.asarray(REWARDS[0]), jnp.asarray(VALUES[0])
    whole = np.full(1, STEPS)
    full = lambda x: np.full((1, STEPS), x)  # noqa: E731
    masks = np.zeros((1, STEPS), bool)
    want = gae_loop(
        REWARDS[:1],
        VALUES[:1],
        BOOTSTRAP[:1],
        full(0.9),
        full(0.8),
        masks,
        masks,
        whole,
    )
    got = ost.gae(r, v, jnp.asarray(BOOTSTRAP[0]), discounts=0.9, lambda_=0.8)
    assert_close(got.advantages, want[0], terms=100)
    short = ost.discounted_returns(r, 0.9, seq_lengths=2)
    assert_close(
        short[:2], np.array([REWARDS[0, 0] + 0.9 * REWARDS[0, 1], REWARDS[0, 1]])
    )
    assert not short[2:].any()
    empty = ost.gae(r[:0], v[:0], jnp.float64(0), discounts=0.9, lambda_=0.8)
    assert empty.advantages.shape == (0,)


def test_gradients_pass_through_every_argument():
    arrays = [jnp.asarray(x) for x in (REWARDS, VALUES, BOOTSTRAP, DISCOUNTS, LAMBDAS)]

    def plain(r, v, last, d, lam):
        a, total = jnp.zeros(BATCH), 0.0
        for t in range(STEPS - 1, -1, -1):
            after = v[:, t + 1] if t + 1 < STEPS else last
            a = r[:, t] + d[:, t] * after - v[:, t] + d[:, t] * lam[:, t] * a
            total += jnp.sum(jnp.sin(a))
        return total

    def ours(r, v, last, d, lam):
        return jnp.sum(
            jnp.sin(ost.gae(r, v, last, discounts=d, lambda_=lam).advantages)
        )

    got, want = (fast_jit(jax.grad(f, tuple(range(5))))(*arrays) for f in (ours, plain))
    for a, b in zip(got, want, strict=True):
        assert_close(a, b, terms=1000)


@every_layout
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_dtypes_and_many_sequences(time_major, dtype):
    """More sequences than lie side by side in a kernel; in bfloat16 XLA runs it."""
    shape = (9, 300) if time_major else (300, 9)
    r, v = (jnp.asarray(draw(*shape, seed=n), dtype) for n in (1, 2))
    last = jnp.asarray(draw(300, seed=3), dtype)
    options = dict(discounts=0.9, lambda_=0.8)
    got = fast_jit(lambda *a: ost.gae(*a, **options, time_major=time_major))(r, v, last)
    r, v, last = (np.asarray(x, np.float64) for x in (r, v, last))
    r, v = (x.T if time_major else x for x in (r, v))
    full = [np.full(r.shape, x) for x in options.values()]
    none = np.zeros(r.shape, bool)
    want = gae_loop(r, v, last, *full, none, none, np.full(300, 9))
    found = got.advantages.T if time_major else got.advantages
    assert_close(found, want, terms=256)


@every_layout
@pytest.mark.parametrize("masks", [False, True])
def test_many_sequences_of_different_lengths(time_major, masks):
    """Later vectors of sequences, and later items of work, have their own lengths."""
    many, steps = 300, 9
    r, v = draw(many, steps, seed=1), draw(many, steps, seed=2)
    last, lengths = draw(many, seed=3), np.random.default_rng(4).integers(0, 10, many)
    ends, cuts = (draw(many, steps, seed=n, low=0) < 0.2 * masks for n in (5, 6))
    full = [np.full(r.shape, rate) for rate in (0.9, 0.8)]
    want = gae_loop(r, v, last, *full, ends, cuts, lengths)
    given = [r, v, *((ends, cuts) if masks else ())]
    given = [jnp.asarray(x.T if time_major else x) for x in given]

    def run(r, v, *marks):
        named = dict(zip(("terminations", "truncations"), marks, strict=False))
        return ost.gae(
            r, v, jnp.asarray(last), discounts=0.9, lambda_=0.8, **named,
            seq_lengths=jnp.asarray(lengths), time_major=time_major,
        ).advantages  # fmt: skip

    got = fast_jit(run)(*given)
    assert_close(got.T if time_major else got, want, terms=256)


@every_layout
@pytest.mark.parametrize("mapped", ["arrays", "numbers", "last", "lengths"])
def test_vmap_of_some_arguments(mapped, time_major):
    layout = (lambda x: np.swapaxes(x, -1, -2)) if time_major else lambda x: x
    at = {name: (2,) if name == mapped else () for name in ("arrays", "numbers")}
    given = {
        "r": layout(draw(*at["arrays"], BATCH, STEPS, seed=1)),
        "v": layout(draw(BATCH, STEPS, seed=2)),
        "last": draw(*((2,) if mapped == "last" else ()), BATCH, seed=3),
        "d": draw(*at["numbers"], seed=4, low=0),
        "n": np.array([LENGTHS, LENGTHS[::-1]] if mapped == "lengths" else LENGTHS),
    }
    own = {"arrays": "r", "numbers": "d", "last": "last", "lengths": "n"}[mapped]

    def run(given):
        return ost.gae(
            given["r"], given["v"], given["last"], discounts=given["d"], lambda_=0.8,
            seq_lengths=given["n"], time_major=time_major,
        ).advantages  # fmt: skip

    axes = {name: 0 if name == own else None for name in given}
    given = {name: jnp.asarray(x) for name, x in given.items()}
    got = fast_jit(jax.vmap(run, (axes,)))(given)
    none = np.zeros((BATCH, STEPS), bool)
    for k in range(2):
        one = {n: np.asarray(x[k] if n == own else x) for n, x in given.items()}
        rates = [np.full((BATCH, STEPS), rate) for rate in (one["d"], 0.8)]
        r, v = layout(one["r"]), layout(one["v"])
        want = gae_loop(r, v, one["last"], *rates, none, none, one["n"])
        assert_close(layout(got[k]), want, terms=100)


@every_layout
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_what_follows_the_end_of_an_episode_does_not_matter(time_major, dtype):
    """A reward that is not finite reaches no step before a truncation or an end."""
    r = jnp.asarray(draw(2, 6, seed=1), dtype).at[:, 4].set(jnp.nan)
    v, last = jnp.asarray(draw(2, 6, seed=2), dtype), jnp.ones(2, dtype)
    marks = jnp.zeros((2, 6), bool).at[0, 2].set(True).at[1, 3].set(True)
    layout = (lambda x: x.T) if time_major else lambda x: x
    for name in ("terminations", "truncations"):
        given = {"discounts": 0.9, "lambda_": 0.8, name: layout(marks)}
        got = ost.gae(layout(r), layout(v), last, **given, time_major=time_major)
        found = np.isfinite(np.asarray(layout(got.advantages), np.float64))
        steps = np.arange(6)
        assert (found[0] == ((steps < 3) | (steps == 5))).all()
        assert (found[1] == ((steps < 4) | (steps == 5))).all()


@every_layout
@every_length
@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize("zeros", ["discounts", "lambda_", "both numbers"])
def test_gradients_of_gae_where_factors_are_0(zeros, masks, lengths, time_major):
    whole = np.full(BATCH, STEPS) if lengths is None else lengths
    some = draw(BATCH, STEPS, seed=20) < 0.5
    d = np.where(some & (zeros == "discounts"), 0.0, DISCOUNTS)
    lam = np.where(some & (zeros == "lambda_"), 0.0, LAMBDAS)
    if zeros == "both numbers":
        d, lam = np.float64(0.9), np.float64(0.0)
    ends, cuts = (x & masks for x in (ENDS, CUTS))
    weights = draw(BATCH, STEPS, seed=21) * (np.arange(STEPS) < whole[:, None])
    named = dict(terminations=ENDS, truncations=CUTS) if masks else {}

    def by_loop(*given):
        r, v, last, *rates = given
        rates = [np.broadcast_to(x, r.shape) for x in rates]
        return (weights * gae_loop(r, v, last, *rates, ends, cuts, whole)).sum()

    def of_ours(r, v, last, d, lam):
        out = ost.gae(
            r, v, last, discounts=d, lambda_=lam, time_major=time_major,
            **{name: layout(x) for name, x in named.items()}, **options,
        )  # fmt: skip
        return (layout(weights) * out.advantages).sum()

    def layout(x):
        return jnp.asarray(x.T if time_major and np.ndim(x) == 2 else x)

    options = {} if lengths is None else dict(seq_lengths=jnp.asarray(lengths))
    given = (REWARDS, VALUES, BOOTSTRAP, d, lam)
    holed = given if lengths is None else [
        holes(x, lengths) if np.ndim(x) == 2 else x for x in given
    ]  # fmt: skip
    found = fast_jit(jax.grad(of_ours, range(5)))(*map(layout, holed))
    for n, got in enumerate(found):
        got = np.asarray(got.T if time_major else got)
        np.testing.assert_allclose(got, differences(by_loop, given, n), atol=1e-8)


def differences(function, given, n):
    """Return finite differences along each element of one argument."""
    out = np.zeros(np.shape(given[n]))
    for at in np.ndindex(out.shape):
        step = np.zeros_like(out)
        step[at] = 1e-5
        ends = [
            function(*given[:n], given[n] + sign * step, *given[n + 1 :])
            for sign in (1, -1)
        ]
        out[at] = (ends[0] - ends[1]) / 2e-5
    return out


def test_second_derivatives_of_gae_where_a_factor_is_0():
    run = lambda lam: ost.gae(  # noqa: E731
        jnp.ones((1, 3)), jnp.ones((1, 3)), jnp.ones(1), discounts=0.9, lambda_=lam
    ).advantages.sum()
    # 3 d + (2 d + d) d l + d (d l)^2, with d = 0.9
    assert_close(jax.grad(run)(0.0), 2 * 0.9 * 0.9, terms=100)
    assert_close(jax.hessian(run)(0.0), 2 * 0.9**3, terms=100)


@every_layout
@pytest.mark.parametrize("numbers", [False, True])
def test_gradients_of_lambda_returns_see_no_padding(numbers, time_major):
    rates = (np.float64(0.9), np.float64(0.8)) if numbers else (DISCOUNTS, LAMBDAS)
    weights = draw(BATCH, STEPS, seed=21) * (np.arange(STEPS) < LENGTHS[:, None])

    def by_loop(r, d, v, lam):
        d, lam = (np.broadcast_to(x, r.shape) for x in (d, lam))
        return (weights * lambda_loop(r, d, v, lam, LENGTHS)).sum()

    def layout(x):
        x = x if np.ndim(x) != 2 else holes(x, LENGTHS)
        return jnp.asarray(x.T if time_major else x)

    def of_ours(*given):
        out = ost.lambda_returns(
            *given, seq_lengths=jnp.asarray(LENGTHS), time_major=time_major
        )
        return (jnp.asarray(weights.T if time_major else weights) * out).sum()

    given = (REWARDS, rates[0], NEXT, rates[1])
    found = fast_jit(jax.grad(of_ours, range(4)))(*map(layout, given))
    for n, got in enumerate(found):
        got = np.asarray(got.T if time_major else got)
        np.testing.assert_allclose(got, differences(by_loop, given, n), atol=1e-8)


@pytest.mark.parametrize("name", ["terminations", "truncations"])
def test_the_value_after_an_end_may_be_nan(name):
    marks = jnp.zeros((1, 4), bool).at[0, 1].set(True)
    values = jnp.ones((1, 4)).at[0, 2].set(jnp.nan)

    def run(values, discounts):
        out = ost.gae(
            jnp.ones((1, 4)), values, jnp.ones(1), discounts=discounts, lambda_=0.5,
            **{name: marks},
        )  # fmt: skip
        return out.advantages[:, :2].sum()

    assert np.isfinite(run(values, 0.9))  # by the native library
    value, found = jax.value_and_grad(run, (0, 1))(values, 0.9)
    assert np.isfinite(value) and all(np.isfinite(x).all() for x in found)


def test_lambda_returns_of_ragged_batches_with_empty_examples():
    rows = [jnp.asarray(draw(n, seed=n)) for n in (3, 0, 5)]
    batch = ragged.RaggedArray.from_list(rows, dim="n")
    run = lambda x: ost.lambda_returns(x, 0.9, x, 0.8)  # noqa: E731
    got = ragged.vmap(run, min_length=0)(batch).to_list()
    for row, one in zip(rows, got, strict=True):
        x = np.asarray(row)[None]
        rates = [np.full_like(x, rate) for rate in (0.9, 0.8)]
        want = lambda_loop(x, rates[0], x, rates[1], [x.shape[1]])
        assert_close(one, want[0], terms=100)


def test_vmap_and_devices():
    arrays = [jnp.asarray(x) for x in (REWARDS, VALUES, BOOTSTRAP)]
    gammas = jnp.linspace(0.5, 0.9, BATCH)
    run = lambda r, v, last, d: ost.gae(r, v, last, discounts=d, lambda_=0.9)  # noqa: E731
    want = [run(*x) for x in zip(*arrays, gammas, strict=True)]
    got = jax.vmap(run)(*arrays, gammas)
    for n, one in enumerate(want):
        assert_close(got.advantages[n], one.advantages, terms=100)
        assert_close(got.returns[n], one.returns, terms=100)
    outer = jax.vmap(run, (None, None, None, 0))(*arrays, gammas)
    assert_close(outer.returns[1], run(*arrays, gammas[1]).returns, terms=100)
    mesh = jax.make_mesh((4,), ("b",))
    spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("b"))
    split = [jax.device_put(x, spec) for x in arrays]
    assert_close(
        jax.jit(run)(*split, gammas[0]).returns, run(*arrays, gammas[0]).returns
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_rounds_results_alone(dtype):
    r, v, last = (jnp.asarray(x, dtype) for x in (REWARDS, VALUES, BOOTSTRAP))
    wide = [x.astype(jnp.float32) for x in (r, v, last)]
    options = dict(discounts=0.99, lambda_=0.95)
    got = ost.gae(r, v, last, **options), ost.discounted_returns(r, 0.99, last)
    want = ost.gae(*wide, **options), ost.discounted_returns(wide[0], 0.99, wide[2])
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert x.dtype == dtype and (x == y.astype(dtype)).all()


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        (dict(rewards=jnp.zeros((2, 3, 4))), ValueError, "`rewards` must have shape"),
        (dict(rewards=jnp.zeros((2, 3), int)), TypeError, "`rewards`"),
        (dict(values=jnp.zeros((2, 4))), ValueError, "`values` must have the shape"),
        (dict(bootstrap=jnp.zeros(3)), ValueError, "`bootstrap`"),
        (dict(discounts=jnp.zeros((2, 4))), ValueError, "`discounts`"),
        (dict(lambda_=True), TypeError, "`lambda_` must be a number, got bool"),
        (dict(lambda_=jnp.array(True)), TypeError, "`lambda_` must be a number, got b"),
        (dict(discounts=jnp.array(1j)), TypeError, "`discounts` must be a number, got"),
        (dict(discounts=10**400), ValueError, "`discounts` must be a number that a"),
        (dict(truncations=jnp.zeros((2, 4), bool)), ValueError, r"shape \(B, T\)"),
        (
            dict(terminations=jnp.zeros((2, 3))),
            TypeError,
            "`terminations` must be bool",
        ),
        (dict(seq_lengths=[1, 4]), ValueError, "0..T"),
    ],
)
def test_errors_say_what_is_wrong(options, error, words):
    given = dict(
        rewards=jnp.zeros((2, 3)),
        values=jnp.zeros((2, 3)),
        bootstrap=jnp.zeros(2),
        discounts=0.9,
        lambda_=0.9,
    )
    with pytest.raises(error, match=words):
        ost.gae(**given | options)


@pytest.mark.skipif(not ost.backends()["cpu"], reason="no native library")
@pytest.mark.parametrize("isa", ["avx512", "avx2", "portable"])
@pytest.mark.parametrize("masked", [False, True])
def test_number_of_threads_changes_no_bit(masked, isa, configure):
    rng = np.random.default_rng(0)
    rewards, values = (rng.normal(size=(5000, 33)).astype("float32") for _ in range(2))
    last = rng.normal(size=33).astype("float32")
    ends = jnp.asarray(rng.random((5000, 33)) < 0.05) if masked else None
    found = []
    for threads in (1, 2, 5):
        configure(isa, threads)
        estimated = ost.gae(
            jnp.asarray(rewards),
            jnp.asarray(values),
            jnp.asarray(last),
            discounts=0.97,
            lambda_=0.93,
            terminations=ends,
            time_major=True,
        )
        found.append(np.asarray(estimated.advantages))
    for other in found[1:]:
        assert_same_bits(other, found[0])
