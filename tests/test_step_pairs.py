"""Pairs of numbers that are not those of a row for each sequence."""

import jax
import jax.numpy as jnp
import pytest
from closures import fast_jit
from test_step_hunt import assert_same, draw

import ostinato as ost

B = 4
READ = {
    "one row of pairs": lambda m, i: m[jnp.arange(B)[None], i[None]][0],
    "a column of pairs": lambda m, i: m[jnp.arange(B)[:, None], i[:, None]][:, 0],
    "the second axis": lambda m, i: m[:, jnp.arange(B), i // 2][:, 0],
}


@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("backend", [None, "xla"])
def test_pairs_of_numbers_read_what_jax_reads(name, backend):
    def step(p, states, x, t):
        h, m = states
        i = jnp.argmax(h, -1).astype(jnp.int32)
        read = READ[name](m, i).reshape(B, -1)[:, :1]
        h = jnp.tanh(h @ p + x + jnp.broadcast_to(read, h.shape))
        return (h, jnp.sin(m + 1)), h

    def gradient(backend):
        def loss(p, x, h, m):
            out = ost.recurrent_net(step, x, (h, m), params=p, backend=backend)
            return jnp.sum(jnp.sin(out.outputs)), out

        shape = (B, B, 3)
        given = draw(0, B, B), draw(1, B, 5, B), draw(2, B, B), draw(3, *shape)
        return fast_jit(jax.grad(loss, (0, 1, 2, 3), has_aux=True))(*given)

    assert_same(gradient(backend), gradient("scan"))
