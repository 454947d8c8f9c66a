"""Small awkward cases for the tests and named workloads for the benchmarks."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from oracles.loop64 import Spec, num_params


@dataclass(frozen=True)
class Case:
    """One call of the operator: its static arguments and its lengths."""

    id: str
    spec: Spec
    steps: int = 5
    batch: int = 3
    lengths: tuple[int, ...] | None = None
    resets: bool = False
    padding: str = "zero"
    time_major: bool = False
    unbatched: bool = False
    seed: int = 1

    @property
    def lstm(self) -> bool:
        return self.spec.mode == "lstm"

    @property
    def slstm(self) -> bool:
        return self.spec.mode == "slstm"

    @property
    def keyed(self) -> bool:
        return self.spec.dropout > 0

    @property
    def terms(self) -> int:
        """Number of terms of the longest sum: a weight gradient, or gates over time."""
        spec = self.spec
        width = spec.input_size + spec.width + spec.hidden_size
        return max(1, self.steps * spec.num_layers * (width + self.batch))


class Inputs(NamedTuple):
    """Arguments and cotangents in numpy, always ``[B, T, ...]``; None if absent."""

    weights: np.ndarray
    x: np.ndarray
    h_0: np.ndarray
    c_0: Any
    seq_lengths: Any
    resets: Any
    dy: np.ndarray
    dh_n: np.ndarray
    dc_n: Any


def make_inputs(case: Case) -> Inputs:
    """Return the same arrays on every call, with NaN where no value may be read."""
    spec, rng = case.spec, np.random.default_rng([case.seed, case.steps, case.batch])
    pseudo = spec.num_layers * spec.num_directions
    h_shape = (pseudo, case.batch, spec.output_size)
    c_shape = (pseudo, case.batch, *spec.cells) if spec.cells else None
    normal = rng.standard_normal
    scale = 1.5 / np.sqrt(spec.hidden_size)  # activations bend, but do not saturate
    lengths = None if case.lengths is None else np.array(case.lengths, np.int32)
    resets = None
    if case.resets:
        resets = rng.random((case.batch, case.steps)) < 0.35
        # One sequence begins with a reset, which discards h_0; the others use h_0.
        resets[:, :1] = False
        resets[: case.batch > 1, :1] = True
    made = Inputs(
        weights=normal(num_params(spec)) * scale,
        x=normal((case.batch, case.steps, spec.input_size)),
        h_0=normal(h_shape) * 0.7,
        c_0=None if c_shape is None else normal(c_shape) * 0.7,
        seq_lengths=lengths,
        resets=resets,
        dy=normal((case.batch, case.steps, spec.width)),
        dh_n=normal(h_shape),
        dc_n=None if c_shape is None else normal(c_shape),
    )
    if case.slstm:
        made.c_0[:, :, 1] = abs(made.c_0[:, :, 1])
        made.c_0[:, :1] = 0  # one sequence begins from zeros, the others do not
    if lengths is not None:
        past = np.arange(case.steps) >= lengths[:, None]
        made.x[past] = np.nan
        if case.padding != "hold":  # held outputs have gradients
            made.dy[past] = np.nan
    return made


def _case(id, mode, input_size=2, hidden_size=3, **fields) -> Case:
    own = {k: fields.pop(k) for k in tuple(fields) if k in Case.__dataclass_fields__}
    if "lengths" in own:
        own.setdefault("batch", len(own["lengths"]))
    return Case(id, Spec(mode, input_size, hidden_size, **fields), **own)


MIXED = (3, 0, 5, 1)  # unsorted, with 0, 1 and T = 5
KINDS = {  # the recurrences; two of them are GRUs
    "relu": dict(mode="rnn_relu"),
    "tanh": dict(mode="rnn_tanh"),
    "lstm": dict(mode="lstm"),
    "gru": dict(mode="gru"),
    "gru_before": dict(mode="gru", reset_after=False),
    "slstm": dict(mode="slstm"),
}


def _every_kind() -> list[Case]:
    deep = dict(num_layers=2, bidirectional=True)
    made = []
    for name, kind in KINDS.items():
        made += [
            _case(f"{name}-plain", **kind, input_size=3, hidden_size=5),
            _case(f"{name}-ones", **kind, **_ONES),
            _case(f"{name}-L2-bi-ragged", **kind, **deep, lengths=MIXED),
            _case(f"{name}-resets", **kind, num_layers=2, resets=True, lengths=MIXED),
            _case(f"{name}-skip", **kind, **deep, input_size=3, input_mode="skip"),
        ]
        made += [
            _case(f"{name}-bias-{bias}", **kind, num_layers=2, steps=3, bias=bias)
            for bias in ("input", "recurrent", "none")
        ]
    return made


def _several_heads() -> list[Case]:
    """Return cases of few, of odd, and of many heads, down to one unit for each."""
    both = dict(bidirectional=True, lengths=MIXED)
    made = [
        _case(f"{name}-heads", **kind, hidden_size=6, num_heads=2, **both)
        for name, kind in KINDS.items()
    ]
    made += [
        _case(f"{name}-heads-of-1", **KINDS[name], hidden_size=5, num_heads=5)
        for name in ("gru", "slstm")
    ]
    projected = dict(mode="lstm", hidden_size=12, proj_size=6, num_heads=3)
    return [
        *made,
        _case("lstm-heads-proj", **projected, num_layers=2, **both),
        _case("gru-heads-resets", "gru", hidden_size=8, num_heads=4, **_CUT),
        _case("lstm-heads-odd", "lstm", 3, 57, num_heads=3, steps=3),
        _case("lstm-heads-of-16", "lstm", 3, 64, num_heads=4, steps=3),
        _case("gru-heads-many", "gru", 3, 70, num_heads=35, steps=3, num_layers=2),
        _case("tanh-heads-wide", "rnn_tanh", 3, 72, num_heads=3, steps=3),
    ]


_CUT = dict(resets=True, lengths=MIXED)
_ONES = dict(input_size=1, hidden_size=1, steps=1, batch=1)
_DEEP = dict(num_layers=2, bidirectional=True)
_PROJ = dict(mode="lstm", hidden_size=4, proj_size=2)
_LONG = (100, 0, 128, 65)
_DROP = dict(dropout=0.4, num_layers=3)

CASES = [
    *_every_kind(),
    _case("lstm-proj", **_PROJ),
    _case("lstm-proj1", mode="lstm", proj_size=1, **_DEEP),
    _case("lstm-proj-L2-bi-ragged", **_PROJ, **_DEEP, lengths=MIXED),
    _case("lstm-proj-bias-none", **_PROJ, num_layers=2, bias="none"),
    _case("lstm-clip", "lstm", num_layers=2, cell_clip=0.3),
    _case("lstm-clip-nan", "lstm", cell_clip=0.3, clip_nan=True, lengths=MIXED),
    _case("lstm-clip-proj-bi", **_PROJ, **_DEEP, cell_clip=0.4, lengths=MIXED),
    _case("lstm-hold", **_PROJ, **_DEEP, padding="hold", lengths=MIXED),
    _case("gru-hold", "gru", num_layers=2, padding="hold", lengths=MIXED),
    _case("gru-hold-no-lengths", "gru", padding="hold"),
    _case("relu-hold", "rnn_relu", **_DEEP, padding="hold", lengths=MIXED),
    _case("lstm-drop", **_PROJ, **_DEEP, padding="drop", lengths=MIXED),
    _case("gru_before-drop", **KINDS["gru_before"], padding="drop", lengths=MIXED),
    _case("tanh-drop-no-lengths", "rnn_tanh", padding="drop"),
    _case("lstm-time_major", **_PROJ, **_DEEP, lengths=MIXED, time_major=True),
    _case("gru-time_major", "gru", resets=True, lengths=MIXED, time_major=True),
    _case("lstm-unbatched", **_PROJ, **_DEEP, batch=1, unbatched=True, lengths=(3,)),
    _case("gru-unbatched", "gru", batch=1, unbatched=True, resets=True),
    _case(
        "tanh-unbatched-hold",
        "rnn_tanh",
        **_DEEP,
        lengths=(0,),
        padding="hold",
        unbatched=True,
    ),
    _case("lstm-dropout", "lstm", **_DROP, bidirectional=True, lengths=MIXED),
    _case("gru-dropout-time_major", "gru", **_DROP, time_major=True, lengths=MIXED),
    _case("relu-dropout-hold", "rnn_relu", **_DROP, padding="hold", lengths=MIXED),
    _case("tanh-dropout-unbatched", "rnn_tanh", **_DROP, batch=1, unbatched=True),
    _case("lstm-odd", "lstm", 13, 17, steps=9, lengths=(9, 4, 0, 7, 1)),
    _case("gru-odd", "gru", 7, 9, steps=9, lengths=(9, 4, 0, 7, 1), **_DEEP),
    _case("tanh-all-empty", "rnn_tanh", **_DEEP, lengths=(0, 0)),
    _case("lstm-one-sequence", "lstm", **_DEEP, lengths=(2,)),
    _case("gru-L4", "gru", num_layers=4, steps=3),
    # Longer than any block of steps into which a backend may split the time axis.
    _case("lstm-T128", "lstm", num_layers=2, steps=128, resets=True, lengths=_LONG),
    _case("gru-T257", "gru", bidirectional=True, steps=257, lengths=(257, 3, 130)),
    *_several_heads(),
    _case("slstm-heads-proj", "slstm", hidden_size=12, proj_size=6, num_heads=3),
    _case("slstm-proj", **{**_PROJ, "mode": "slstm"}, **_DEEP, lengths=MIXED),
    _case("slstm-hold", "slstm", **_DEEP, padding="hold", lengths=MIXED),
    _case("slstm-dropout-time_major", "slstm", **_DROP, time_major=True, lengths=MIXED),
    _case("slstm-unbatched", "slstm", batch=1, unbatched=True, resets=True),
    _case("slstm-T130", "slstm", steps=130, resets=True, lengths=(130, 0, 65)),
    _case("slstm-odd", "slstm", 13, 17, steps=9, lengths=(9, 4, 0, 7, 1)),
    _case("slstm-T0", "slstm", **_DEEP, steps=0, lengths=(0, 0), padding="hold"),
    _case("slstm-B0", "slstm", **_DEEP, lengths=()),
    _case("lstm-T0", **_PROJ, **_DEEP, steps=0),
    _case("gru-T0", "gru", **_DEEP, steps=0, lengths=(0, 0), padding="hold"),
    _case("lstm-B0", **_PROJ, **_DEEP, batch=0),
    _case("gru-B0", "gru", **_DEEP, lengths=(), padding="hold"),
    _case("gru-B0-T130", "gru", batch=0, steps=130),
    _case("tanh-T0-unbatched", "rnn_tanh", steps=0, batch=1, unbatched=True),
    _case(
        "lstm-everything",
        **_PROJ,
        **_DEEP,
        dropout=0.5,
        cell_clip=0.6,
        bias="recurrent",
        padding="hold",
        lengths=MIXED,
        time_major=True,
    ),
    _case(
        "gru_before-everything",
        **KINDS["gru_before"],
        input_size=3,
        num_layers=3,
        dropout=0.25,
        bias="input",
        input_mode="skip",
        padding="drop",
        lengths=MIXED,
        resets=True,
    ),
]
BY_ID = {case.id: case for case in CASES}


def _workload(batch: int, hidden: int, steps: int = 100) -> dict:
    return dict(batch=batch, steps=steps, input_size=hidden, hidden_size=hidden)


WORKLOADS = {
    "N1H64": _workload(1, 64),
    "N1H256": _workload(1, 256),
    "N1H512": _workload(1, 512),
    "N1H1024": _workload(1, 1024),
    "N16H128": _workload(16, 128),
    "N32H256": _workload(32, 256),
    "N32H256T1000": _workload(32, 256, steps=1000),
    "N64H512": _workload(64, 512),
}
