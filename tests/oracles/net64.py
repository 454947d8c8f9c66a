"""A network of any step function in numpy: each sequence alone, at its true length.

So no mask can be wrong in the same way as in the library. Steps take and return arrays
of one sequence, without a batch axis. It shares no code with the library.
"""

from typing import Any, NamedTuple

import jax
import numpy as np


class Result(NamedTuple):
    outputs: Any
    states: Any
    all_states: Any


def run(
    step,
    inputs,
    states,
    *,
    params=None,
    lengths=None,
    resets=None,
    reverse=False,
    padding="hold",
    window=1,
) -> Result:
    """Run `step` over every sequence; `inputs`, `states` and results lead with B."""
    tree = jax.tree.map
    batch = jax.tree.leaves(states)[0].shape[0]
    steps = jax.tree.leaves(inputs)[0].shape[1]
    sequences = []
    for b in range(batch):
        length = steps if lengths is None else int(lengths[b])
        sequence = tree(lambda a, b=b: np.asarray(a[b]), inputs)
        state = tree(lambda a, b=b: np.asarray(a[b]), states)
        first, outputs, after = state, [None] * steps, [None] * steps
        for t in range(length)[:: -1 if reverse else 1]:
            if resets is not None and resets[b, t]:
                state = tree(np.zeros_like, state)
            x_t = tree(lambda a, t=t: a[t], sequence)
            new, outputs[t] = step(params, state, x_t, t)
            if window > 1:
                state = tree(lambda a, n: np.concatenate([a[1:], n[None]]), state, new)
            else:
                state = new
            after[t] = new
        newest = tree(lambda a: a[-1], first) if window > 1 else first
        sequences.append((length, outputs, after, newest, state))
    return _pad(sequences, steps, reverse, padding)


def _pad(sequences, steps, reverse, padding) -> Result:
    tree = jax.tree.map
    nonempty = next(s for s in sequences if s[0] > 0)
    zero = tree(np.zeros_like, nonempty[1][0])
    outputs, all_states, states = [], [], []
    for length, out, after, first, last in sequences:
        hold = padding == "hold"
        fill = out[length - 1] if hold and length else zero
        outputs.append([*out[:length], *[fill] * (steps - length)])
        still = first if reverse or length == 0 else after[length - 1]
        still = still if hold else tree(np.zeros_like, first)
        all_states.append([*after[:length], *[still] * (steps - length)])
        dropped = padding == "drop" and length < steps
        states.append(tree(np.zeros_like, last) if dropped else last)
    stack = lambda *leaves: np.stack(leaves)  # noqa: E731
    over_time = [tree(stack, *steps) for steps in outputs]
    states_over_time = [tree(stack, *steps) for steps in all_states]
    return Result(
        tree(stack, *over_time), tree(stack, *states), tree(stack, *states_over_time)
    )
