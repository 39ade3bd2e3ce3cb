"""The types of arrays that the package works with; docstrings give the shapes."""

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Kinds = npt.NDArray[np.int8]
"""Kinds and flags, a byte each."""
Masks = npt.NDArray[np.uint64]
"""Sets of small numbers as bits, 64 to a word."""
