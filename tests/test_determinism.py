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
backend, threads = sys.argv[1:]
if threads == "pinned":
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import jax, jax.numpy as jnp, numpy as np
import ostinato as ost

digests = hashlib.sha256(), hashlib.sha256()
layers = 2 if backend == "cpu" else 1  # XLA compiles every one
for mode in ("lstm", "gru", "rnn_tanh")[: layers + 1]:
    spec = ost.RNNSpec(mode, 96, 96, layers, bidirectional=True)
    weights = ost.init_weights(jax.random.key(0), spec)
    x = jax.random.normal(jax.random.key(1), (24, 50, 96))
    run = lambda w, x: ost.rnn(spec, w, x, seq_lengths=np.arange(24) * 2,
        backend=backend)[0]
    pull = jax.jit(lambda w, x, dy: (jax.vjp(run, w, x)[1](dy), run(w, x)))
    dy = jax.random.normal(jax.random.key(2), (24, 50, 192))
    (dw, dx), y = pull(weights, x, dy)
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
def digests(backend: str, threads: str, run: int = 0, **environ: str) -> list[str]:
    """Hash the weight gradients, and the outputs with the input gradients.

    `run` tells runs apart that have everything else in common.
    """
    environment = {k: v for k, v in os.environ.items() if k not in OURS} | environ
    if backend == "cpu" and run == 0:
        cache = os.path.join(os.environ["JAX_COMPILATION_CACHE_DIR"], "as-users")
        environment["JAX_COMPILATION_CACHE_DIR"] = cache
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, backend, threads],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


@every_backend
def test_another_run_changes_no_bit(backend):
    assert digests(backend, "free") == digests(backend, "free", run=1)


@every_backend
@pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="this system cannot pin a process"
)
def test_number_of_threads_changes_no_bit_of_outputs_and_input_gradients(backend):
    assert digests(backend, "free")[1] == digests(backend, "pinned")[1]


@pytest.mark.skipif("cpu" not in BACKENDS, reason="no cpu backend")
def test_number_of_threads_changes_no_bit_of_weight_gradients_on_cpu():
    one, *others = (
        digests("cpu", "free", OSTINATO_NUM_THREADS=n) for n in ("1", "2", "3")
    )
    assert others == [one, one]
