"""Products of bfloat16 in tiles: those of avx512_amx, and everywhere emulated ones.

The emulation is of the instructions alone: everything around them is what runs.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_cpu
from cases import BY_ID
from emulation import EMULATED, level, tiles
from harness import arguments, assert_padding_is_exact, assert_same, expected, named
from tolerance import assert_same_bits

import ostinato as ost

pytestmark = test_cpu.pytestmark
TILES = [level(isa) for isa in (EMULATED, "avx512_amx")]
TILED = [  # one and two rows of tiles, several tiles deep, whole and with a rest
    test_cpu.wide("lstm-I64-H64-B40", "lstm", 64, 40, True, input_size=64),
    test_cpu.wide(
        "lstm-I70-H96-B35", "lstm", 96, 35, True, input_size=70, proj_size=40
    ),
    test_cpu.wide("gru-I96-H64-B65", "gru", 64, 65, True, input_size=96, resets=True),
    test_cpu.wide(
        "gru-I33-H35-B16", "gru", 35, 16, False, input_size=33, **test_cpu.DEEP
    ),
    test_cpu.wide("tanh-I64-H130-B3", "rnn_tanh", 130, 3, True, input_size=64),
]


@pytest.mark.parametrize("isa", TILES)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("case", TILED, ids=lambda c: c.id)
def test_tiles_of_bfloat16(case, recompute, isa, configure):
    """Values, gradients and bits, and every thread has given its registers back."""
    made = arguments(case, "bfloat16")
    run = test_cpu.compiled(case, recompute=recompute)
    configure(isa, 1)
    before = tiles().ostinato_tile_products() if isa == EMULATED else 0
    alone = named(case, *run(made))
    if isa == EMULATED:
        assert tiles().ostinato_tile_products() > before
    assert_same(case, alone, expected(case, "bfloat16"), dtype="bfloat16")
    assert_padding_is_exact(case, alone)
    configure(isa, 3)
    for name, value in named(case, *run(made)).items():
        assert_same_bits(value, alone[name], name)
    if isa == EMULATED:
        assert tiles().ostinato_threads_with_tiles() == 0


@pytest.mark.parametrize("isa", TILES)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    "id",
    [
        "tanh-L2-bi-ragged",
        "lstm-everything",
        "lstm-clip-proj-bi",
        "lstm-T128",
        "gru-resets",
        "gru-L2-bi-ragged",
        "gru-T257",
    ],
)
def test_conformance_where_tiles_are(id, recompute, isa, configure):
    """Gradients multiply bfloat16 there, also in products too small for a tile."""
    configure(isa, 2)
    test_cpu.TestCpu().check(BY_ID[id], "bfloat16", recompute=recompute)


@pytest.mark.parametrize("isa", TILES)
def test_rows_have_the_same_bits_in_any_batch_of_tiles(isa, configure):
    """A product has tiles of as many rows as there are: their sums are the same.

    That is what `batch_invariant` promises, of gradients of inputs, too.
    """
    configure(isa, 2)
    spec = ost.RNNSpec("lstm", 64, 64, batch_invariant=True)
    weights = ost.init_weights(jax.random.key(0), spec, jnp.bfloat16)
    x = jax.random.normal(jax.random.key(1), (67, 2, 64), jnp.bfloat16)

    @jax.jit
    def run(x):
        y, pull = jax.vjp(lambda x: ost.rnn(spec, weights, x, backend="cpu").y, x)
        return y, pull(x)[0]

    want = [np.asarray(a) for a in run(x)]
    for rows in (1, 2, 15, 17, 33):
        for got, all_of_it in zip(run(x[:rows]), want, strict=True):
            assert_same_bits(got, all_of_it[:rows], f"{rows} rows")


@pytest.mark.parametrize("isa", TILES)
def test_weights_prepared_for_vectors_serve_tiles(isa, configure):
    """Panels are the same, and results with them."""
    spec = ost.RNNSpec("gru", 40, 70)
    weights = ost.init_weights(jax.random.key(0), spec, jnp.bfloat16)
    x = jax.random.normal(jax.random.key(1), (3, 7, 40), jnp.bfloat16)
    configure("avx512_bf16", 2)
    prepared = ost.prepare(spec, weights)
    configure(isa, 2)
    with_them = ost.rnn(spec, prepared, x, backend="cpu").y
    assert_same_bits(with_them, ost.rnn(spec, weights, x, backend="cpu").y)


@pytest.mark.parametrize("isa", [level("avx512_amx")])
def test_tiles_of_other_libraries_in_one_process(isa, configure):
    """torch's products use the registers too, in turns with ours on one thread."""
    torch = pytest.importorskip("torch", reason="needs torch, of the extra `peers`")
    case = TILED[0]
    made, run = arguments(case, "bfloat16"), test_cpu.compiled(case, recompute=False)
    configure(isa, 2)
    a = torch.randn(70, 96, dtype=torch.bfloat16)
    b = torch.randn(96, 50, dtype=torch.bfloat16)
    ours, theirs = jax.tree.leaves(run(made)), a @ b
    for _ in range(5):
        for got, want in zip(jax.tree.leaves(run(made)), ours, strict=True):
            assert_same_bits(got, want)
        assert torch.equal(a @ b, theirs)
