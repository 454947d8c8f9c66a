"""What `ragged.vmap` does not take, and what it says."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closures import fast_jit
from jax import lax
from jax.experimental import checkify
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from ostinato import ragged
from ostinato.ragged import rules
from ostinato.ragged.core import registry
from ostinato.ragged.types.checked import checked

LENGTHS = (3, 1, 4)
ROWS = np.random.default_rng(2).standard_normal((10, 4))


def batch(lengths=LENGTHS, dim="n", max_length=6):
    lengths = jnp.asarray(lengths, jnp.int32)
    return ragged.RaggedArray(
        jnp.asarray(ROWS), lengths, dim=dim, max_length=max_length
    )


def unchecked(lengths, dim="n", max_length=6):
    """Return a batch with unchecked lengths, as a jitted function may get it."""
    x = batch((1,) * len(lengths), dim, max_length)
    leaves, tree = jax.tree.flatten(x)
    return jax.tree.unflatten(tree, [leaves[0], jnp.asarray(lengths, jnp.int32)])


# ---------------------------------------------------------------- what has no rule


def spectrum(x):
    return jnp.fft.fft(x, axis=0)


def wrapped(x):
    scaled = jax.jit(lambda a: 2 * a)(x)
    return jax.jit(spectrum)(scaled)


@pytest.mark.parametrize("function", [spectrum, wrapped])
def test_unknown_primitive_names_itself_its_operands_and_the_line(function):
    line = inspect.getsourcelines(spectrum)[1] + 1
    with pytest.raises(NotImplementedError) as caught:
        ragged.vmap(function)(batch())
    message = str(caught.value)
    assert "'fft'" in message
    assert "operands: complex128[4,n]" in message
    assert f"test_ragged_errors.py:{line} (spectrum)" in message


def convolved_with_itself(x):
    return lax.conv_general_dilated(x[None, None], x[None, None], (1,), "VALID")[0, 0]


UNSUPPORTED = {
    "singular_values": ("svd", lambda x: jnp.linalg.svd(x, full_matrices=False)[1]),
    "orthogonal": ("qr", lambda x: jnp.linalg.qr(x.T)[0]),
    "eigenvalues": ("eigh", lambda x: jnp.linalg.eigh(x @ x.T)[0]),
    "halves": ("reshape", lambda x: x.reshape(x.shape[0] // 2, 8)),
    "callback": ("callback", lambda x: jax.pure_callback(np.sin, x, x)),
    "kernel": ("conv", lambda x: jnp.stack([convolved_with_itself(c) for c in x.T])),
    "print_keys": (
        "debug_print",
        lambda x: (
            jax.debug.print("{}", jax.random.split(jax.random.key(0), x.shape[0])),
            x,
        )[1],
    ),
    "windows_at_places": (
        "scatter-add",
        lambda x: lax.scatter_add(
            jnp.zeros((9, 4)),
            jnp.array([[0], [2]]),
            jnp.stack([x, x]),
            lax.ScatterDimensionNumbers((1, 2), (), (0,)),
        ),
    ),
    "generator": (
        "rng_bit_generator",
        lambda x: lax.rng_bit_generator(jnp.zeros(4, jnp.uint32), x.shape)[1],
    ),
    "ragged_behind": (
        "random_split",
        lambda x: jax.random.split(jax.random.key(0), (2, x.shape[0])),
    ),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported(name):
    primitive, function = UNSUPPORTED[name]
    with pytest.raises(NotImplementedError, match=primitive):
        ragged.vmap(function)(batch())


def test_collectives_are_unsupported():
    with pytest.raises(NotImplementedError, match="axis name"):
        ragged.vmap(lambda x: lax.psum(x.sum(0), "batch"))(batch())
    with pytest.raises(NotImplementedError, match="axis name"):
        ragged.vmap(lambda x: lax.axis_index("batch"))(batch())


def test_random_bits_that_depend_on_the_padding_are_unsupported():
    def noise(x):
        return x + jax.random.normal(jax.random.key(0), x.shape)

    def same_for_all(x):
        return x.sum(0) + jax.random.normal(jax.random.key(0), (4,))

    with jax.threefry_partitionable(False):
        with pytest.raises(NotImplementedError, match="partitionable"):
            ragged.vmap(noise)(batch())
        assert ragged.vmap(same_for_all)(batch()).shape == (3, 4)


Inconclusive = jax.errors.InconclusiveDimensionOperation
SIZES_IN_PYTHON = {
    "branch": (Inconclusive, lambda x: x if x.shape[0] > 2 else 2 * x),
    "steps": (Inconclusive, lambda x: jnp.linspace(0, 1, x.shape[0])),
    "halves": (Inconclusive, lambda x: x.reshape(x.shape[0] // 2, -1)),
    "len": (TypeError, len),
    "rows": ((Inconclusive, AttributeError), lambda x: sum(row for row in x)),
    "float": (TypeError, lambda x: x * float(x.shape[0])),
    "numpy": (TypeError, lambda x: np.zeros(x.shape)),
    "power": (ValueError, lambda x: x * x.shape[0] ** -0.5),
    "index": (IndexError, lambda x: x[x.shape[0] // 2]),
    "scan_length": (
        Inconclusive,
        lambda x: lax.scan(lambda c, _: (c, c), 0.0, None, length=x.shape[0]),
    ),
    "convolve": (TypeError, lambda x: jnp.convolve(x[:, 0], jnp.ones(3))),
    "least_squares": (Inconclusive, lambda x: jnp.linalg.lstsq(x, x[:, 0])[0]),
}


SCAN_OF_JAX = lax.associative_scan


def test_a_scan_imported_by_its_own_name_is_told_what_to_call():
    with pytest.raises(NotImplementedError) as caught:
        ragged.vmap(lambda x: SCAN_OF_JAX(jnp.add, x))(batch())
    assert any("ragged.associative_scan" in note for note in caught.value.__notes__)
    assert lax.associative_scan is SCAN_OF_JAX


@pytest.mark.parametrize("name", SIZES_IN_PYTHON)
def test_python_that_asks_for_a_size_is_told_what_to_do(name):
    kind, function = SIZES_IN_PYTHON[name]
    with pytest.raises(kind) as caught:
        ragged.vmap(function)(batch())
    (advice,) = [n for n in caught.value.__notes__ if "`min_length`" in n]
    assert advice.startswith("A size is a symbol inside of ragged.vmap, not a number")
    for instead in ("jax.lax.scan", "jax.vmap", "jax.lax.fori_loop(0, size, ...)"):
        assert instead in advice


def test_loops_in_the_advice_run():
    def total(x):
        return lax.fori_loop(0, x.shape[0], lambda i, total: total + x[i], jnp.zeros(4))

    x = batch()
    got, want = ragged.vmap(total)(x), ragged.vmap(lambda x: x.sum(0))(x)
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_sizes_that_may_be_0_get_the_same_advice():
    with pytest.raises(TypeError, match="n_plus_1") as caught:
        ragged.vmap(lambda x: x[1:] - x[:-1], min_length=0)(batch())
    assert any("`min_length`" in note for note in caught.value.__notes__)


def test_errors_of_the_function_itself_are_left_alone():
    def function(x):
        raise ValueError("too many words")

    with pytest.raises(ValueError, match="too many words") as caught:
        ragged.vmap(function)(batch())
    assert not any("`min_length`" in n for n in getattr(caught.value, "__notes__", []))


def test_arguments_without_a_ragged_array_say_so():
    for arrays in ([jnp.ones(2), jnp.ones(3, int)], (jnp.ones(2), jnp.ones(3))):
        with pytest.raises(ValueError, match="inconsistent sizes") as caught:
            ragged.vmap(lambda xs: xs[0])(arrays)
        assert any("from_list" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("make", [jnp.ones, np.ones])
def test_a_list_of_arrays_is_told_to_become_a_batch(make):
    message = (
        r"different lengths \(2, 3\); make it a batch by ragged.RaggedArray.from_l"
    )
    with pytest.raises(ValueError, match=message):
        ragged.vmap(lambda w, x: x.sum(), in_axes=(None, 0))(1.0, [make(2), make(3)])


# --------------------------------------------------------------------------- lengths


def test_unequal_lengths_of_one_dim():
    with pytest.raises(ValueError, match=r"'n' must have equal lengths.*example 1"):
        ragged.vmap(jnp.add)(batch(), batch((3, 2, 4)))
    out = ragged.vmap(lambda x, y: x.sum() + y.sum())(batch(), batch((3, 2, 4), "m"))
    assert out.shape == (3,)


WRONG_LENGTHS = {
    "beyond_the_capacity": ((6, 5, 1), r"10 tokens"),
    "beyond_the_longest": ((7, 1, 1), r"0\.\.6"),
    "negative": ((3, -1, 2), r"0\.\.6"),
    "empty": ((3, 0, 2), "min_length"),
}


def sums(x):
    return ragged.vmap(lambda x: x.sum(0))(x)


@pytest.mark.parametrize("name", WRONG_LENGTHS)
def test_wrong_lengths_raise_when_concrete(name):
    lengths, message = WRONG_LENGTHS[name]
    with pytest.raises(ValueError, match=message):
        sums(unchecked(lengths))


@pytest.mark.parametrize("name", WRONG_LENGTHS)
def test_wrong_lengths_are_caught_by_checkify_when_traced(name):
    lengths, message = WRONG_LENGTHS[name]
    checked = fast_jit(checkify.checkify(sums))
    error, _ = checked(unchecked(lengths))
    with pytest.raises(checkify.JaxRuntimeError, match=message):
        error.throw()
    error, out = checked(batch())
    assert error.get() is None
    np.testing.assert_allclose(out[0], ROWS[:3].sum(0))


def test_unequal_lengths_are_caught_by_checkify_when_traced():
    both = fast_jit(checkify.checkify(ragged.vmap(jnp.add)))
    error, _ = both(batch(), unchecked((3, 2, 4)))
    with pytest.raises(checkify.JaxRuntimeError, match="equal lengths"):
        error.throw()


MADE_OF_TRACED = {
    "too_long": (
        lambda x: ragged.RaggedArray(ROWS, x, max_length=3),
        ((3, 4, 1), r"0\.\.max_length = 0\.\.3"),
        (3, 2, 1),
    ),
    "too_many": (
        lambda x: ragged.RaggedArray(ROWS, x, max_length=9),
        ((8, 4, 1), "10 tokens"),
        (8, 1, 1),
    ),
    "splits": (
        lambda x: ragged.RaggedArray.from_row_splits(ROWS, x),
        ((1, 4, 5), "begin with 0"),
        (0, 4, 5),
    ),
    "ids": (
        lambda x: ragged.RaggedArray.from_segment_ids(ROWS[:3], x, num_segments=3),
        ((0, 2, 1), "ascend"),
        (0, 0, 2),
    ),
}


@pytest.mark.parametrize("name", MADE_OF_TRACED)
def test_arrays_made_of_traced_lengths_are_checked_by_checkify(name):
    make, (wrong, message), right = MADE_OF_TRACED[name]
    checked = fast_jit(checkify.checkify(make))
    with pytest.raises(checkify.JaxRuntimeError, match=message):
        checked(np.asarray(wrong))[0].throw()
    assert checked(np.asarray(right))[0].get() is None


def first_sum(data, lengths):
    x = ragged.RaggedArray(data, lengths, max_length=4)
    return ragged.vmap(lambda x: x.sum())(x)[0]


CHECKED_UNDER = {
    "jit": lambda data, lengths: jax.jit(first_sum)(data, lengths),
    "grad": jax.grad(first_sum),
    "remat": jax.grad(jax.checkpoint(first_sum)),
    "jvp": lambda data, lengths: jax.jvp(
        lambda d: first_sum(d, lengths), [data], [data]
    ),
    "vmap": lambda data, lengths: jax.vmap(first_sum)(
        jnp.stack([data, data]), jnp.stack([0 * lengths + 1, lengths])
    ),
    "vmap of data": lambda data, lengths: jax.vmap(first_sum, (0, None))(
        jnp.stack([data, data]), lengths
    ),
    "scan": lambda data, lengths: jax.lax.scan(
        lambda total, x: (total + first_sum(x, lengths), None), 0.0, data[None]
    ),
    "nested": lambda data, lengths: ragged.vmap(
        lambda x, own: first_sum(data, own) + x.sum(), constraints=("n >= 1",)
    )(
        ragged.RaggedArray(data, jnp.array([2, 3])),
        jnp.stack([0 * lengths + 1, lengths]),
    ),
}


@pytest.mark.parametrize("name", CHECKED_UNDER)
def test_checkify_looks_into_transformations(name):
    checked = fast_jit(checkify.checkify(CHECKED_UNDER[name]))
    data = jnp.arange(6.0)
    error, _ = checked(data, jnp.asarray([1, 5]))
    assert "0..max_length = 0..4" in error.get()
    assert checked(data, jnp.asarray([2, 4]))[0].get() is None


def test_checks_are_no_effects():
    """A jitted function with an effect is called through Python, each time."""
    x = batch()
    for function in (sums, lambda x: ragged.RaggedArray(x.data, x.lengths)):
        assert not jax.make_jaxpr(function)(x).effects
    exported = jax.export.export(jax.jit(first_sum))(jnp.ones(6), jnp.array([2, 3]))
    found = jax.export.deserialize(exported.serialize())
    assert found.call(jnp.ones(6), jnp.array([2, 3])) == 2


def test_what_is_checked_can_be_transposed():
    def twice(x, lengths):
        x, y = checked([x, x], {"some": lengths > 0, "few": lengths < 9})
        return x + y

    x, lengths = jnp.arange(3.0), jnp.arange(1, 4)
    (found,) = jax.linear_transpose(lambda x: twice(x, lengths), x)(x)
    np.testing.assert_array_equal(found, 2 * x)
    np.testing.assert_array_equal(jax.grad(lambda x: twice(x, lengths).sum())(x), 2)
    for axes in ((0, 0), (0, None), (None, 0)):
        y = jax.vmap(twice, axes)(
            *(
                x if a is None else x[None]
                for x, a in zip((x, lengths), axes, strict=True)
            )
        )
        np.testing.assert_array_equal(y[0], 2 * x)


def test_traced_lengths_run_without_checkify():
    assert fast_jit(sums)(unchecked((6, 5, 1))).shape == (3, 4)


def test_constraints_are_checked():
    run = ragged.vmap(lambda x: x * 2, constraints=("n >= 2",))
    with pytest.raises(ValueError, match=r"n >= 2.*example 1"):
        run(batch())


# ------------------------------------------------------------------------- arguments


def test_padded_ragged_is_no_argument():
    pairs = ragged.vmap(lambda x: x @ x.T)(batch())
    with pytest.raises(NotImplementedError, match="cannot map a PaddedRagged.*n@0"):
        ragged.vmap(lambda p: p)(pairs)


def test_wrong_arguments():
    x, identity = batch(), lambda *args: args
    with pytest.raises(ValueError, match="one entry for each of 1 arguments"):
        ragged.vmap(identity, in_axes=(0, 0))(x)
    with pytest.raises(TypeError, match="in_axes"):
        ragged.vmap(identity, in_axes="n")(x)
    with pytest.raises(ValueError, match="in_axes.*mapped by its examples"):
        ragged.vmap(identity, in_axes=(None,))(x)
    with pytest.raises(ValueError, match="in_axes.*has 2 for an array"):
        ragged.vmap(identity, in_axes=(0, 2))(x, jnp.ones((3, 3)))
    message = (
        r"equally many examples, got 2 in `args\[0\]\['w'\]` and 3 in `args\[1\]` and "
        r"5 in `kwargs\['y'\]`; `in_axes` takes None for an argument that all examples"
    )
    with pytest.raises(ValueError, match=message):
        ragged.vmap(lambda p, x, y: x)({"w": jnp.ones(2)}, x, y=jnp.ones(5))
    with pytest.raises(ValueError, match="`out_axes` is None for a result"):
        ragged.vmap(lambda x: x.sum(0), out_axes=None)(x)
    with pytest.raises(ValueError, match="`out_axes` has 3"):
        ragged.vmap(lambda x: x.sum(0), out_axes=3)(x)


@pytest.mark.parametrize(
    "options",
    [{"min_length": -1}, {"scan": "fast"}, {"scan": []}, {"lanes": 0}, {"tiers": 0}],
    ids=str,
)
def test_wrong_options(options):
    (name,) = options
    with pytest.raises(ValueError, match=f"`{name}`"):
        ragged.vmap(lambda x: x, **options)


# -------------------------------------------------------------------------- register


@pytest.fixture
def scratch_rules(monkeypatch):
    """Restore the registry after a test."""
    assert rules.__name__  # those of JAX's primitives are there already
    monkeypatch.setattr(registry, "_entries", dict(registry._entries))


def make_primitive(name):
    """Return the running total of the tokens as a primitive of a user."""
    primitive = Primitive(name)
    primitive.def_impl(lambda x: jnp.cumsum(x, 0))
    primitive.def_abstract_eval(lambda x: x)
    mlir.register_lowering(
        primitive, mlir.lower_fun(lambda x: jnp.cumsum(x, 0), multiple_results=False)
    )
    batching.primitive_batchers[primitive] = lambda args, dims: (
        jnp.cumsum(jnp.moveaxis(args[0], dims[0], 0), 1),
        0,
    )
    return primitive


def test_own_primitive_with_and_without_a_rule(scratch_rules):
    running_p = make_primitive("running_total")
    mapped = ragged.vmap(lambda x: 1 + running_p.bind(2 * x))
    with pytest.raises(NotImplementedError, match="'running_total'.*ragged.register"):
        mapped(batch())

    @ragged.register(running_p)
    def rule(ctx, eqn, x):
        flat = ctx.to_flat(x)
        segments = ctx.segments(flat.dim)
        totals = jnp.cumsum(flat.x, 0)
        before = jnp.concatenate([jnp.zeros_like(totals[:1]), totals])
        starts = segments.offsets[segments.ids]
        return ragged.Flat(totals - before[starts], flat.shape, flat.axis)

    ends = np.cumsum(LENGTHS)
    for got, tokens in zip(mapped(batch()), np.split(ROWS, ends), strict=False):
        np.testing.assert_allclose(got, 1 + np.cumsum(2 * tokens, 0), rtol=1e-12)
    with pytest.raises(ValueError, match="running_total has a ragged rule already"):
        ragged.register(running_p)(rule)


def test_own_primitive_of_a_name_that_jax_has_gets_no_rule_of_jax():
    with pytest.raises(NotImplementedError, match="'sort': it has no rule"):
        ragged.vmap(make_primitive("sort").bind)(batch())


def test_own_primitive_without_ragged_axes_needs_no_rule():
    running_p = make_primitive("running_of_dense")
    out = ragged.vmap(lambda x: running_p.bind(x.sum(0)))(batch())
    parts = np.split(ROWS, np.cumsum(LENGTHS))[:3]
    np.testing.assert_allclose(out, [np.cumsum(p.sum(0)) for p in parts], rtol=1e-12)


def test_rule_that_is_unsupported_or_gives_another_shape(scratch_rules):
    running_p = make_primitive("running_unsupported")

    @ragged.register(running_p)
    def rule(ctx, eqn, x):
        if x.x.dtype == jnp.float32:
            raise ragged.Unsupported("float32 is beneath it")
        return ragged.Shared(jnp.zeros(2), (2,))

    mapped = ragged.vmap(running_p.bind)
    with pytest.raises(NotImplementedError, match="running_unsupported.*beneath it"):
        mapped(batch().with_data(jnp.asarray(ROWS, jnp.float32)))
    with pytest.raises(TypeError, match="rule of 'running_unsupported' must give"):
        mapped(batch())


def test_wrong_registrations():
    with pytest.raises(TypeError, match="primitives"):
        ragged.register(jnp.sin)
    with pytest.raises(ValueError, match="at least one"):
        ragged.register()
    with pytest.raises(ValueError, match="sin has a ragged rule already"):
        ragged.register(lax.sin_p)(lambda ctx, eqn, x: x)


@pytest.mark.parametrize("kind", ["Nonzero", "Remat"])
def test_whole_operations_of_jax_0_12(kind):
    """They are an object in one primitive, made of others or with more to it."""
    tree = jax.tree.structure((0, 0))
    made = {"in_tree": tree, "expand": lambda self, x, y: [jnp.cumsum(x) * y]}
    primitive = Primitive("call_hi_primitive")
    primitive.multiple_results = True
    primitive.def_abstract_eval(lambda x, y, **_: [x])
    whole = type(kind, (), made)()
    run = ragged.vmap(lambda x: primitive.bind(x, x[0], _prim=whole)[0])
    batch = ragged.RaggedArray.from_list([jnp.array([2.0, 1.0]), jnp.array([3.0])])
    if kind == "Remat":
        with pytest.raises(NotImplementedError, match="no rule for Remat"):
            run(batch)
        return
    for got, want in zip(run(batch).to_list(), ([4.0, 6.0], [9.0]), strict=True):
        np.testing.assert_array_equal(got, want)
