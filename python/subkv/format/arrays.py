"""Arrays by element type, as signatures name them; docstrings give the shapes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

U8 = NDArray[np.uint8]
F16 = NDArray[np.float16]
F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
