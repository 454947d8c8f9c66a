"""Examples that a branch or a step of a loop does not use: they have no gradient there.

The oracle is a loop over the examples.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closures import fast_jit
from jax import lax

import ostinato as ost
from ostinato import ragged

LENGTHS = (3, 1, 4, 1)
ROWS = np.random.default_rng(7).uniform(0.2, 1.5, (12, 3))
PARTS = [jnp.asarray(p) for p in np.split(ROWS, np.cumsum(LENGTHS))[:-1]]
PARTS[1] = -PARTS[1]
W = jnp.asarray(np.random.default_rng(8).uniform(0.2, 1, (3, 3)))


def batch():
    """Return the examples, with NaN in the unused capacity."""
    data = np.full((12, 3), np.nan)
    data[:9] = np.concatenate(PARTS)
    return ragged.RaggedArray(data, LENGTHS, max_length=5)


def check(function, orders=2, **options):
    """Compare values and both gradients with the loop, and by jvp of the gradient."""
    x, n = batch(), sum(LENGTHS)
    mapped = ragged.vmap(function, in_axes=(None, 0), **options)

    def of_batch(w, tokens):
        data = jnp.concatenate([tokens, x.data[n:]])
        return jnp.sum(jnp.sin(mapped(w, x.with_data(data))))

    def of_loop(w, tokens):
        parts = jnp.split(tokens, np.cumsum(LENGTHS)[:-1])
        return jnp.sum(jnp.sin(jnp.stack([function(w, p) for p in parts])))

    tokens = jnp.concatenate(PARTS)
    for run in (jax.value_and_grad, second)[:orders]:
        got, want = (
            fast_jit(run(loss, argnums=(0, 1)))(W, tokens)
            for loss in (of_batch, of_loop)
        )
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-11)


def second(loss, argnums):
    def run(w, tokens):
        gradient = jax.grad(loss, argnums)
        return jax.jvp(gradient, (w, tokens), (jnp.cos(w), jnp.cos(tokens)))[1]

    return run


# ----------------------------------------------------------------------- conditions

BRANCHES = {
    # a value, and a shared one, where the root has no derivative
    "of_a_row": lambda w, x: lax.cond(
        x[0, 0] > 0, lambda: jnp.sqrt(x[0] @ w).sum(), lambda: x[0, 1]
    ),
    "of_tokens_and_weights": lambda w, x: lax.cond(
        x[0, 0] > 0, lambda: jnp.sqrt(x @ w).sum(), lambda: w[0, 0] * x[0, 0]
    ),
    "of_a_size": lambda w, x: lax.cond(
        jnp.array(x.shape[0]) > 1,
        lambda: (x * w[0][None]).std(),
        lambda: w[0, 0] * x[0, 0],
    ),
    "of_tokens_alone": lambda w, x: (
        w[0, 0] * lax.cond(x.sum() > 0, lambda x: jnp.log(x), lambda x: x**2, x).sum()
    ),
    "of_dense_values": lambda w, x: (
        lambda s: lax.cond(s > 0, lambda: jnp.sqrt(s * w[0]), lambda: s * w[1]).sum()
    )(x.sum()),
    "switch": lambda w, x: lax.switch(
        jnp.clip(x.shape[0] - 2, 0, 2),
        [
            lambda: jnp.sqrt(jnp.abs(x[0] - x[0, 0]) @ w).sum(),
            lambda: x.sum() * w[0, 0],
            lambda: (x[1:] @ w).std(),
        ],
    ),
    "never": lambda w, x: lax.cond(
        x.sum() > 1e9, lambda: jnp.sqrt(w * 0 - x.sum() ** 2).sum(), lambda: x.sum()
    ),
    "in_a_scan": lambda w, x: lax.scan(
        lambda h, a: (
            lax.cond(a[0] > 0, lambda: jnp.log(a * h + w[0]), lambda: h * w[1]),
            None,
        ),
        jnp.ones(3),
        x,
    )[0].sum(),
    "loop_in_a_branch": lambda w, x: lax.cond(
        x[0, 0] > 0,
        lambda: lax.scan(lambda h, a: (jnp.sqrt(h + a * w[0]), h), x[0], x)[1].sum(),
        lambda: w[0, 0],
    ),
}


@pytest.mark.parametrize("name", BRANCHES)
def test_a_branch_gives_a_gradient_to_examples_that_take_it(name):
    check(BRANCHES[name])


# ---------------------------------------------- derivatives that make something of zero


@jax.custom_vjp
def unit(x):
    """Return `x`; the gradient is scaled to length 1, and NaN for a zero gradient."""
    return x


unit.defvjp(lambda x: (x, x), lambda x, g: (g / jnp.linalg.norm(g) + 0 * x,))


@jax.custom_vjp
def with_loss(x, w):
    """Return `x`; the gradient of a further loss of `x` and `w` is added."""
    return x


with_loss.defvjp(
    lambda x, w: (x, (x, w)),
    lambda kept, g: (g + 2 * kept[0], kept[0] * kept[1] + jnp.sin(kept[1])),
)


def recur(own, w, x):
    return lax.scan(lambda h, a: (own(jnp.tanh(h @ w + a), w), h), x[0], x)[1].sum()


def of_unit(h, w):
    return unit(h)


def of_loss(h, w):
    return with_loss(h, w[0])


def recur_back(own, w, x):
    step = lambda h, a: (own(jnp.tanh(h @ w + a), w), h)  # noqa: E731
    return lax.scan(step, x[0], x, reverse=True)[1].sum()


def in_turns(own, w, x):
    turn = lambda i, h: own(jnp.tanh(h @ w + x[i]), w)  # noqa: E731
    return lax.fori_loop(0, x.shape[0], turn, jnp.zeros(3)).sum()


def in_a_network(own, w, x):
    step = lambda w, h, a, t: (own(jnp.tanh(h @ w + a)[0], w)[None], h)  # noqa: E731
    return ost.recurrent_net(step, x[None], jnp.zeros((1, 3)), params=w).states.sum()


def in_a_branch(own, w, x):
    return lax.cond(x[0, 0] > 0, lambda: own(x[0] @ w, w).sum(), lambda: x.sum())


def of_inner_gradient(own, w, x):
    return jnp.sum(jax.grad(lambda w: recur(own, w, x))(w) ** 2)


LOOPS = {
    "padded": (recur, {"scan": "padded"}),
    "packed": (recur, {"scan": "packed", "lanes": 2}),
    "auto": (recur, {}),
    "auto, reverse": (recur_back, {}),
    "turns": (in_turns, {}),
    "network": (in_a_network, {"orders": 1}),
    "branch": (in_a_branch, {}),
    "inner gradient": (of_inner_gradient, {"scan": "padded"}),
}


@pytest.mark.alike
@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("own", [of_unit, of_loss])
def test_derivatives_of_their_own_at_steps_that_no_example_uses(own, name):
    """A derivative that is not linear may give zero a gradient."""
    loop, options = LOOPS[name]
    check(lambda w, x: loop(own, w, x), **options)
