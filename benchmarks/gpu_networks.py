"""Networks on a GPU, next to XLA's loop and to cuDNN as JAX and PyTorch call it.

cuDNN's LSTM of `jax.experimental.rnn` takes the same flat weights, so its results are
compared; PyTorch's layers have weights of their own, and only their time counts. It
packs sequences of different lengths before the measured time, and has float16 beside
our bfloat16.
"""

import functools as ft
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ostinato as ost
from ostinato.apps.bench import timing

from . import programs

OURS, XLA, CUDNN, TORCH = "ostinato", "xla", "jax.experimental.rnn", "torch"
HALF = "torch float16"
MODES = ("lstm", "gru", "slstm", "rnn_tanh")
DTYPES = ("bfloat16", "float32")
KINDS = ("infer", "train")
SIZES = {  # sequences, steps, units, and whether lengths differ
    "N16T200H128": (16, 200, 128, False),
    "N64T200H256": (64, 200, 256, False),
    "N64T200H256-ragged": (64, 200, 256, True),
    "N128T200H512": (128, 200, 512, False),
}
OF_ONE_SIZE, ONE_SIZE = ("slstm", "rnn_tanh"), "N64T200H256"
LARGEST_ERROR = 0.05  # of the largest value: factors are rounded to 8 or 10 bits


def rows(backend: str, rounds: int) -> Iterator[tuple[str, Callable[[], dict]]]:
    """Yield the name of each row and the function that measures it."""
    for mode in MODES:
        for dtype in DTYPES:
            for size, shape in SIZES.items():
                if mode in OF_ONE_SIZE and size != ONE_SIZE:
                    continue
                for kind in KINDS:
                    name = f"{mode}-{size}-{dtype}-{kind}"
                    yield (
                        name,
                        ft.partial(network, backend, rounds, mode, dtype, shape, kind),
                    )


def network(
    backend: str, rounds: int, mode: Any, dtype: str, shape: tuple, kind: str
) -> dict:
    """Return the seconds of each contender in each round, and what they mean.

    A contender that fails is left out, with its error in the row.
    """
    batch, steps, hidden, ragged = shape
    spec = ost.RNNSpec(mode, hidden, hidden)
    random = np.random.default_rng(0)
    draw = lambda: jnp.asarray(random.standard_normal(shape[:3]), dtype)  # noqa: E731
    weights = ost.init_weights(jax.random.key(0), spec, dtype=dtype)
    lengths = _lengths(batch, steps) if ragged else np.full(batch, steps)
    lengths = jnp.asarray(lengths, jnp.int32)
    given = (weights, draw()) + ((draw(),) if kind == "train" else ())

    def ours(weights: Any, x: Any, *, backend: str = backend) -> Any:
        options: dict[str, Any] = {"seq_lengths": lengths} if ragged else {}
        return ost.rnn(spec, weights, x, backend=backend, **options).y

    runs = {XLA: ft.partial(ours, backend="xla"), OURS: ours}
    if mode == "lstm" and dtype == "float32" and _has_gpu():
        runs[CUDNN] = ft.partial(_cudnn, hidden, lengths)
    calls, errors, want = {}, {}, None
    for name, run in runs.items():
        function = programs.training(run) if kind == "train" else run
        try:
            program = jax.jit(function).lower(*given).compile()
            got = jax.tree.leaves(program(*given))
        except Exception as error:  # the other contenders are measured all the same
            errors[name] = f"{type(error).__name__}: {error}"[:300]
            continue
        want = got if want is None else want
        for x, y in zip(got, want, strict=True):
            _check(name, x, y)
        calls[name] = ft.partial(programs.wait, program, given)
    names = {TORCH: dtype} | ({HALF: "float16"} if dtype == "bfloat16" else {})
    for name, torch_dtype in names.items():
        try:
            if call := torch_call(mode, torch_dtype, shape, kind):
                calls[name] = call
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {error}"[:300]
    taken = timing.take_turns(calls, rounds)
    median = {name: float(np.median(each)) for name, each in taken.items()}
    found: dict[str, Any] = {"median": median, "seconds": taken, "errors": errors}
    if OURS in median:
        found["us a step"] = 1e6 * median[OURS] / steps
        found |= {
            f"{name}/ours": seconds / median[OURS]
            for name, seconds in median.items()
            if name != OURS
        }
    return found


def _check(name: str, got: Any, want: Any) -> None:
    got, want = (np.asarray(each, np.float32) for each in (got, want))
    error = np.max(np.abs(got - want)) / max(np.max(np.abs(want)), 1e-6)
    if not error <= LARGEST_ERROR:
        raise AssertionError(f"{name} differs from xla by {error:.1e} of its size")


def _has_gpu() -> bool:
    return jax.default_backend() == "gpu"


def _cudnn(hidden: int, lengths: Any, weights: Any, x: Any) -> Any:
    """Run cuDNN's LSTM as JAX does."""
    from jax.experimental import rnn

    zeros = jnp.zeros((1, x.shape[0], hidden), x.dtype)
    return rnn.lstm(
        x,
        zeros,
        zeros,
        weights,
        lengths,
        input_size=hidden,
        hidden_size=hidden,
        num_layers=1,
        dropout=0.0,
        bidirectional=False,
    )[0]


def torch_call(
    mode: str, dtype: str, shape: tuple, kind: str, device: str = "cuda"
) -> Callable | None:
    """Return a call of PyTorch's layer on a GPU, or None if PyTorch has none."""
    try:
        import torch
    except ImportError:
        return None
    kinds = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU, "rnn_tanh": torch.nn.RNN}
    if mode not in kinds or (device == "cuda" and not torch.cuda.is_available()):
        return None
    batch, steps, hidden, ragged = shape
    layer = kinds[mode](hidden, hidden, batch_first=True)
    layer = layer.to(device, getattr(torch, dtype))
    x = torch.randn(batch, steps, hidden, device=device, dtype=getattr(torch, dtype))
    if ragged:
        lengths = torch.as_tensor(_lengths(batch, steps))
        x = torch.nn.utils.rnn.pack_padded_sequence(
            x, lengths, batch_first=True, enforce_sorted=False
        )
    (x.data if ragged else x).requires_grad_(kind == "train")

    def call() -> None:
        with torch.set_grad_enabled(kind == "train"):
            y, _ = layer(x)
            if kind == "train":
                (y.data if ragged else y).sum().backward()
        if device == "cuda":
            torch.cuda.synchronize()

    return call


def _lengths(batch: int, steps: int) -> np.ndarray:
    return np.random.default_rng(1).integers(1, steps + 1, batch)
