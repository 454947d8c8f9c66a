"""The operator of ostinato in its XLA form, which other platforms run."""

from ..problem import Data, Problem
from . import own
from .contender import Contender, Unsupported


def build(problem: Problem, data: Data, threads: int) -> Contender:
    """Build the contender.

    Raises:
        Unsupported: ostinato runs the problem on XLA anyway.
    """
    del threads  # XLA uses the CPUs of the process
    if own.chosen(problem, data) == "xla":
        raise Unsupported("it is what ostinato itself runs here")
    return own.contender(problem, data, own.flat_weights(problem, data), "xla")
