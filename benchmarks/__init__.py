"""How fast the operator is, next to its peers and to what the machine allows.

`python -m benchmarks.run` measures, `.compare` holds two results against each other,
`.report` writes the table and draws the pictures of docs/results.md. `.disturbed` times
rows next to torch while other programs take processor time.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Sizes and tolerances are those of the tests.
sys.path.append(str(ROOT / "tests"))
