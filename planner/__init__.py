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

from typing import TYPE_CHECKING

from planner.support.errors import PlannerError
from planner.support.version import __version__

if TYPE_CHECKING:
    from planner.api import (
        SOLVERS,
        Inputs,
        Plans,
        Search,
        Simulation,
        Training,
        WhatIf,
        calibrate,
        calibration_path,
        call_factory,
        check_cost_model,
        check_outputs,
        compare,
        compare_engines,
        compare_traces,
        convert,
        export,
        find_checkpoint,
        find_model,
        find_profile,
        find_topology,
        import_topology,
        inspect,
        is_compiled,
        launch,
        load_operators,
        measure,
        newest_profile,
        other_question,
        overwrite_note,
        own_options,
        pipedream_report,
        probe,
        profile,
        profile_path,
        read_calibration,
        read_config,
        read_inputs,
        read_model,
        read_plan_inputs,
        read_profile,
        read_profiles,
        read_strategy,
        read_topology,
        read_trace,
        rescale,
        sensitivity,
        simulate,
        simulate_stages,
        solve,
        solve_under,
        start_launch,
        start_probe,
        trainer,
        write_calibration,
        write_overlay,
        write_profile,
        write_profiles,
        write_strategy,
        write_svg,
        write_text,
        write_topology,
        write_trace,
        write_weights,
    )

__all__ = [
    "SOLVERS",
    "Inputs",
    "PlannerError",
    "Plans",
    "Search",
    "Simulation",
    "Training",
    "WhatIf",
    "__version__",
    "calibrate",
    "calibration_path",
    "call_factory",
    "check_cost_model",
    "check_outputs",
    "compare",
    "compare_engines",
    "compare_traces",
    "convert",
    "export",
    "find_checkpoint",
    "find_model",
    "find_profile",
    "find_topology",
    "import_topology",
    "inspect",
    "is_compiled",
    "launch",
    "load_operators",
    "measure",
    "newest_profile",
    "other_question",
    "overwrite_note",
    "own_options",
    "pipedream_report",
    "probe",
    "profile",
    "profile_path",
    "read_calibration",
    "read_config",
    "read_inputs",
    "read_model",
    "read_plan_inputs",
    "read_profile",
    "read_profiles",
    "read_strategy",
    "read_topology",
    "read_trace",
    "rescale",
    "sensitivity",
    "simulate",
    "simulate_stages",
    "solve",
    "solve_under",
    "start_launch",
    "start_probe",
    "trainer",
    "write_calibration",
    "write_overlay",
    "write_profile",
    "write_profiles",
    "write_strategy",
    "write_svg",
    "write_text",
    "write_topology",
    "write_trace",
    "write_weights",
]

if not TYPE_CHECKING:  # to a type checker, a module with __getattr__ has every name there is

    def __getattr__(name: str) -> object:
        """A function or type of `planner.api`, or `planner.operators`."""
        from importlib import import_module

        if name == "operators":
            return import_module("planner.operators")
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module("planner.api"), name)

    def __dir__() -> list[str]:
        """All names, loaded or not."""
        return sorted({*globals(), *__all__})
