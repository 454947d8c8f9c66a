"""Functions in functions: jit, remat, custom derivatives, derivatives inside."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from .attention import attention
from .control import lstm
from .program import D, programs


@jax.custom_jvp
def square(x):
    return x**2


@square.defjvp
def _(primals, tangents):
    """Seven times the true derivative, so that it is seen which one is used."""
    return square(primals[0]), 14 * primals[0] * tangents[0]


@jax.custom_vjp
def product(x, w):
    return x @ w


def _product_fwd(x, w):
    return product(x, w), (x, w)


def _product_bwd(kept, dy):
    """Three and five times the true ones."""
    x, w = kept
    return 3 * dy @ w.T, 5 * x.T @ dy


product.defvjp(_product_fwd, _product_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def clipped(bound, x):
    """The identity; gradients are cut to `[-bound, bound]`."""
    return x


clipped.defvjp(
    lambda bound, x: (x, None), lambda bound, _, dy: (jnp.clip(dy, -bound, bound),)
)


@jax.custom_vjp
def scaled_back(w):
    """Return a result of weights alone, the same for all examples."""
    return w**3


scaled_back.defvjp(lambda w: (w**3, w), lambda w, dw: (7 * w * dw,))


@jax.custom_vjp
def with_weights(x, w):
    """One result of the example, one of the weights alone."""
    return x @ w, 2 * w


with_weights.defvjp(
    lambda x, w: (with_weights(x, w), (x, w)),
    lambda kept, d: (3 * d[0] @ kept[1].T, 5 * kept[0].T @ d[0] + 4 * d[1]),
)


def both_of_weights(x, w):
    y, doubled = with_weights(x, w)
    return y @ doubled, doubled * x[0][:, None]


@jax.custom_vjp
def mean_pool(x):
    return x.mean(0)


mean_pool.defvjp(
    lambda x: (x.mean(0), x),
    lambda x, dy: (2 * jnp.broadcast_to(dy[None], x.shape) / x.shape[0],),
)


@jax.jit
def jitted(x, w):
    return jax.jit(lambda a: jnp.tanh(a @ w))(x) + x.sum(0)[None]


def checkpointed(x, w, u):
    return jax.checkpoint(attention)(x, w, u)


def checkpoint_names(x, w):
    from jax.ad_checkpoint import checkpoint_name

    inner = lambda a: jnp.sin(checkpoint_name(jnp.tanh(a @ w), "hidden"))  # noqa: E731
    policy = jax.checkpoint_policies.save_only_these_names("hidden")
    return jax.checkpoint(inner, policy=policy)(x)


def checkpointed_steps(x, w):
    step = jax.checkpoint(lambda h, a: (jnp.tanh(h @ w + a),) * 2)
    return lax.scan(step, jnp.zeros(D), x)


def scan_with_custom_step(x, w):
    def step(h, a):
        h = jnp.tanh(square(a) + product(h[None], w)[0])
        return h, h

    return lax.scan(step, jnp.zeros(D), x)


def inner_gradient(x, w):
    return jax.grad(lambda a: (jnp.tanh(a @ w) ** 2).mean())(x)


def inner_gradient_of_loop(x, w_gates):
    loss = lambda a, g: (lstm(a, g)[1] ** 2).sum()  # noqa: E731
    return jax.grad(loss, (0, 1))(x, w_gates)


def gradient_step(x, w, b):
    """Weights of the example's own after a step of descent."""
    loss = lambda v: ((x @ v - b[None]) ** 2).mean()  # noqa: E731
    fitted = w - 0.1 * jax.grad(loss)(w)
    return x @ fitted


def token_gradients(x, w):
    return jax.vmap(jax.grad(lambda row: jnp.sin(row @ w).sum()))(x)


def hessian_product(x, w):
    gradient = jax.grad(lambda a: (jnp.tanh(a @ w) ** 3).sum())
    return jax.jvp(gradient, (x,), (jnp.cos(x),))


def small_jacobian(x, b):
    return jax.jacfwd(lambda v: jnp.tanh(x * v[None]).sum(0))(b)


def pulled_back(x, w):
    out, pull = jax.vjp(lambda a: jax.nn.softmax(a @ w, 0), x)
    return out, pull(jnp.cos(out))[0]


PROGRAMS = programs(
    {
        "custom_jvp": lambda x: square(x) + 1,
        "custom_jvp_of_pairs": lambda x: square(x @ x.T).sum(1),
        "custom_vjp": product,
        "custom_vjp_own_weights": lambda x, own_w: product(x, own_w),
        "custom_vjp_of_weights": lambda x, w: jnp.tanh(x @ scaled_back(w)),
        "custom_vjp_of_positions": lambda x, scale: (
            scaled_back(scale * jnp.arange(x.shape[0], dtype=x.dtype))[:, None] * x
        ),
        "custom_vjp_with_weights": both_of_weights,
        "custom_vjp_static": lambda x: (clipped(0.3, x) ** 3).sum(),
        "custom_vjp_to_dense": lambda x, w: mean_pool(jnp.tanh(x @ w)),
        "jitted": jitted,
        "checkpointed": checkpointed,
        "checkpoint_names": checkpoint_names,
        "checkpointed_steps": checkpointed_steps,
        "scan_with_custom_step": scan_with_custom_step,
        "inner_gradient": inner_gradient,
        "inner_gradient_of_loop": inner_gradient_of_loop,
        "gradient_step": gradient_step,
        "token_gradients": token_gradients,
        "hessian_product": hessian_product,
        "tangent": lambda x, x2: jax.jvp(jnp.sin, (x,), (x2,)),
        "small_jacobian": small_jacobian,
        "pulled_back": pulled_back,
        "named_scope": lambda x: jax.named_call(jnp.sin, name="wave")(x),
    }
)
