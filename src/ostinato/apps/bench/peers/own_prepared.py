"""The operator of ostinato with prepared weights."""

import ostinato as ost

from ..problem import Data, Problem
from . import own
from .contender import Contender, Unsupported


def build(problem: Problem, data: Data, threads: int) -> Contender:
    """Build the contender.

    Raises:
        Unsupported: prepared weights are of no use for the problem.
    """
    del threads
    if problem.differentiates:
        raise Unsupported("training gains nothing from it")
    if problem.batch > 1:
        raise Unsupported("packing is a small part of such a call")
    weights = ost.prepare(problem.spec, own.flat_weights(problem, data))
    return own.contender(problem, data, weights)
