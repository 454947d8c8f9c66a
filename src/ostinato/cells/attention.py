"""Attention over a memory, around any cell."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple, TypeGuard, get_args

import jax
import jax.numpy as jnp
from jax import lax

from .. import _checks
from .._padding import is_step, select
from .._recurrent.remat import tag
from .._rnn.accumulation import accumulation_dtype, wide_product, widen
from .._typing import Array, ArrayLike, Float, Int
from .base import (
    GatedCell,
    SizedCell,
    add,
    check_cell,
    check_inputs,
    check_output,
    check_params,
    check_params_type,
    draw,
    product,
    set_field,
)

Kind = Literal["regular", "recurrent", "dot", "soft_coverage"]


class AttentionParams(NamedTuple):
    """Parameters of the inner cell and of the attention; None if the kind lacks one.

    Attributes:
        cell: parameters of the inner cell.
        w_query: `[E, H]`, H the inner cell's output size.
        b_query: `[E]`.
        w_memory: `[E, E]`.
        b_memory: `[E]`.
        v: `[E]`.
        w_context: `[E, E]`, only of `recurrent`.
        b_context: `[E]`, only of `recurrent`.
        w_coverage: `[E, E]`, only of `soft_coverage`.
        b_coverage: `[E]`, only of `soft_coverage`.
    """

    cell: Any
    w_query: Any
    b_query: Any
    w_memory: Any
    b_memory: Any
    v: Any
    w_context: Any
    b_context: Any
    w_coverage: Any
    b_coverage: Any


class AttentionState(NamedTuple):
    """States of the inner cell, `context [B, E]`, and `coverage [B, M]` or None."""

    cell: Any
    context: Any
    coverage: Any


class AttentionOutput(NamedTuple):
    """The `output [B, H + E]`, and the attention weights `[B, M]`, which sum to 1."""

    output: Any
    weights: Any


@dataclasses.dataclass(frozen=True)
class Attention(SizedCell):
    """A cell that reads a memory, for example an encoder's outputs, through attention.

    With `s_j` the entries of the memory, `h_t` the output of the inner cell, and 0 for
    `ctx_0` and `cov_0`:

        h_t   = cell([x_t, ctx_{t-1}])
        e_tj  = v . tanh(s'_j + q_t)                                   regular
        e_tj  = v . tanh(s'_j + q_t + w_context ctx_{t-1} + b_context) recurrent
        e_tj  = s_j . q_t                                              dot
        e_tj  = v . tanh(s'_j + q_t + cov_{t-1,j} u_j)                 soft_coverage
        a_t   = softmax of e_t over the entries of the memory
        cov_t = cov_{t-1} + a_t
        ctx_t = sum over j of a_tj s_j

        q_t  = w_query h_t + b_query
        s'_j = w_memory s_j + b_memory
        u_j  = w_coverage s_j + b_coverage

    `dot` with E = H has no parameters: `q_t = h_t`.

    This cell has no memory: `init` it, then pass `attend(memory)` to `recurrent_net`.

    Args:
        cell: the inner cell; its `input_size` is that of the inputs plus E. If it reads
            them in one product with a matrix, as an `LSTM` does, the part of the inputs
            runs before the loop.
        kind: the choice of energies `e_tj`.
        memory_size: E, features of a memory entry; it has to be given.

    Parameters: `AttentionParams`. States: `AttentionState`. Output: `[h_t, ctx_t]`,
    `[B, H + E]`. Recompute names: those of the inner cell, and `energies` (the argument
    of the softmax, `[B, M]`, and the results of the tanh, `[B, M, E]`).

    Raises:
        TypeError, ValueError: a wrong cell, input size or kind, or in use a wrong dtype
            or shape; the message names the argument.

    References:
        Order of the steps: Luong et al. (2015), arXiv:1508.04025, with input feeding.
        `regular`: Bahdanau et al. (2014), arXiv:1409.0473. `recurrent`: Zhang et al.
        (2016), arXiv:1601.03317, section 4.1. `soft_coverage`: Tu et al. (2016),
        arXiv:1601.04811. All four as in Caffe2.
    """

    cell: SizedCell
    kind: Kind = "regular"
    memory_size: int = 0

    def __post_init__(self) -> None:
        check_cell("cell", self.cell)
        _checks.check_choice("kind", self.kind, get_args(Kind))
        size = _checks.check_size("memory_size", self.memory_size)
        set_field(self, "memory_size", size)
        if self.cell.input_size <= size:
            raise ValueError(
                "`cell` must have an input_size above memory_size: it reads the inputs "
                f"and the context, got input_size={self.cell.input_size} and "
                f"memory_size={size}"
            )

    @property
    def input_size(self) -> int:
        """Features of one input step, without the context."""
        return self.cell.input_size - self.memory_size

    @property
    def output_size(self) -> int:
        """Features H + E of one step's output."""
        return self.cell.output_size + self.memory_size

    @property
    def recompute_names(self) -> tuple[str, ...]:
        """Names that `recurrent_net(recompute=...)` accepts; see the class."""
        return (*self.cell.recompute_names, "energies")

    def param_shapes(self) -> AttentionParams:
        """Return the shapes of the parameters, without those of the inner cell."""
        size, query = self.memory_size, self.cell.output_size
        matrix, vector = (size, size), (size,)
        scored = self.kind != "dot"
        has_query = scored or query != size
        recurrent, coverage = self.kind == "recurrent", self.kind == "soft_coverage"
        return AttentionParams(
            cell=None,
            w_query=(size, query) if has_query else None,
            b_query=vector if has_query else None,
            w_memory=matrix if scored else None,
            b_memory=vector if scored else None,
            v=vector if scored else None,
            w_context=matrix if recurrent else None,
            b_context=vector if recurrent else None,
            w_coverage=matrix if coverage else None,
            b_coverage=vector if coverage else None,
        )

    def init(self, key: Array, dtype: Any = jnp.float32) -> AttentionParams:
        """Draw parameters: of the inner cell, and from U(-k, k) with k = E ** -0.5."""
        inner, outer = jax.random.split(_checks.check_key(key))
        params = draw(outer, self.param_shapes(), dtype, self.memory_size**-0.5, {})
        return params._replace(cell=self.cell.init(inner, dtype))

    def attend(
        self,
        memory: Float[Array, "B M E"],
        memory_lengths: Int[ArrayLike, " B"] | None = None,
        *,
        return_weights: bool = False,
    ) -> AttendingCell:
        """Return a cell that attends to `memory`, for `recurrent_net`.

        Args:
            memory: `[B, M, E]`, floats; gradients reach it.
            memory_lengths: integers `[B]`, each in 0..M. Values past the end of a
                memory, NaN included, reach no result; a memory of length 0 has the
                context 0. None means that every memory has M entries.
            return_weights: return `AttentionOutput(output, weights)` from each step,
                not just `output`.

        Raises:
            TypeError: `memory` is not an array of floats, or a length not an integer.
            ValueError: a shape is wrong, or a length is out of range.
        """
        memory = _checks.check_array("memory", memory)
        _checks.check_floating("memory", memory, _checks.FLOATS)
        _checks.check_rank("memory", memory, "B", "M", "E")
        batch, entries, _ = memory.shape
        _checks.check_shape("memory", memory, B=batch, M=entries, E=self.memory_size)
        mask = None
        if memory_lengths is not None:
            lengths = _checks.check_seq_lengths(
                memory_lengths, batch, entries, False, "memory_lengths", "M"
            )
            mask = is_step(lengths, entries, 1)
            memory = select(mask, memory)
        return_weights = _checks.check_bool("return_weights", return_weights)
        return AttendingCell(self, memory, mask, return_weights)

    def initial_state(self, batch: int, dtype: Any = jnp.float32) -> AttentionState:
        """Return zeros; raise ValueError for `soft_coverage`, which needs a memory."""
        if self.kind == "soft_coverage":
            raise ValueError(_NO_MEMORY)
        return _initial_state(self, batch, dtype, None)

    def step(self, params: Any, states: Any, inputs_t: Any, t: Array) -> Any:
        """Raise ValueError, since this cell has no memory."""
        raise ValueError(_NO_MEMORY)


_NO_MEMORY = (
    "this `Attention` has no memory; use the cell that its `attend(memory, "
    "memory_lengths)` returns"
)


class _Prepared(NamedTuple):
    """Parameters, the memory `[B, M, E]`, and their products from before the loop."""

    params: AttentionParams
    memory: Array
    keys: Any  # s'
    coverage: Any  # u


@dataclasses.dataclass(frozen=True, eq=False)
class AttendingCell(SizedCell):
    """An `Attention` with the memory that it reads, as `Attention.attend` returns it.

    Attributes:
        attention: the `Attention`, which has the equations and parameters of this cell.
        memory: `[B, M, E]`, 0 where the mask is False.
        mask: bool `[B, M]`, True for the entries of the memory, or None.
        return_weights: whether the output is an `AttentionOutput`.

    Holds under every JAX transformation.
    """

    attention: Attention
    memory: Array
    mask: Array | None
    return_weights: bool

    @property
    def input_size(self) -> int:
        """Features of one input step, without the context."""
        return self.attention.input_size

    @property
    def output_size(self) -> int:
        """Features H + E of one step's output."""
        return self.attention.output_size

    @property
    def recompute_names(self) -> tuple[str, ...]:
        """Names that `recurrent_net(recompute=...)` accepts; see the class."""
        return self.attention.recompute_names

    def init(self, key: Array, dtype: Any = jnp.float32) -> AttentionParams:
        """Draw parameters like `Attention.init`."""
        return self.attention.init(key, dtype)

    def initial_state(self, batch: int, dtype: Any = jnp.float32) -> AttentionState:
        """Return zeros: the cell's states, context `[B, E]` and coverage `[B, M]`."""
        entries = self.memory.shape[1]
        coverage = entries if self.attention.kind == "soft_coverage" else None
        return _initial_state(self.attention, batch, dtype, coverage)

    def prepare(self, params: Any) -> _Prepared:
        """Check `params`, and compute the products of weights with the memory."""
        check_params_type(self.attention, params, AttentionParams)
        shapes = self.attention.param_shapes()
        for leaf in jax.tree.leaves(params):
            leaf = _checks.check_array("params", leaf)
            _checks.check_same_dtype(memory=self.memory, params=leaf)
        own = check_params(self.attention, params._replace(cell=None), shapes)
        params = own._replace(cell=self.attention.cell.prepare(params.cell))
        keys = coverage = None
        if params.w_memory is not None:
            keys = self._project(params.w_memory, params.b_memory)
        if params.w_coverage is not None:
            coverage = self._project(params.w_coverage, params.b_coverage)
        return _Prepared(params, self.memory, keys, coverage)

    def _project(self, w: Array, b: Array) -> Array:
        return add(product(self.memory, w), b).astype(self.memory.dtype)

    def precompute(self, params: _Prepared, inputs: Array) -> Any:
        """Return the inner cell's product with the inputs if it has one, or these."""
        inputs = check_inputs(inputs, self.input_size, memory=self.memory)
        cell = self.attention.cell
        if _has_input_product(cell):
            return cell.input_product(params.params.cell, inputs)
        return inputs

    def step(self, params: _Prepared, states: Any, inputs_t: Array, t: Array) -> Any:
        """Run one step on a result of `precompute`."""
        states = self._check_states(states)
        inner = params.params.cell
        cell = self.attention.cell
        if _has_input_product(cell):
            part = cell.input_product(inner, states.context, first=self.input_size)
            inputs_t = jax.tree.map(jnp.add, inputs_t, part)
        else:
            inputs_t = jnp.concatenate([inputs_t, states.context], axis=-1)
            inputs_t = cell.precompute(inner, inputs_t)
        cell_states, h = cell.step(inner, states.cell, inputs_t, t)
        h = check_output(cell, h)
        energies = tag(self._energies(params, states, h), "energies")
        weights = masked_softmax(energies, self.mask)
        context = _weighted_sum(weights.astype(h.dtype), params.memory)
        coverage = states.coverage
        if coverage is not None:
            coverage = (widen(coverage) + weights).astype(coverage.dtype)
        output = jnp.concatenate([h, context], axis=-1)
        if self.return_weights:
            output = AttentionOutput(output, weights.astype(h.dtype))
        return AttentionState(cell_states, context, coverage), output

    def _check_states(self, states: Any) -> AttentionState:
        if not isinstance(states, AttentionState):
            raise TypeError(
                "`states` must be an AttentionState, as `initial_state` makes it, got "
                f"{_checks.describe(states)}"
            )
        batch, entries, size = self.memory.shape
        _checks.check_shape("states.context", states.context, B=batch, E=size)
        if self.attention.kind == "soft_coverage":
            _checks.check_shape("states.coverage", states.coverage, B=batch, M=entries)
        return states

    def _energies(self, ready: _Prepared, states: AttentionState, h: Array) -> Array:
        """Return the energies `e_t`, `[B, M]`, in the accumulation dtype."""
        params = ready.params
        query = widen(h)
        if params.w_query is not None:
            query = add(product(h, params.w_query), params.b_query)
        if ready.keys is None:
            return _score(ready.memory, query.astype(h.dtype))
        if params.w_context is not None:
            part = product(states.context, params.w_context)
            query = query + add(part, params.b_context)
        hidden = ready.keys + jnp.broadcast_to(
            query.astype(h.dtype)[:, None], ready.keys.shape
        )
        if ready.coverage is not None:
            covered = states.coverage[..., None].astype(hidden.dtype)
            hidden = hidden + jnp.broadcast_to(covered, hidden.shape) * ready.coverage
        return product(tag(jnp.tanh(hidden), "energies"), params.v[None])[..., 0]


def _has_input_product(cell: SizedCell) -> TypeGuard[GatedCell[Any]]:
    """Return whether a cell's product with the inputs may be added up of two parts.

    A subclass with a `precompute` of its own may do something else with the inputs.
    """
    return type(cell).precompute is GatedCell.precompute


def _initial_state(
    attention: Attention, batch: int, dtype: Any, coverage: int | None
) -> AttentionState:
    return AttentionState(
        attention.cell.initial_state(batch, dtype),
        jnp.zeros((batch, attention.memory_size), dtype),
        # It is a sum over all steps, which would stop growing in 16 bits.
        None
        if coverage is None
        else jnp.zeros((batch, coverage), accumulation_dtype(dtype)),
    )


def masked_softmax(energies: Array, mask: Array | None) -> Array:
    """Return the softmax over the entries of the last axis where `mask` holds, else 0.

    Masked values cause no NaN and no gradient, even where all entries are masked.
    """
    if mask is None:
        mask = jnp.ones(energies.shape, bool)
    floor = jnp.where(mask, energies, -jnp.inf)
    top = jnp.max(floor, axis=-1, keepdims=True, initial=jnp.finfo(energies.dtype).min)
    centred = jnp.where(mask, energies - lax.stop_gradient(top), 0)
    terms = jnp.where(mask, jnp.exp(centred), 0)
    total = jnp.sum(terms, axis=-1, keepdims=True)
    return terms / jnp.where(total > 0, total, 1)


def _score(memory: Array, query: Array) -> Array:
    """Return the products of `[B, M, E]` and `[B, E]`: `[B, M]`, wide."""
    return wide_product(memory, query, (2, 1), batch=((0,), (0,)))


def _weighted_sum(weights: Array, memory: Array) -> Array:
    """Return the sum of `[B, M, E]` with weights `[B, M]`, in the memory's dtype."""
    out = wide_product(weights, memory, (1, 1), batch=((0,), (0,)))
    return out.astype(memory.dtype)
