"""The dtypes that sums and states are kept in."""

from __future__ import annotations

from typing import Any

import numpy as np


def accumulation_dtype(dtype: Any) -> np.dtype:
    """Return float32 for 16-bit floats, else the dtype itself."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)
