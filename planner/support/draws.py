"""Random numbers of Python and numpy, which no trace of a module shows."""

import pickle
import random

import numpy as np

ELSEWHERE = "random numbers of Python's or numpy's module random"


def drawn_elsewhere() -> tuple[object, bytes]:
    """Where the generators of Python and numpy are."""
    return random.getstate(), pickle.dumps(np.random.get_state())
