"""Tests of weights of `xlstm` and TiRex, against what these packages computed.

`oracles/record_xlstm.py` wrote the numbers, and says which versions.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closures import fast_jit
from harness import assert_says
from interop_cases import assert_weights_are_checked
from tolerance import assert_close, assert_same_bits

import ostinato as ost
from ostinato.interop import xlstm as from_xlstm

RECORDED = json.loads(
    (Path(__file__).parent / "oracles" / "xlstm.json").read_text(encoding="utf-8")
)
H, K = 4, 2
D = H // K


def arrays(tree):
    if isinstance(tree, dict):
        return {name: arrays(value) for name, value in tree.items()}
    return np.array(tree, np.float64)


def states(a):
    """Return `[4, B, H]` as the operator has it."""
    return tuple(jnp.asarray(s)[None] for s in a)


@pytest.mark.parametrize("backend", ["xla", None])
@pytest.mark.parametrize("name", ["layer", "convolved"])
def test_values_and_gradients_are_those_of_the_package(name, backend):
    case = arrays(RECORDED[name])
    spec, _, notes = from_xlstm.from_state_dict(case["weights"])
    assert (spec.mode, spec.num_heads, spec.hidden_size) == ("slstm", K, H)
    assert spec.input_size == case["x"].shape[-1]
    assert any("conv1d" in note for note in notes) == (name == "convolved")

    def run(tensors, state):
        weights = from_xlstm.from_state_dict(tensors).weights
        return ost.rnn(spec, weights, case["x"], states(state), backend=backend)

    tensors = {n: jnp.asarray(a) for n, a in case["weights"].items()}

    def loss(tensors, state):
        y, final = run(tensors, state)
        weighted = [jnp.sum(f[0] * d) for f, d in zip(final, case["dfinal"])]  # noqa: B905
        return jnp.sum(y * case["dy"]) + sum(weighted)

    y, final = run(tensors, case["state"])
    assert_close(y, case["y"], terms=50)
    for got, want in zip(final, case["final"], strict=True):
        assert_close(got[0], want, terms=50)
    grads, dstate = fast_jit(jax.grad(loss, (0, 1)))(
        tensors, jnp.asarray(case["state"])
    )
    wanted = case["gradients"]
    assert_close(dstate, wanted.pop("state"), terms=300)
    for tensor, want in wanted.items():
        assert_close(grads[tensor], want, terms=300, what=tensor)


def of_gates(cell):
    """Return a network that reads preactivations, as a cell of the package does."""
    ones = {
        f"{gate}.weight": np.zeros((K, D, D))
        for gate in ("fgate", "igate", "zgate", "ogate")
    }
    named = {f"slstm_cell.{name}": value for name, value in cell.items()}
    spec, weights, _ = from_xlstm.from_state_dict({**ones, **named})
    (layer,) = ost.unpack_weights(weights, spec)
    spec = ost.RNNSpec("slstm", 4 * H, H, bias="input", num_heads=K)
    layer = layer._replace(w_ih=jnp.eye(4 * H, dtype=weights.dtype))
    return spec, ost.pack_weights([layer], spec)


@pytest.mark.parametrize("backend", ["xla", None])
def test_an_empty_row_beside_an_active_one_is_what_the_package_computes_alone(backend):
    """Check the case in which the package itself returns NaN for the batch."""
    case = arrays(RECORDED["empty_row"])
    assert case["is_nan_in_one_batch"].tolist() == [True, False]
    spec, weights = of_gates(case["weights"])
    y, _ = ost.rnn(spec, weights, case["gates"], states(case["state"]), backend=backend)
    np.testing.assert_allclose(y, case["y"], rtol=1e-10, atol=1e-10)  # of exp(1000.)


def test_the_equations_of_tirex():
    case = arrays(RECORDED["tirex"])
    spec, weights = of_gates(case["weights"])
    y = ost.rnn(spec, weights, case["gates"]).y
    assert_close(y, case["y"], dtype="float32", terms=50)


@pytest.mark.parametrize("backend", ["vanilla", "cuda"])
@pytest.mark.parametrize("name", ["layer", "convolved"])
def test_tensors_go_back(name, backend):
    torch = pytest.importorskip("torch")
    case = arrays(RECORDED[name])
    spec, weights, _ = from_xlstm.from_state_dict(case["weights"])
    back = from_xlstm.to_state_dict(spec, weights, "a.", backend=backend)
    if backend == "vanilla":
        for tensor, value in back.items():
            assert_same_bits(value.numpy(), case["weights"][tensor.removeprefix("a.")])
    else:
        assert back["a.slstm_cell._recurrent_kernel_"].shape == (K, D, 4 * D)
    if name == "convolved":
        back["a.conv1d.conv.weight"] = torch.zeros(1)
    assert from_xlstm.find({**back, "b": 0}) == ["a."]
    again = from_xlstm.from_state_dict(back, "a.")
    assert again.spec == spec
    assert_same_bits(again.weights, weights)


def test_biases_are_added_and_missing_ones_are_zeros():
    pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    for bias in ("double", "none"):
        spec = ost.RNNSpec("slstm", 2, 2, num_heads=2, bias=bias)
        weights = jnp.asarray(rng.standard_normal(spec.num_params))
        (layer,) = ost.unpack_weights(weights, spec)
        layer = layer._replace(w_ih=jnp.tile(jnp.eye(2), (4, 1)))
        weights = ost.pack_weights([layer], spec)
        one, flat, _ = from_xlstm.from_state_dict(
            from_xlstm.to_state_dict(spec, weights)
        )
        x = rng.standard_normal((2, 3, 2))
        assert_close(ost.rnn(one, flat, x).y, ost.rnn(spec, weights, x).y)


def test_errors_name_the_tensor_or_the_field():
    tensors = arrays(RECORDED["layer"]["weights"])
    with pytest.raises(ValueError, match=r"`sd` must hold 'x\.fgate\.weight'.*=''"):
        from_xlstm.from_state_dict(tensors, "x.")
    with pytest.raises(TypeError, match="`sd` must be a mapping"):
        from_xlstm.from_state_dict([1])  # type: ignore[arg-type]
    bad = {**tensors, "ogate.weight": np.zeros((2, 3, 3))}
    with pytest.raises(
        ValueError, match=r"ogate\.weight'\]` must have shape \(2, 2, 2"
    ):
        from_xlstm.from_state_dict(bad)
    bad = {**tensors, "slstm_cell._recurrent_kernel_": np.zeros((2, 3, 3))}
    with pytest.raises(ValueError, match=r"must have shape \(heads, d, 4 d\)"):
        from_xlstm.from_state_dict(bad)
    spec, weights, _ = from_xlstm.from_state_dict(tensors)
    dense = ost.RNNSpec("slstm", H, H, num_heads=K)
    for spec, words in (
        (ost.RNNSpec("lstm", H, H), "`spec` mode='slstm' 'lstm'"),
        (ost.RNNSpec("slstm", 3, H), "`spec` input 4 8 3"),
        (ost.RNNSpec("slstm", H, H, proj_size=2), "`spec` proj_size=0 2"),
        (dense, "`weights` w_ih 'i' 2"),
    ):
        with pytest.raises(ValueError) as info:
            from_xlstm.to_state_dict(spec, jnp.ones(spec.num_params))
        assert_says(info, words)


def test_arguments_of_the_exporter_are_checked():
    pytest.importorskip("torch")
    spec = ost.RNNSpec("slstm", 4, 4)
    assert_weights_are_checked(from_xlstm.to_state_dict, spec)
    with pytest.raises(TypeError, match="`prefix` must be a string, got int 5"):
        from_xlstm.to_state_dict(spec, jnp.zeros(spec.num_params), 5)


def test_what_is_no_state_dict_and_no_prefix_is_an_error():
    tensors = arrays(RECORDED["layer"]["weights"])
    with pytest.raises(TypeError, match="`sd` must be a mapping, got NoneType"):
        from_xlstm.find(None)
    with pytest.raises(TypeError, match="`prefix` must be a string, got int 5"):
        from_xlstm.from_state_dict(tensors, 5)
    named = {f"block.{name}": a for name, a in tensors.items()}
    with pytest.raises(ValueError, match=r"give prefix='block\.'"):
        from_xlstm.from_state_dict(named)
    with pytest.raises(ValueError, match="it has no sLSTM layer"):
        from_xlstm.from_state_dict({})
    del named["block.ogate.weight"]
    with pytest.raises(ValueError, match=r"must hold 'block\.ogate\.weight'$"):
        from_xlstm.from_state_dict(named, "block.")


def test_a_later_layer_is_exported():
    """The tensors are those of the layer that is named, not of the first one."""
    pytest.importorskip("torch")
    spec = ost.RNNSpec("slstm", 2, 2, 2, num_heads=2, bias="input")
    weights = jnp.asarray(np.random.default_rng(0).standard_normal(spec.num_params))
    layers = [
        one._replace(w_ih=one.w_ih * jnp.tile(jnp.eye(2), (4, 1)))
        for one in ost.unpack_weights(weights, spec)
    ]
    weights = ost.pack_weights(layers, spec)
    for n, layer in enumerate(layers):
        tensors = from_xlstm.to_state_dict(spec, weights, layer=n)
        one, flat, _ = from_xlstm.from_state_dict(tensors)
        np.testing.assert_array_equal(flat, ost.pack_weights([layer], one))
