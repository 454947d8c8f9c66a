"""The trial of kernels on the fake GPU: `cuda_child.py BUG MODULE DEFINITION ...`.

BUG is the name of one of `CHANGES`. See cuda_emulation.py.
"""

import json
import sys

import cuda_emulation

from ostinato._linear import api, cuda, cuda_trial, lowering

LINE = "  const Index unit = part.sequence * UnitsOf(r) + part.unit;"
CHANGES = {
    "none": lambda text: text,
    "wrong": lambda text: text.replace("step->a[i] = Widen", "step->a[i] = -Widen"),
    "crash": lambda text: text.replace(LINE, LINE + " __builtin_trap();"),
    "hang": lambda text: text.replace(LINE, LINE + " for (;;) usleep(10000);"),
    "refused": lambda text: text + "nonsense",
}


def main(bug: str, definitions: list[str]) -> str:
    before = cuda_emulation.kernels._read("linear.h")
    assert bug == "none" or CHANGES[bug](before) != before
    cuda_emulation.fake_gpu(setattr, CHANGES[bug])
    lowering._KERNELS = {"cpu": cuda}
    run = api.linear_recurrence

    def on_fake_gpu(*args, backend, **options):
        return run(*args, backend={"cuda": "cpu"}.get(backend, backend), **options)

    api.linear_recurrence = on_fake_gpu
    return cuda_trial.main(definitions)


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[3:])))
