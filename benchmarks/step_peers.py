"""Benchmark of networks in other libraries: `python -m benchmarks.step_peers`.

The networks of `steps.py` by `recurrent_net`, next to a loop of PyTorch over the same
step, the same loop over a step that `torch.compile` has compiled, flax's `nnx.RNN`, and
`lax.scan`. Results are checked before anything is timed; the table goes to
docs/results.md.
"""

import functools as ft
import os
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer
from tolerance import assert_close

from ostinato.apps.bench import processes
from ostinato.apps.bench.peers import Unsupported

from . import floors, recurrent, results, tables
from .recurrent import SCAN, Case
from .steps import Network, networks
from .stored import Measure, Out, Page, Stored

OUT = Path("out/bench/step_peers.json")
MARK = "step peers"
CASES = {name: recurrent.CASES[name] for name in ("N1H64", "N8H64", "N32H256")}
OURS, TORCH, COMPILED, NNX, FLOOR = "ours", "torch", "torch.compile", "nnx.RNN", "floor"
PEERS = (SCAN, TORCH, COMPILED, NNX)
HEADS = ("network", "ms", *PEERS, FLOOR)
KINDS = ("infer", "train")


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each contender.")] = 5,
    rows: Annotated[str, typer.Option(help="Pattern of the rows.")] = "*",
    threads: Annotated[int, typer.Option(min=1, help="Of each contender.")] = 2,
    out: Out = OUT,
    page: Page = None,
    measure: Measure = True,
) -> None:
    """Time networks by `recurrent_net` next to other libraries.

    Rows are added to those in `out`, of which the same ones are replaced.
    """
    stored = Stored(out)
    if measure:
        stored.begin()
        peaks = floors.measure(threads)
        for label, case in CASES.items():
            for name, network in networks(case.size).items():
                for kind in KINDS:
                    row = f"{name}, {label}-{kind}"
                    if not fnmatch(row, rows):
                        continue
                    train = kind == "train"
                    builders = {
                        who: ft.partial(build, who, name, case, train, threads)
                        for who in (OURS, *PEERS)
                    }
                    timed = processes.take_turns(builders, rounds)
                    for who, why in timed.skipped.items():
                        print(f"{row}: without {who}: {why}")
                    least = floor(network, case, train, peaks)
                    found = {"seconds": timed.seconds, FLOOR: least}
                    stored.add(row, found)
                    print(*line(row, found), flush=True)
    stored.show(text, MARK, page)


# ------------------------------------------------------------------------- contenders


def build(who: str, name: str, case: Case, train: bool, threads: int) -> Callable:
    """Return a call of a contender whose results are those of `lax.scan`.

    Raises:
        Unsupported: the contender cannot run the network.
    """
    os.environ["OSTINATO_NUM_THREADS"] = str(threads)
    network = networks(case.size)[name]
    states = network.cell.initial_state(case.batch, case.dtype)
    arguments = recurrent.make(network, recurrent.STEPS, case, recurrent.ENTRIES)
    run = recurrent.scanned(network.step_on, states)
    if train:
        shape = jax.eval_shape(run, *arguments).shape
        dy = np.random.default_rng(1).standard_normal(shape, np.float32)
        arguments = (*arguments, jnp.asarray(dy))
    reference = of_jax(run, arguments, train)
    if who == SCAN:
        return reference
    if who in (TORCH, COMPILED):
        call = of_torch(name, who == COMPILED, states, arguments, train, threads)
    else:
        run = recurrent.ours(network.step_on, states)
        if who == NNX:
            run = of_nnx(network.step_on, states)
        call = of_jax(run, arguments, train)
    pairs = zip(jax.tree.leaves(call()), jax.tree.leaves(reference()), strict=True)
    for got, want in pairs:
        assert_close(got, want, terms=arguments[1].size, what=who)
    return call


