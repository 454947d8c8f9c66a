"""Script that reads an HDF5 file in a process of its own, for `keras_files`.

The HDF5 library can loop for ever, or crash, on a damaged file. Nothing imports this
module: it is run with the path of a file, or `-` for one on the standard input, and
writes a line of JSON, `{"config": ..., "arrays": [[path, dtype, shape], ...]}` or
`{"error": ...}`, followed by the bytes of the arrays. The dtype of what are no numbers
is null, and has no bytes.
"""

import io
import json
import math
import os
import re
import sys

import h5py

_LEAVES = re.compile(r"(kernel|recurrent_kernel|bias)(:\d+)?|cell/vars/[012]")
_LISTS = re.compile(r"weight_names\d*")
_MAX_NODES = 200_000


def main(path: str) -> None:
    """Write what the file at `path` holds to the standard output."""
    out = sys.stdout.buffer
    try:
        data = sys.stdin.buffer.read() if path == "-" else b""
        size = len(data) if path == "-" else os.path.getsize(path)
        _limit_time(size)
        source = io.BytesIO(data) if path == "-" else path
        with h5py.File(source, "r", **({} if path == "-" else {"locking": False})) as f:
            config = f.attrs.get("model_config")
            arrays = [_read(name, node, size) for name, node in _in_order(f)]
        if isinstance(config, bytes):
            config = config.decode()
        head = {"config": config, "arrays": [array[:3] for array in arrays]}
    except Exception as error:  # whatever the library meets in damaged bytes
        head, arrays = {"error": f"{error}" or type(error).__name__}, []
    out.write(json.dumps(head).encode() + b"\n")
    for *_, raw in arrays:
        out.write(raw)
    out.flush()


def _limit_time(size: int) -> None:
    """Let the system end this process after a second or so, and more for large files.

    A small layer takes 4 kB and 1 ms.
    """
    try:
        import resource
    except ImportError:  # not a Unix; there the parent's patience is the limit
        return
    used = resource.getrusage(resource.RUSAGE_SELF)
    more = min(size // 1_000_000, 30) + size // 20_000_000
    limit = math.ceil(used.ru_utime + used.ru_stime + 0.5) + more
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))


def _walk(file):
    """Yield the datasets with weights by path, along plain links alone."""
    pending, seen = [("", file)], 0
    while pending:
        before, group = pending.pop()
        for name in group:
            seen += 1
            if seen > _MAX_NODES:
                raise ValueError(f"it has more than {_MAX_NODES} groups and arrays")
            path = f"{before}/{name}" if before else name
            wanted = _LEAVES.fullmatch(name) or _LEAVES.fullmatch(path[-11:])
            if not isinstance(group.get(name, getlink=True), h5py.HardLink):
                if wanted:
                    raise ValueError(f"links to other places are not read: {path!r}")
                continue
            node = group[name]
            if isinstance(node, h5py.Group):
                if path.count("/") < 60:  # groups may hold themselves
                    pending.append((path, node))
            elif wanted and isinstance(node, h5py.Dataset):
                yield path, node


def _in_order(file):
    """Return the datasets with weights, those of a layer in the order of Keras.

    An attribute of the layer's group, or several that are numbered, lists them.
    """
    found = dict(_walk(file))
    layers, listed = _group(file, "model_weights"), {}
    for layer in layers or ():
        group = _group(layers, layer)
        attributes = {} if group is None else group.attrs
        parts = sorted(filter(_LISTS.fullmatch, attributes), key=lambda n: (len(n), n))
        names = [name for part in parts for name in _texts(attributes[part])]
        for name in names:
            listed.setdefault(f"model_weights/{layer}/{name}", len(listed))
    return sorted(found.items(), key=lambda item: listed.get(item[0], len(listed)))


def _group(parent, name: str):
    """Return a group that lies in another one, not behind a link; None if none does."""
    inside = isinstance(parent.get(name, getlink=True), h5py.HardLink)
    return parent[name] if inside and isinstance(parent[name], h5py.Group) else None


def _texts(attribute) -> list[str]:
    """Return the texts of an attribute; none if it holds something else."""
    names = attribute.tolist() if hasattr(attribute, "tolist") else []
    names = names if isinstance(names, list) else [names]
    return [n.decode() if isinstance(n, bytes) else str(n) for n in names]


def _is_bfloat16(node) -> bool:
    """Return whether the bytes of an array are those of bfloat16."""
    return node.dtype.itemsize == 2 and node.attrs.get("dtype") == "bfloat16"


def _read(path: str, node, size: int) -> tuple[str, str | None, list[int], bytes]:
    """Return an array if it lies in the file and fits in it."""
    if node.external or node.is_virtual:
        raise ValueError(f"arrays in other files are not read: {path!r}")
    if node.nbytes > size:
        raise ValueError(
            f"arrays must fit in its {size} bytes, got {node.dtype}{list(node.shape)} "
            f"in {path!r}"
        )
    half = _is_bfloat16(node)
    if not half and node.dtype.kind not in "fiub":
        return path, None, [0], b""
    array = node[()]
    kind = "bfloat16" if half else array.dtype.newbyteorder("<").str
    raw = array if half else array.astype(kind, copy=False)
    return path, kind, list(node.shape), raw.tobytes()


if __name__ == "__main__":
    main(sys.argv[1])
