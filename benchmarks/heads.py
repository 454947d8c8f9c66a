"""Benchmark of heads and of the sLSTM: `python -m benchmarks.heads`.

Each network runs next to the same one as a step function of `lax.scan`, next to a
network without heads, an LSTM if it is an sLSTM, and with `--xlstm DIR` next to the
backend "vanilla" of the package `xlstm`, which `pip install --no-deps --target DIR
xlstm==2.0.6` installed. Results are checked before anything is timed.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer
from tolerance import assert_close

import ostinato as ost
from ostinato.apps.bench import timing

from . import results, tables
from .programs import training
from .stored import Measure, Out, Page, Stored

OUT = Path("out/bench/heads.json")
MARK = "heads"
OURS, SCAN, DENSE, XLSTM = "ours", "lax.scan", "one head", "xlstm"
KINDS = ("infer", "train")


def network(
    mode: Any, units: int, heads: int, skip: bool = False, inputs: int | None = None
) -> ost.RNNSpec:
    """Return the spec of a network with one bias; None means `units` inputs."""
    return ost.RNNSpec(
        mode,
        inputs or units,
        units,
        num_heads=heads,
        bias="double" if mode == "gru" else "input",
        input_mode="skip" if skip else "linear",
    )


ROWS = {  # (spec, sequences, steps)
    "LSTM, 4 heads, N32H256T100": (network("lstm", 256, 4), 32, 100),
    "LSTM, 4 heads, N32I64H256T100": (network("lstm", 256, 4, inputs=64), 32, 100),
    "LSTM, 4 heads, N32H256T100, skip": (network("lstm", 256, 4, True), 32, 100),
    "GRU, 4 heads, N32H256T100": (network("gru", 256, 4), 32, 100),
    "GRU, 4 heads, N32I64H256T100": (network("gru", 256, 4, inputs=64), 32, 100),
    "GRU, 4 heads, N32H256T100, skip": (network("gru", 256, 4, True), 32, 100),
    "LSTM, 4 heads, N1H256T100, skip": (network("lstm", 256, 4, True), 1, 100),
    "GRU, 4 heads, N1H256T100, skip": (network("gru", 256, 4, True), 1, 100),
    "sLSTM, 4 heads, N16H128T256": (network("slstm", 128, 4), 16, 256),
    "sLSTM, 4 heads, N32H256T100": (network("slstm", 256, 4), 32, 100),
    "sLSTM, 256 heads, N8H256T4096, skip": (network("slstm", 256, 256, True), 8, 4096),
}


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each contender.")] = 5,
    only: Annotated[str, typer.Option(help="A part of the names of rows.")] = "",
    xlstm: Annotated[
        Path | None, typer.Option(help="Folder with the package xlstm.")
    ] = None,
    out: Out = OUT,
    page: Page = None,
    measure: Measure = True,
) -> None:
    """Time networks of several heads next to others.

    Rows are added to those in `out`, of which the same ones are replaced.
    """
    stored = Stored(out)
    if measure:
        stored.begin()
        for name in (name for name in ROWS if only in name):
            for kind in KINDS:
                calls = checked(*ROWS[name], kind == "train", xlstm)
                row = f"{name}-{kind}"
                stored.add(row, timing.take_turns(calls, rounds))
                print(*line(row, stored.rows[row]), flush=True)
    stored.show(text, MARK, page)


# --------------------------------------------------------------------------- measuring


def checked(
    spec: ost.RNNSpec, batch: int, steps: int, train: bool, xlstm: Path | None = None
) -> dict[str, Callable]:
    """Return compiled calls of all contenders; those of the same network agree."""
    rng = np.random.default_rng(0)
    # Arrays of JAX: of numpy's, every call would make a copy first.
    x, dy = (
        jnp.asarray(rng.standard_normal((batch, steps, size), np.float32))
        for size in (spec.input_size, spec.hidden_size)
    )
    weights = ost.init_weights(jax.random.key(0), spec)
    dense = dataclasses.replace(
        spec, mode="lstm" if spec.mode == "slstm" else spec.mode, num_heads=1
    )
    runs = {
        OURS: (lambda w, x: ost.rnn(spec, w, x).y, weights),
        SCAN: (lambda w, x: by_scan(spec, w, x), weights),
        DENSE: (
            lambda w, x: ost.rnn(dense, w, x).y,
            ost.init_weights(jax.random.key(0), dense),
        ),
    }
    calls, found = {}, {}
    for name, (run, w) in runs.items():
        given = (w, x, dy) if train else (w, x)
        program = jax.jit(training(run) if train else run).lower(*given).compile()
        found[name] = jax.tree.leaves(program(*given))
        calls[name] = lambda p=program, g=given: jax.block_until_ready(p(*g))
    for a, b in zip(found[OURS], found[SCAN], strict=True):
        assert_close(a, b, terms=x.size * spec.hidden_size)
    if xlstm is not None and spec.mode == "slstm" and spec.input_mode == "linear":
        calls[XLSTM], y = by_package(spec, weights, x, dy, train, xlstm)
        assert_close(found[OURS][0], y, terms=x.size * spec.hidden_size)
    return calls


def by_scan(spec: ost.RNNSpec, weights: Any, x: Any) -> Any:
    """Run a network as users write it: one product with the input, then a loop."""
    (w,) = ost.unpack_weights(weights, spec)
    heads, gates = spec.num_heads, spec.num_gates
    recurrent = w.w_hh.reshape(gates, heads, -1, w.w_hh.shape[1])
    gx = jnp.tile(x, gates) if w.w_ih is None else x @ w.w_ih.T
    gx = jnp.swapaxes(gx + w.b_ih, 0, 1)

    def product(h: Any) -> Any:
        parts = h.reshape(len(h), heads, -1)
        return jnp.einsum("bkd,gkud->bgku", parts, recurrent).reshape(len(h), -1)

    def step(states: Any, gx: Any) -> Any:
        states = _STEPS[spec.mode](states, gx, product(states[0]), w.b_hh)
        return states, states[0]

    zeros = jnp.zeros((len(x), spec.hidden_size), x.dtype)
    states = (zeros,) * len(spec.state_shape(1) if spec.mode != "gru" else (0,))
    return jnp.swapaxes(jax.lax.scan(step, states, gx)[1], 0, 1)


def _lstm(states: Any, gx: Any, gh: Any, _: Any) -> Any:
    i, f, g, o = jnp.split(gx + gh, 4, axis=-1)
    c = jax.nn.sigmoid(f) * states[1] + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


def _gru(states: Any, gx: Any, gh: Any, b_hh: Any) -> Any:
    (rx, zx, nx), (rh, zh, nh) = (jnp.split(a, 3, axis=-1) for a in (gx, gh + b_hh))
    r, z = jax.nn.sigmoid(rx + rh), jax.nn.sigmoid(zx + zh)
    return ((1 - z) * jnp.tanh(nx + r * nh) + z * states[0],)


def _slstm(states: Any, gx: Any, gh: Any, _: Any) -> Any:
    (i, f, z, o), (_, c, n, m) = jnp.split(gx + gh, 4, axis=-1), states
    log_f = jax.nn.log_sigmoid(f) + m
    m = jnp.where(n == 0, i, jnp.maximum(i, log_f))
    i, f = jnp.exp(i - m), jnp.exp(jnp.minimum(log_f - m, 0))
    c, n = f * c + i * jnp.tanh(z), f * n + i
    return jax.nn.sigmoid(o) * c / n, c, n, m


_STEPS: dict[str, Callable] = {"lstm": _lstm, "gru": _gru, "slstm": _slstm}


def by_package(
    spec: ost.RNNSpec, weights: Any, x: Any, dy: Any, train: bool, directory: Path
) -> tuple[Callable, Any]:
    """Return a call of the package `xlstm`, and its outputs.

    The product with the input is one of torch, as its own layers do not mix heads.
    """
    import torch
    from oracles.record_xlstm import load

    module = load(directory, "xlstm.blocks.slstm.cell")
    (w,) = ost.unpack_weights(weights, spec)
    heads, units = spec.num_heads, spec.hidden_size // spec.num_heads
    cell = module.sLSTMCell(
        module.sLSTMCellConfig(
            hidden_size=spec.hidden_size,
            num_heads=heads,
            backend="vanilla",
            dtype="float32",
            enable_automatic_mixed_precision=False,
        )
    )
    kernel = np.asarray(w.w_hh).reshape(4, heads, units, units).swapaxes(0, 1)
    shape = cell._recurrent_kernel_.shape
    with torch.no_grad():
        cell._recurrent_kernel_.copy_(torch.tensor(kernel.reshape(shape)))
        cell._bias_.copy_(torch.tensor(np.asarray(w.b_ih)))
    w_ih, x_in, dy_in = (torch.tensor(np.asarray(a)) for a in (w.w_ih, x, dy))
    wanted = [w_ih, x_in, *cell.parameters()]

    def forward() -> Any:
        y, _ = cell(x_in @ w_ih.T)
        return y.transpose(1, 2).reshape(dy_in.shape)

    def call() -> Any:
        if not train:
            with torch.no_grad():
                return forward()
        for a in wanted:
            a.requires_grad_(True)
        y = forward()
        torch.autograd.grad(y, wanted, dy_in)
        return y.detach()

    return call, call().numpy()


# --------------------------------------------------------------------------- reporting


def text(stored: Stored) -> str:
    """Format the results as the text for results.md."""
    return f"{stored.conditions('jax')}.\n\n" + tables.markdown(
        ("network", "ms", SCAN, DENSE, "multiply-adds", XLSTM),
        [line(row, seconds) for row, seconds in stored.rows.items()],
    )


def line(row: str, seconds: dict[str, list[float]]) -> tuple[str, ...]:
    """Format our milliseconds, and the time of every other contender over ours."""
    medians = {name: results.spread(taken).median for name, taken in seconds.items()}
    scan, dense, xlstm = (
        tables.ratio(medians[name] / medians[OURS] if name in medians else None)
        for name in (SCAN, DENSE, XLSTM)
    )
    found = tables.ratio(fewer(row.rpartition("-")[0]))
    return row, tables.duration(medians[OURS]), scan, dense, found, xlstm


def fewer(name: str) -> float | None:
    """Return the multiply-adds of one head over those of the heads of a row.

    None stands for an sLSTM, which is compared with an LSTM, and for unknown rows.
    """
    if name not in ROWS or ROWS[name][0].mode == "slstm":
        return None
    spec = ROWS[name][0]
    inputs = 0 if spec.input_mode == "skip" else spec.input_size
    units = spec.hidden_size
    return (inputs + units) / (inputs + units / spec.num_heads)


if __name__ == "__main__":
    typer.run(main)
