"""The tests that every backend must pass. A subclass names the backend.

They compare forward and every gradient of every case with the float64 loop, and then
test properties that a case cannot show. Each case is compiled once and called with
several cotangents.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import BY_ID, CASES, Case
from compile_options import usual_jit
from harness import (
    COTANGENTS,
    arguments,
    assert_padding_is_exact,
    assert_same,
    call,
    cotangent_of,
    expected,
    join,
    key_of,
    lay_out,
    named,
    options_of,
    spec_of,
    split,
    value_and_pullback,
)
from tolerance import assert_close, assert_same_bits, tolerance

import ostinato as ost

AS_USERS = ("lstm-clip-proj-bi", "gru-heads", "slstm-L2-bi-ragged")
"""Cases that one test compiles as users do."""


program = functools.cache(value_and_pullback)
"""The same, compiled once for several tests, as lengths are traced."""


def cases(*ids: str):
    return pytest.mark.parametrize("case", [BY_ID[i] for i in ids], ids=list(ids))


class Conformance:
    """Tests of one backend, whose subclass ``Test<Backend>`` sets `backend`.

    Attributes:
        backend: the name that every call gets.
        dtype: the dtype of the main tests, the widest that the backend has.
        dtypes: all dtypes that the backend has.
        refuses: ids of cases that must raise a ``BackendError`` instead.
    """

    backend: str
    dtype = "float64"
    dtypes = ("float64", "float32", "bfloat16", "float16")
    refuses: frozenset[str] = frozenset()

    def refused(self, case: Case, dtype=None) -> bool:
        """Return whether the case must raise an error, and check that it does."""
        if case.id not in self.refuses:
            return False
        with pytest.raises(ost.BackendError):
            call(case, arguments(case, dtype or self.dtype), self.backend)
        return True

    def check(self, case: Case, dtype=None, **options) -> None:
        """Check values and gradients: all cotangents together, then each alone."""
        dtype = dtype or self.dtype
        if self.refused(case, dtype):
            return
        made = arguments(case, dtype)
        run = (value_and_pullback if options else program)(
            case, self.backend, **options
        )
        for only in (None, *COTANGENTS):
            if only is not None and getattr(made, only) is None:
                continue
            zeros = {
                n: np.zeros_like(getattr(made, n))
                for n in COTANGENTS
                if only not in (None, n) and getattr(made, n) is not None
            }
            got = named(case, *run(made._replace(**zeros)))
            want = expected(case, dtype, only=only)
            assert_same(case, got, want, dtype=dtype, what=f"{only or 'all'}: ")
            assert_padding_is_exact(case, got)

    @pytest.mark.alike
    @pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
    def test_forward_and_gradients_match_float64_loop(self, case):
        self.check(case)

    @pytest.mark.alike
    @cases(  # without relu, whose slope jumps where 16 bits round a 0 to above 0
        "tanh-L2-bi-ragged",
        "tanh-skip",
        "lstm-L2-bi-ragged",
        "lstm-clip-proj-bi",
        "gru-resets",
        "gru_before-L2-bi-ragged",
        "slstm-L2-bi-ragged",
        "lstm-heads-proj",
        "gru-heads",
    )
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    def test_narrow_dtypes_match_float64_loop(self, case, dtype):
        if dtype not in self.dtypes:
            with pytest.raises(ost.BackendError, match=dtype):
                call(case, arguments(case, dtype), self.backend)
            return
        # A cell of each kind as users compile.
        as_users = dtype == "float32" and case.id in AS_USERS
        self.check(case, dtype, jit=usual_jit if as_users else jax.jit)

    @cases(
        "relu-L2-bi-ragged",
        "lstm-everything",
        "lstm-resets",
        "lstm-dropout",
        "gru-L2-bi-ragged",
        "gru_before-everything",
        "lstm-T128",
        "gru-T257",
        "gru-B0-T130",
        "slstm-T130",
        "gru-heads-many",
    )
    def test_recompute_changes_nothing(self, case):
        self.check(case, recompute=True)

    @cases("lstm-proj-L2-bi-ragged", "gru-resets", "tanh-unbatched-hold", "lstm-T0")
    def test_no_initial_state_means_zeros(self, case):
        made = arguments(case, self.dtype)
        h_0, c_0 = jax.tree.map(np.zeros_like, (made.h_0, made.c_0))
        out, grads = program(case, self.backend)(made._replace(h_0=h_0, c_0=c_0))

        @jax.jit
        def run(made):
            spec, options = spec_of(case), options_of(case, made, self.backend)
            operator = lambda w, x: ost.rnn(spec, w, x, **options)  # noqa: E731
            out, pull = jax.vjp(operator, made.weights, made.x)
            return out, pull(cotangent_of(made))

        absent, zeros = run(made), (out, grads[:2])
        for a, b in zip(jax.tree.leaves(absent), jax.tree.leaves(zeros), strict=True):
            assert_close(a, b, terms=case.terms)

    @cases("lstm-everything", "gru_before-everything", "relu-dropout-hold")
    def test_second_call_gives_the_same_bits(self, case):
        if self.refused(case):
            return
        made = arguments(case, self.dtype)
        run = value_and_pullback(case, self.backend, jit=usual_jit)
        first, second = (jax.tree.leaves(run(made)) for _ in range(2))
        for a, b in zip(first, second, strict=True):
            assert_same_bits(a, b)

    @cases("lstm-L2-bi-ragged", "gru-time_major")
    def test_lengths_share_one_compilation(self, case):
        traces, inner = [], program(case, self.backend)

        @jax.jit
        def run(made):
            traces.append(case.id)
            return inner(made)

        for lengths in (case.lengths, (0, 5, 2, 2), (5, 5, 5, 5)):
            other = dataclasses.replace(case, lengths=lengths)
            got = named(other, *run(arguments(other, self.dtype)))
            assert_same(other, got, expected(other, self.dtype), dtype=self.dtype)
        assert len(traces) == 1

    @cases("lstm-L2-bi-ragged", "gru-plain")
    def test_concrete_lengths_equal_traced_ones(self, case):
        lengths = (3, 0, 5, 1)[-case.batch :]
        case = dataclasses.replace(case, lengths=lengths)
        made, want = arguments(case, self.dtype), expected(case, self.dtype)
        kinds = (np.asarray(lengths), np.asarray(lengths, np.uint8), list(lengths))
        for given in kinds:
            eager = call(case, made, self.backend, seq_lengths=given)
            assert_close(eager.y, want["y"], terms=case.terms)
        closed = jax.jit(lambda made: call(case, made, self.backend, seq_lengths=given))
        assert_close(closed(made).y, want["y"], terms=case.terms)

    @cases("lstm-hold", "lstm-drop", "gru-unbatched")
    def test_traced_lengths_out_of_range_are_clamped(self, case):
        wild, tame = (9, -4, 5, -1)[: case.batch], (5, 0, 5, 0)[: case.batch]
        run, case = program(case, self.backend), dataclasses.replace(case, lengths=tame)
        made = arguments(case, self.dtype)
        # The others share a program, and so its type of lengths.
        lengths = np.array(wild[0]) if case.unbatched else np.array(wild, np.int32)
        got = named(case, *run(made._replace(seq_lengths=lengths)))
        want = expected(case, self.dtype)
        assert_same(case, got, want, dtype=self.dtype)

    @cases(
        "lstm-resets",
        "gru-unbatched",
        "gru_before-everything",
        "relu-plain",
        "slstm-resets",
        "slstm-heads-proj",
    )
    def test_steps_one_by_one_equal_the_sequence(self, case):
        if self.refused(case):
            return
        case = dataclasses.replace(
            case, lengths=None, resets=False, padding="zero",
            spec=dataclasses.replace(case.spec, dropout=0.0),
        )  # fmt: skip
        made, spec = arguments(case, self.dtype), spec_of(case)
        step = jax.jit(
            lambda x, state: ost.rnn_step(
                spec, made.weights, x, state, backend=self.backend
            )
        )
        want = expected(case, self.dtype)
        want_y, x = lay_out(case, "dy", want["y"]), np.asarray(made.x)
        state = join(made.h_0, made.c_0)
        for t in range(case.steps):
            y, state = step(x[t] if case.unbatched else x[:, t], state)
            y_t = want_y[t] if case.unbatched else want_y[:, t]
            assert_close(y, y_t, terms=case.terms, what=f"y at step {t}")
        h_n, c_n = split(state)
        assert_close(h_n, lay_out(case, "h_0", want["h_n"]), terms=case.terms)
        if c_n is not None:
            assert_close(c_n, lay_out(case, "c_0", want["c_n"]), terms=case.terms)

    @cases(
        "relu-hold",
        "lstm-everything",
        "lstm-unbatched",
        "gru-resets",
        "gru-T0",
        "gru_before-drop",
        "slstm-proj",
    )
    @pytest.mark.parametrize("recompute", [False, True])
    def test_explicit_passes_match_float64_loop(self, case, recompute):
        if self.refused(case):
            return
        made, spec = arguments(case, self.dtype), spec_of(case)
        options = options_of(case, made, self.backend)

        @jax.jit
        def both(made):
            state = join(made.h_0, made.c_0)
            out, reserve = ost.rnn_forward(
                spec, made.weights, made.x, state, recompute=recompute, **options
            )
            dstate = join(made.dh_n, made.dc_n)
            return out, [
                ost.rnn_backward(spec, made.weights, reserve, made.dy, *given)
                for given in ((dstate,), ())
            ]

        out, grads = both(made)
        for only, g in zip((None, "dy"), grads, strict=True):
            flat = (g.weights, g.x, *split(g.initial_state))
            got, want = named(case, out, flat), expected(case, self.dtype, only=only)
            assert_same(case, got, want, dtype=self.dtype, what=f"{only}: ")
            assert_padding_is_exact(case, got)

    @cases("lstm-dropout", "gru-dropout-time_major")
    def test_without_a_key_nothing_is_dropped(self, case):
        made = arguments(case, self.dtype)
        out = jax.jit(lambda made: call(case, made, self.backend, key=None))(made)
        got = named(case, out, (None,) * 4)
        want = expected(case, self.dtype, keyed=False)
        assert_same(case, got, {k: want[k] for k in got}, dtype=self.dtype)

    @cases("lstm-dropout", "tanh-dropout-unbatched")
    def test_certain_dropout_leaves_zeros_for_the_next_layer(self, case):
        spec = dataclasses.replace(case.spec, dropout=1.0)
        self.check(dataclasses.replace(case, spec=spec))

    @cases("gru-dropout-time_major")
    def test_old_and_new_keys_give_one_mask(self, case):
        made, new = arguments(case, self.dtype), key_of(case)
        run = jax.jit(lambda made, key: call(case, made, self.backend, key=key))
        old = jax.random.key_data(new)
        y = np.asarray(run(made, new).y)
        assert_same_bits(run(made, old).y, y)
        other = np.asarray(run(made, jax.random.key(99)).y)
        assert np.abs(other - y).max() > 1e-3

    @cases("lstm-dropout", "gru-dropout-time_major")
    def test_mask_does_not_depend_on_the_lengths(self, case):
        """Check that a result does not change when another sequence gets longer."""
        run = program(case, self.backend)
        made = arguments(case, self.dtype)
        full = dataclasses.replace(case, lengths=(5, 5, 5, 5))
        longer = arguments(full, self.dtype)
        first = np.where(np.isnan(made.x), longer.x, made.x)
        lengths = np.array(made.seq_lengths)
        lengths[1] = 5
        a, b = (
            sequences(case, np.asarray(run(given)[0].y), [0, 2, 3])
            for given in (made, made._replace(x=first, seq_lengths=lengths))
        )
        assert_close(a, b, terms=case.terms)

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_sixteen_bit_values_are_summed_in_float32(self, dtype):
        """Check sums so long that a 16-bit number would not grow any more."""
        if dtype not in self.dtypes:
            pytest.skip(f"the backend {self.backend} has no {dtype}")
        steps = 6000 if dtype == "float16" else 600
        eps = float(jnp.finfo(dtype).eps)
        run = lambda spec, w, x: ost.rnn(spec, w, x, backend=self.backend)  # noqa: E731
        put = lambda *arrays: jax.device_put([a.astype(dtype) for a in arrays])  # noqa: E731
        # An open forget gate makes the cell a running sum: 6000 / 4 = 1500 here.
        spec = ost.RNNSpec("lstm", 1, 1, bias="input")
        weights = np.array([0.0] * 8 + [30.0, 30.0, np.arctanh(0.25), 30.0])
        _, (_, c_n) = run(spec, *put(weights, np.zeros((1, steps, 1))))
        np.testing.assert_allclose(float(np.squeeze(c_n)), steps / 4, rtol=4 * eps)

        # A linear unit over ones: a product, and then two gradients, count the ones.
        spec = ost.RNNSpec("rnn_relu", steps, 1, bias="input")
        weights = np.array([1] * steps + [0, 0])
        y, _ = run(spec, *put(weights, np.ones((1, steps))))
        np.testing.assert_allclose(float(np.squeeze(y)), steps, rtol=eps)
        spec = ost.RNNSpec("rnn_relu", 1, 1, bias="input")
        total = lambda w, x: jnp.sum(run(spec, w, x).y)  # noqa: E731
        given = put(np.array([1, 0, 0]), np.ones((1, steps, 1)))
        w_ih, _, b_ih = np.asarray(jax.jit(jax.grad(total))(*given), np.float64)
        np.testing.assert_allclose([w_ih, b_ih], steps, rtol=eps)

    def test_clip_nan_stops_a_nan_in_the_cell(self):
        case = BY_ID["lstm-clip-nan"]
        made, run = with_nan_in_the_cell(case, self.dtype), program(case, self.backend)
        assert all(np.isfinite(a).all() for a in jax.tree.leaves(run(made)))
        one, _ = run(made._replace(seq_lengths=np.ones(4, np.int32)))
        c_n = np.asarray(one.state[1])
        assert c_n[0, 0, 1] == np.asarray(case.spec.cell_clip, self.dtype)

    def test_without_clip_nan_a_nan_in_the_cell_shows(self):
        case = BY_ID["lstm-clip-proj-bi"]
        made = with_nan_in_the_cell(case, self.dtype)
        out, _ = program(case, self.backend)(made)
        assert np.isnan(np.asarray(out.state[1])[0, 0, 1])

    def test_tolerance_notices_swapped_gates(self):
        """Check that the comparison above would notice gates in another order."""
        case = BY_ID["lstm-plain"]
        spec, made = spec_of(case), arguments(case, self.dtype)
        layers = ost.unpack_weights(made.weights, spec)
        swap = [
            layer._replace(w_ih=np.roll(layer.w_ih, spec.hidden_size, axis=0))
            for layer in layers
        ]
        other = made._replace(weights=ost.pack_weights(swap, spec))
        run = program(case, self.backend)
        got, want = named(case, *run(other)), expected(case, self.dtype)
        for name in want:
            error = np.abs(got[name] - want[name]).max()
            assert error > 100 * tolerance(self.dtype, case.terms), name


def with_nan_in_the_cell(case: Case, dtype):
    made = arguments(case, dtype)
    c_0 = np.array(made.c_0)
    c_0[0, 0, 1] = np.nan
    return made._replace(c_0=c_0)


def sequences(case: Case, y, indices):
    return y[:, indices] if case.time_major else y[indices]
