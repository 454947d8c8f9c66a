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
pinned, *backends = sys.argv[1:]
if pinned == "pinned":
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import jax, jax.numpy as jnp, numpy as np
import ostinato as ost
from ostinato import _config, _native

for backend in backends:
    calls = []
    # What XLA compiles takes long: one mode of one layer.
    on_cpu = backend == "cpu"
    layers, modes = (2, ["lstm", "gru", "rnn_tanh"]) if on_cpu else (1, ["lstm"])
    for mode in modes:
        spec = ost.RNNSpec(mode, 96, 96, layers, bidirectional=True)
        size = jax.eval_shape(lambda: ost.init_weights(jax.random.key(0), spec)).shape
        shapes = size, (24, 50, 96), (24, 50, 192)
        rng = np.random.default_rng(0)  # what JAX draws would be compiled, too
        w, x, dy = (jnp.asarray(rng.standard_normal(s, np.float32)) for s in shapes)
        run = lambda w, x, spec=spec: ost.rnn(spec, w, x,
            seq_lengths=np.arange(24) * 2, backend=backend)[0]
        pull = jax.jit(lambda w, x, dy, run=run: (jax.vjp(run, w, x)[1](dy), run(w, x)))
        calls.append((pull, w * 0.1, x, dy))
    for count in [None, 1, 2, 3] if on_cpu else [None]:
        if count is not None:
            level = _config.CPU_ISAS.index(_native.cpu_features().isa)
            _native.status().library.ostinato_configure(level, count)
        digests = hashlib.sha256(), hashlib.sha256()
        for pull, *given in calls:
            (dw, dx), y = pull(*given)
            for digest, leaves in zip(digests, ((dw,), (dx, y)), strict=True):
                for leaf in leaves:
                    digest.update(np.asarray(leaf).tobytes())
        print(backend, *(digest.hexdigest() for digest in digests))
"""


BACKENDS = ["xla"]
if ost.backends()["cpu"]:
    BACKENDS.append("cpu")
every_backend = pytest.mark.parametrize("backend", BACKENDS)


# The tests compile with little optimisation, and once; here every run compiles, as
# users' do.
OURS = ("XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR")


@functools.cache
def digests(pinned: bool = False, run: int = 0) -> dict[str, list[list[str]]]:
    """Hash the weight gradients, and the outputs with the input gradients.

    For each backend there is a list of such pairs of hashes, the first from as many
    threads as the process uses by itself, the others from 1, 2 and 3 threads, on cpu
    only. `run` tells runs apart that have everything else in common.
    """
    environment = {k: v for k, v in os.environ.items() if k not in OURS}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "pinned" if pinned else "free", *BACKENDS],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, list[list[str]]] = {backend: [] for backend in BACKENDS}
    for line in done.stdout.splitlines():
        backend, *pair = line.split()
        found[backend].append(pair)
    return found


@every_backend
def test_another_run_changes_no_bit(backend):
    assert digests()[backend][0] == digests(run=1)[backend][0]


@every_backend
@pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="this system cannot pin a process"
)
def test_number_of_threads_changes_no_bit_of_outputs_and_input_gradients(backend):
    free, pinned = digests()[backend][0], digests(pinned=True)[backend][0]
    assert free[1] == pinned[1]


@pytest.mark.skipif("cpu" not in BACKENDS, reason="no cpu backend")
def test_number_of_threads_changes_no_bit_of_weight_gradients_on_cpu():
    free, *others = digests()["cpu"]
    assert others == [free] * 3
