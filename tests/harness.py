"""Helpers that turn a case into a call of the library and of the oracle."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from cases import Case, Inputs, make_inputs
from oracles import loop64
from tolerance import assert_close

import ostinato as ost

COTANGENTS = ("dy", "dh_n", "dc_n")


def spec_of(case: Case) -> ost.RNNSpec:
    return ost.RNNSpec(**dataclasses.asdict(case.spec))


def key_of(case: Case):
    return jax.random.key(case.seed + 3) if case.keyed else None


def dropout_masks(case: Case, key):
    """Return masks by the contract: functions of key, layer and shape alone."""
    shape = (case.batch, case.steps, case.spec.width)
    kept = np.float32(1 - case.spec.dropout)
    return [
        np.asarray(jax.random.bernoulli(jax.random.fold_in(key, layer), kept, shape))
        for layer in range(case.spec.num_layers - 1)
    ]


def rounded(made: Inputs, dtype) -> Inputs:
    """Return the arrays for the library: floats in `dtype`, still batch-major.

    `jnp.asarray` would compile a program for each shape.
    """
    return Inputs(
        *(
            None
            if a is None
            else jax.device_put(a.astype(dtype) if a.dtype == np.float64 else a)
            for a in made
        )
    )


def lay_out(case: Case, name: str, value):
    """Convert a batch-major array of numpy to the layout of the case."""
    if value is None:
        return None
    state = name in ("h_0", "c_0", "dh_n", "dc_n")
    if case.time_major and name in ("x", "dy", "resets"):
        value = np.swapaxes(value, 0, 1)
    if case.unbatched and state:
        value = value[:, 0]
    elif case.unbatched and name != "weights":
        axis = 1 if case.time_major and value.ndim > 1 else 0
        value = np.squeeze(value, axis)
    return value


def batch_major(case: Case, name: str, value) -> np.ndarray:
    """Convert a result or gradient from the layout of the case to batch-major."""
    value = np.asarray(value)
    state = name in ("h_n", "c_n", "h_0", "c_0")
    if case.unbatched and name != "weights":
        value = np.expand_dims(value, 1 if state else 0)
    if case.time_major and not case.unbatched and not state and name != "weights":
        value = np.swapaxes(value, 0, 1)
    return value


def join(h, c):
    """Return the state as users see it; c is one array, or several on its last but one
    axis."""
    if c is None:
        return h
    return (h, c) if c.ndim == h.ndim else (h, *jnp.moveaxis(c, -2, 0))


def split(state):
    """Return the inverse of `join`."""
    if not isinstance(state, tuple):
        return state, None
    h, *cells = state
    stack = np.stack if isinstance(h, np.ndarray) else jnp.stack
    return h, cells[0] if len(cells) == 1 else stack(cells, axis=-2)


def arguments(case: Case, dtype="float64") -> Inputs:
    """Return the library's arguments and cotangents, in the layout of the case."""
    made = make_inputs(case)._asdict()
    return rounded(Inputs(*(lay_out(case, n, a) for n, a in made.items())), dtype)


def options_of(case: Case, made: Inputs, backend: str | None) -> dict:
    return {
        "seq_lengths": made.seq_lengths,
        "resets": made.resets,
        "key": key_of(case),
        "padding": case.padding,
        "time_major": case.time_major,
        "backend": backend,
    }


def call(case: Case, made: Inputs, backend: str | None, **changes):
    """Call ``ost.rnn`` on the arrays of `made`."""
    options = options_of(case, made, backend) | changes
    state = join(made.h_0, made.c_0)
    return ost.rnn(spec_of(case), made.weights, made.x, state, **options)


def value_and_pullback(case: Case, backend: str | None, jit=jax.jit, **changes):
    """Return a compiled function from `made` to values and all gradients."""

    @jit
    def run(made: Inputs):
        def operator(weights, x, h_0, c_0):
            given = made._replace(weights=weights, x=x, h_0=h_0, c_0=c_0)
            return call(case, given, backend, **changes)

        out, pull = jax.vjp(operator, made.weights, made.x, made.h_0, made.c_0)
        return out, pull(cotangent_of(made))

    return run


def cotangent_of(made: Inputs):
    return ost.RNNOutput(made.dy, join(made.dh_n, made.dc_n))


def named(case: Case, output, grads) -> dict[str, np.ndarray]:
    """Return results and gradients by name, batch-major."""
    output, grads = jax.device_get((output, grads))
    h_n, c_n = split(output.state)
    arrays = {"y": output.y, "h_n": h_n, "c_n": c_n}
    arrays |= {
        f"d{name}": g
        for name, g in zip(("weights", "x", "h_0", "c_0"), grads, strict=True)
    }
    return {
        name: batch_major(case, name.removeprefix("d"), a)
        for name, a in arrays.items()
        if a is not None
    }


def expected(case: Case, dtype="float64", keyed=True, only=None) -> dict:
    """Return what the oracle gives in place of `named`, for inputs rounded to `dtype`.

    `only` names one cotangent; the others are then zero.
    """
    result, pullback = _oracle(case, str(jnp.dtype(dtype)), keyed)
    made = rounded(make_inputs(case), dtype)
    cts = [getattr(made, n) if only in (None, n) else None for n in COTANGENTS]
    arrays = {**result._asdict()}
    arrays |= {f"d{n}": g for n, g in pullback(*cts)._asdict().items()}
    return {n: a for n, a in arrays.items() if a is not None}


@functools.cache
def _oracle(case: Case, dtype: str, keyed: bool):
    made = jax.device_get(rounded(make_inputs(case), dtype))
    masks = dropout_masks(case, key_of(case)) if case.keyed and keyed else None
    return loop64.vjp(
        case.spec,
        *(made.weights, made.x, made.h_0, made.c_0),
        seq_lengths=made.seq_lengths,
        resets=made.resets,
        dropout_masks=masks,
        padding=case.padding,
    )


def assert_same(case: Case, got: dict, want: dict, *, dtype, what: str = "") -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert got[name].dtype == jnp.dtype(dtype), f"{name}: {got[name].dtype}"
        assert_close(got[name], value, dtype=dtype, terms=case.terms, what=what + name)


def assert_padding_is_exact(case: Case, got: dict) -> None:
    """Check the padding: exact zeros, or exact copies of the last output."""
    for b, n in enumerate(case.lengths or ()):
        assert not got["dx"][b, n:].any()
        past = got["y"][b, n:]
        if case.padding != "hold":
            assert not past.any()
        elif n > 0:
            assert (past == got["y"][b, n - 1]).all()


def assert_says(info, words: str) -> None:
    """Check that the message holds every word, in any order."""
    message = str(info.value)
    for word in split_words(words):
        assert word in message, f"{word!r} is not in: {message}"


def split_words(text: str) -> list[str]:
    """Split a text at spaces outside brackets."""
    words, depth = [""], 0
    for letter in text:
        depth += (letter in "([") - (letter in ")]")
        if letter == " " and depth == 0:
            words.append("")
        else:
            words[-1] += letter
    return words
