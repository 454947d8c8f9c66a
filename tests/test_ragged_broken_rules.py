"""Tests of a test: rules that are wrong on purpose are caught by the programs."""

import dataclasses

import jax.numpy as jnp
import pytest
from jax import lax
from ragged_loop import check, other_tokens_in_padding
from ragged_programs import BY_NAME

from ostinato.ragged import Context, Flat, Padded, Sizes
from ostinato.ragged.core import registry
from ostinato.ragged.primitives.relocate import Sources
from ostinato.ragged.rules import control, dot, elementwise, linalg
from ostinato.ragged.schedule import packed_scan, padded_scan, tiered

PACKED = {"scan": "packed", "lanes": 2}
PADDED = {"scan": "padded"}

# ---------------------------------------------------------------- what is put in place


def rule(name, make):
    """Replace the rule of a primitive by `make(rule)`."""

    def apply(monkeypatch):
        entries = dict(registry._entries)
        (key,) = [k for k in entries if getattr(k, "name", k) == name]
        entries[key] = entries[key]._replace(rule=make(entries[key].rule))
        monkeypatch.setattr(registry, "_entries", entries)

    return apply


def attribute(owner, name, make):
    """Replace a function or a method by `make` of it."""
    return lambda monkeypatch: monkeypatch.setattr(
        owner, name, make(getattr(owner, name))
    )


def changed(**changes):
    """Change fields of a returned NamedTuple, each by a function of the tuple."""

    def make(function):
        def call(*args):
            made = function(*args)
            return made._replace(**{k: f(made) for k, f in changes.items()})

        return call

    return make


def bind(eqn, *arrays, **params):
    result = eqn.primitive.bind(*arrays, **params)
    return result if eqn.primitive.multiple_results else [result]


def without_masks(_):
    """Run on padded examples as if all of them were valid."""

    def broken(ctx, eqn, *values, **params):
        run = lambda _, *arrays: bind(eqn, *arrays, **params)  # noqa: E731
        return ctx.batched(run, values, ctx.out_shapes(eqn))

    return broken


def over_all_tokens(_):
    """Run on the tokens of all examples as if they were one."""

    def broken(ctx, eqn, *values, **params):
        flat = [ctx.to_flat(v) for v in values]
        results = bind(eqn, *(v.x for v in flat), **params)
        return [Flat(x, flat[0].shape, flat[0].axis) for x in results]

    return broken


def next_token(original):
    """Return results that begin one token too late."""

    def broken(ctx, eqn, *values, **params):
        result = original(ctx, eqn, *values, **params)
        (shape,) = ctx.out_shapes(eqn)
        flat = ctx.to_flat(result)
        return Flat(jnp.roll(flat.x, 1, flat.axis), shape, flat.axis)

    return broken


def next_example(original):
    """Return to each example the result of the one before it."""

    def broken(ctx, eqn, *values, **params):
        result = original(ctx, eqn, *values, **params)
        return Padded(jnp.roll(ctx.to_padded(result).x, 1, 0), result.shape)

    return broken


def without_gradient(original):
    def broken(ctx, eqn, *values, **params):
        value = original(ctx, eqn, *values, **params)
        return dataclasses.replace(value, x=lax.stop_gradient(value.x))

    return broken


def inlined(name):
    """Inline a function with derivatives of its own, without them."""

    def make(_):
        return lambda ctx, eqn, *values, **params: ctx.evaluate(params[name], values)

    return make


def last_branch(_):
    def broken(ctx, eqn, index, *values, branches, **params):
        return ctx.evaluate(branches[-1], values)

    return broken


def bits_of_all_tokens(_):
    def broken(ctx, eqn, keys, *, shape, **params):
        tokens = (ctx.capacity(shape[0]), *shape[1:])
        bits = eqn.primitive.bind(keys.x, shape=tokens, **params)
        return Flat(bits, ctx.out_shapes(eqn)[0], 0)

    return broken


def associative_over_all_tokens(_):
    def broken(ctx, eqn, x, **params):
        return [Flat(jnp.cumsum(ctx.to_flat(x).x, 0), x.shape, 0)]

    return broken


def first_of_two(function):
    return lambda *args: args[-2]


def unchanged(position):
    return lambda function: lambda *args: args[position]


def _rolled(x):
    return jnp.roll(x, 1)


# ------------------------------------------------------- broken, and who is to see it

