"""What the planner does, as functions, in the words of the command line. The commands call these
and nothing else, and `planner` has them all: `planner.solve(...)`.

Artefacts go in and come out: a profile, a topology, a plan. Where an argument is a `File`, it may
be a path instead of the artefact that the file holds; a topology may also be named, as on the
command line: a file, one in ./topologies, or a preset. Options that several functions share are
the frozen types of `planner.artefacts.options`. Mistakes are `PlannerError`s, ready to print.
Progress is told to callbacks. Nothing is printed. Files are written by the functions whose
names begin with `write`, by `export`, by `convert`, by `launch` for its trace, and by `profile` for
its cache.

    export, call_factory                        a PyTorch module as an ONNX file
    profile, profile_sizes, rescale             the costs of operators
    compare_engines                             measured and computed costs beside each other
    solve, compare, solve_under, sensitivity    a plan, and its bottlenecks
    solve_contest                               a problem of the iopddl contest
    simulate, simulate_stages                   one iteration of a plan
    launch, start_launch, read_config, trainer  training, by the planner's loop or by yours
    measure                                     the plans of all solvers, run on this machine
    probe, start_probe                          measuring the cluster
    write_weights                               what was trained, as an ONNX file
    compare_traces, calibrate                   measured beside predicted
    convert, import_topology                    other formats
    read_..., write_..., find_..., newest_...   files

Readers raise a `FileError` if a file is missing, malformed or of another kind, writers if it cannot
be written. Modules are imported when they are used, because some take long to load.
"""

from inspect import isfunction
from typing import TYPE_CHECKING

from planner.api.files import Inputs as Inputs
from planner.api.files import calibration_path as calibration_path
from planner.api.files import compare_traces as compare_traces
from planner.api.files import convert as convert
from planner.api.files import find_profile as find_profile
from planner.api.files import find_topology as find_topology
from planner.api.files import newest_profile as newest_profile
from planner.api.files import read_calibration as read_calibration
from planner.api.files import read_inputs as read_inputs
from planner.api.files import read_plan_inputs as read_plan_inputs
from planner.api.files import read_profile as read_profile
from planner.api.files import read_profiles as read_profiles
from planner.api.files import read_strategy as read_strategy
from planner.api.files import read_topology as read_topology
from planner.api.files import read_trace as read_trace
from planner.api.files import write_calibration as write_calibration
from planner.api.files import write_overlay as write_overlay
from planner.api.files import write_profile as write_profile
from planner.api.files import write_profiles as write_profiles
from planner.api.files import write_svg as write_svg
from planner.api.files import write_text as write_text
from planner.api.files import write_topology as write_topology
from planner.api.files import write_trace as write_trace
from planner.api.models import call_factory as call_factory
from planner.api.models import export as export
from planner.api.models import find_checkpoint as find_checkpoint
from planner.api.models import find_model as find_model
from planner.api.models import inspect as inspect
from planner.api.models import load_operators as load_operators
from planner.api.models import read_model as read_model
from planner.api.models import write_weights as write_weights
from planner.api.outputs import check_outputs as check_outputs
from planner.api.outputs import other_question as other_question
from planner.api.outputs import overwrite_note as overwrite_note
from planner.api.plans import compare as compare
from planner.api.plans import is_compiled as is_compiled
from planner.api.plans import pipedream_report as pipedream_report
from planner.api.plans import sensitivity as sensitivity
from planner.api.plans import simulate as simulate
from planner.api.plans import simulate_stages as simulate_stages
from planner.api.plans import solve as solve
from planner.api.plans import solve_contest as solve_contest
from planner.api.plans import solve_under as solve_under
from planner.api.plans import write_strategy as write_strategy
from planner.api.profiles import calibrate as calibrate
from planner.api.profiles import compare_engines as compare_engines
from planner.api.profiles import profile as profile
from planner.api.profiles import profile_path as profile_path
from planner.api.profiles import profile_sizes as profile_sizes
from planner.api.profiles import rescale as rescale
from planner.api.topologies import import_topology as import_topology
from planner.api.topologies import probe as probe
from planner.api.topologies import start_probe as start_probe
from planner.api.training import launch as launch
from planner.api.training import measure as measure
from planner.api.training import read_config as read_config
from planner.api.training import start_launch as start_launch
from planner.api.training import trainer as trainer
from planner.artefacts.options import Asking as Asking
from planner.artefacts.options import Devices as Devices
from planner.artefacts.options import LossOptions as LossOptions
from planner.artefacts.options import ModelOptions as ModelOptions
from planner.artefacts.options import Search as Search
from planner.artefacts.options import Solving as Solving
from planner.artefacts.options import Training as Training
from planner.artefacts.options import WhatIf as WhatIf
from planner.clusters.options import Importing as Importing
from planner.launcher.failures import rank as rank
from planner.launcher.options import Loop as Loop
from planner.launcher.options import Probing as Probing
from planner.planning.cost_models import check_cost_model as check_cost_model
from planner.planning.cost_models import check_model as check_model
from planner.planning.cost_models import check_solvers as check_solvers
from planner.planning.plans import MAX_ACTIONS as MAX_ACTIONS
from planner.planning.plans import Plans as Plans
from planner.planning.plans import Simulation as Simulation
from planner.profilers.options import Measuring as Measuring
from planner.solvers.manual import Manual as Manual
from planner.solvers.registry import SOLVERS as SOLVERS
from planner.solvers.registry import automatic as automatic
from planner.solvers.registry import own_options as own_options
from planner.solvers.registry import portfolio as portfolio
from planner.support.arguments import checks_arguments
from planner.support.options import declared
from planner.support.reading import File as File
from planner.training.options import Checkpoints as Checkpoints
from planner.training.options import Launching as Launching
from planner.training.options import WeightsOptions as WeightsOptions

