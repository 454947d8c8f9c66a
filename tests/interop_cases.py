"""Asymmetric weights, runs of both sides and damaged files for the tests of interop."""

import contextlib
import itertools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ostinato as ost

LIMIT = 2e-6
"""How far float32 results of two libraries may stand apart."""
MUTATIONS = 60
"""Damaged files a format; 1,000 for a thorough run by hand."""
SECONDS = 2.0
"""How much processor time one damaged file may take."""

run = jax.jit(ost.rnn, static_argnums=0)


def draw(*shape, seed=0, scale=0.6, dtype=np.float32):
    return (np.random.default_rng([seed, *shape]).normal(size=shape) * scale).astype(
        dtype
    )


def weights_of(spec, seed=0, dtype=np.float32):
    return jnp.asarray(draw(spec.num_params, seed=seed, dtype=dtype))


def redraw(tree, seed=0):
    """The same tree with random values, as no initialiser of biases draws them."""
    leaves, structure = jax.tree.flatten(tree)
    new = [
        jnp.asarray(draw(*leaf.shape, seed=seed + n), leaf.dtype)
        for n, leaf in enumerate(leaves)
    ]
    return jax.tree.unflatten(structure, new)


@contextlib.contextmanager
def lenient():
    """JAX as other libraries expect it; the tests of this one are stricter."""
    with (
        jax.enable_x64(False),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        yield


def distance(imported, x, want):
    """The largest difference between our outputs and those of the other library."""
    y = run(imported.spec, imported.weights, jnp.asarray(x)).y
    assert y.shape == want.shape
    return float(np.abs(np.asarray(y) - np.asarray(want)).max())


def swaps(order):
    """All orders of gates in which two are swapped: `"i g f o"` for `"i f g o"`."""
    gates = order.split()
    for a, b in itertools.combinations(range(len(gates)), 2):
        wrong = list(gates)
        wrong[a], wrong[b] = gates[b], gates[a]
        yield " ".join(wrong)


def assert_swaps_show(monkeypatch, table, mode, convert, x, want):
    """The table's order gives the same numbers, and no order with two gates swapped."""
    assert distance(convert(), x, want) <= LIMIT
    for wrong in swaps(table[mode]):
        with monkeypatch.context() as patch:
            patch.setitem(table, mode, wrong)
            assert distance(convert(), x, want) > 1e-3, wrong


def assert_weights_are_checked(export, spec, traced=False, **options):
    """The exporter names `weights` that are no floats, do not fit or are traced."""
    weights = weights_of(spec)
    prepared = export(spec, ost.prepare(spec, weights), **options)
    assert jax.tree.structure(prepared) == jax.tree.structure(
        export(spec, weights, **options)
    )
    for wrong, error, words in [
        (weights.astype(int), TypeError, "have one of the dtypes"),
        (weights[:-1], ValueError, r"have shape \["),
        ([1.0], TypeError, "be an array"),
    ]:
        with pytest.raises(error, match=f"`weights` must {words}"):
            export(spec, wrong, **options)
    if not traced:
        with pytest.raises(TypeError, match="`weights` must not be traced"):
            jax.jit(lambda w: export(spec, w, **options) and 0)(weights)


def mutations(data, count, seed=0):
    """Damaged copies of a file: cut, overwritten, exchanged, repeated, grown."""
    rng = np.random.default_rng(seed)
    for n in range(count):
        bad = bytearray(data)
        at, size = int(rng.integers(len(bad))), int(rng.integers(1, 64))
        match n % 6:
            case 0:
                del bad[at:]
            case 1:
                bad[at] ^= 1 << int(rng.integers(8))
            case 2:
                bad[at : at + size] = rng.bytes(size)
            case 3:
                other = int(rng.integers(len(bad)))
                bad[at : at + size] = bad[other : other + size]
            case 4:
                bad[at : at + 8] = b"\xff" * 8
            case 5:
                bad[at:at] = bad[at : at + size]
        yield bytes(bad)


def assert_damage_is_one_error(read, path, data):
    """Each damaged file is read, or raises ValueError, soon; many raise."""
    whole = 0
    for bad in mutations(data, MUTATIONS):
        path.write_bytes(bad)
        start = time.process_time()
        with contextlib.suppress(ValueError):
            read(path)
            whole += 1
        assert time.process_time() - start < SECONDS
    assert whole < MUTATIONS * 0.9
