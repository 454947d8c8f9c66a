"""A plugin that fails a run of pytest unless it calls something in every module.

`pytest --every-module @tests/quick.txt` proves that the quick tests cover the package.
"""

import ast
import cProfile
import importlib.util
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "ostinato"
# Modules whose functions only run if this package of the extra `peers` is installed.
NEEDS = {
    "apps/bench/peers/flax_nnx.py": "flax",
    "apps/bench/peers/onnx_runtime.py": "onnxruntime",
    "apps/bench/peers/torch_nn.py": "torch",
    "nn/_equinox_cells.py": "equinox",
    "nn/_equinox_layers.py": "equinox",
    "nn/_flax_cells.py": "flax",
    "nn/_flax_layers.py": "flax",
    "nn/_flax_rngs.py": "flax",
    "nn/_flax_serialization.py": "flax",
    "nn/equinox.py": "equinox",
    "nn/flax.py": "flax",
    "nn/linen.py": "flax",
    "interop/equinox.py": "equinox",
    "interop/flax.py": "flax",
    "interop/keras.py": "keras",
    "interop/onnx.py": "onnx",
    "interop/onnx_files.py": "onnx",
    "interop/torch.py": "torch",
    "ragged/rules/errors.py": "equinox",
    "nn/keras.py": "keras",
    "nn/sequence_layers.py": "sequence_layers",
}


# Run in processes of their own, which read files of strangers, try kernels, or tell the
# C library what memory to keep.
ELSEWHERE = {
    "_linear/cuda_trial.py",
    "_rnn/cuda_trial.py",
    "apps/memory.py",
    "apps/music/mat_script.py",
    "interop/hdf5_script.py",
}


class EveryModule:
    """Profiles this process, or gathers what the workers of pytest-xdist called."""

    def __init__(self, config: pytest.Config):
        self.called: set[tuple[str, str]] = set()
        self.is_worker = hasattr(config, "workerinput")
        self.profile = cProfile.Profile()

    def pytest_sessionstart(self) -> None:
        self.profile.enable()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node) -> None:
        output = getattr(node, "workeroutput", {})
        self.called |= {(file, name) for file, name in output.get("called", [])}

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self.profile.disable()
        for entry in self.profile.getstats():
            if not isinstance(entry.code, str):  # that of a function in C
                self.called.add((entry.code.co_filename, entry.code.co_name))
        if self.is_worker:
            ours = [pair for pair in sorted(self.called) if str(SOURCE) in pair[0]]
            session.config.workeroutput["called"] = ours  # type: ignore[attr-defined]
        elif missed := missed_modules(self.called):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
            print("\nno test calls anything in: " + ", ".join(missed))


def missed_modules(called: set[tuple[str, str]]) -> list[str]:
    """Return the modules that define functions of which none was called."""
    names: dict[str, set[str]] = {}
    for file, name in called:
        names.setdefault(file, set()).add(name)
    missed = []
    for path in sorted(SOURCE.rglob("*.py")):
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        functions = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
        if functions and not functions & names.get(str(path), set()):
            missed.append(str(path.relative_to(SOURCE)))
    there = importlib.util.find_spec
    here = [name for name in missed if name not in ELSEWHERE]
    return [name for name in here if name not in NEEDS or there(NEEDS[name])]