def of_jax(run: Callable, arguments: Any, train: bool) -> Callable:
    """Return a call of a compiled function of JAX."""
    run = recurrent.training(run) if train else run
    program = jax.jit(run).lower(*arguments).compile()
    return lambda: jax.block_until_ready(program(*arguments))


def of_nnx(step_of: Callable, states: Any) -> Callable:
    """Return a function that runs the step as the cell of an `nnx.RNN`."""
    from flax import nnx

    class Cell(nnx.RNNCellBase):
        def __init__(self, params: Any, memory: Any) -> None:
            leaves, self.structure = jax.tree.flatten(params)
            self.params = nnx.List([nnx.Param(a) for a in leaves])
            self.memory = nnx.Variable(memory)

        @property
        def num_feature_axes(self) -> int:
            return 1

        def initialize_carry(self, input_shape: Any, rngs: Any) -> Any:
            return states

        def __call__(self, carry: Any, x: Any) -> Any:
            params = self.structure.unflatten([p[...] for p in self.params])
            return step_of(self.memory[...])(params, carry, x, 0)

    def run(params: Any, x: Any, memory: Any) -> Any:
        return nnx.RNN(Cell(params, memory), time_major=True, rngs=False)(x)

    return run


def of_torch(
    name: str, compiles: bool, states: Any, arguments: Any, train: bool, threads: int
) -> Callable:
    """Return a call of PyTorch's loop.

    Raises:
        Unsupported: the step cannot be compiled here.
    """
    import torch

    from . import torch_steps

    torch.set_num_threads(threads)
    step = torch_steps.STEPS[name]
    tensors = lambda tree: jax.tree.map(lambda a: torch.tensor(np.asarray(a)), tree)  # noqa: E731
    states = tensors(states)
    params, x, memory, *dy = tensors(arguments)
    if compiles:
        step = torch.compile(step, dynamic=False)
    leaves = jax.tree.leaves((params, x, memory))

    def forward() -> Any:
        return torch_steps.run(step, params, states, x, memory)

    @torch.inference_mode()
    def infer() -> Any:
        return forward()

    def training() -> Any:
        y = forward()
        gradients = torch.autograd.grad(y, leaves, dy[0], materialize_grads=True)
        return [y.detach(), *gradients]

    if train:
        for leaf in leaves:
            leaf.requires_grad_()
    call = training if train else infer
    try:
        call()
    except RuntimeError as error:
        if not compiles:
            raise
        raise Unsupported(f"{type(error).__name__}: {error}") from error
    return lambda: jax.tree.map(np.asarray, call())


def floor(network: Network, case: Case, train: bool, peaks: floors.Peaks) -> float:
    """Return the least seconds for the products with the matrices of every step."""
    shapes = jax.eval_shape(network.init, jax.random.key(0))
    if hasattr(shapes, "w_memory"):  # its product is made once
        shapes = shapes._replace(w_memory=None)
    matrices = [a.shape for a in jax.tree.leaves(shapes) if len(a.shape) == 2]
    return floors.of_matrices(matrices, case.batch, recurrent.STEPS, train, peaks)


# ---------------------------------------------------------------------------- reporting


def text(stored: Stored) -> str:
    """Format the results as the text for results.md."""
    rows = [line(row, found) for row, found in stored.rows.items()]
    said = stored.conditions("jax", "torch", "flax")
    return f"{said}.\n\n{tables.markdown(HEADS, rows)}"


def line(row: str, found: dict) -> tuple[str, ...]:
    """Format our milliseconds, and the times of the others and of the floor over it."""
    medians = {who: results.spread(s).median for who, s in found["seconds"].items()}
    medians[FLOOR] = found[FLOOR]
    ratios = (
        tables.ratio(medians[who] / medians[OURS] if who in medians else None)
        for who in (*PEERS, FLOOR)
    )
    return (row, tables.duration(medians[OURS]), *ratios)


if __name__ == "__main__":
    typer.run(main)
