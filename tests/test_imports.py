"""Tests of the tiers of the package, and of what an import loads."""

import fnmatch
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import import_rules
import pytest

import ostinato

SOURCE = Path(__file__).parents[1] / "src" / "ostinato"


def test_every_module_keeps_to_its_tier():
    assert import_rules.violations(SOURCE) == []


TYPING = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n"
TIER4 = "(tier 4) from tier"
TIER5 = "(tier 5) from tier"
TIER7 = "(tier 7) from tier"
TOP = "the top of the package, which imports it"
LOGIC = "in an __init__ without logic"


def violations(root: Path, module: str, code: str) -> list[str]:
    """Return the violations of a package of two tiers with one more file."""
    files = {
        "__init__.py": '"""Top."""\n\nfrom ._rnn.api import rnn as rnn\n',
        "_config.py": "import os\n\nDEBUG = os.environ.get('OSTINATO_DEBUG')\n",
        "_checks.py": "from . import _config\n",
        "_rnn/__init__.py": '"""Nothing here."""\n',
        "_rnn/api.py": "from .._checks import check\nfrom . import xla\n",
        "_rnn/xla.py": "import jax.numpy as jnp\nimport numpy as np\n",
        "cells/__init__.py": "from .basic import LSTM as LSTM\n",
        "cells/basic.py": "from ostinato._rnn.api import rnn\n",
        "ragged/__init__.py": "",
        "ragged/core/registry.py": "",
        "ragged/rules/dot.py": "from ..core import registry\n",
        "nn/flax.py": "from ..cells import LSTM\n",
        "interop/torch.py": "import torch\n",
        "apps/__init__.py": "",
        "apps/g2p.py": "import optax\n\nimport ostinato as ost\n",
        "cli.py": "from .apps import g2p\n",
        module: code,
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return import_rules.violations(root)


@pytest.mark.parametrize(
    "module, code",
    [
        ("_rnn/api.py", "from .._checks import check\n"),
        ("_native.py", "from . import _config\n"),
        ("_rnn/passes.py", "from . import api\n"),
        ("_compat.py", "from jax._src import custom_partitioning\n"),
        ("nn/flax.py", "from flax import nnx\nfrom .._rnn import api\n"),
        ("nn/flax.py", "from ostinato import RNNSpec\n"),
        ("apps/tools.py", "from . import g2p\nfrom ostinato import cells\n"),
        ("_checks.py", "'''Mentions OSTINATO_DEBUG in a sentence.'''\n"),
        (
            "_typing.py",
            f"{TYPING}    from jaxtyping import Float\n",
        ),
        (
            "__init__.py",
            "from ._checks import f\nif not _TYPE_CHECKING:\n    __getattr__ = f(1)\n",
        ),
    ],
)
def test_what_the_rules_allow_passes(tmp_path, module, code):
    assert violations(tmp_path, module, code) == []


@pytest.mark.parametrize(
    "module, code, message",
    [
        ("_rnn/xla.py", "from . import api", f"imports _rnn.api {TIER4} 2"),
        ("_rnn/xla.py", "from .api import rnn", f"imports _rnn.api {TIER4} 2"),
        (
            "_checks.py",
            "def late():\n    import ostinato._rnn.api",
            f"imports _rnn.api {TIER4} 0",
        ),
        (
            "_checks.py",
            "import importlib\nimportlib.import_module('ostinato._rnn.api')",
            f"imports _rnn.api {TIER4} 0",
        ),
        ("ragged/vmap.py", "from .. import cells", f"imports cells {TIER5} 5"),
        (
            "ragged/core/interpreter.py",
            "from ..rules import dot",
            "imports ragged.rules.dot (tier 4 of ragged) from tier 2",
        ),
        (
            "_rnn/api.py",
            f"{TYPING}    from .. import cells",
            f"imports cells {TIER5} 4",
        ),
        ("cells/basic.py", "from ostinato import rnn", f"imports {TOP}"),
        ("apps/g2p.py", "from .._rnn import api", "imports _rnn.api, not public"),
        ("apps/g2p.py", "from .. import cli", "imports cli (tier 11) from tier 8"),
        ("__init__.py", "from .nn import flax", f"imports nn.flax {TIER7} 5"),
        (
            "interop/more.py",
            "from ..nn.flax import a",
            f"imports nn.flax {TIER7} 6",
        ),
        ("cli.py", "from . import _config", "imports _config, not public"),
        ("_rnn/xla.py", "import optax", "imports optax"),
        ("interrupts.py", "import numpy as np", "imports numpy"),
        ("_checks.py", "import jaxlib", "imports jaxlib"),
        ("nn/flax.py", "import torch", "imports torch"),
        (
            "_rnn/xla.py",
            "from jax._src import core",
            "imports jax._src.core; private JAX names belong in _compat",
        ),
        (
            "_rnn/xla.py",
            "from os import environ\nenviron['OSTINATO_FAST']",
            "reads OSTINATO_FAST; only _config may",
        ),
        ("_rnn/init2.py", "", "has no tier; give it one in tests/import_rules.py"),
        ("_rnn/__init__.py", "from . import api", f"ImportFrom {LOGIC}"),
        ("__init__.py", "def f(): pass", f"FunctionDef {LOGIC}"),
    ],
)
def test_what_the_rules_forbid_is_found(tmp_path, module, code, message):
    found = violations(tmp_path, module, code)
    assert [line.split(": ", 1)[1] for line in found] == [message]
    where = module.removesuffix(".py").replace("/__init__", "").replace("/", ".")
    assert found[0].startswith(f"{where}:")


def test_importing_the_package_adds_nothing_to_jax():
    code = (
        "import sys, jax; top = lambda: {name.split('.')[0] for name in sys.modules}; "
        "before = top(); import ostinato; print(*top() - before)"
    )
    said = subprocess.check_output([sys.executable, "-c", code], text=True)
    added = set(said.split())
    assert "ostinato" in added
    assert added - sys.stdlib_module_names - {"ostinato"} == set()


def test_importing_the_package_takes_less_than_half_of_the_time_of_jax():
    code = (
        "from time import process_time as now; a = now(); import jax, numpy; "
        "b = now(); import ostinato; print((now() - b) / (b - a))"
    )
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    ratios = (  # the first run may compile the modules, as an installation does
        float(subprocess.check_output([sys.executable, "-c", code], env=env))
        for _ in range(3)
    )
    assert any(ratio < 0.5 for ratio in ratios)


def test_the_version_is_that_of_the_distribution():
    settings = tomllib.loads((SOURCE.parents[1] / "pyproject.toml").read_text())
    assert "version" in settings["project"]["dynamic"]
    source = settings["tool"]["scikit-build"]["metadata"]["version"]["input"]
    text = (SOURCE.parents[1] / source).read_text()
    assert f'\n__version__ = "{ostinato.__version__}"\n' in text


def said_by(code):
    """Return the last line that a program writes, which fails."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    return done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    "code, end",
    [
        ("ostinato.nn.LSTM", "; write: from ostinato.nn.flax import LSTM, or from *"),
        ("ostinato.interop.torch", "; write: import ostinato.interop.torch, or *"),
        ("ostinato.foo", "has no attribute 'foo'"),
        ("from ostinato import nn; nn.LSTM", "; write: from ostinato.nn.flax import *"),
        ("from ostinato import nn; nn.flax", "; write: import ostinato.nn.flax"),
    ],
)
def test_a_module_that_is_not_imported_is_told_of(code, end):
    said = said_by(f"import ostinato; {code}")
    assert fnmatch.fnmatch(said, f"AttributeError: module 'ostinato*{end}"), said


@pytest.mark.parametrize(
    "name, extra",
    [
        ("equinox", "equinox"),
        ("flax", "flax"),
        ("linen", "flax"),
        ("keras", "keras"),
        ("sequence_layers", "sequence-layers"),
    ],
)
def test_a_library_that_is_not_installed_is_told_of(name, extra):
    library = "flax" if name == "linen" else name
    said = said_by(
        f"import sys; sys.modules[{library!r}] = None; import ostinato.nn.{name}"
    )
    assert f"needs the package `{library}" in said
    assert said.endswith(f"run: pip install 'ostinato[{extra}]'")


@pytest.mark.parametrize(
    "call, library, extra",
    [
        ("torch.to_state_dict(spec, weights)", "torch", "torch"),
        ("onnx.from_model('m.onnx')", "onnx", "onnx"),
        ("keras.from_file('m.keras')", "h5py", "keras"),
        ("flax.to_cell(spec, weights)", "flax", "flax"),
        ("equinox.to_cell(spec, weights)", "equinox", "equinox"),
    ],
)
def test_a_converter_says_which_library_is_not_installed(call, library, extra):
    module = call.split(".")[0]
    said = said_by(
        f"import sys; sys.modules[{library!r}] = None\n"
        f"import jax, ostinato as ost; from ostinato.interop import {module}\n"
        "spec = ost.RNNSpec('lstm', 2, 3, bias='recurrent')\n"
        f"weights = ost.init_weights(jax.random.key(0), spec); {call}"
    )
    assert said.startswith(f"ModuleNotFoundError: this needs the package `{library}`")
    assert said.endswith(f"run: pip install 'ostinato[{extra}]'")