REDUCTIONS = {
    "reduce_sum": "pair_sums",
    "reduce_max": "pair_extremes",
    "reduce_min": "pair_extremes",
    "reduce_prod": "pair_products",
    "reduce_or": "pair_logic",
    "argmax": "pair_choices",
    "argmin": "pair_choices",
    "dot_general": "gram_features",
    "sort": "sort",
}
BROKEN = {
    **{
        f"{name}_without_mask": (rule(name, without_masks), seen, {})
        for name, seen in REDUCTIONS.items()
    },
    "cumsum_over_all_tokens": (rule("cumsum", over_all_tokens), "cumsum", {}),
    "cummax_over_all_tokens": (rule("cummax", over_all_tokens), "cummax", {}),
    "rev_of_all_tokens": (rule("rev", over_all_tokens), "flip_both", {}),
    "gather_a_token_off": (rule("gather", next_token), "gather_tokens", {}),
    "concatenate_a_token_off": (rule("concatenate", next_token), "token_first", {}),
    "pad_a_token_off": (rule("pad", next_token), "pad", {}),
    "sum_of_the_neighbour": (rule("reduce_sum", next_example), "sum", {}),
    "max_without_gradient": (rule("reduce_max", without_gradient), "max", {}),
    "dot_without_gradient": (rule("dot_general", without_gradient), "mlp", {}),
    "bits_of_all_tokens": (rule("random_bits", bits_of_all_tokens), "fresh_noise", {}),
    "derivative_of_custom_jvp": (
        rule("custom_jvp_call", inlined("call_jaxpr")),
        "custom_jvp",
        {},
    ),
    "derivative_of_custom_vjp": (
        rule("custom_vjp_call", inlined("call_jaxpr")),
        "custom_vjp",
        {},
    ),
    "one_branch_for_all": (rule("cond", last_branch), "by_sign", {}),
    "nothing_masked": (
        attribute(Sizes, "mask", lambda _: lambda *args: jnp.asarray(True)),
        "conv_same",
        {},
    ),
    "no_border": (attribute(linalg, "_extended", unchanged(1)), "solve", {}),
    "rows_of_the_neighbour": (
        attribute(Context, "segments", changed(ids=lambda s: s.ids[::-1])),
        "add_per_example",
        {},
    ),
    "positions_from_one": (
        attribute(Context, "segments", changed(position=lambda s: s.position + 1)),
        "position_codes",
        {},
    ),
    "unused_counted": (
        attribute(Context, "segments", changed(drop_ids=lambda s: s.ids)),
        "sum",
        {},
    ),
    "offsets_a_token_off": (
        attribute(Context, "segments", changed(offsets=lambda s: s.offsets + 1)),
        "rest",
        {},
    ),
    "unused_as_it_comes": (
        attribute(Context, "fill_unused", unchanged(1)),
        "mean_of_mlp",
        {},
    ),
    "lengths_one_less": (
        attribute(
            Context,
            "lengths",
            lambda f: lambda ctx, dim: jnp.maximum(f(ctx, dim) - 1, 0),
        ),
        "cross",
        {},
    ),
    "top_k_without_mask": (rule("top_k", without_masks), "top_k", {}),
    "pool_without_mask": (rule("reduce_window_max", without_masks), "max_pool", {}),
    "scatter_a_token_off": (rule("scatter-add", next_token), "scatter_to_tokens", {}),
    "associative_over_all_tokens": (
        rule("ragged_associative_scan", associative_over_all_tokens),
        "associative_sum",
        {},
    ),
    "operator_without_lengths": (
        attribute(Context, "lengths", lambda f: lambda ctx, dim: f(ctx, dim) // 2 + 1),
        "rnn_lstm",
        {},
    ),
    "gradient_of_padding": (
        attribute(Context, "_without_gradient_of_padding", lambda _: lambda _, v: v.x),
        "singular_past_the_end",
        {},
    ),
    "factor_added_up_over_padding": (
        attribute(elementwise, "_whole", unchanged(1)),
        "singular_past_the_end",
        {},
    ),
    "tiers_out_of_order": (
        attribute(tiered, "descending", lambda f: lambda x: (f(x)[0], f(x)[1][::-1])),
        "attention",
        {"tiers": 2},
    ),
    "tiers_a_token_off": (
        attribute(
            tiered.TieredBatch, "_in_tiers", changed(element=lambda p: p.element + 1)
        ),
        "attention",
        {"tiers": 2},
    ),
    "rows_back_from_elsewhere": (
        attribute(
            Context,
            "_sources",
            lambda f: lambda *args: (f(*args)[0], Sources(*map(_rolled, f(*args)[1]))),
        ),
        "conv_same",
        {},
    ),
    "padding_taken_for_tokens": (
        attribute(dot, "is_filled", lambda _: lambda _: True),
        "singular_pairs",
        {},
    ),
    "packed_scan_never_begin": (
        attribute(packed_scan, "_schedule", changed(begins=lambda p: p.begins & False)),
        "rnn",
        PACKED,
    ),
    "packed_scan_begin_a_step_late": (
        attribute(
            packed_scan, "_schedule", changed(begins=lambda p: jnp.roll(p.begins, 1, 0))
        ),
        "rnn",
        PACKED,
    ),
    "packed_scan_read_a_step_late": (
        attribute(
            packed_scan,
            "_schedule",
            changed(tokens=lambda p: p.tokens._replace(element=p.tokens.element + 1)),
        ),
        "rnn",
        PACKED,
    ),
    "padded_scan_goes_on": (
        attribute(padded_scan, "_select", first_of_two),
        "rnn",
        PADDED,
    ),
    "loops_go_on": (
        attribute(control, "select", first_of_two),
        "until_small",
        {},
    ),
}


@pytest.mark.alike
@pytest.mark.parametrize("name", BROKEN)
def test_broken_rule_is_caught(name, monkeypatch):
    break_it, program, options = BROKEN[name]
    other_tokens_in_padding(monkeypatch)
    break_it(monkeypatch)
    # What the comparison says, not some assertion on the way.
    with pytest.raises(
        AssertionError, match="lengths {|gradient of the unused capacity"
    ):
        check(BY_NAME[program], options)
