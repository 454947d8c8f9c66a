"""Linear cells with complex states and constant factors: LRU and S5."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .. import _checks
from .._rnn.accumulation import widen
from .._typing import Array
from .base import (
    broadcast,
    check_inputs,
    check_params,
    product,
    set_field,
    tag_gate,
)
from .linear_base import LinearCell


@dataclasses.dataclass(frozen=True)
class _ComplexCell(LinearCell):
    """A linear cell with complex states, constant factors and a skip connection."""

    input_size: int
    hidden_size: int

    def __post_init__(self) -> None:
        for name in ("input_size", "hidden_size"):
            set_field(self, name, _checks.check_size(name, getattr(self, name)))

    @property
    def output_size(self) -> int:
        """Features of one step's output, as many as of the input."""
        return self.input_size

    def initial_state(self, batch: int, dtype: Any = jnp.float32) -> Array:
        """Return zeros: `h [B, H]`, complex64, or complex128 for float64."""
        shape = (_checks.check_batch(batch), self.hidden_size)
        return jnp.zeros(shape, _complex_dtype(_checks.check_float_dtype(dtype)))

    def checked_state(self, states: Any, batch: int, params: Any) -> Array:
        """Check the state `h [B, H]` and return it."""
        h = _checks.check_array("h", states)
        _checks.check_shape("h", h, B=batch, H=self.hidden_size)
        wanted = _complex_dtype(self.output_dtype(params))
        if h.dtype != wanted:
            raise TypeError(
                f"`h` must be {np.dtype(wanted).name}, as `initial_state` makes it, "
                f"got {h.dtype}"
            )
        return h

    def param_shapes(self) -> Any:
        """Return the shapes of the parameters."""
        raise NotImplementedError(f"{type(self).__name__} defines no parameters")

    def prepare(self, params: Any) -> Any:
        """Check names and shapes of `params`; return them as arrays of JAX."""
        return check_params(self, params, self.param_shapes())

    def precompute(self, params: Any, inputs: Any) -> Any:
        """Compute the real and the imaginary part of `B x` for all steps."""
        inputs = check_inputs(inputs, self.input_size, params=params.d)
        return product(inputs, params.b_re), product(inputs, params.b_im), inputs

    def read(self, params: Any, h: Array, inputs: Any) -> Array:
        """Return `Re(C h) + d * x`."""
        real = _real_product(h, params.c_re, params.c_im)
        return real + broadcast(params.d, real) * widen(inputs[-1])


def _complex_dtype(dtype: Any) -> Any:
    return jnp.complex128 if np.dtype(dtype) == np.float64 else jnp.complex64


def _complex_gate(re: Array, im: Array) -> Array:
    """Return `re + i im`, tagged by parts, as JAX can store no complex values."""
    return jax.lax.complex(tag_gate(re), tag_gate(im))


def _real_product(h: Array, re: Array, im: Array) -> Array:
    """Return the real part of `(re + i im) h` over the last axis."""
    return product(h.real, widen(re)) - product(h.imag, widen(im))


class LRUParams(NamedTuple):
    """Parameters `nu theta gamma [H]`, `b_re b_im [H, I]`, `c_re c_im [I, H]`, `d [I]`.

    The factors are `exp(-exp(nu) + i exp(theta))`, and `exp(gamma)` scales the inputs.
    """

    nu: Any
    theta: Any
    gamma: Any
    b_re: Any
    b_im: Any
    c_re: Any
    c_im: Any
    d: Any


