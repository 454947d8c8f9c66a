"""Attention over a memory, around any cell."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import lax

from .. import _checks
from .._recurrent.remat import tag
from .._rnn.accumulation import accumulation_dtype, wide_product, widen
from .._typing import Array, ArrayLike
from .base import (
    GatedCell,
    SizedCell,
    add,
    check_cell,
    check_inputs,
    check_kind,
    check_params,
    draw,
    product,
    set_field,
)

Kind = Literal["regular", "recurrent", "dot", "soft_coverage"]


class AttentionParams(NamedTuple):
    """Of the inner cell, and `[E, H]`, `[E, E]` or `[E]`; None where the kind has none.

    Attributes:
        cell: parameters of the inner cell.
        w_query: `[E, H]`, H the inner cell's output size.
        b_query: `[E]`.
        w_memory: `[E, E]`.
        b_memory: `[E]`.
        v: `[E]`.
        w_context: `[E, E]`, of `recurrent`.
        b_context: `[E]`, of `recurrent`.
        w_coverage: `[E, E]`, of `soft_coverage`.
        b_coverage: `[E]`, of `soft_coverage`.
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
    """`output [B, H + E]` and the attention weights, `[B, M]`, which sum to 1."""

    output: Any
    weights: Any


@dataclasses.dataclass(frozen=True)
class Attention(SizedCell):
    """A cell that reads a memory, say an encoder's outputs, through attention.

    With `s_j` the memory's entries, `h_t` what the inner cell puts out, `ctx_0 = 0` and
    `cov_0 = 0`:

        h_t   = cell([x_t, ctx_{t-1}])
        e_tj  = v . tanh(s'_j + q_t)                                   regular
        e_tj  = v . tanh(s'_j + q_t + w_context ctx_{t-1} + b_context) recurrent
        e_tj  = s_j . q_t                                              dot
        e_tj  = v . tanh(s'_j + q_t + cov_{t-1,j} u_j)                 soft_coverage
        a_t   = softmax of e_t over the row's memory
        cov_t = cov_{t-1} + a_t
        ctx_t = sum over j of a_tj s_j

        q_t  = w_query h_t + b_query
        s'_j = w_memory s_j + b_memory
        u_j  = w_coverage s_j + b_coverage

    `dot` with E = H has no parameters: `q_t = h_t`.

    This cell holds no memory: `init` it, then hand `attend(memory)` to `recurrent_net`.

    Args:
        cell: the inner cell; its `input_size` is that of the inputs plus E. Where it
            is one of the plain cells, the product with the inputs runs for all steps
            at once, and only that with the context in the loop.
        kind: which energies `e_tj`.
        memory_size: E, features of a memory entry.

    Parameters: `AttentionParams`. States: `AttentionState`. Output: `[h_t, ctx_t]`,
    `[B, H + E]`. Recompute names: those of the inner cell, and `energies` (what the
    softmax reads, `[B, M]`, and where there is a tanh, its `[B, M, E]` values).

    Raises:
        TypeError, ValueError: `cell` is no cell or has too few inputs, an unknown kind,
            or in use an argument of the wrong dtype or shape; the message names it.

    References:
        Order of the steps: Luong et al. (2015), arXiv:1508.04025, with input feeding.
        `regular`: Bahdanau et al. (2014), arXiv:1409.0473. `recurrent`: Zhang et al.
        (2016), arXiv:1601.03317, section 4.1. `soft_coverage`: Tu et al. (2016),
        arXiv:1601.04811. All four as in Caffe2.
    """

    cell: SizedCell
    kind: Kind = "regular"
    memory_size: int = dataclasses.field(kw_only=True)

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
        """H + E."""
        return self.cell.output_size + self.memory_size

    @property
    def recompute_names(self) -> tuple[str, ...]:
        """The inner cell's, and `energies`."""
        return (*self.cell.recompute_names, "energies")

    def param_shapes(self) -> AttentionParams:
        """Shapes of the parameters, without the inner cell's."""
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
        """Draw the inner cell's parameters; the others from U(-k, k), k = E ** -0.5."""
        inner, outer = jax.random.split(_checks.check_key(key))
        params = draw(outer, self.param_shapes(), dtype, self.memory_size**-0.5, {})
        return params._replace(cell=self.cell.init(inner, dtype))

    def attend(
        self,
        memory: Array,
        memory_lengths: ArrayLike | None = None,
        *,
        return_weights: bool = False,
    ) -> AttendingCell:
        """The cell that attends to `memory`, to hand to `recurrent_net`.

        Args:
            memory: `[B, M, E]`, floats; differentiated as whatever a step closes over.
            memory_lengths: integers `[B]`, each in 0..M. What stands past a row's end,
                NaN included, reaches nothing; a row of length 0 has the context 0.
                None: every row has M entries.
            return_weights: put out `AttentionOutput(output, weights)` instead of
                `output` alone.

        Raises:
            TypeError: `memory` is no array of floats, or lengths are not integers.
            ValueError: a wrong shape, or a length out of range.
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
            mask = jnp.arange(entries, dtype=jnp.int32)[None] < lengths[:, None]
            memory = jnp.where(mask[..., None], memory, jnp.zeros((), memory.dtype))
        return_weights = _checks.check_bool("return_weights", return_weights)
        return AttendingCell(self, memory, mask, return_weights)

    def initial_state(self, batch: int, dtype: Any = jnp.float32) -> AttentionState:
        """Zeros; of `soft_coverage` they depend on the memory's size."""
        if self.kind == "soft_coverage":
            raise ValueError(_NO_MEMORY)
        return _initial_state(self, batch, dtype, None)

    def step(self, params: Any, states: Any, inputs_t: Any, t: Array) -> Any:
        """Not without a memory."""
        raise ValueError(_NO_MEMORY)


