"""interop.haiku: the numbers of haiku's own cores."""

import functools as ft

import jax
import jax.numpy as jnp
import pytest
from interop_cases import (
    LIMIT,
    assert_swaps_show,
    distance,
    draw,
    lenient,
    redraw,
)

from ostinato.interop import haiku as ours

pytestmark = pytest.mark.peers
hk = pytest.importorskip("haiku", reason="needs the extra `peers`")

X = draw(2, 5, 3)
CORES = {
    "lstm": lambda: hk.LSTM(4),
    "gru": lambda: hk.GRU(4),
    "vanilla_rnn": lambda: hk.VanillaRNN(4),
    "vanilla_rnn-one-bias": lambda: hk.VanillaRNN(4, double_bias=False),
}


@ft.cache
def params_and_outputs(name, scope=None):
    def forward(x):
        def inner():
            core = CORES[name]()
            state = core.initial_state(x.shape[0])
            return hk.dynamic_unroll(core, x, state, time_major=False)[0]

        return inner() if scope is None else hk.to_module(inner)(scope)()

    with lenient():
        f = hk.without_apply_rng(hk.transform(forward))
        params = redraw(f.init(jax.random.key(0), jnp.asarray(X)))
        return params, f.apply(params, jnp.asarray(X))


@pytest.mark.parametrize("name", CORES)
def test_core_gives_the_same_numbers(name):
    params, want = params_and_outputs(name)
    imported = ours.from_params(params, name.partition("-")[0])
    assert distance(imported, X, want) <= LIMIT
    assert imported.spec.bias == ("double" if name == "vanilla_rnn" else "input")


@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_any_two_gates_swapped_show(name, monkeypatch):
    params, want = params_and_outputs(name)
    convert = lambda: ours.from_params(params, name)  # noqa: E731
    assert_swaps_show(monkeypatch, ours.GATES, name, convert, X, want)


def test_core_inside_a_model_is_found():
    params, want = params_and_outputs("lstm", "policy")
    params = {**params, "head/linear": {"w": X, "b": X}}
    assert distance(ours.from_params(params, "lstm"), X, want) <= LIMIT
    name = next(m for m in params if "lstm" in m).removesuffix("/linear")
    assert name != "lstm"
    assert distance(ours.from_params(params, "lstm", name), X, want) <= LIMIT
    twice = params | {"lstm_1/linear": params[f"{name}/linear"]}
    assert distance(ours.from_params(twice, "lstm", "lstm_1"), X, want) <= LIMIT
    with pytest.raises(ValueError, match=f"unless `name` .* got {name}, lstm_1"):
        ours.from_params(twice, "lstm")


def test_wrong_parameters_are_named():
    lstm, gru = (params_and_outputs(name)[0] for name in ("lstm", "gru"))
    with pytest.raises(ValueError, match="`kind` must be one of"):
        ours.from_params(lstm, "rnn")
    with pytest.raises(TypeError, match="`params` must be a mapping"):
        ours.from_params(X, "lstm")
    with pytest.raises(ValueError, match="no such core among lstm/linear"):
        ours.from_params(lstm, "gru")
    with pytest.raises(ValueError, match=r"`params\['b'\]\['w_i'\]` must be given"):
        ours.from_params(lstm, "gru", "b")
    bad = {"lstm/linear": {"w": jnp.zeros((3, 16)), "b": jnp.zeros(16)}}
    with pytest.raises(ValueError, match=r"shapes w \[I\+H, 4\*H\]"):
        ours.from_params(bad, "lstm")
    for bad in (None, jnp.ones(3)):
        with pytest.raises(TypeError, match=r"`params\['lstm/linear'\]` must be a map"):
            ours.from_params({"lstm/linear": bad}, "lstm")
    for leaf, shape in (("w_h", (4, 11)), ("w_i", (3, 9)), ("b", (11,))):
        bad = {"gru": dict(gru["gru"]) | {leaf: jnp.zeros(shape, jnp.float32)}}
        with pytest.raises(ValueError, match=r"`params\['gru'\]\['(w_h|w_i|b)'\]`"):
            ours.from_params(bad, "gru")