@dataclasses.dataclass(frozen=True)
class LRU(_ComplexCell):
    """The linear recurrent unit, whose H complex states turn and decay by themselves.

        lambda = exp(-exp(nu) + i exp(theta))
        h_t = lambda * h_{t-1} + exp(gamma) * (B x_t)
        y_t = Re(C h_t) + d * x_t

    Args:
        input_size: I, of inputs and outputs.
        hidden_size: H.
        r_min: the least absolute value of a factor at the start, in [0, 1).
        r_max: the largest one, in (r_min, 1].
        max_phase: the largest angle of a factor at the start.

    Parameters: `LRUParams`. State: `h [B, H]`, complex; output: `[B, I]`. No recompute
    names but `gates`, which stands for everything except the states.

    Raises:
        TypeError, ValueError: a size or a bound is wrong, or in use the dtype or shape
            of an argument; the message names it.

    Holds under every JAX transformation.

    References:
        Orvieto et al., Resurrecting Recurrent Neural Networks for Long Sequences
        (2023), arXiv:2303.06349.
    """

    r_min: float = 0.0
    r_max: float = 1.0
    max_phase: float = 2 * math.pi

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("r_min", "r_max", "max_phase"):
            set_field(self, name, _checks.check_finite(name, getattr(self, name)))
        if not 0 <= self.r_min < self.r_max <= 1:
            raise ValueError(
                "`r_min` and `r_max` must satisfy 0 <= r_min < r_max <= 1, got "
                f"{self.r_min} and {self.r_max}"
            )
        if not self.max_phase > 0:
            raise ValueError(f"`max_phase` must be positive, got {self.max_phase}")

    @property
    def recompute_names(self) -> tuple[str, ...]:
        """Names that `recurrent_net(recompute=...)` accepts."""
        return ("gates",)

    def param_shapes(self) -> LRUParams:
        """Return the shapes of the parameters."""
        size, features = self.hidden_size, self.input_size
        into, out_of = (size, features), (features, size)
        each = (size,)
        return LRUParams(each, each, each, into, into, out_of, out_of, (features,))

    def init(self, key: Array, dtype: Any = jnp.float32) -> LRUParams:
        """Draw factors from the ring, B and C from normal distributions."""
        dtype = _checks.check_float_dtype(dtype)
        keys = jax.random.split(_checks.check_key(key), 7)
        ring, angle = (
            jax.random.uniform(k, (self.hidden_size,), jnp.float32) for k in keys[:2]
        )
        square = self.r_min**2 + ring * (self.r_max**2 - self.r_min**2)
        square = jnp.clip(square, 1e-8, 1 - 1e-6)
        nu = jnp.log(-0.5 * jnp.log(square))
        theta = jnp.log(jnp.maximum(self.max_phase * angle, 1e-8))
        gamma = 0.5 * jnp.log1p(-square)
        shapes = self.param_shapes()
        normal = lambda k, shape, size: _normal(k, shape) * size**-0.5  # noqa: E731
        into, out_of = 2 * self.input_size, self.hidden_size
        params = LRUParams(
            nu,
            theta,
            gamma,
            normal(keys[2], shapes.b_re, into),
            normal(keys[3], shapes.b_im, into),
            normal(keys[4], shapes.c_re, out_of),
            normal(keys[5], shapes.c_im, out_of),
            _normal(keys[6], shapes.d),
        )
        return jax.tree.map(lambda a: a.astype(dtype), params)

    def terms(self, params: Any, inputs: Any) -> tuple[Array, Array]:
        """Return the factors `[H]`, and the inputs of the state `[..., H]`."""
        factor = jax.lax.complex(
            -jnp.exp(widen(params.nu)), jnp.exp(widen(params.theta))
        )
        re, im, _ = inputs
        scale = jnp.broadcast_to(jnp.exp(widen(params.gamma)), re.shape)
        return jnp.exp(factor), _complex_gate(scale * re, scale * im)


class S5Params(NamedTuple):
    """Parameters of `S5`.

    `lambda_re lambda_im log_step [H]`, `b_re b_im [H, I]`, `c_re c_im [I, H]` and
    `d [I]`.
    """

    lambda_re: Any
    lambda_im: Any
    log_step: Any
    b_re: Any
    b_im: Any
    c_re: Any
    c_im: Any
    d: Any