_NO_MEMORY = (
    "this `Attention` has no memory; use the cell that its `attend(memory, "
    "memory_lengths)` returns"
)


class _Ready(NamedTuple):
    """Parameters, the memory `[B, M, E]`, and what is made of both before the loop."""

    params: AttentionParams
    memory: Array
    keys: Any  # s'
    coverage: Any  # u


@dataclasses.dataclass(frozen=True, eq=False)
class AttendingCell(SizedCell):
    """What `Attention.attend` returns: an `Attention` and the memory it reads.

    Attributes:
        attention: the `Attention`; its equations and parameters are this cell's.
        memory: `[B, M, E]`, 0 where masked.
        mask: bool `[B, M]`, True where there is memory, or None.
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
        """H + E."""
        return self.attention.output_size

    @property
    def recompute_names(self) -> tuple[str, ...]:
        """The inner cell's, and `energies`."""
        return self.attention.recompute_names

    def init(self, key: Array, dtype: Any = jnp.float32) -> AttentionParams:
        """As `Attention.init`."""
        return self.attention.init(key, dtype)

    def initial_state(self, batch: int, dtype: Any = jnp.float32) -> AttentionState:
        """Zeros: the inner cell's states, context `[B, E]`, coverage `[B, M]`."""
        entries = self.memory.shape[1]
        coverage = entries if self.attention.kind == "soft_coverage" else None
        return _initial_state(self.attention, batch, dtype, coverage)

    def prepare(self, params: Any) -> _Ready:
        """The products of the memory with weights, for all steps."""
        check_kind(self.attention, params, AttentionParams)
        shapes = self.attention.param_shapes()
        check_params(self.attention, params._replace(cell=None), shapes)
        for leaf in jax.tree.leaves(params):
            _checks.check_same_dtype(memory=self.memory, params=leaf)
        keys = coverage = None
        if params.w_memory is not None:
            keys = self._project(params.w_memory, params.b_memory)
        if params.w_coverage is not None:
            coverage = self._project(params.w_coverage, params.b_coverage)
        inner = self.attention.cell.prepare(params.cell)
        return _Ready(params._replace(cell=inner), self.memory, keys, coverage)

    def _project(self, w: Array, b: Array) -> Array:
        return add(product(self.memory, w), b).astype(self.memory.dtype)

    def precompute(self, params: _Ready, inputs: Array) -> Any:
        """The inner cell's product with the inputs, where it can be told apart."""
        check_inputs(inputs, self.input_size, memory=self.memory)
        cell = self.attention.cell
        if isinstance(cell, GatedCell):
            return cell.input_product(params.params.cell, inputs)
        return inputs

    def step(self, params: _Ready, states: Any, inputs_t: Array, t: Array) -> Any:
        """One step, on what `precompute` made."""
        states = self._check_states(states)
        inner = params.params.cell
        cell = self.attention.cell
        if isinstance(cell, GatedCell):
            part = cell.input_product(inner, states.context, first=self.input_size)
            inputs_t = jax.tree.map(jnp.add, inputs_t, part)
        else:
            inputs_t = jnp.concatenate([inputs_t, states.context], axis=-1)
            inputs_t = cell.precompute(inner, inputs_t)
        cell_states, h = cell.step(inner, states.cell, inputs_t, t)
        energies = tag(self._energies(params, states, h), "energies")
        weights = masked_softmax(energies, self.mask)
        context = _mix(weights.astype(h.dtype), params.memory)
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

    def _energies(self, ready: _Ready, states: AttentionState, h: Array) -> Array:
        """`e_t`, `[B, M]`, wide."""
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


def _initial_state(
    attention: Attention, batch: int, dtype: Any, coverage: int | None
) -> AttentionState:
    return AttentionState(
        attention.cell.initial_state(batch, dtype),
        jnp.zeros((batch, attention.memory_size), dtype),
        # A sum over all steps: 16 bits would soon add nothing to it.
        None
        if coverage is None
        else jnp.zeros((batch, coverage), accumulation_dtype(dtype)),
    )


def masked_softmax(energies: Array, mask: Array | None) -> Array:
    """Softmax over the last axis where `mask` holds, 0 elsewhere and in empty rows.

    No NaN and no gradient comes from what is masked, nor from rows without any entry.
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
    """`[B, M, E]` and `[B, E]` to `[B, M]`, wide."""
    return wide_product(memory, query, (2, 1), batch=((0,), (0,)))


def _mix(weights: Array, memory: Array) -> Array:
    """`[B, M]` and `[B, M, E]` to `[B, E]`, in the memory's dtype."""
    out = wide_product(weights, memory, (1, 1), batch=((0,), (0,)))
    return out.astype(memory.dtype)
