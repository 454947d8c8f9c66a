"""`with_sharding_constraint` within `ragged.vmap`, on the four devices of the tests."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ostinato import ragged

LENGTHS = (3, 1, 2)
MESH = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))


def constrain(x, *spec):
    return lax.with_sharding_constraint(x, NamedSharding(MESH, P(*spec)))


FUNCTIONS = {
    "rows": (lambda x, w, at: at(x @ w, "d"), None),
    "features": (lambda x, w, at: at(x @ w, None, "d"), P(None, "d")),
    "pairs": (lambda x, w, at: at(x @ w @ x.T, None, "d"), P(None, None, "d")),
    "of_one_example": (lambda x, w, at: at((x @ w).sum(0), "d"), P(None, "d")),
    "weights": (lambda x, w, at: x @ at(w, "d"), None),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_constraint_changes_where_values_lie_and_no_value(name):
    general, spec = FUNCTIONS[name]
    function = functools.partial(general, at=constrain)
    plain = functools.partial(general, at=lambda x, *_: x)
    rng = np.random.default_rng(0)
    examples = [rng.standard_normal((n, 4)) for n in LENGTHS]
    batch = ragged.RaggedArray.from_list(examples, capacity=8, max_length=4)
    w = jnp.asarray(rng.standard_normal((4, 4)))

    def total(data, w):
        out = ragged.vmap(function, in_axes=(0, None))(batch.with_data(data), w)
        values = out if isinstance(out, jax.Array) else out.data
        return jnp.sum(jnp.sin(values)), out

    run = jax.jit(jax.grad(total, argnums=(0, 1), has_aux=True))
    (of_tokens, of_w), out = run(batch.data, w)
    assert run.lower(batch.data, w).as_text().count("sharding") >= 1
    if spec is not None:
        values = out if isinstance(out, jax.Array) else out.data
        assert values.sharding.spec == spec

    def each(examples, w):
        return sum(jnp.sum(jnp.sin(plain(x, w))) for x in examples)

    want_tokens, want_w = jax.grad(each, argnums=(0, 1))(examples, w)
    np.testing.assert_allclose(of_w, want_w, rtol=1e-10)
    np.testing.assert_allclose(of_tokens[:6], np.concatenate(want_tokens), rtol=1e-10)
    results = out if isinstance(out, jax.Array) else out.to_list()
    for got, x in zip(results, examples, strict=True):
        np.testing.assert_allclose(got, plain(x, w), rtol=1e-10)
