"""Random functions of one example under `ragged.vmap`, against a loop."""

import numpy as np
import pytest
import random_examples
from ragged_loop import check

OPTIONS = [{}, {}, {"scan": "packed"}, {"scan": "packed", "lanes": 2}, {"tiers": 2}]


@pytest.mark.alike
@pytest.mark.parametrize("seed", range(30))
def test_random_program_equals_the_loop(seed):
    rng = np.random.default_rng(seed)
    names = rng.choice(list(random_examples.OPERATIONS), rng.integers(4, 13))
    operations = [(str(name), *rng.integers(0, 10, 3).tolist()) for name in names]
    program = random_examples.program(operations, least=seed % 3)
    check(program, OPTIONS[rng.integers(len(OPTIONS))])
