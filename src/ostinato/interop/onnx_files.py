"""Models of ONNX as files hold them: nodes by name, and constants within bounds.

A model can place the data of a constant in another file. Here that file has to lie in
the model's own folder, and to be as large as the constant says.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Any

import numpy as np

from .. import _checks
from .._files import BadFileError, reading
from .._modules import needs

_MAX_HOPS = 16
_SHAPES = ("Shape", "Size")  # what they return depends on no element
_KIND = "a model of ONNX"


class Graph:
    """The main graph of a model.

    Attributes:
        nodes: all nodes, by name or else by first output.
    """

    def __init__(self, onnx: Any, model: Any, path: Path | None) -> None:
        self._onnx, self._path = onnx, path
        self.nodes: dict[str, Any] = {}
        self._makers: dict[str, str] = {}
        self._constants = {t.name: t for t in model.graph.initializer}
        self._functions = {(f.domain, f.name) for f in model.functions}
        for number, node in enumerate(model.graph.node):
            name = node.name or next(filter(None, node.output), f"node {number}")
            while name in self.nodes:
                name = f"{name} ({number})"
            self.nodes[name] = node
            for output in node.output:
                self._makers[output] = name
            if node.op_type == "Constant" and node.output:
                for attribute in node.attribute:
                    if attribute.name == "value":
                        self._constants[node.output[0]] = attribute.t
        self._order = {name: number for number, name in enumerate(self.nodes)}

    def attributes(self, node: Any) -> dict[str, Any]:
        """Return the attributes of a node; text is decoded."""
        found = {}
        for attribute in node.attribute:
            value = self._onnx.helper.get_attribute_value(attribute)
            if isinstance(value, list):
                value = [_text(one) for one in value]
            found[attribute.name] = _text(value)
        return found

    def wraps(self, node: Any) -> bool:
        """Return whether there are nodes inside of a node, which are not in `nodes`."""
        graphs = self._onnx.AttributeProto.GRAPH, self._onnx.AttributeProto.GRAPHS
        inside = any(attribute.type in graphs for attribute in node.attribute)
        return inside or (node.domain, node.op_type) in self._functions

    def computes(self, name: str) -> bool:
        """Return whether a node of the graph makes what has a name."""
        return name in self._makers

    def constant(self, name: str) -> np.ndarray | None:
        """Return a constant of the graph; None if the name is not that of one."""
        for _ in range(_MAX_HOPS):  # exporters share equal constants by `Identity`
            maker = self.nodes.get(self._makers.get(name, ""))
            if name in self._constants or not maker or maker.op_type != "Identity":
                break
            name = next(iter(maker.input), "")
        if name not in self._constants:
            return None
        tensor = self._constants[name]
        if tensor.data_location == self._onnx.TensorProto.EXTERNAL:
            return self._external(name, tensor)
        try:
            return self._onnx.numpy_helper.to_array(tensor)
        except Exception as error:  # whatever its reader meets
            raise BadFileError(f"`{name}` cannot be read: {error}") from error

    def _external(self, name: str, tensor: Any) -> np.ndarray:
        entries = {entry.key: entry.value for entry in tensor.external_data}
        if self._path is None:
            raise BadFileError(
                f"`{name}` lies in a file: give the path of the model, not a ModelProto"
            )
        location = entries.get("location", "")
        path = _beside(self._path, location)
        if path is None:
            raise BadFileError(
                f"`{name}` must lie in a file of the model's folder, got "
                f"{location[:100]!r}"
            )
        try:
            kind = self._onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
        except KeyError:
            raise BadFileError(
                f"`{name}` must have a type of ONNX, got {tensor.data_type}"
            ) from None
        dtype = np.dtype(kind)
        wanted = math.prod(tensor.dims) * dtype.itemsize
        offset = _number(entries, "offset", 0)
        length = _number(entries, "length", wanted)
        if offset < 0:
            raise BadFileError(f"`{name}` must begin at 0 or above in {path.name!r}")
        if min([*tensor.dims, length]) < 0 or length != wanted or dtype.hasobject:
            raise BadFileError(f"`{name}` must have {wanted} bytes, got {length}")
        if path.stat().st_size < offset + length:
            raise BadFileError(f"`{name}` must fit in the file {path.name!r}")
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read(length)
        return np.frombuffer(data, dtype).reshape(tuple(tensor.dims))

    def sources(
        self, name: str, kinds: Set[str]
    ) -> tuple[list[tuple[str, int]], list[str]]:
        """Return what nodes of these kinds a value is made from, and how.

        Returns:
            The outputs of such nodes that the value depends on, but not through another
            of them or through shapes alone: name of the node and number of the output;
            and the operations that stand between, in the order of the graph.
        """
        pending, ends, behind = [name], set(), set()
        while pending:
            value = pending.pop()
            maker = self._makers.get(value)
            if not value or maker is None or maker in behind:
                continue
            node = self.nodes[maker]
            if _operation(node) in kinds:
                ends.add((maker, [*node.output].index(value)))
            elif _operation(node) not in _SHAPES:
                behind.add(maker)
                pending += node.input
        made, between = {self.nodes[maker].output[n] for maker, n in ends}, []
        for maker in sorted(behind, key=self._order.__getitem__):
            node = self.nodes[maker]
            if made.intersection(node.input):
                made.update(filter(None, node.output))
                between.append(_operation(node))
        return sorted(ends, key=lambda end: (self._order[end[0]], end[1])), between


def _operation(node: Any) -> str:
    """Return what a node does, told from operations of others of the same name."""
    ours, kind = node.domain in ("", "ai.onnx"), _text(node.op_type)
    return kind if ours else f"{_text(node.domain)}.{kind}"


def read_model(path_or_model: Any) -> Graph:
    """Return the graph of a file, or of a model in memory.

    Raises:
        ValueError: the file is damaged.
        TypeError: the argument is neither.
        ImportError: onnx is not installed.
    """
    with needs("onnx"):
        import onnx

    if isinstance(path_or_model, onnx.ModelProto):
        return Graph(onnx, path_or_model, None)
    if not isinstance(path_or_model, (str, os.PathLike)):
        raise TypeError(
            "`path_or_model` must be a path or an onnx.ModelProto, got "
            f"{_checks.describe(path_or_model)}"
        )
    with reading(path_or_model, _KIND):
        path = Path(path_or_model)
        model = onnx.load_model_from_string(path.read_bytes())
        if not model.HasField("graph") or not model.ir_version:
            raise ValueError("it has no graph")
        return Graph(onnx, model, path)


def data_files(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield the files in which the data of a model lie besides its own."""
    with needs("onnx"):
        import onnx

    with reading(path, _KIND):
        model = onnx.load_model_from_string(Path(path).read_bytes())
    for location in _locations(model):
        if (found := _beside(Path(path), location)) is not None:
            yield found


def _number(entries: Mapping[str, str], key: str, default: int) -> int:
    """Return a number of bytes; -1 for text that is none."""
    try:
        return int(entries.get(key, default))
    except ValueError:
        return -1


def _beside(path: Path, location: str) -> Path | None:
    """Return the file of a model's data, which lies beside the model, or beside a link.

    None: it is elsewhere, or there is none.
    """
    folders = path.parent.resolve(), path.resolve().parent
    for folder in folders:
        try:
            found = (folder / location).resolve()
            there = found.is_file()
        except (OSError, RuntimeError, ValueError):  # no file, or a circle of links
            continue
        if there and any(map(found.is_relative_to, folders)):
            return found
    return None


def _locations(message: Any) -> Iterator[str]:
    """Yield the places of data outside of a model, of all tensors in it."""
    for field, value in message.ListFields():
        if field.name == "external_data":
            yield from (entry.value for entry in value if entry.key == "location")
        elif field.message_type is not None:
            parts = [value] if hasattr(value, "ListFields") else value
            for part in parts:
                yield from _locations(part)


def _text(value: Any) -> Any:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
