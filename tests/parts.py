"""A plugin that runs a part of the cases that are alike.

A test that is marked `alike` checks one property in many cases, and nearly every fault
shows in several of them. `pytest --part 2/3` runs the second third of these cases, and
all other tests.
"""

import argparse
import zlib

import pytest


def add_option(parser: pytest.Parser) -> None:
    parser.addoption(
        "--part",
        type=part,
        default="1/1",
        help="run one part of the cases that are alike, such as 2/3; by default all",
    )


def configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "alike: a part of the cases may stand for all")
    config.pluginmanager.register(Part(*config.getoption("--part")))


def part(text: str) -> tuple[int, int]:
    """Return which part it is, from 1 on, and of how many."""
    number, _, count = text.partition("/")
    if number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count):
        return int(number), int(count)
    raise argparse.ArgumentTypeError(f"expected a part such as 2/3, got {text!r}")


class Part:
    """Leaves out the other parts."""

    def __init__(self, number: int, count: int):
        self.number, self.count = number, count

    def pytest_report_header(self) -> str:
        return f"part {self.number} of {self.count} of the cases that are alike"

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list) -> None:
        others = [item for item in items if not self._has(item)]
        items[:] = [item for item in items if self._has(item)]
        if others:
            config.hook.pytest_deselected(items=others)

    def _has(self, item: pytest.Item) -> bool:
        # By a checksum: in turns, one part would have all cases of one dtype.
        place = zlib.crc32(item.nodeid.encode()) % self.count
        return item.get_closest_marker("alike") is None or place == self.number - 1
