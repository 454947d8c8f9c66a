"""The fake GPU of cuda_driver.py in the place of a real one."""

import contextlib

import jax
import pytest
from cuda_driver import COMPILER, ON_CPU, fake_gpu, own_folder
from jax.interpreters import mlir

from ostinato import _native
from ostinato._cuda import check, device
from ostinato._linear import cuda, lowering
from ostinato._rnn import backends
from ostinato._step.primitive import RULES

needs_emulator = pytest.mark.skipif(
    COMPILER is None or _native.status().library is None,
    reason="needs the native library and a C++ compiler",
)

_lowered = ["cpu"]  # the platforms, innermost last


def lower_loops() -> None:
    """Compile loops over steps for the CPU as for the platform chosen last."""
    for primitive, rules in RULES.items():
        mlir.register_lowering(primitive, rules[_lowered[-1]], "cpu")


@contextlib.contextmanager
def gpu_in_place(monkeypatch, change=lambda text: text):
    """Run on the fake GPU: linear recurrences as "cpu", all else as "cuda"."""
    with monkeypatch.context() as patch:
        patch.setenv("OSTINATO_CACHE_DIR", str(own_folder() / "cache"))
        patch.setattr(check, "failure", lambda *_: None)
        patch.setattr(lowering, "KERNELS", {"cpu": cuda})
        patch.setattr(backends, "BACKENDS", ON_CPU)
        fake_gpu(patch.setattr, change)
        _lowered.append("cuda")
        lower_loops()
        jax.clear_caches()
        try:
            yield
        finally:
            _lowered.pop()
            lower_loops()
    device.status.cache_clear()
    jax.clear_caches()
