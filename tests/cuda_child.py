"""The trial of kernels on the fake GPU: `cuda_child.py BUG MODULE DEFINITION ...`.

BUG is the name of one of `CHANGES`. See cuda_driver.py.
"""

import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"  # before anything asks JAX

import cuda_driver

from ostinato._cuda import check
from ostinato._linear import api, cuda, cuda_trial, lowering
from ostinato._rnn import backends
from ostinato._rnn import cuda_trial as rnn_trial
from ostinato._step.cuda import trial as step_trial

LINE = "  const Index unit = part.sequence * UnitsOf(r) + part.unit;"
PUT = "OSTINATO_DEVICE void Put(float* p, float x) {"
HANG = " for (volatile bool on = true; on;) {}"
CHANGES = {
    "none": lambda text: text,
    "wrong": lambda text: text.replace("step->a[i] = Widen", "step->a[i] = -Widen"),
    "crash": lambda text: text.replace(LINE, LINE + " __builtin_trap();"),
    "hang": lambda text: text.replace(LINE, LINE + HANG),
    "wrong store": lambda text: text.replace(PUT, PUT + " x = -x;"),
    "crash in a step": lambda text: text.replace(PUT, PUT + " __builtin_trap();"),
    "hang in a step": lambda text: text.replace(PUT, PUT + HANG),
    "wrong gate": lambda text: text.replace("g[1] * c + g[0]", "g[0] * c + g[1]"),
}


def main(bug: str, module: str, definitions: list[str]) -> str:
    files = ("linear.h", "recurrent.h", "step.h")
    texts = map(cuda_driver.kernels._read, files)
    assert bug == "none" or any(CHANGES[bug](text) != text for text in texts)
    cuda_driver.fake_gpu(setattr, CHANGES[bug])
    if module == step_trial.PROGRAM:
        return step_trial.main(*definitions)
    if module.startswith("ostinato._rnn"):
        backends.BACKENDS = cuda_driver.ON_CPU
        return rnn_trial.main(definitions)
    lowering.KERNELS = {"cpu": cuda}
    run = api.linear_recurrence

    def on_fake_gpu(*args, backend, **options):
        return run(*args, backend={"cuda": "cpu"}.get(backend, backend), **options)

    api.linear_recurrence = on_fake_gpu
    return cuda_trial.main(definitions)


if __name__ == "__main__":
    check.PLATFORM = "cpu"
    check.report(main, *sys.argv[1:3], sys.argv[3:])
