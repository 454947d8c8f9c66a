"""The contenders, one adapter each: ostinato itself and its peers.

An adapter's `build(problem, data, threads)` returns a `Contender`, or raises
`Unsupported`. The preparation of a call (conversion of weights, packing of sequences)
is not timed.
"""

import dataclasses
import importlib

from ..problem import Data, Problem, Results
from .contender import Contender as Contender
from .contender import Unsupported as Unsupported

OURS, PREPARED, STREAM, XLA = "ostinato", "prepared", "stream", "xla"
PEERS = {  # other libraries, with the packages that their adapters import
    "torch": ("torch",),
    "onnxruntime": ("onnxruntime", "onnx"),
    "flax": ("flax",),
    "scan": (),
}
_MODULES = {
    OURS: "own",
    PREPARED: "own_prepared",
    STREAM: "own_stream",
    XLA: "own_xla",
    "torch": "torch_nn",
    "onnxruntime": "onnx_runtime",
    "flax": "flax_nnx",
    "scan": "lax_scan",
}


def build(name: str, problem: Problem, data: Data, threads: int) -> Contender:
    """Build the contender called `name`.

    Raises:
        Unsupported: it cannot run the problem, or is not installed.
    """
    try:
        module = importlib.import_module(f"{__name__}.{_MODULES[name]}")
    except ModuleNotFoundError as error:
        raise Unsupported(f"needs the package {error.name}") from error
    return module.build(problem, data, threads)


def reference(problem: Problem, data: Data, threads: int) -> Results:
    """Compute the reference results, by `lax.scan` in float32."""
    kind = "train" if problem.differentiates else problem.kind
    scan = build(
        "scan", dataclasses.replace(problem, kind=kind, dtype="float32"), data, threads
    )
    return scan.results(scan.call())
