"""The texts of kernels, and their machine code, compiled once and kept in files."""

from __future__ import annotations

import dataclasses
import hashlib
import threading
from importlib import resources
from typing import NamedTuple

from . import cache, nvrtc, plan
from .device import Gpu

_OPTIONS = ("-std=c++17",)
_BEFORE = {"recurrent.h": ("cells.h",), "recurrent_backward.h": ("cells.h",)}


@dataclasses.dataclass(frozen=True)
class Text:
    """A text, compiled with some definitions.

    Attributes:
        file: in the folder `text`.
        definitions: such as `"STORAGE=float"`.
        code: what follows the file, where it is made for a call.
    """

    file: str
    definitions: tuple[str, ...]
    code: str = ""

    def __str__(self) -> str:
        of = cache.key(self.code)[:8] if self.code else ", ".join(self.definitions)
        return f"{self.file.removesuffix('.h')} ({of})"

    def source(self) -> str:
        """Return all that is compiled."""
        files = ("primitives.h", *_BEFORE.get(self.file, ()), self.file)
        return "\n".join([*map(_read, files), self.code])

    def options(self, arch: str) -> tuple[str, ...]:
        """Return the options of NVRTC for an architecture."""
        return (f"-arch={arch}", *_OPTIONS, *(f"-D{each}" for each in self.definitions))

    def key(self, arch: str, version: str) -> str:
        """Return what stands for the machine code that this version of NVRTC makes."""
        return cache.key(self.source(), *self.options(arch), version)


def linear(dtype: str, blocks: bool) -> Text:
    """Return the text of linear recurrences of a dtype, maybe with 2x2 blocks."""
    storage = plan.STORAGE[dtype]
    accum = plan.STORAGE[plan.accumulation(dtype)]
    definitions = (f"STORAGE={storage}", f"ACCUM={accum}", f"BLOCKS={int(blocks)}")
    return Text("linear.h", definitions)


def step_loop(code: str) -> Text:
    """Return the text of a loop over a step, of which `code` is made for the step."""
    return Text("step.h", (), code)


def recurrent(layout: plan.RnnPlan) -> Text:
    """Return the text of a layer of the operator with a layout."""
    definitions = dict(
        MODE=plan.MODES[layout.mode],
        STORAGE=plan.STORAGE[layout.dtype],
        UNITS=layout.units,
        CLUSTER=layout.cluster,
        TILES=layout.tiles,
        HELD=layout.held,
        SHARED=layout.shared_bytes,
    )
    return Text("recurrent.h", tuple(f"{k}={v}" for k, v in definitions.items()))


def recurrent_backward(layout: plan.RnnPlan) -> Text:
    """Return the text of the backward pass of `recurrent`."""
    forward = recurrent(layout).definitions
    storage = plan.STORAGE[layout.dtype]
    own = (
        f"HELD={layout.held_fragments}",
        f"SHARED={layout.backward_shared_bytes}",
        f"BUFFERS={layout.part_buffers}",
        f"BEFORE={storage if layout.mode == 'gru' else 'float'}",
    )
    return Text("recurrent_backward.h", (*forward[:-2], *own))


TEXTS = tuple(
    linear(dtype, blocks) for dtype in plan.STORAGE for blocks in (False, True)
)
"""All texts of linear recurrences."""


def of_layer(layout: plan.RnnPlan, gpu: Gpu) -> tuple[Text, ...]:
    """Return the texts that run a layer: forward, and backward if that fits the GPU."""
    forward = recurrent(layout)
    if plan.backward_reason(layout, gpu) is not None:
        return (forward,)
    return forward, recurrent_backward(layout)


RECURRENT_TEXTS = {
    text(layout): layout
    for mode in plan.MODES
    for dtype in ("bfloat16", "float32")
    for layout in plan.rnn_plans(dtype, mode)
    for text in (recurrent, recurrent_backward)
}
"""All texts of the operator, with one of the layouts that take them."""


class Code(NamedTuple):
    """Machine code; `digest` stands for its bytes."""

    cubin: bytes
    digest: str


_lock = threading.Lock()
_compiled: dict[str, Code] = {}


def compiled(text: Text, arch: str) -> Code:
    """Return the machine code of a text: of this process, of a file, or made now.

    Raises:
        RuntimeError: there is no NVRTC.
        ostinato._cuda.nvrtc.CompileError: it refuses the text or the architecture.
    """
    compiler, reason = nvrtc.find()
    if compiler is None:
        raise RuntimeError(reason)
    key = text.key(arch, compiler.version)
    with _lock:
        if key not in _compiled:
            name = f"{key}.cubin"
            cubin = cache.load(name)
            if cubin is None:
                made = nvrtc.compile_text(compiler, text.source(), text.options(arch))
                cubin = made.cubin
                cache.store(name, cubin)
            _compiled[key] = Code(cubin, hashlib.sha256(cubin).hexdigest())
        return _compiled[key]


def _read(file: str) -> str:
    assert __package__ is not None
    return (resources.files(__package__) / "text" / file).read_text(encoding="utf-8")
