"""The planner: how to split the training of an ONNX model over several devices.

    import planner

    profile = planner.profile("model.onnx", batch=4)
    plans = planner.solve(profile, topology="p3", gpus=4)
    planner.write_strategy(plans.plan, "strategy.json", model="model.onnx")

The functions are those of `planner.api`, which is loaded when one of them is first asked for;
`planner.operators.register` adds an operator. The way from a model to a trained model, a folder for
each step:

    model/export/ -> model.onnx                                  your module as a file
    model/ -> operators/, profilers/ -> Profile                  the costs of the operators
    clusters/ -> Topology                                        devices and links
    costs/, resharding/ -> solvers/ -> Strategy                  a device for every operator
    schedules/ -> simulator/                                     the times of one iteration
    planning/ -> Plan -> reports/, model/annotated/              choose, show, write
    launcher/ -> training/                                       run
"""

from importlib import import_module
from typing import TYPE_CHECKING

from planner.support.errors import PlannerError as PlannerError
from planner.support.version import __version__ as __version__

if TYPE_CHECKING:  # to a type checker, a module with __getattr__ has every name there is
    from planner import operators as operators
    from planner.api import *  # noqa: F403
else:

    def __getattr__(name: str) -> object:
        """A name of `planner.api`, or the folder `planner.operators`."""
        if name == "operators":
            return import_module("planner.operators")
        api = import_module("planner.api")
        if name == "__all__":
            return [*api.__all__, "PlannerError", "__version__"]
        if name in api.__all__:
            return getattr(api, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        """All names, loaded or not."""
        return sorted({*globals(), *import_module("planner.api").__all__})
