"""Gurobi: a model in a silent environment, and the error that says that it cannot be used here.

Source: Gurobi Optimization, https://docs.gurobi.com/projects/optimizer (error codes).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

TOO_LARGE, NO_LICENCE = 10010, 10009


class EngineUnavailableError(Exception):
    """The engine cannot solve this model here; another one can. The message says why."""


@contextmanager
def gurobi_model() -> Iterator[tuple[Any, Any]]:
    """Gives the module and an empty model, on one thread.

    Raises:
        EngineUnavailableError: if there is no licence, or it does not cover so large a model; also
            while the model is solved.
    """
    import gurobipy

    try:
        # Empty and silent before it starts, or the licence's banner goes to standard output.
        with gurobipy.Env(empty=True) as env:
            env.setParam("OutputFlag", 0)
            env.start()
            with gurobipy.Model(env=env) as model:
                model.Params.Threads = 1
                yield gurobipy, model
    except gurobipy.GurobiError as error:
        if error.errno in (TOO_LARGE, NO_LICENCE):
            why = "model too large for its licence" if error.errno == TOO_LARGE else "no licence"
            raise EngineUnavailableError(f"gurobi: {why} (error {error.errno})") from error
        raise
