"""Random functions of one example under `ragged.vmap`, against a loop."""

import random_examples
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged_loop import check

numbers = st.integers(0, 9)
operation = st.tuples(
    st.sampled_from(list(random_examples.OPERATIONS)), numbers, numbers, numbers
)
options = [{}, {}, {"scan": "packed"}, {"scan": "packed", "lanes": 2}, {"tiers": 2}]


@settings(max_examples=30)
@given(
    st.lists(operation, min_size=4, max_size=12),
    st.sampled_from([0, 1, 2]),
    st.sampled_from(options),
)
def test_random_programs_equal_the_loop(operations, least, options):
    check(random_examples.program(operations, least), options)
