"""Benchmarks of the operator next to its peers and to the limits of the machine.

`python -m benchmarks.run` measures, `.compare` compares two results, `.report` writes
the tables and draws the pictures of docs/results.md. `.disturbed` times rows next to
torch while other programs take processor time.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
# The modules `cases` and `tolerance` of the tests give sizes and tolerances.
sys.path.append(str(ROOT / "tests"))
