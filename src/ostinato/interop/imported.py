"""The result of every importer, and the code that all converters share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .. import (
    LayerWeights,
    RNNSpec,
    _checks,
    pack_weights,
    param_shapes,
    unpack_weights,
)
from .._rnn.joining import Rows
from .._rnn.modes import MODES
from .._typing import Array, Float
from .exported import require

__all__ = ["Imported", "bidirectional", "stack"]

_FLIP = "flip x along time"
FLIPPED, FLIPPED_BACK = f"{_FLIP}; y is flipped too", f"{_FLIP}, and y back"
"""What notes say of networks that read sequences from their last step on."""


class Imported(NamedTuple):
    """A network from another library.

    Attributes:
        spec: the network.
        weights: its flat vector, `[spec.num_params]`, as `ostinato.rnn` takes it.
        notes: sentences on what the weights alone do not say, such as a dropout rate
            or a layout of time that the caller has to ask for.
    """

    spec: RNNSpec
    weights: Float[Array, " num_params"]
    notes: tuple[str, ...] = ()


class Contents(NamedTuple):
    """The contents of a file of another library.

    Attributes:
        found: networks by name.
        others: for everything else in the file its name, and why it was not converted.
    """

    found: dict[str, Imported]
    others: dict[str, str]


def as_array(name: str, value: Any) -> Array:
    """Return a tensor of any library as a JAX array of floats.

    Raises:
        TypeError: `value` is no array, or holds no floats.
        ValueError: `value` is a masked array of numpy.
    """
    if hasattr(value, "detach"):
        value = _from_torch(name, value)
    value = _checks.unwrap(value)
    _checks.check_unmasked(name, value)
    if hasattr(value, "__array__") and not isinstance(value, jax.Array):
        value = np.asarray(value)
    value = _checks.check_array(name, value)
    _checks.check_floating(name, value, _checks.FLOATS)
    return value


def _from_torch(name: str, tensor: Any) -> np.ndarray:
    try:
        tensor = tensor.detach().cpu()
        if str(tensor.dtype) == "torch.bfloat16":  # which numpy does not know
            return tensor.float().numpy().astype(jnp.bfloat16)
        return tensor.numpy().copy()  # since the memory of a tensor may change
    except (RuntimeError, TypeError) as error:  # sparse, quantised, float8, no values
        raise TypeError(
            f"`{name}` must be a dense tensor of a dtype that numpy has: {error}"
        ) from error


def check_state_dict(sd: Any, prefix: str = "", hint: str = "") -> None:
    """Check a state dict, and a prefix of names in it.

    Raises:
        TypeError: `sd` is no mapping, or `prefix` no string; `hint` is added to what is
            said of a module.
    """
    if not isinstance(sd, Mapping):
        known = callable(getattr(sd, "state_dict", None))
        more = f"; its state_dict() is one{hint}" if known else ""
        got = " ".join(_checks.describe(sd).split())  # of a module it has many lines
        raise TypeError(f"`sd` must be a mapping, got {got}{more}")
    _checks.check_text("`prefix`", prefix)


def gate_order(mode: str) -> str:
    """Return the gates of a mode in the order of this package, such as `"i f g o"`."""
    return " ".join(MODES[mode].gates)


def reorder_gates(a: Any, given: str, wanted: str, axis: int = 0) -> Any:
    """Return the gate blocks of `a` along `axis` in another order.

    Args:
        a: an array, or `Rows`: blocks of equal size, one for each gate.
        given: the gates as they are, such as `"i o f g"`.
        wanted: the same gates as they are to be.
        axis: along which the blocks follow each other.
    """
    if given == wanted:
        return a
    if isinstance(a, Rows):
        return a.reorder([given.split().index(gate) for gate in wanted.split()])
    blocks = dict(
        zip(given.split(), jnp.split(a, len(given.split()), axis), strict=True)
    )
    return jnp.concatenate([blocks[gate] for gate in wanted.split()], axis)


def build(
    mode: str,
    layers: Sequence[LayerWeights],
    label: Callable[[int, str], str],
    *,
    order: str | None = None,
    bidirectional: bool = False,
    notes: Sequence[str] = (),
    **options: Any,
) -> Imported:
    """Return the network that weights of all pseudo-layers describe.

    Args:
        mode: of `RNNSpec`.
        layers: for each pseudo-layer its weights, of this package's shapes; biases that
            only some pseudo-layers have become zeros in the others.
        label: what the source calls a field of a pseudo-layer, for messages.
        order: the gates as the source orders their rows, such as `"i o f g"`; None: as
            this package does.
        bidirectional: whether pseudo-layers come in pairs.
        notes: see `Imported`.
        options: more fields of `RNNSpec`.

    Raises:
        ValueError: shapes that do not fit each other; the message names the tensor.
        TypeError: dtypes differ.
    """
    first, gates = layers[0], len(MODES[mode].gates)
    check_matrices(first, label, gates)
    spec = RNNSpec(
        mode,  # pyright: ignore[reportArgumentType]
        input_size=first.w_ih.shape[1],
        hidden_size=first.w_hh.shape[0] // gates,
        num_layers=len(layers) // (2 if bidirectional else 1),
        bidirectional=bidirectional,
        proj_size=0 if first.w_hr is None else first.w_hr.shape[0],
        bias=_bias_mode(layers),
        **options,
    )
    whole = []
    for p, (layer, want) in enumerate(zip(layers, param_shapes(spec), strict=True)):
        fields = {}
        for name, shape in want._asdict().items():
            value = getattr(layer, name)
            if shape is None:
                continue
            if value is None and name in ("b_ih", "b_hh"):
                value = jnp.zeros(shape, layer.w_hh.dtype)
            if value is None or tuple(value.shape) != tuple(shape):
                got = "none" if value is None else list(value.shape)
                raise ValueError(
                    f"`{label(p, name)}` must have shape {list(shape)}, which follows "
                    f"from the other tensors, got {got}"
                )
            if order is not None and name != "w_hr":
                value = reorder_gates(value, order, gate_order(mode))
            fields[name] = value
        whole.append(want._replace(**fields))
    _checks.check_same_dtype(
        **{
            label(p, name): value
            for p, layer in enumerate(whole)
            for name, value in layer._asdict().items()
            if value is not None
        }
    )
    return Imported(spec, pack_weights(whole, spec), tuple(notes))


def stack(networks: Sequence[Imported]) -> Imported:
    """Return one network whose layers are those of several, one after the other.

    Args:
        networks: for example the cells of a model, or the nodes of an ONNX model, the
            first layer first; each reads the outputs of the one before.

    Returns:
        `Imported(spec, weights, notes)` with the notes of all, each once. It computes,
        in one call, what the networks compute one after the other. With `dropout` and a
        `key`, dropout acts between the joined networks too, as after every layer but
        the last; one after the other, they have none there.

    Raises:
        ValueError: `networks` is empty; they differ in mode, number of directions or
            another field but `input_size`, `num_layers` and `bias`; sizes do not fit;
            notes say to flip time for some of them, so that no one call computes all.
        TypeError: dtypes differ, or a network is no `Imported`.

    Holds under every JAX transformation.
    """
    networks = [*networks]
    if not networks:
        raise ValueError("`networks` must hold at least one network, got none")
    for n, network in enumerate(networks):
        _check_imported(f"networks[{n}]", network)
    _check_flips(networks)
    layers = [unpack_weights(network.weights, network.spec) for network in networks]
    both = networks[0].spec.bidirectional
    return _join(networks, [(n, p) for n, ps in enumerate(layers) for p in ps], both)


def _check_imported(name: str, network: Any) -> None:
    if not isinstance(network, Imported):
        raise TypeError(
            f"`{name}` must be an Imported, as converters return it, got "
            f"{_checks.describe(network)}"
        )


def _check_flips(networks: Sequence[Imported]) -> None:
    """Raise ValueError if one call cannot flip time as the networks' notes say.

    All may read backwards and return outputs in the order of their inputs; or the first
    one alone may return them in the order in which it reads.
    """
    turned = _says(networks[0], FLIPPED_BACK)
    for n, network in enumerate(networks[1:], 1):
        if _says(network, FLIPPED_BACK) != turned or _says(network, FLIPPED):
            raise ValueError(
                f"`networks[{n}]` must read time in the order of the one before, as "
                f"one call has no flip between layers, got the notes {network.notes} "
                f"after {networks[n - 1].notes}; call one after the other"
            )


def _says(network: Imported, words: str) -> bool:
    return any(words in note for note in network.notes)


def bidirectional(forward: Imported, backward: Imported) -> Imported:
    """Return one layer that runs two networks of one layer in both directions.

    Args:
        forward: the network that reads each sequence from its first step on.
        backward: the network that reads it from its last step on; its outputs are
            aligned with those of `forward`.

    Returns:
        `Imported(spec, weights, notes)` with `bidirectional=True`, and the notes of
        both, without those to flip time, which the network itself does.

    Raises:
        ValueError: a network has more layers or both directions already; they differ in
            mode, sizes or another field but `bias`; or a note of `forward` says that it
            reads from the last step on.
        TypeError: dtypes differ, or a network is no `Imported`.

    Holds under every JAX transformation.
    """
    networks = (forward, backward)
    for name, network in zip(("forward", "backward"), networks, strict=True):
        _check_imported(name, network)
        if network.spec.num_layers > 1 or network.spec.bidirectional:
            raise ValueError(
                f"`{name}` must have one layer and one direction, got {network.spec}"
            )
    if _says(forward, _FLIP):
        raise ValueError(
            "`forward` must read sequences from their first step on, got the notes "
            f"{forward.notes}; give it as `backward`"
        )
    layers = [unpack_weights(network.weights, network.spec)[0] for network in networks]
    joined = _join(networks, [*enumerate(layers)], True)
    return joined._replace(notes=tuple(n for n in joined.notes if _FLIP not in n))


def _join(
    networks: Sequence[Imported],
    layers: Sequence[tuple[int, LayerWeights]],
    both_directions: bool,
) -> Imported:
    """Return the network of pseudo-layers that come with their network's number."""
    for network in networks:
        require(
            network.spec,
            "a part of a network",
            hint="call the networks one after the other",
            input_mode="linear",
        )
    free = {"input_size", "num_layers", "bias"}
    first, *others = (
        {k: v for k, v in dataclasses.asdict(network.spec).items() if k not in free}
        for network in networks
    )
    for n, fields in enumerate(others, 1):
        for name, value in first.items():
            if fields[name] != value:
                raise ValueError(
                    f"`networks[{n}].spec` must have {name}={value!r}, as the first "
                    f"one has, got {fields[name]!r}"
                )
    options = {name: first[name] for name in _OPTIONS}
    return build(
        first["mode"],
        [layer for _, layer in layers],
        lambda p, field: f"networks[{layers[p][0]}], layer {p}, {field}",
        bidirectional=both_directions,
        notes=[*dict.fromkeys(note for network in networks for note in network.notes)],
        **options,
    )


_OPTIONS = ("dropout", "cell_clip", "clip_nan", "reset_after", "batch_invariant")


def check_matrices(
    layer: LayerWeights, label: Callable[[int, str], str], gates: int
) -> None:
    """Raise ValueError unless the matrices of the first layer give its sizes."""
    for name in ("w_ih", "w_hh", "w_hr"):
        value = getattr(layer, name)
        if value is not None and (value.ndim != 2 or 0 in value.shape):
            raise ValueError(
                f"`{label(0, name)}` must be a matrix, got {_checks.describe(value)}"
            )
    rows = layer.w_hh.shape[0]
    if rows % gates:
        raise ValueError(
            f"`{label(0, 'w_hh')}` must have rows for {gates} gates, got "
            f"{list(layer.w_hh.shape)}"
        )


def _bias_mode(layers: Sequence[LayerWeights]) -> Any:
    has_input = any(layer.b_ih is not None for layer in layers)
    has_recurrent = any(layer.b_hh is not None for layer in layers)
    if has_input and has_recurrent:
        return "double"
    return "input" if has_input else "recurrent" if has_recurrent else "none"
