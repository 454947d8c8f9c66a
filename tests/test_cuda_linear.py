"""Linear recurrences by the kernels of GPUs, run on the CPU, against numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_driver import calls
from cuda_emulation import gpu_in_place, needs_emulator
from linear_cases import CASES, SIZES, Case, check
from tolerance import assert_same_bits

import ostinato as ost
from ostinato._cuda import plan
from ostinato._cuda.device import Gpu

WIDE = (("each", (3,), (3,)), ("shared", (2, 1), (2, 3)), ("matrix", (2, 2), (2,)))
LONG = [  # several chunks, the last of which is short
    Case(kind, constant, dtype, reverse=reverse, resets=resets, time_major=resets,
         steps=steps, batch=2, shapes=(factors, units))
    for kind, factors, units in WIDE
    for constant, dtype, reverse, resets, steps in (
        (False, "float64", False, False, 97),
        (False, "float32", True, True, 130),
    )
]  # fmt: skip
LONG += [
    Case("one", steps=3000, batch=1, shapes=((), ())),  # chunks of chunks
    Case("each", dtype="bfloat16", steps=100, batch=1, shapes=((3,), (3,))),
    Case("matrix", dtype="complex64", steps=100, batch=1),
]


@pytest.fixture(scope="module")
def on_gpu():
    patch = pytest.MonkeyPatch()
    with gpu_in_place(patch):
        yield


SOME = [*CASES[:-6:4], *CASES[-6:], *SIZES[::2]]


@needs_emulator
@pytest.mark.parametrize("case", SOME, ids=lambda c: c.id)
def test_results_and_gradients_equal_numpy(case, on_gpu):
    before = len(calls())
    check(case, "cpu")
    ran = " ".join(calls()[before:])
    assert ("cuLaunchKernelEx linear_run" in ran) == (case.batch > 0)
    assert "error" not in ran


@needs_emulator
@pytest.mark.parametrize("case", LONG, ids=lambda c: c.id)
def test_chunks_equal_numpy(case, on_gpu):
    before = len(calls())
    check(case, "cpu")
    assert any("linear_summary" in call for call in calls()[before:])


@needs_emulator
@pytest.mark.parametrize("reverse", [False, True])
def test_ragged_chunks_equal_one_chunk(reverse, on_gpu, monkeypatch):
    rng = np.random.default_rng(1)
    lengths = jnp.array([130, 0, 1, 64, 65])
    a, b = (jnp.asarray(rng.standard_normal((5, 130, 3)), jnp.float64) for _ in "ab")
    past = (jnp.arange(130)[None] >= lengths[:, None])[..., None]
    a, b = (jnp.where(past, jnp.nan, x) for x in (0.7 * a, b))
    resets = jnp.asarray(rng.random((5, 130)) < 0.03)
    h_0 = jnp.asarray(rng.standard_normal((5, 3)))

    def run(backend):
        options = dict(reverse=reverse, seq_lengths=lengths, resets=resets)
        return ost.linear_recurrence(a, b, h_0, **options, backend=backend)

    got, want = run("cpu"), run("xla")
    np.testing.assert_allclose(got.h, want.h, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(got.h_n, want.h_n, rtol=1e-12, atol=1e-12)
    assert_same_bits(got.h_n[1], h_0[1])


@needs_emulator
def test_a_reset_forgets_what_is_not_finite_in_an_earlier_chunk(on_gpu):
    b = jnp.ones((1, 200, 1)).at[0, 3, 0].set(jnp.inf)
    resets = jnp.zeros((1, 200), bool).at[0, 100].set(True)
    h, _ = ost.linear_recurrence(jnp.ones(1), b, resets=resets, backend="cpu")
    assert np.isinf(h[0, 50, 0]) and h[0, 199, 0] == 100


@needs_emulator
def test_devices_share_a_batch(on_gpu):
    mesh = jax.make_mesh((4,), ("b",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.NamedSharding(mesh, jax.P("b"))
    b = jnp.arange(4 * 70.0).reshape(4, 70, 1)
    run = jax.jit(lambda a, b: ost.linear_recurrence(a, b, backend="cpu").h)
    want = jax.block_until_ready(run(jnp.full(1, 0.5), b))
    before = len(calls())
    got = jax.block_until_ready(run(jnp.full(1, 0.5), jax.device_put(b, split)))
    launches = [c for c in calls()[before:] if c.startswith("cuLaunchKernelEx")]
    assert len(launches) == 3 * 4  # of each device: summaries, their states, all steps
    assert got.sharding.is_equivalent_to(split, 3)
    assert_same_bits(got, want)


# Each is a mistake that a kernel could have, as a change of its text.
BUGS = {
    "no mask of lengths": ("given < r.steps ? given : r.steps", "r.steps"),
    "padding is not zeroed": ("t < end && t < r.steps", "t < part.first"),
    "resets are ignored": ("if (step.reset) moved[i] = 0;", ""),
    "no state between chunks": ("Load(before + (part.chunk - 1) * states", "0 * (0"),
    "the state of another chunk": ("(part.chunk - 1) * states", "0 * states"),
    "wrong direction": ("r.reverse ? part.length - 1 - k : k", "k"),
    "reverse from the padded end": ("part.length - 1 - k", "r.steps - 1 - k"),
    "factor on the wrong side": ("? state[i] + step.b[i] :", "? state[i] :"),
    "rows and columns": ("a[i * kParts + j] * x[j]", "a[j * kParts + i] * x[j]"),
    "past the end": ("if (k + i < part.last) LoadStep", "LoadStep"),
    "too many threads": ("if (index >= columns * r.chunks) return false;", ""),
    "last state of the first chunk": ("part.chunk != r.chunks - 1", "part.chunk != 0"),
    "product transposed": ("[i * kParts + column] = to", "[column * kParts + i] = to"),
    "resets inside are lost": ("reset = reset || step.reset;", ""),
}  # fmt: skip
HARD = [
    Case("matrix", reverse=True, ragged=True, resets=True),
    Case("matrix", resets=True, steps=97, batch=2),
    Case("matrix", steps=97, batch=1),
]


@needs_emulator
@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_caught(bug, monkeypatch):
    old, new = BUGS[bug]

    def change(text):
        assert text.count(old) >= 1
        return text.replace(old, new)

    failures = []
    with gpu_in_place(monkeypatch, change):
        for case in HARD:
            try:
                check(case, "cpu")
            except (AssertionError, jax.errors.JaxRuntimeError) as failure:
                failures.append(failure)
                break
    assert failures


# --------------------------------------------------------------------------------- plan

H200 = Gpu("H200", (9, 0), 132, 232448, "13.0")


@pytest.mark.parametrize(
    ("dtype", "block", "sizes", "words"),
    [
        ("float16", None, (4, 5, 6), "no kernels for float16"),
        ("int32", None, (4, 5, 6), "no kernels for int32"),
        ("float32", 3, (4, 5, 6), r"not [3, 3]"),
        ("float32", None, (4, 2**20, 2**20), "more than one launch holds"),
    ],
)
def test_the_plan_says_what_has_no_kernel(dtype, block, sizes, words):
    assert words in plan.linear(dtype, block, *sizes, H200)


@pytest.mark.parametrize("steps", [0, 1, 31, 32, 33, 63, 64, 1000, 1_000_001])
@pytest.mark.parametrize("batch", [0, 1, 3, 64, 200_000])
@pytest.mark.parametrize("units", [1, 2, 130])
def test_chunks_cover_all_steps(steps, batch, units):
    for block in (None, 2)[: 1 + (units % 2 == 0)]:
        found = plan.linear("float32", block, steps, batch, units, H200)
        assert found.columns == batch * units // (block or 1)
        assert found.chunks * found.chunk >= steps
        assert (found.chunks - 1) * found.chunk < max(1, steps)
        assert found.chunks == 1 or found.chunk >= 32
        assert found.grid(found.chunks).blocks * plan.THREADS >= found.columns
        if found.columns >= H200.processors * 1024:
            assert found.chunks == 1


def test_a_plan_is_told():
    assert "8192 threads, one for each" in str(
        plan.linear("float32", None, 9, 64, 128, H200)
    )
    long = str(plan.linear("float32", None, 2**20, 1, 1, H200))
    assert "32768 threads, 32768 chunks of 32 steps for each" in long
