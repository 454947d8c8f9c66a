"""ONNX Runtime: a model with one LSTM, GRU or RNN node, without gradients."""

from typing import Any

import numpy as np
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from ..problem import Data, Problem
from .contender import Contender, Unsupported, results

_NODES = {"lstm": "LSTM", "gru": "GRU", "rnn_tanh": "RNN"}
_GATES = {"lstm": (0, 3, 1, 2), "gru": (1, 0, 2), "rnn_tanh": (0,)}  # i o f c, z r h
_OPSET, _IR_VERSION = 17, 8  # old versions, which every recent runtime reads


def build(problem: Problem, data: Data, threads: int) -> Contender:
    """Build the contender.

    Raises:
        Unsupported: the problem is not inference of one layer in float32.
    """
    if problem.differentiates:
        raise Unsupported("inference only")
    if problem.dtype != "float32":
        raise Unsupported(f"its recurrent nodes on CPU have no {problem.dtype}")
    if problem.num_layers > 1:
        raise Unsupported("a node has one layer")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(
        _model(problem, data), options, providers=["CPUExecutionProvider"]
    )
    feeds = dict(x=data.x, h_0=data.h_0, c_0=data.c_0, lengths=data.lengths)
    feeds = {name: array for name, array in feeds.items() if array is not None}

    def translated(returned):
        y, *state = returned  # y is [T, D, N, H]
        y = np.swapaxes(y, 1, 2)
        return results(problem, data, y, tuple(state))

    return Contender(lambda: session.run(None, feeds), translated)


def _model(problem: Problem, data: Data) -> bytes:
    constants = dict(
        w_ih=[_reordered(problem.mode, layer.w_ih) for layer in data.layers],
        w_hh=[_reordered(problem.mode, layer.w_hh) for layer in data.layers],
        bias=[
            np.concatenate([_reordered(problem.mode, b) for b in (one.b_ih, one.b_hh)])
            for one in data.layers
        ],
    )
    lstm = problem.mode == "lstm"
    lengths = "lengths" if problem.ragged else ""
    inputs = ["x", "w_ih", "w_hh", "bias", lengths, "h_0"] + ["c_0"] * lstm
    outputs = ["y", "h_n"] + ["c_n"] * lstm
    attributes: dict[str, Any] = dict(hidden_size=problem.hidden_size)
    if problem.mode == "gru":
        attributes["linear_before_reset"] = 1
    if problem.bidirectional:
        attributes["direction"] = "bidirectional"
    floats = TensorProto.FLOAT
    given: list[tuple[str, int, Any]] = [
        ("x", floats, data.x),
        ("h_0", floats, data.h_0),
    ]
    given += [("c_0", floats, data.c_0)] * lstm
    given += [("lengths", TensorProto.INT32, data.lengths)] * problem.ragged
    graph = helper.make_graph(
        [helper.make_node(_NODES[problem.mode], inputs, outputs, **attributes)],
        problem.name,
        [helper.make_tensor_value_info(n, kind, a.shape) for n, kind, a in given],
        [helper.make_tensor_value_info(name, floats, None) for name in outputs],
        [numpy_helper.from_array(np.stack(a), name) for name, a in constants.items()],
    )
    model = helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid("", _OPSET)],
        ir_version=_IR_VERSION,
    )
    return model.SerializeToString()


def _reordered(mode: str, array: np.ndarray) -> np.ndarray:
    blocks = np.split(array, len(_GATES[mode]))
    return np.concatenate([blocks[gate] for gate in _GATES[mode]])
