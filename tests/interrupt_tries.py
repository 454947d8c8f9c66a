"""A program that interrupts `train g2p` at random moments and reports how it ends.

    python tests/interrupt_tries.py --tries 200 --load 2

A signal is sent a random time after a random event (the start, a compilation, an epoch,
or the last epoch), so that the moments do not depend on the speed of the machine; every
fourth one while `--load` other processes keep the cores busy. A try is good if the
process ends in time with the signal's code, or has ended by itself before, prints no
traceback, leaves no half-written file, and can be resumed if its folder holds a state.
"""

import argparse
import collections
import random
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import g2p_command

from ostinato.apps import files
from ostinato.apps.errors import UserError
from ostinato.apps.g2p import checkpoint
from ostinato.apps.tensors import RESUME_FILE

EPOCHS = 40
# The events to wait for, and the most seconds to wait after each of them.
EVENTS = {
    "start": ("", 2.5),
    "compilation": ("Compiling jit(", 0.7),
    "epoch": ("epoch ", 1.0),
    "last epoch": (f"epoch {EPOCHS}.0", 2.5),
}
# Before this time, the interpreter itself starts, and ends as any program does.
INTERPRETER = 0.1
COUNTS = {"compilation": 20, "epoch": 2}  # most events in a run, a second apart

LAST_WORDS = {
    "anything was learned": "nothing learned yet",
    "anything new was learned": "nothing new learned yet",
    "not measured yet": "before the first evaluation",
    "interrupted: the best": "learned and measured",
    "curve are in": "had finished",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tries", type=int, default=200)
    parser.add_argument("--load", type=int, default=0, help="busy processes")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        packages = g2p_command.make_packages(Path(folder) / "packages")
        ends, times, bad = collections.Counter(), [], 0
        for number in range(options.tries):
            event = list(EVENTS)[number % len(EVENTS)]
            count = rng.randint(1, COUNTS.get(event, 1))
            first = INTERPRETER if event == "start" else 0
            delay = rng.uniform(first, EVENTS[event][1])
            which = rng.choice((signal.SIGINT, signal.SIGTERM))
            load = options.load if number // len(EVENTS) % 4 == 3 else 0
            busy = [
                subprocess.Popen([sys.executable, "-c", "while True: pass"])
                for _ in range(load)
            ]
            try:
                process = g2p_command.start(
                    packages,
                    Path(folder) / f"{number}",
                    *("--epochs", str(EPOCHS)),
                    JAX_LOG_COMPILES="1",
                )
                heard = await_event(process, EVENTS[event][0], count)
                end, took, wrong = one_try(
                    process, Path(folder) / f"{number}", which, delay, heard
                )
            finally:
                for process in busy:
                    process.kill()
                    process.wait()
            ends[end] += 1
            bad += bool(wrong)
            if took is not None:
                times.append(took)
            when = (
                f"{number:3} {which.name:7} load {load} {event} {count} + {delay:.2f} s"
            )
            mark = f" BAD: {wrong}" if wrong else ""
            print(f"{when}: {end}, took {took} s{mark}", flush=True)
    times.sort()
    print(f"{bad} of {options.tries} bad; seconds to the end: median", end=" ")
    print(f"{times[len(times) // 2]:.2f}, longest {times[-1]:.2f}")
    for end, count in ends.most_common():
        print(f"{count:4} {end}")


def await_event(process: subprocess.Popen[str], marker: str, count: int) -> str:
    """Read output until `count` lines contained the marker, or it ends; return it."""
    assert process.stdout is not None
    heard = []
    while marker and count and (line := process.stdout.readline()):
        heard.append(line)
        count -= marker in line
    return "".join(heard)


def one_try(
    process: subprocess.Popen[str],
    out: Path,
    which: signal.Signals,
    delay: float,
    heard: str,
) -> tuple[str, float | None, str]:
    """Interrupt a run; return how it ended, how long that took, and any problem.

    `heard` is what it has written before.
    """
    if g2p_command.wait(process, delay, kill=False) is not None:
        good = process.returncode == 0
        what = "" if good else f"its code was {process.returncode}"
        return "ended by itself before the signal", None, what
    process.send_signal(which)
    took = g2p_command.wait(process, g2p_command.ENDS)
    text, code = heard + process.communicate()[0], process.returncode
    said = [what for words, what in LAST_WORDS.items() if words in text]
    end = f"code {code}, {', '.join(said) or 'no last words'}"
    if took is None:
        return end, took, f"it had not ended after {g2p_command.ENDS} s"
    wanted = (128 + which, *([0] if "had finished" in said else []))
    if code not in wanted or any(word in text for word in g2p_command.BAD):
        return end, took, f"its output was {text!r}"
    names = [path.name for path in out.iterdir()] if out.exists() else []
    if parts := [name for name in names if name.endswith(files.PART)]:
        return end, took, f"it left {parts}"
    try:
        if checkpoint.MODEL_FILE in names:
            checkpoint.load_model(out)
        if RESUME_FILE in names:
            assert checkpoint.FILES.read(out / RESUME_FILE)[1]["step"] > 0
        elif "before the first evaluation" in said or "learned and measured" in said:
            return end, took, "it left no state"
    except UserError as error:
        return end, took, str(error)
    return end, took, ""


if __name__ == "__main__":
    main()
