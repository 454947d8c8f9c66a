"""`ragged.vmap` of every program against a loop over the examples."""

import pytest
from ragged_loop import check, length_sets, other_tokens_in_padding
from ragged_programs import BY_NAME, PROGRAMS

CASES = [
    pytest.param(
        program,
        options,
        id="-".join([program.name, *(f"{k}={v}" for k, v in options.items())]),
    )
    for program in PROGRAMS
    for options in program.options
]


def test_length_sets_cover_what_may_go_wrong():
    """With and without unused capacity, empty examples and batches where allowed."""
    assert len(PROGRAMS) >= 150
    assert len(BY_NAME) == len(PROGRAMS)
    for program in PROGRAMS:
        sets = length_sets(program)
        for dim in program.dims:
            sums = [sum(lengths[dim]) for lengths in sets]
            assert len(set(sums)) > 1
            drawn = {k for lengths in sets for k in lengths[dim]}
            assert (0 in drawn) == (0 in sums) == (program.at_least == 0)
            assert min(drawn) >= program.at_least or dim == "m"


@pytest.fixture(autouse=True)
def _padding(monkeypatch):
    other_tokens_in_padding(monkeypatch)


@pytest.mark.alike
@pytest.mark.parametrize("program, options", CASES)
def test_program_equals_the_loop(program, options):
    check(program, options)
