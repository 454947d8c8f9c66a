"""Tests of packed storage: the same results as for a padded batch, without padding.

Both backends are compared with the float64 loop. Tokens outside the steps of sequences
are NaN in inputs (True in masks), and must be zero in results.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import BY_ID, CASES, Case, Inputs
from closures import BY_ID as CLOSURES
from closures import direction_of, fast_jit, loss_of, ours_in, plain, primal_of
from harness import assert_same, expected
from jaxprs import equations_in
from packed import (
    PackedRun,
    Placement,
    call_of,
    on_packed,
    operator,
    own_lengths,
    value_and_pullback,
)
from test_second_derivatives import MODES, clean
from test_transforms import assert_trees_close
from tolerance import assert_close, assert_same_bits

from ostinato import _native
from ostinato._rnn import cpu
from ostinato._rnn.call import Operands, Packed, RNNCall

PLAIN = [
    case.id
    for case in CASES
    if not (case.time_major or case.unbatched or case.padding != "zero")
]
AFTER = [i for i in PLAIN if BY_ID[i].spec.reset_after]
SOME = ["lstm-dropout", "gru_before-L2-bi-ragged"]
NARROW = ["lstm-clip-proj-bi", "gru-resets"]
native = pytest.mark.skipif(
    _native.status().library is None,
    reason=f"no native library: {_native.status().reason}",
)


def on_both(cpu, xla):
    """Parametrize a test by backend and case.

    The xla backend needs few cases, since it pads and runs code tested elsewhere.
    """
    return pytest.mark.parametrize(
        ("backend", "case"),
        [pytest.param("cpu", BY_ID[i], id=f"cpu-{i}", marks=native) for i in cpu]
        + [pytest.param("xla", BY_ID[i], id=f"xla-{i}") for i in xla],
    )


both = pytest.mark.parametrize(
    "backend", [pytest.param("cpu", marks=native), pytest.param("xla")]
)


def segment_lengths_of(case: Case) -> list:
    """Return segments as long as the steps, longer ones, and the longest possible."""
    own = np.array(own_lengths(case), int)
    more = np.minimum(own + np.arange(case.batch) % 3, case.steps)
    return [own, more, np.full(case.batch, case.steps)]


def check(case: Case, backend: str, dtype="float64", **changes) -> None:
    run = value_and_pullback(call_of(case, backend, **changes))
    capacity = case.steps * case.batch + 2
    for lengths in segment_lengths_of(case):
        packed = PackedRun(case, Placement.of(lengths, capacity), dtype)
        got = packed.named(*run(*packed.arguments()))
        assert_same(case, got, expected(case, dtype), dtype=dtype, what=f"{lengths} ")
        for b, n in enumerate(own_lengths(case)):
            assert not got["y"][b, n:].any()
            assert not got["dx"][b, n:].any()


@on_both(AFTER, SOME)
def test_forward_and_gradients_match_float64_loop(backend, case):
    check(case, backend)


@on_both(NARROW, NARROW[:1])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_narrow_dtypes_match_float64_loop(backend, case, dtype):
    check(case, backend, dtype)


@on_both(["lstm-resets", "gru-L2-bi-ragged", "lstm-T128", "gru-B0"], ["lstm-resets"])
def test_recompute_changes_nothing(backend, case):
    check(case, backend, recompute=True)


@both
def test_lengths_share_one_compilation_and_may_fill_all_rows(backend):
    case, traces = BY_ID["lstm-L2-bi-ragged"], []
    inner = value_and_pullback(call_of(case, backend))

    @jax.jit
    def run(*args):
        traces.append(args)
        return inner(*args)

    for lengths in ((5, 5, 2, 0), (0, 5, 2, 2), (0, 0, 0, 0), (3, 4, 0, 5)):
        other = dataclasses.replace(case, lengths=lengths)
        packed = PackedRun(other, Placement.of(lengths, 12))
        got = packed.named(*run(*packed.arguments()))
        assert_same(other, got, expected(other), dtype="float64", what=f"{lengths} ")
    assert len(traces) == 1


@both
def test_what_does_not_fit_is_cut_off(backend):
    """Check lengths that are too large or negative: no token of others is read."""
    case = BY_ID["gru-L2-bi-ragged"]
    packed = PackedRun(case, Placement.of((4, 4, 4, 0), 13))
    made, _, masks = packed.arguments()
    run = value_and_pullback(call_of(case, backend))
    wild = jnp.array([4, -3, 9, 20], jnp.int32)
    steps = jnp.array([4, 2, 20, -1], jnp.int32)
    tame = jnp.array([4, 0, 9, 0], jnp.int32)
    made = made._replace(x=jnp.nan_to_num(made.x), dy=jnp.nan_to_num(made.dy))
    cut = jnp.array([4, 0, 5, 0], jnp.int32)
    got = run(made._replace(seq_lengths=steps), wild, masks)
    want = run(made._replace(seq_lengths=cut), tame, masks)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_same_bits(a, b)
    assert not got[0].y[9:].any()
    assert got[0].y[8].any()


@both
@pytest.mark.parametrize(
    ("batch", "steps", "capacity"), [(0, 5, 4), (3, 0, 4), (3, 5, 0), (0, 0, 0)]
)
def test_nothing_to_run_gives_zeros_and_the_initial_state(
    backend, batch, steps, capacity
):
    case = dataclasses.replace(
        BY_ID["lstm-L2-bi-ragged"], batch=batch, steps=steps, lengths=(0,) * batch
    )
    packed = PackedRun(case, Placement.of((0,) * batch, capacity))
    got = packed.named(*value_and_pullback(call_of(case, backend))(*packed.arguments()))
    assert_same(case, got, expected(case), dtype="float64")


# -------------------------------------------------------------------- transformations


@pytest.mark.parametrize(
    ("backend", "id", "modes"),
    [
        pytest.param("cpu", "lstm", MODES[:1], marks=native),
        pytest.param("cpu", "heads", MODES, marks=native),
        ("xla", "gru", MODES[:1]),
    ],
)
def test_derivatives_match_the_plain_scan(backend, id, modes):
    """Check forward mode, and second derivatives: once in every mix of modes."""
    case = CLOSURES[id]
    primal, step = primal_of(case), direction_of(case)
    loss, reference = (
        loss_of(case, on_packed(case, backend)),
        loss_of(case, plain(case)),
    )

    @fast_jit
    def derivatives(p, d):
        return jax.jvp(loss, (p,), (d,))[1], [mode(loss, p, d) for mode in modes]

    @fast_jit
    def wanted(p, d):
        return jax.jvp(reference, (p,), (d,))[1], MODES[0](reference, p, d)

    slope, products = derivatives(primal, clean(step))
    want_slope, want = wanted(clean(primal), clean(step))
    assert_close(slope, want_slope, terms=1000)
    for result in products:
        assert_trees_close(result, want, terms=1000)


def two_runs() -> tuple[Case, dict]:
    """Stack the arguments of two runs that differ in values and lengths."""
    base, spread = BY_ID["lstm-dropout"], []
    for seed, lengths in ((1, (3, 0, 5, 1)), (2, (0, 4, 2, 5))):
        case = dataclasses.replace(base, seed=seed, lengths=lengths)
        made, segment_lengths, masks = PackedRun(
            case, Placement.of(lengths, 13)
        ).arguments()
        spread.append(
            made._asdict() | {"segment_lengths": segment_lengths, "masks": masks}
        )
    return base, jax.tree.map(lambda *a: jnp.stack(a), *spread)


def with_gradients(call: RNNCall):
    inner = value_and_pullback(call)
    return lambda made: inner(
        Inputs(**{n: made[n] for n in Inputs._fields}),
        made["segment_lengths"],
        made["masks"],
    )


@pytest.mark.parametrize(
    ("backend", "shared"),
    [
        pytest.param("cpu", (), marks=native),
        pytest.param("cpu", ("x",), marks=native),
        pytest.param("cpu", ("seq_lengths", "segment_lengths"), marks=native),
        pytest.param("cpu", ("weights",), marks=native),
        ("xla", ("weights",)),
    ],
)
def test_vmap_equals_a_loop(backend, shared):
    case, args = two_runs()
    for name in shared:  # so a NaN of the first run is a step of the second
        args[name] = jnp.nan_to_num(jnp.stack([args[name][0]] * 2))
    given = {n: args[n][0] if n in shared else args[n] for n in args}
    axes = {n: None if n in shared else 0 for n in args}
    run = with_gradients(call_of(case, backend))
    got = jax.jit(jax.vmap(run, (axes,)))(given)
    for i in range(2):
        want = run(jax.tree.map(lambda a, i=i: a[i], args))
        alone = jax.tree.map(lambda a, i=i: a[i], got)
        assert_trees_close(alone, want, terms=case.terms)


@native
def test_vmap_over_data_is_one_call_of_buffers():
    case, args = two_runs()
    weights = args["weights"][0]

    def run(made):
        given = Inputs(**{n: made[n] for n in Inputs._fields})._replace(weights=weights)
        return operator(
            call_of(case, "cpu"), given, made["segment_lengths"], made["masks"]
        )

    twice = jax.tree.map(lambda a: jnp.stack([a, a[::-1]]), args)
    jaxpr = jax.make_jaxpr(jax.vmap(jax.vmap(run)))(twice)
    calls = equations_in(jaxpr.jaxpr)
    (eqn,) = [e for e in calls if e.primitive.name == "ostinato_rnn"]
    assert eqn.params["call"].packed == Packed(5, buffers=4)
    assert not any(eqn.params["ensemble"])
    got, want = jax.jit(jax.vmap(jax.vmap(run)))(twice), jax.jit(jax.vmap(run))(args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_same_bits(a[0], b)
        assert_same_bits(a[1, 0], b[1])


@native
def test_gradient_is_two_fused_calls():
    case = CLOSURES["lstm"]
    loss = loss_of(case, on_packed(case, "cpu"))
    names = ours_in(jax.grad(loss), primal_of(case))
    assert [n for n in names if n != "ostinato_rnn_tangent"] == [
        "ostinato_rnn",
        "ostinato_rnn_bwd",
    ]


@both
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_shards_are_gathered(backend, kind):
    """Check that every device runs all tokens, since it cannot find its own share."""
    case = BY_ID["gru-L2-bi-ragged"]
    packed = PackedRun(case, Placement.of((3, 0, 5, 1), 12))
    kinds = (getattr(jax.sharding.AxisType, kind),)
    mesh = jax.make_mesh((4,), ("batch",), kinds, devices=jax.devices("cpu")[:4])
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("batch"))
    made, segment_lengths, masks = packed.arguments()
    x, steps, segment_lengths = jax.device_put(
        (made.x, made.seq_lengths, segment_lengths), split
    )
    made = made._replace(x=x, seq_lengths=steps)
    got = value_and_pullback(call_of(case, backend))(made, segment_lengths, masks)
    got = packed.named(*jax.tree.map(np.asarray, got))
    assert_same(case, got, expected(case), dtype="float64")


# ------------------------------------------------------------------- the native call


@native
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(packed=Packed(5, buffers=3)), "`packed_buffers` must divide"),
        (dict(lengths=3), "segment_lengths has 3 elements, want 4"),
        (dict(seq_lengths=5), "seq_lengths has 5 elements, want 4"),
        (dict(resets=11), "resets has 11 elements, want 12"),
    ],
    ids=["buffers", "segment_lengths", "seq_lengths", "resets"],
)
def test_a_call_that_does_not_add_up_is_an_error(change, message):
    case = BY_ID["gru-resets"]
    packed = PackedRun(case, Placement.of(own_lengths(case), 12))
    made, *_ = packed.arguments()
    call = RNNCall(call_of(case, "cpu").spec, packed=change.get("packed", Packed(5)))
    operands = Operands(
        *(made.weights, made.x, (made.h_0,)),
        seq_lengths=jnp.zeros(change.get("seq_lengths", 4), jnp.int32),
        segment_lengths=jnp.zeros(change.get("lengths", 4), jnp.int32),
        resets=jnp.zeros(change.get("resets", 12), bool),
    )
    results = jax.tree.leaves(call.output_shapes(operands))
    with pytest.raises(RuntimeError, match="ostinato_rnn_fwd.*" + message):
        run = jax.jit(lambda o: cpu.forward(call, results, (False,) * 6, o))
        jax.block_until_ready(run(operands))


@both
def test_a_sequence_that_begins_within_the_rows_ends_with_them(backend):
    case = BY_ID["gru-L2-bi-ragged"]
    packed = PackedRun(case, Placement.of((4, 4, 2, 0), 10))
    made, _, masks = packed.arguments()
    run = value_and_pullback(call_of(case, backend))
    made = made._replace(
        x=jnp.nan_to_num(made.x),
        dy=jnp.nan_to_num(made.dy),
        seq_lengths=jnp.full(4, case.steps, jnp.int32),
    )
    got = run(made, jnp.array([4, 4, 9, 20], jnp.int32), masks)
    want = run(made, jnp.array([4, 4, 2, 0], jnp.int32), masks)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_same_bits(a, b)


@native
def test_buffers_must_divide_the_tokens():
    case = BY_ID["gru-resets"]
    made, *_ = PackedRun(case, Placement.of(own_lengths(case), 13)).arguments()
    call = RNNCall(call_of(case, "cpu").spec, packed=Packed(5, buffers=2))
    numbers = jnp.zeros(4, jnp.int32)
    operands = Operands(
        *(made.weights, made.x, (made.h_0,)),
        seq_lengths=numbers,
        segment_lengths=numbers,
        resets=jnp.zeros(13, bool),
    )
    results = jax.tree.leaves(call.output_shapes(operands))
    with pytest.raises(RuntimeError, match="`packed_buffers` must divide"):
        run = jax.jit(lambda o: cpu.forward(call, results, (False,) * 6, o))
        jax.block_until_ready(run(operands))