@dataclasses.dataclass(frozen=True)
class S5(_ComplexCell):
    """The diagonal state-space layer S5, a differential equation in discrete steps.

        dh/dt = lambda * h + B x,   y = 2 Re(C h) + d * x

    with steps of `exp(log_step)`. Between steps the input is constant
    (`discretization="zoh"`), or the trapezoidal rule applies (`"bilinear"`).

    Args:
        input_size: I, of inputs and outputs.
        hidden_size: H, complex states; each stands for itself and its conjugate.
        discretization: `"zoh"` or `"bilinear"`.
        step_min: the least step at the start.
        step_max: the largest one.

    Parameters: `S5Params`. State: `h [B, H]`, complex; output: `[B, I]`. No recompute
    names but `gates`, which stands for everything except the states.

    Raises:
        TypeError, ValueError: as for `LRU`.

    Holds under every JAX transformation.

    References:
        Smith, Warrington and Linderman, Simplified State Space Layers for Sequence
        Modeling (2023), arXiv:2208.04933: one block of HiPPO-N at the start.
    """

    discretization: Literal["zoh", "bilinear"] = "zoh"
    step_min: float = 0.001
    step_max: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        _checks.check_choice("discretization", self.discretization, ("zoh", "bilinear"))
        for name in ("step_min", "step_max"):
            set_field(self, name, _checks.check_finite(name, getattr(self, name)))
        if not 0 < self.step_min <= self.step_max:
            raise ValueError(
                "`step_min` and `step_max` must satisfy 0 < step_min <= step_max, got "
                f"{self.step_min} and {self.step_max}"
            )

    @property
    def recompute_names(self) -> tuple[str, ...]:
        """Names that `recurrent_net(recompute=...)` accepts."""
        return ("gates",)

    def param_shapes(self) -> S5Params:
        """Return the shapes of the parameters."""
        size, features = self.hidden_size, self.input_size
        into, out_of = (size, features), (features, size)
        each = (size,)
        return S5Params(each, each, each, into, into, out_of, out_of, (features,))

    def init(self, key: Array, dtype: Any = jnp.float32) -> S5Params:
        """Take the eigenvalues of HiPPO-N; draw B and C, in its eigenvectors."""
        dtype = _checks.check_float_dtype(dtype)
        keys = jax.random.split(_checks.check_key(key), 4)
        values, vectors = _hippo(2 * self.hidden_size)
        whole, features = 2 * self.hidden_size, self.input_size
        draw = lambda k, shape, size: _normal(k, shape) * size**-0.5  # noqa: E731
        vectors = jnp.asarray(vectors, jnp.complex64)
        b = vectors.conj().T @ draw(keys[0], (whole, features), features).astype(
            vectors.dtype
        )
        c = draw(keys[1], (features, whole), whole).astype(vectors.dtype) @ vectors
        ends = math.log(self.step_min), math.log(self.step_max)
        uniform = jax.random.uniform(keys[2], (self.hidden_size,), jnp.float32)
        log_step = ends[0] + (ends[1] - ends[0]) * uniform
        params = S5Params(
            jnp.asarray(np.real(values), jnp.float32),
            jnp.asarray(np.imag(values), jnp.float32),
            log_step,
            b.real,
            b.imag,
            c.real,
            c.imag,
            _normal(keys[3], (features,)),
        )
        return jax.tree.map(lambda a: a.astype(dtype), params)

    def terms(self, params: Any, inputs: Any) -> tuple[Array, Array]:
        """Return the factors `[H]`, and the inputs of the state `[..., H]`."""
        rate = jax.lax.complex(widen(params.lambda_re), widen(params.lambda_im))
        step = jnp.exp(widen(params.log_step)).astype(rate.dtype)
        moved = rate * step
        if self.discretization == "zoh":
            factor = jnp.exp(moved)
            scale = step * _mean_exp(moved)
        else:
            factor = (1 + moved / 2) / (1 - moved / 2)
            scale = step / (1 - moved / 2)
        re, im, _ = inputs
        scale = jnp.broadcast_to(scale, re.shape)
        scaled = scale * jax.lax.complex(re, im)
        return factor, _complex_gate(scaled.real, scaled.imag)

    def read(self, params: Any, h: Array, inputs: Any) -> Array:
        """Return `2 Re(C h) + d * x`."""
        real = _real_product(h, params.c_re, params.c_im)
        return 2 * real + broadcast(params.d, real) * widen(inputs[-1])


def _mean_exp(z: Array) -> Array:
    """Return `(exp(z) - 1) / z`, which is 1 for 0.

    Its derivatives are differences of nearly equal numbers where z is small, so there
    it is a Taylor polynomial, whose rest is below the precision of float64.
    """
    near = jnp.abs(z) < 0.5
    small = jnp.where(near, z, jnp.zeros_like(z))
    large = jnp.where(near, jnp.ones_like(z), z)
    series = jnp.ones_like(z)
    for k in range(17, 1, -1):  # 1 + z/2 (1 + z/3 (1 + ...))
        series = 1 + series * small / k
    return jnp.where(near, series, (jnp.exp(large) - 1) / large)


def _normal(key: Array, shape: tuple[int, ...]) -> Array:
    return jax.random.normal(key, shape, jnp.float32)


def _hippo(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return half of the eigenvalues of the matrix HiPPO-N, and their eigenvectors.

    The matrix is normal: -1/2 on the diagonal and skew-symmetric besides, so that
    eigenvalues come in conjugate pairs; those with a positive imaginary part are kept.
    """
    root = np.sqrt(2 * np.arange(size) + 1.0)
    lower = np.tril(np.outer(root, root), -1)
    skew = -(lower - lower.T) / 2
    values, vectors = np.linalg.eigh(-1j * skew)
    kept = slice(size // 2, None)
    return -0.5 + 1j * values[kept], vectors[:, kept]
