"""Record what the packages `xlstm` and `tirex-ts` compute, into xlstm.json.

    pip install --no-deps --target DIR xlstm==2.0.6 tirex-ts==1.4.2
    python tests/oracles/record_xlstm.py DIR

The packages are loaded without their dependencies, which a CPU does not need: only the
files of the sLSTM are run. Everything is float64, except TiRex's equations, which are
float32.
"""

import importlib
import json
import sys
import types
from pathlib import Path

import torch

B, T, H, K = 2, 3, 4, 2
_PACKAGES = (
    "xlstm",
    "xlstm.blocks",
    "xlstm.blocks.slstm",
    "xlstm.components",
    "tirex",
    "tirex.models",
    "tirex.models.slstm",
)


def load(directory, module):
    """Import a module of a package without the code that packages run at first."""
    sys.path.insert(0, str(directory))
    for name in _PACKAGES:
        if name.split(".")[0] == module.split(".")[0]:
            package = types.ModuleType(name)
            package.__path__ = [str(Path(directory, *name.split(".")))]
            sys.modules.setdefault(name, package)
    if module.startswith("tirex"):
        util = types.ModuleType("tirex.util")
        util.dataclass_from_dict = None  # for CUDA only
        sys.modules["tirex.util"] = util
    return importlib.import_module(module)


def numbers(value):
    if isinstance(value, dict):
        return {name: numbers(a) for name, a in value.items()}
    return value.detach().tolist()


def record_layer(module, kernel_size):
    """Run a layer on random weights, without its group norm."""
    config = module.sLSTMLayerConfig(
        embedding_dim=H,
        num_heads=K,
        conv1d_kernel_size=kernel_size,
        backend="vanilla",
        dtype="float32",
        enable_automatic_mixed_precision=False,
    )
    layer = module.sLSTMLayer(config).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn_like(parameter))
    x = torch.randn(B, T, H, dtype=torch.float64)
    state = torch.randn(4, B, H, dtype=torch.float64)
    state[2] = state[2].abs() + 0.1
    x_conv = layer.conv_act_fn(layer.conv1d(x)) if kernel_size else x
    gates = [layer.fgate(x_conv), layer.igate(x_conv), layer.zgate(x), layer.ogate(x)]
    state.requires_grad_(True)
    y, final = layer.slstm_cell(torch.cat(gates, dim=-1), state=state)
    y = y.transpose(1, 2).reshape(B, T, H)
    dy, dfinal = torch.randn_like(y), torch.randn_like(final)
    loss = torch.sum(y * dy) + torch.sum(final * dfinal)
    wanted = {
        name: parameter
        for name, parameter in layer.named_parameters()
        if "group_norm" not in name and "conv1d" not in name
    }
    gradients = torch.autograd.grad(loss, [*wanted.values(), state])
    return {
        "weights": layer.state_dict(),
        "x": torch.cat([x_conv, x], -1) if kernel_size else x,
        "state": state,
        "y": y,
        "final": final,
        "dy": dy,
        "dfinal": dfinal,
        "gradients": dict(zip([*wanted, "state"], gradients, strict=True)),
    }


def record_empty_row(module):
    """Run a row of zero state alone, and beside an active one."""
    config = module.sLSTMCellConfig(
        hidden_size=H,
        num_heads=K,
        backend="vanilla",
        dtype="float32",
        enable_automatic_mixed_precision=False,
    )
    cell = module.sLSTMCell(config).double()
    with torch.no_grad():
        cell._recurrent_kernel_.copy_(torch.randn_like(cell._recurrent_kernel_))
        cell._bias_.copy_(torch.randn_like(cell._bias_))
        cell._bias_[:H] -= 1000.0  # the input gate
    gates = torch.randn(B, T, 4 * H, dtype=torch.float64)
    state = torch.randn(4, B, H, dtype=torch.float64)
    state[2] = state[2].abs() + 0.1
    state[:, 0] = 0
    alone, _ = cell(gates[:1], state[:, :1])
    other, _ = cell(gates[1:], state[:, 1:])
    both, _ = cell(gates, state)
    return {
        "weights": cell.state_dict(),
        "gates": gates,
        "state": state,
        "y": torch.cat([alone, other]).transpose(1, 2).reshape(B, T, H),
        "is_nan_in_one_batch": torch.isnan(both).flatten(1).any(1),
    }


def record_tirex(module):
    """Run TiRex's equations in float32: its module rounds to bfloat16."""
    kernel, bias = torch.randn(K, H // K, 4 * (H // K)), torch.randn(4 * H)
    gates = torch.randn(T, B, 4 * H)
    rows = bias.reshape(K, 4, H // K).permute(1, 0, 2).reshape(-1)
    y, _ = module.sLSTMCellTorch.slstm_forward(
        gates, torch.zeros(4, B, H), kernel, rows
    )
    weights = {"_recurrent_kernel_": kernel, "_bias_": bias}
    return {"weights": weights, "gates": gates.transpose(0, 1), "y": y.transpose(0, 1)}


def main():
    torch.manual_seed(0)
    layer = load(Path(sys.argv[1]), "xlstm.blocks.slstm.layer")
    tirex = load(Path(sys.argv[1]), "tirex.models.slstm.cell")
    recorded = {
        "versions": {"xlstm": "2.0.6", "tirex-ts": "1.4.2", "torch": torch.__version__},
        "layer": numbers(record_layer(layer, 0)),
        "convolved": numbers(record_layer(layer, 3)),
        "empty_row": numbers(record_empty_row(layer)),
        "tirex": numbers(record_tirex(tirex)),
    }
    path = Path(__file__).with_name("xlstm.json")
    path.write_text(json.dumps(recorded, indent=None, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
