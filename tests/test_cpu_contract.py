"""Orders, names and numbers that cpu.py and the native library have to agree on."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import pytest

import ostinato as ost
from ostinato import _native
from ostinato._rnn import call, cpu, modes

library, reason = _native.status()
pytestmark = pytest.mark.skipif(library is None, reason=f"no native library: {reason}")
TEXT = "" if library is None else library.ostinato_contract().decode()
LINES = TEXT.splitlines()
SPEC = ost.RNNSpec("lstm", 3, 5)


def swapped(line: str, at: int) -> str:
    name, words = line.split(": ")
    each = words.split()
    each[at], each[at + 1] = each[at + 1], each[at]
    return f"{name}: {' '.join(each)}"


SWAPS = [
    (n, at)
    for n, line in enumerate(LINES)
    for at in range(len(line.split(": ")[1].split()) - 1)
    # The library numbers its modes; cpu.py takes the numbers from there.
    if not line.startswith("modes:") and swapped(line, at) != line
]


def with_line(n: int, line: str) -> str:
    return "\n".join([*LINES[:n], line, *LINES[n + 1 :]])


class FakeLibrary:
    def __init__(self, text: str):
        self.text = text

    def ostinato_contract(self) -> bytes:
        return self.text.encode()


def test_the_library_keeps_the_contract():
    assert cpu.disagreement(TEXT) is None


@pytest.mark.parametrize("n, at", SWAPS)
def test_two_swapped_words_are_refused(n, at):
    """Also where the arrays that they name are of equal size."""
    line = swapped(LINES[n], at)
    message = cpu.disagreement(with_line(n, line))
    assert message is not None
    name, theirs = line.split(": ")
    ours = LINES[n].split(": ")[1]
    assert f"{name} = {theirs!r}, want {ours!r}" in message


def test_a_line_that_is_missing_or_more_is_refused():
    for text in (with_line(len(LINES) - 1, "more: x"), "\n".join(LINES[:-1]), ""):
        assert "want" in str(cpu.disagreement(text))


class Swapped(NamedTuple):
    """`call.Operands` with its two arrays of lengths, int32 `[B]`, swapped."""

    weights: Any
    x: Any
    states: tuple
    segment_lengths: Any = None
    seq_lengths: Any = None
    resets: Any = None
    dropout_masks: tuple = ()
    prepared: Any = None


def test_swapped_operands_of_this_side_are_refused(monkeypatch):
    assert sorted(Swapped._fields) == sorted(call.Operands._fields)
    monkeypatch.setitem(cpu._TUPLES, "operands", Swapped)
    message = cpu.disagreement.__wrapped__(TEXT)
    assert "want 'weights x states segment_lengths seq_lengths" in str(message)


def test_a_mode_that_has_other_states_is_refused(monkeypatch):
    mode = modes.MODES["lstm"]
    monkeypatch.setitem(modes.MODES, "lstm", mode._replace(states=("c", "h")))
    assert "lstm = 'gates i f g o, states h c" in str(
        cpu.disagreement.__wrapped__(TEXT)
    )


def test_a_library_that_breaks_the_contract_is_not_used(monkeypatch):
    n = next(n for n, line in enumerate(LINES) if line.startswith("operands: "))
    fake: Any = FakeLibrary(with_line(n, swapped(LINES[n], 3)))
    status = _native.NativeStatus(fake, None)
    monkeypatch.setattr(_native, "status", lambda: status)
    available, detail = ost.backends()["cpu"]
    assert not available and "operands = " in detail
    weights = jnp.ones(SPEC.num_params)
    x = jnp.ones((1, 2, 3))
    assert ost.explain(SPEC, x).backend == "xla"
    with pytest.raises(ost.BackendError, match="operands = 'weights x states seg"):
        ost.rnn(SPEC, weights, x, backend="cpu")


def test_an_unknown_mode_is_an_error_of_the_library():
    """A number from outside never indexes a table of kernels."""
    assert library is not None
    pointer = library.ostinato_prepared_bytes.argtypes[1]
    numbers = (pointer._type_ * len(cpu._INTEGERS))(99)
    assert library.ostinato_prepared_bytes(0, numbers) == -1
