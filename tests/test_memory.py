"""Memory that the process of a job keeps between updates."""

import os
import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource
import numpy as np
from ostinato.apps import memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.empty(10 << 20, np.uint8).fill(1)  # below 4 MB numpy has a way of its own
    np.empty(50 << 20, np.uint8).fill(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

memory.keep()
print(faults(), faults())
"""


def faults(**variables):
    """Return the page faults of filling arrays, and of filling more like them."""
    left = {
        k: v for k, v in os.environ.items() if not k.startswith(("MALLOC", "GLIBC"))
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=left | variables,
        capture_output=True,
        text=True,
        check=True,
    )
    return map(int, done.stdout.split())


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_memory_of_an_update_serves_the_next_one():
    first, second = faults()
    assert first > 10 and second < 5


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_what_the_user_set_is_left_alone():
    first, second = faults(MALLOC_ARENA_MAX="3")
    assert second > first / 2 > 5


def test_commands_keep_memory():
    program = """
from ostinato import cli
cli.memory.keep = lambda: print("kept")
cli.app = lambda: None
cli.main()
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "kept\n"
