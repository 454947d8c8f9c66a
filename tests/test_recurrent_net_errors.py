"""Tests of bad input to `recurrent_net`: errors name argument, want and got."""

import functools as ft

import jax
import jax.numpy as jnp
import pytest
from harness import assert_says

import ostinato as ost

T, B = 4, 3
X = jnp.zeros((B, T, 2))
STATES = {"h": jnp.zeros((B, 2)), "n": jnp.zeros(B, jnp.int32)}


def keep(params, states, x, t):
    return states, {"y": ost.tag(x, "input"), "z": (2 * x, x)}


def call(step=keep, inputs=X, states=STATES, **options):
    return ost.recurrent_net(step, inputs, states, **options)


def returning(change):
    """Return a call with a step whose new states are changed."""
    return lambda: call(lambda p, s, x, t: (change(s), x))


# The call, the exception, and words that the message must contain.
CALLS = {
    "step": (lambda: call(3), TypeError, "`step` function cell int 3"),
    "padding": (lambda: call(padding="none"), ValueError, "`padding` 'hold' 'none'"),
    "reverse": (lambda: call(reverse=1), TypeError, "`reverse` True int 1"),
    "time-major": (lambda: call(time_major=0), TypeError, "`time_major` int 0"),
    "all-states": (
        lambda: call(return_all_states=1),
        TypeError,
        "`return_all_states` int 1",
    ),
    # inputs
    "inputs-rank": (
        lambda: call(inputs={"x": X, "v": jnp.zeros(B)}),
        ValueError,
        "`inputs['v']` [B, T, ...] [3] batch axis of 1",
    ),
    "inputs-rank-time-major": (
        lambda: call(inputs=jnp.zeros(T), time_major=True),
        ValueError,
        "`inputs` [T, B, ...] [4]",
    ),
    "inputs-sizes": (
        lambda: call(inputs=(X, X[:, 1:])),
        ValueError,
        "`inputs[1]` [B, T] [3, 4] `inputs[0]` [3, 3, 2]",
    ),
    "inputs-list": (
        lambda: call(inputs={"x": "abc"}),
        TypeError,
        "`inputs['x']` array str",
    ),
    "length-missing": (
        lambda: call(inputs=None),
        ValueError,
        "`length` must be given `inputs`",
    ),
    "length-differs": (lambda: call(length=7), ValueError, "`length` T = 4 7"),
    "length-negative": (
        lambda: call(inputs=None, length=-1),
        ValueError,
        "`length` at least 0 -1",
    ),
    "length-float": (
        lambda: call(inputs=None, length=2.0),
        TypeError,
        "`length` integer float 2.0",
    ),
    "no-arrays": (
        lambda: call(inputs=None, states=(), length=2),
        ValueError,
        "`initial_states` array [B, ...] tuple",
    ),
    # states
    "states-batch": (
        lambda: call(states={"h": jnp.zeros((B + 1, 2))}),
        ValueError,
        "`initial_states['h']` [B, ...] [3] [4, 2]",
    ),
    "states-number": (
        lambda: call(states=0.0),
        TypeError,
        "`initial_states` array float 0.0",
    ),
    "states-keys": (
        lambda: call(states=jax.random.split(jax.random.key(0), B)),
        TypeError,
        "`initial_states` numbers key<fry>",
    ),
    "window-slots": (
        lambda: call(states=jnp.zeros((B, 2, 5)), window=3),
        ValueError,
        "`initial_states` [B, window, ...] [3, 3] [3, 2, 5]",
    ),
    "window-no-slots": (
        lambda: call(window=2),
        ValueError,
        "`initial_states['n']` [B, window, ...] [3, 2] [3]",
    ),
    "window-zero": (lambda: call(window=0), ValueError, "`window` at least 1 0"),
    # lengths and resets
    "lengths-shape": (
        lambda: call(seq_lengths=[1, 2]),
        ValueError,
        "`seq_lengths` (B) (3,) (2,)",
    ),
    "lengths-range": (
        lambda: call(seq_lengths=[1, 5, 0]),
        ValueError,
        "`seq_lengths` 0..4 5 sequence 1",
    ),
    "lengths-under-jit": (
        lambda: jax.jit(lambda x: call(inputs=x, seq_lengths=[1, -1, 0]))(X),
        ValueError,
        "`seq_lengths` 0..4 -1 sequence 1",
    ),
    "lengths-float": (
        lambda: call(seq_lengths=jnp.zeros(B)),
        TypeError,
        "`seq_lengths` integers float64[3]",
    ),
    "resets-shape": (
        lambda: call(resets=jnp.zeros((T, B), bool)),
        ValueError,
        "`resets` (B, T) (3, 4) (4, 3)",
    ),
    "resets-dtype": (
        lambda: call(resets=jnp.zeros((B, T))),
        TypeError,
        "`resets` bool float64[3, 4]",
    ),
    "resets-reverse": (
        lambda: call(resets=jnp.zeros((B, T), bool), reverse=True),
        ValueError,
        "`resets` reverse=False reverse=True",
    ),
    # recompute and segments
    "recompute-unknown": (
        lambda: call(recompute=("input", "gates")),
        ValueError,
        "`recompute` ostinato.tag 'gates' 'input'",
    ),
    "recompute-none-there": (
        lambda: call(lambda p, s, x, t: (s, x), recompute=("gates",)),
        ValueError,
        "`recompute` 'gates' none",
    ),
    "recompute-string": (
        lambda: call(recompute="input"),
        TypeError,
        "`recompute` tuple ('gates',) str 'input'",
    ),
    "recompute-numbers": (
        lambda: call(recompute=(1,)),
        TypeError,
        "`recompute` tuple (1,)",
    ),
    "segment-zero": (
        lambda: call(segment_length=0),
        ValueError,
        "`segment_length` at least 1 0",
    ),
    "segment-word": (
        lambda: call(segment_length="some"),
        ValueError,
        "`segment_length` integer 'auto' 'some'",
    ),
    "tag-name": (lambda: ost.tag(X, 3), TypeError, "`name` string int 3"),
    # outputs
    "outputs-unknown": (
        lambda: call(outputs_with_grads=("y", "w")),
        ValueError,
        "`outputs_with_grads` 'w' 'y' 'z'",
    ),
    "outputs-index": (
        lambda: call(lambda p, s, x, t: (s, (x, x)), outputs_with_grads=(2,)),
        ValueError,
        "`outputs_with_grads` 2 0, 1",
    ),
    "outputs-one-array": (
        lambda: call(lambda p, s, x, t: (s, x), outputs_with_grads=(0,)),
        ValueError,
        "`outputs_with_grads` 0 none",
    ),
    "outputs-string": (
        lambda: call(outputs_with_grads="y"),
        TypeError,
        "`outputs_with_grads` tuple ('y',) str 'y'",
    ),
    "outputs-bools": (
        lambda: call(outputs_with_grads={"y": True}),
        ValueError,
        "`outputs_with_grads` bools structure {'y': True}",
    ),
    "step-of-3": (
        lambda: call(lambda p, s, x: (s, x)),
        TypeError,
        "`step` four arguments step(params, states, inputs_t, t) (p, s, x)",
    ),
    "step-of-5": (
        lambda: call(lambda p, s, x, t, u: (s, x)),
        TypeError,
        "`step` four arguments step(params, states, inputs_t, t) (p, s, x, t, u)",
    ),
    # results of the step
    "result": (
        lambda: call(lambda p, s, x, t: s),
        TypeError,
        "`step` (new_states, outputs_t) dict",
    ),
    "structure-missing": (
        returning(lambda s: {"h": s["h"]}),
        TypeError,
        "`step` structure {'h': *, 'n': *} {'h': *} without `states['n']`",
    ),
    "structure-more": (
        returning(lambda s: s | {"c": s["h"]}),
        TypeError,
        "`step` structure with `states['c']`",
    ),
    "structure-kind": (
        returning(lambda s: (s["h"], s["n"])),
        TypeError,
        "`step` structure {'h': *, 'n': *} (*, *)",
    ),
    "shape": (
        returning(lambda s: s | {"h": s["h"][:, :1]}),
        ValueError,
        "`step` `states['h']` [3, 2] [3, 1]",
    ),
    "dtype": (
        returning(lambda s: s | {"n": jnp.ones(B)}),
        TypeError,
        "`step` `states['n']` int32 float64",
    ),
    "window-shape": (
        lambda: call(lambda p, s, x, t: (s, x), states=jnp.zeros((B, 2, 5)), window=2),
        ValueError,
        "`step` `states` [3, 5] [3, 2, 5]",
    ),
    "output-batch": (
        lambda: call(lambda p, s, x, t: (s, {"mean": x.mean()})),
        ValueError,
        "`step` `outputs['mean']` [B, ...] B = 3 []",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_bad_input_is_refused_with_a_reason(name):
    function, error, words = CALLS[name]
    with pytest.raises(error) as info:
        function()
    assert_says(info, words)


def test_traced_lengths_out_of_range_are_clamped():
    run = jax.jit(lambda n: call(seq_lengths=n, padding="zero").outputs["y"])
    assert run(jnp.array([9, -3, 2])).shape == (B, T, 2)


def test_steps_that_take_four_arguments_in_another_form_run():
    def of_three(params, states, x):
        return states, {"y": x}

    @ft.wraps(of_three)  # its signature, to inspect, is that of the function
    def wrapped(params, states, x, t):
        return of_three(params, states, x)

    for step in (
        wrapped,
        jax.jit(wrapped),
        ft.partial(lambda _, *four: wrapped(*four), 1),
    ):
        assert call(step).outputs["y"].shape[:2] == (B, T)


def test_errors_inside_of_the_step_are_left_alone():
    def step(params, states, x, t):
        return (lambda a: a)(states, x)

    with pytest.raises(TypeError, match="takes 1 positional argument but 2 were given"):
        call(step)
