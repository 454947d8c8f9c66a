"""How calls are laid out on a GPU: pure functions of sizes and of the GPU.

A plan is either that layout, or the reason, a text, why the backend xla runs the call.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from . import device
from .device import Gpu

MEASURED: frozenset[str] = frozenset()
"""Architectures with figures in docs/results.md, where kernels run without being asked.

None has any yet.
"""

THREADS = 128  # of a block
_WARP = 32
MOST_BLOCKS = 2**31 - 1
# Threads of a processor that keep its memory busy: half of those that it can hold.
_THREADS_OF_PROCESSOR = 1024
# A shorter chunk would not pay for its summary, which is read and written once.
_FEWEST_STEPS = 32

STORAGE = {
    "float32": "float",
    "float64": "double",
    "bfloat16": "BFloat16",
    "complex64": "Complex<float>",
    "complex128": "Complex<double>",
}
"""What kernels call the dtypes that they have."""

MODES = {
    "lstm": "kLstm",
    "gru": "kGru",
    "slstm": "kSlstm",
    "rnn_tanh": "kTanh",
    "rnn_relu": "kRelu",
}
"""What they call the modes of the operator."""


def unmeasured_reason() -> str | None:
    """Return why kernels run only where asked for; None where they always do.

    The driver is not asked while there are no such architectures: that alone would
    start it in programs that run on CPUs.
    """
    gpu = device.status().gpu if MEASURED else None
    if gpu is not None and gpu.arch in MEASURED:
        return None
    where = "any GPU" if gpu is None else gpu.arch
    return (
        f"its kernels have not been measured on {where}; backend='cuda' takes them, or "
        "OSTINATO_BACKEND=cuda for all calls"
    )


class Grid(NamedTuple):
    """The blocks of a launch.

    Attributes:
        blocks: how many.
        threads: of a block.
        shared_bytes: the shared memory of a block.
        cluster: the blocks of a cluster.
    """

    blocks: int
    threads: int = THREADS
    shared_bytes: int = 0
    cluster: int = 1


class LinearPlan(NamedTuple):
    """The layout of a linear recurrence.

    Attributes:
        columns: how many recurrences of single units, or pairs of them, there are;
            maybe none.
        chunk: the steps that one thread runs.
        chunks: the chunks of a sequence, 1 where sequences and units are enough.
    """

    columns: int
    chunk: int
    chunks: int

    def grid(self, chunks: int) -> Grid:
        """Return the blocks that run so many chunks of every sequence."""
        return Grid(math.ceil(self.columns * chunks / THREADS))

    def __str__(self) -> str:
        threads = _count(self.columns * self.chunks, "thread")
        if self.chunks == 1:
            return f"{threads}, one for each recurrence"
        return (
            f"{threads}, {self.chunks} chunks of {self.chunk} steps for each recurrence"
        )


def linear(
    dtype: str, block: int | None, steps: int, batch: int, units: int, gpu: Gpu
) -> LinearPlan | str:
    """Lay out a linear recurrence.

    Args:
        dtype: of all arrays, by name.
        block: the rows of a factor that is a matrix; None for numbers.
        steps: of every sequence.
        batch: how many sequences.
        units: of a step; blocks take `block` of them together.
        gpu: where it runs.
    """
    reason = linear_reason(dtype, block)
    if reason is not None:
        return reason
    columns = batch * units // (block or 1)
    wanted = gpu.processors * _THREADS_OF_PROCESSOR
    most = min(wanted // max(1, columns), steps // _FEWEST_STEPS)
    chunk = max(1, math.ceil(steps / max(1, most)))
    plan = LinearPlan(columns, chunk, max(1, math.ceil(steps / chunk)))
    if plan.grid(plan.chunks).blocks > MOST_BLOCKS:
        return f"{columns} recurrences are more than one launch holds"
    return plan


def linear_reason(dtype: str, block: int | None) -> str | None:
    """Return why no size of such a call has a kernel; None if some have."""
    if dtype not in STORAGE:
        return f"it has no kernels for {dtype}"
    if block not in (None, 2):
        return f"it has kernels for blocks [2, 2], not {[block, block]}"
    return None


class RnnPlan(NamedTuple):
    """The layout of one layer of the operator.

    Attributes:
        mode: of the operator.
        dtype: of all arrays, by name.
        units: of a head, rounded up to what the kernel is compiled for.
        cluster: the blocks that share the weights of a head of a direction.
        tiles: the tiles of eight sequences that a cluster runs together.
        clusters: how many of them the sequences of all heads and directions take.
    """

    mode: str
    dtype: str
    units: int
    cluster: int
    tiles: int
    clusters: int

    @property
    def units_of_lane(self) -> int:
        """Return how many units a lane computes: its four gates are those of one."""
        return _units_of_lane(self.mode)

    @property
    def warps(self) -> int:
        """Return the warps of a block, of eight lanes for each two sequences."""
        return self.units // self.cluster // 8 // self.units_of_lane

    @property
    def words(self) -> int:
        """Return the 32-bit words of the states of a sequence."""
        return self.units // (2 if self.dtype == "bfloat16" else 1)

    @property
    def depth(self) -> int:
        """Return how many products of tiles a row of weights takes."""
        return self.words // 8

    @property
    def held(self) -> int:
        """Return how many of these have their weights in registers, an even number."""
        others = _OTHER_REGISTERS + self._more_states
        free = self._registers - others - 16 * self.tiles
        return min(self.depth, _MOST_HELD, free // 16 * 2)

    @property
    def held_fragments(self) -> int:
        """Return how many fragments of weights a lane has in the backward pass.

        They are as many as registers hold. With one buffer of parts, they are as few as
        shared memory allows.
        """
        if self.part_buffers == 2:
            return self._most_held_fragments
        held = self._most_held_fragments
        while self._backward_bytes(1, held - 2) <= _MOST_SHARED:
            held -= 2
        return held

    @property
    def part_buffers(self) -> int:
        """Return how many buffers for parts of cotangents the backward pass has.

        A second one spares a wait in each step.
        """
        needed = self._backward_bytes(2, self._most_held_fragments)
        return 2 if self.cluster == 1 or needed <= _MOST_SHARED else 1

    @property
    def _most_held_fragments(self) -> int:
        free = self._registers - _OTHER_REGISTERS - self._more_states
        most = min(_MOST_HELD_FRAGMENTS, free // 8 * 2)
        tiles, depth = self._unit_tiles
        return min(most // tiles // 2 * 2, depth) * tiles

    @property
    def _unit_tiles(self) -> tuple[int, int]:
        """Return the tiles of units of a warp backwards, and the products of each."""
        tiles = self.units // 16 * self._halves // self.warps
        return tiles, self._gate_words // 8 // self._halves

    @property
    def _halves(self) -> int:
        return 2 if self.cluster == 1 and self.units_of_lane == 1 else 1

    @property
    def _gate_words(self) -> int:
        """Return the words of a block's cotangents of gates of a sequence."""
        return 4 // self.units_of_lane * self.words // self.cluster

    @property
    def _more_states(self) -> int:
        """Return the registers that more states than those of an LSTM take."""
        return 16 if self.mode == "slstm" else 0

    @property
    def _registers(self) -> int:
        """Return how many a thread can have, as those of a block fit a processor."""
        return min(255, _REGISTERS // (self.warps * 32))

    @property
    def shared_bytes(self) -> int:
        """Return the shared memory of a block: states, counters, other weights."""
        states = 2 * 8 * self.tiles * self.words * 4
        return states + 16 + max(1, self.warps * 2 * (self.depth - self.held) * 32) * 16

    @property
    def backward_shared_bytes(self) -> int:
        """Return the shared memory of a block of the backward pass."""
        return self._backward_bytes(self.part_buffers, self.held_fragments)

    def _backward_bytes(self, buffers: int, held: int) -> int:
        groups = self.units // self.cluster // 8
        gates = 2 * 8 * self.tiles * self._gate_words * 4
        parts = self.cluster * self._halves * groups * self.tiles * 32 * 8
        tiles, depth = self._unit_tiles
        weights = max(1, self.warps * (tiles * depth - held) * 32) * 16
        return gates + buffers * parts + 16 + weights

    @property
    def grid(self) -> Grid:
        """Return the blocks of a launch."""
        blocks = self.clusters * self.cluster
        return Grid(blocks, self.warps * 32, self.shared_bytes, self.cluster)

    @property
    def backward_grid(self) -> Grid:
        """Return the blocks of a launch of the backward pass."""
        return self.grid._replace(shared_bytes=self.backward_shared_bytes)

    def __str__(self) -> str:
        clusters = _count(self.clusters, "cluster")
        return (
            f"{clusters} of {_count(self.cluster, 'block')}, each of "
            f"{8 * self.tiles} sequences with weights for {self.units} units"
        )


def step_loop(elements: int, gpu: Gpu) -> Grid:
    """Lay out a loop over a step, of which each thread runs one element.

    Few elements are spread over all processors.
    """
    threads = THREADS if elements >= THREADS * gpu.processors else _WARP
    return Grid(math.ceil(elements / threads), threads)


_MOST_SHARED = 232448  # bytes of a block on GPUs with clusters
# Of a processor; a thread can have 255 of them.
_REGISTERS = 65536
# A product's weights take 8 registers of each thread, a tile's 4 in the backward pass.
_MOST_HELD, _MOST_HELD_FRAGMENTS = 16, 32
# What a thread needs beside weights, and beside 16 for the sums of each tile forwards.
_OTHER_REGISTERS = 76

# For units rounded up: the blocks of a cluster, and the most tiles. With more, NVRTC
# runs out of registers. A simple RNN takes a quarter of the blocks. It has one tile,
# and so has an sLSTM.
_PLACES = {
    "bfloat16": {
        32: (1, 1),
        64: (1, 1),
        96: (1, 1),
        128: (1, 1),
        192: (2, 1),
        256: (4, 2),
        384: (8, 1),
        512: (8, 2),
    },
    "float32": {
        32: (1, 1),
        64: (1, 1),
        96: (1, 1),
        128: (2, 2),
        192: (4, 2),
        256: (8, 2),
        384: (8, 1),
        512: (16, 1),
    },
}


FEWEST_UNITS = min(map(min, _PLACES.values()))
"""Heads of fewer units have a kernel for this many."""


def rnn(
    mode: str, dtype: str, hidden: int, matrices: int, batch: int, gpu: Gpu
) -> RnnPlan | str:
    """Lay out one layer of the operator.

    Args:
        mode: of the operator.
        dtype: of all arrays, by name.
        hidden: units of a head.
        matrices: of recurrent weights: the heads of all directions of the layer.
        batch: how many sequences.
        gpu: where it runs.
    """
    reason = rnn_reason(mode, dtype, hidden, gpu)
    if reason is not None:
        return reason
    units = _rounded(dtype, hidden)
    cluster, most_tiles = _place(mode, dtype, units)
    at_once = max(1, gpu.processors // cluster)
    tiles = 1
    clusters = math.ceil(batch / 8)
    while tiles < most_tiles and clusters > 1 and matrices * clusters > at_once:
        tiles *= 2
        clusters = math.ceil(batch / 8 / tiles)
    layout = RnnPlan(mode, dtype, units, cluster, tiles, matrices * clusters)
    if layout.grid.blocks > MOST_BLOCKS:
        return f"{batch} sequences are more than one launch holds"
    return layout


def rnn_reason(mode: str, dtype: str, hidden: int, gpu: Gpu) -> str | None:
    """Return why no batch of such a layer has a kernel; None if some have."""
    if mode not in MODES:
        return f"it has no kernels for {mode}"
    if dtype not in _PLACES:
        return f"it has no kernels for a {mode} of {dtype}"
    most = max(_PLACES[dtype])
    if hidden > most:
        return f"it has kernels for up to {most} units, not {hidden}"
    units = _rounded(dtype, hidden)
    cluster, _ = _place(mode, dtype, units)
    if cluster > 1 and gpu.arch != _CLUSTERS:
        most = max(u for u in _PLACES[dtype] if _place(mode, dtype, u)[0] == 1)
        return (
            f"on {gpu.arch} it has kernels for up to {most} units, not {hidden}; more "
            f"take clusters of blocks as {_CLUSTERS} has them"
        )
    one = RnnPlan(mode, dtype, units, cluster, 1, 1)
    if one.shared_bytes > gpu.shared_bytes:
        return f"{hidden} units need {one.shared_bytes} bytes of shared memory"
    return None


_CLUSTERS = "sm_90a"


def backward_reason(layout: RnnPlan, gpu: Gpu) -> str | None:
    """Return why XLA runs the backward pass of a layer; None if a kernel does."""
    needed = layout.backward_shared_bytes
    if needed > gpu.shared_bytes:
        return f"it needs {needed} bytes of shared memory, {gpu.name} has fewer"
    return None


def _units_of_lane(mode: str) -> int:
    return 4 if mode in ("rnn_tanh", "rnn_relu") else 1


def _place(mode: str, dtype: str, units: int) -> tuple[int, int]:
    """Return the blocks of a cluster and the most tiles."""
    blocks, tiles = _PLACES[dtype][units]
    if mode not in ("lstm", "gru"):
        tiles = 1
    return max(1, blocks // _units_of_lane(mode)), tiles


def _rounded(dtype: str, hidden: int) -> int:
    return min(units for units in _PLACES[dtype] if units >= hidden)


def rnn_plans(dtype: str, mode: str) -> list[RnnPlan]:
    """Return a plan of every text that a mode and a dtype can take."""
    places = {units: _place(mode, dtype, units) for units in _PLACES[dtype]}
    return [
        RnnPlan(mode, dtype, units, cluster, tiles, 1)
        for units, (cluster, most) in places.items()
        for tiles in range(1, most + 1)
    ]


def accumulation(dtype: str) -> str:
    """Return the dtype of states and sums."""
    return "float32" if dtype == "bfloat16" else dtype


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