if TYPE_CHECKING:
    from planner.artefacts.calibration import Calibration as Calibration
    from planner.artefacts.plan import Plan as Plan
    from planner.artefacts.problem import Problem as Problem
    from planner.artefacts.problem import Result as Result
    from planner.artefacts.profile import Profile as Profile
    from planner.artefacts.topology import Topology as Topology
    from planner.launcher.probe import Probed as Probed
    from planner.model.export.export import Exported as Exported
    from planner.model.inspection import Inspection as Inspection
    from planner.model.load import Model as Model
    from planner.model.trainable import Choice as Choice
    from planner.planning.choices import ContestAnswer as ContestAnswer
    from planner.planning.other_cost_models import ForeignComparison as ForeignComparison
    from planner.planning.portfolio import SolverComparison as SolverComparison
    from planner.planning.portfolio import SolverRow as SolverRow
    from planner.planning.refine import Refinement as Refinement
    from planner.planning.sensitivity import Gain as Gain
    from planner.profilers.analytic import RooflineFit as RooflineFit
    from planner.profilers.compare import EngineComparison as EngineComparison
    from planner.profilers.measured import Effort as Effort
    from planner.profilers.sizes import SizedProfiles as SizedProfiles
    from planner.simulator.account import Account as Account
    from planner.simulator.traces.calibrate import CheckedCalibration as CheckedCalibration
    from planner.simulator.traces.comparison import TraceComparison as TraceComparison
    from planner.simulator.traces.read import Trace as Trace
    from planner.solvers.pipedream.costs import PipeDreamReport as PipeDreamReport
    from planner.training.checkpoints.into_onnx import Weights as Weights
    from planner.training.loop import BatchTrainer as BatchTrainer
    from planner.training.report import LaunchReport as LaunchReport
    from planner.training.trials import Trial as Trial

# The names of `planner`; others are for the commands.
__all__ = [
    "SOLVERS", "Inputs", "Plans", "Search", "Simulation", "Training", "WhatIf", "calibrate",
    "calibration_path", "call_factory", "check_cost_model", "check_outputs", "compare",
    "compare_engines", "compare_traces", "convert", "export", "find_checkpoint", "find_model",
    "find_profile", "find_topology", "import_topology", "inspect", "is_compiled", "launch",
    "load_operators", "measure", "newest_profile", "other_question", "overwrite_note",
    "own_options", "pipedream_report", "probe", "profile", "profile_path", "profile_sizes",
    "read_calibration", "read_config", "read_inputs", "read_model", "read_plan_inputs",
    "read_profile", "read_profiles", "read_strategy", "read_topology", "read_trace", "rescale",
    "sensitivity", "simulate", "simulate_stages", "solve", "solve_contest", "solve_under",
    "start_launch", "start_probe", "trainer", "write_calibration", "write_overlay", "write_profile",
    "write_profiles", "write_strategy", "write_svg", "write_text", "write_topology", "write_trace",
    "write_weights",
]  # fmt: skip

# Parameters of functions that are options of commands, too.
_PARAMETERS = {**declared(Devices), **declared(Asking), "bandwidth": declared(Solving)["bandwidth"]}
# Each function checks its arguments by its signature, so that no function has to.
globals().update(
    {
        name: checks_arguments(value, _PARAMETERS)
        for name, value in globals().items()
        if name in __all__ and isfunction(value)
    }
)
