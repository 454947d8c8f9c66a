"""A step of `recurrent_net` beside the same step in a loop that NumPy can run."""

import jax.numpy as jnp

import ostinato as ost


def native_and_loop(step, x, h_0):
    """Return two functions of parameters that return the states of all steps.

    Args:
        step: `step(params, h, x_t, np)` returns the new state, in the module `np`.
        x: inputs `[T, B, ...]`, in NumPy.
        h_0: the initial state `[B, ...]`, in NumPy.

    Returns:
        `native(params)` of the native loop, and `loop(params, np)`.
    """

    def native(params):
        def run(p, h, x, t):
            h = step(p, h, x, jnp)
            return h, h

        return ost.recurrent_net(
            run, x, jnp.asarray(h_0), params=params, time_major=True, backend="cpu"
        ).outputs

    def loop(params, np):
        h, outputs = h_0, []
        for row in x:
            h = step(params, h, row, np)
            outputs.append(h)
        return np.stack(outputs)

    return native, loop
