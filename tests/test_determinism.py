"""Tests that results have the same bits on every run, for any number of threads.

On the cpu backend no result depends on the number of threads. On xla there is one
exception, documented in docs/faq.md: weight gradients are sums over all steps by XLA's
matrix product, which splits long sums by the number of threads.
"""

import functools
import os
import subprocess
import sys

import pytest

import ostinato as ost

PROGRAM = """
import hashlib, os, sys
backend, pinned, *counts = sys.argv[1:]
if pinned == "pinned":
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import jax, jax.numpy as jnp, numpy as np
import ostinato as ost
from ostinato import _config, _native

calls = []
# What XLA compiles takes long: one mode of one layer.
layers, modes = (2, ["lstm", "gru", "rnn_tanh"]) if backend == "cpu" else (1, ["lstm"])
for mode in modes:
    spec = ost.RNNSpec(mode, 96, 96, layers, bidirectional=True)
    weights = ost.init_weights(jax.random.key(0), spec)
    x = jax.random.normal(jax.random.key(1), (24, 50, 96))
    run = lambda w, x, spec=spec: ost.rnn(spec, w, x, seq_lengths=np.arange(24) * 2,
        backend=backend)[0]
    pull = jax.jit(lambda w, x, dy, run=run: (jax.vjp(run, w, x)[1](dy), run(w, x)))
    dy = jax.random.normal(jax.random.key(2), (24, 50, 192))
    calls.append((pull, weights, x, dy))
for count in counts or [None]:
    if count is not None:
        level = _config.CPU_ISAS.index(_native.cpu_features().isa)
        _native.status().library.ostinato_configure(level, int(count))
    digests = hashlib.sha256(), hashlib.sha256()
    for pull, *given in calls:
        (dw, dx), y = pull(*given)
        for digest, leaves in zip(digests, ((dw,), (dx, y)), strict=True):
            for leaf in leaves:
                digest.update(np.asarray(leaf).tobytes())
    print(*(digest.hexdigest() for digest in digests))
"""


BACKENDS = ["xla"]
if ost.backends()["cpu"]:
    BACKENDS.append("cpu")
every_backend = pytest.mark.parametrize("backend", BACKENDS)


# The tests compile with little optimisation; here every run compiles as users' do. What
# XLA makes may differ from run to run, so it compiles every time for its own backend;
# around the cpu kernels, one cache serves all runs but the one that compiles anew.
OURS = ("XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR")


@functools.cache
def digests(
    backend: str, *counts: int, pinned: bool = False, run: int = 0
) -> list[list[str]]:
    """Hash the weight gradients, and the outputs with the input gradients.

    Each count of threads gives one pair of hashes; without counts there is one pair,
    from as many threads as the process uses by itself. `run` tells runs apart that have
    everything else in common.
    """
    environment = {k: v for k, v in os.environ.items() if k not in OURS}
    if backend == "cpu" and run == 0:
        cache = os.path.join(os.environ["JAX_COMPILATION_CACHE_DIR"], "as-users")
        environment["JAX_COMPILATION_CACHE_DIR"] = cache
    arguments = [backend, "pinned" if pinned else "free", *map(str, counts)]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return [line.split() for line in done.stdout.splitlines()]


@every_backend
def test_another_run_changes_no_bit(backend):
    assert digests(backend) == digests(backend, run=1)


@every_backend
@pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="this system cannot pin a process"
)
def test_number_of_threads_changes_no_bit_of_outputs_and_input_gradients(backend):
    [free], [pinned] = digests(backend), digests(backend, pinned=True)
    assert free[1] == pinned[1]


@pytest.mark.skipif("cpu" not in BACKENDS, reason="no cpu backend")
def test_number_of_threads_changes_no_bit_of_weight_gradients_on_cpu():
    one, *others = digests("cpu", 1, 2, 3)
    assert others == [one, one]
    assert [one] == digests("cpu")
