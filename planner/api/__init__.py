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
    profile, rescale, compare_engines           the costs of operators
    solve, compare, solve_under, sensitivity    a plan, and its bottlenecks
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

import os
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from planner.artefacts.options import Search as Search
from planner.artefacts.options import Training as Training
from planner.artefacts.options import WhatIf as WhatIf
from planner.launcher import ending as ending
from planner.solvers.registry import SOLVERS as SOLVERS
from planner.solvers.registry import automatic as automatic
from planner.solvers.registry import option_fields as option_fields
from planner.solvers.registry import own_options as own_options
from planner.solvers.registry import portfolio as portfolio
from planner.solvers.registry import with_given
from planner.support.errors import FileError, ModelError, OptionError
from planner.support.literals import keys_of

if TYPE_CHECKING:
    from torch import nn

    from planner.artefacts.calibration import Calibration as Calibration
    from planner.artefacts.plan import Plan as Plan
    from planner.artefacts.problem import Problem as Problem
    from planner.artefacts.problem import Result as Result
    from planner.artefacts.profile import Profile as Profile
    from planner.artefacts.topology import Topology as Topology
    from planner.launcher.probe import Probed as Probed
    from planner.launcher.settings import LoopOptions, TrainingOptions
    from planner.model import Choice as Choice
    from planner.model import Model as Model
    from planner.model.export.export import Exported as Exported
    from planner.model.inspection import Inspection as Inspection
    from planner.planning.other_cost_models import ForeignComparison as ForeignComparison
    from planner.planning.portfolio import Attempts
    from planner.planning.portfolio import SolverComparison as SolverComparison
    from planner.planning.portfolio import SolverRow as SolverRow
    from planner.planning.refine import Refinement as Refinement
    from planner.planning.refine import Wanted
    from planner.planning.sensitivity import Gain as Gain
    from planner.profilers.analytic import RooflineFit as RooflineFit
    from planner.profilers.compare import EngineComparison as EngineComparison
    from planner.profilers.measured import Effort as Effort
    from planner.profilers.parts import MeasuredParts
    from planner.simulator.account import Account as Account
    from planner.simulator.traces.calibrate import CheckedCalibration as CheckedCalibration
    from planner.simulator.traces.comparison import TraceComparison as TraceComparison
    from planner.simulator.traces.read import Trace as Trace
    from planner.solvers.pipedream.costs import PipeDreamReport as PipeDreamReport
    from planner.training.checkpoints.into_onnx import Weights as Weights
    from planner.training.own_loop import LoopTrainer as LoopTrainer
    from planner.training.report import LaunchReport as LaunchReport
    from planner.training.trials import Trial as Trial

File = str | os.PathLike[str]
"""The path of a file."""

# Iterations with more actions are not described action by action.
MAX_ACTIONS = 300_000


# ------------------------------------------------------------------------------- modules


def export(
    module: "nn.Module",
    inputs: object,
    path: File,
    dynamic_shapes: object = None,
    *,
    check: bool = True,
    verbose: bool = False,
) -> "Exported":
    """Writes a PyTorch module as an ONNX file whose training is the module's training.

    Every parameter is an initializer of its own with its name in the module; a parameter that
    several submodules share is one. The module is exported in its own mode: in training mode,
    BatchNormalization and Dropout are in training form. It is left as it was.

    Args:
        module: a torch module.
        inputs: example inputs: a tensor, a tuple of tensors, or a dict of tensors by argument.
            Their shapes become those of the file.
        path: the file to write; weights of 2 GB or more are written to PATH.data beside it.
        dynamic_shapes: as in torch.onnx.export; arguments that a dict leaves out are static.
        check: whether the file is run on the example inputs, and its outputs and the gradients of
            all parameters are compared with the module's own.
        verbose: whether what torch prints is shown.

    Raises:
        ExportError: if torch cannot trace or translate the module, the inputs do not fit, or the
            file computes something else than the module, or has other gradients.
        FileError: if the file cannot be written.
    """
    from planner.model.export.export import export_module
    from planner.operators.gradients.check import check_gradients

    checker = check_gradients if check else None
    return export_module(module, inputs, Path(path), dynamic_shapes, check=checker, verbose=verbose)


def call_factory(name: str) -> "tuple[nn.Module, object]":
    """The module and example inputs that a function of yours makes, for `export`.

    Args:
        name: "module:function" of a function without required arguments that returns both; the
            module may be a .py file in the current folder.

    Raises:
        ExportError: if there is no such function, or it fails or returns something else.
    """
    from planner.model.export.factory import call_factory as called

    return called(name)


# ------------------------------------------------------------------------------ profiles


def load_operators(modules: Sequence[str]) -> None:
    """Imports modules that register operators (`planner.operators.register`).

    Args:
        modules: their names; each may be a .py file in the current folder.

    Raises:
        OptionError: if one cannot be imported.
    """
    from planner.support.named import module_named

    for name in modules:
        module_named(name, "--operators", OptionError)


def read_model(
    path: File,
    *,
    batch: int | None = None,
    dims: Mapping[str, int] | None = None,
    train: Sequence[str] = (),
    freeze: Sequence[str] = (),
    tie: Sequence[str] = (),
    untie: Sequence[str] = (),
    output: str | Sequence[str] = (),
    loss: str | Mapping[str, str] | None = None,
    class_dim: int | Mapping[str, int] | None = None,
    batch_norm: str | None = None,
) -> "Model":
    """The model in an ONNX file, its dimensions bound and its constants folded.

    Args:
        batch: samples per microbatch, for models whose first dimension is symbolic.
        dims: sizes of other symbolic dimensions, by name.
        train: initializers to train that the planner's rules would freeze.
        freeze: initializers not to train.
        tie: initializers that stay one parameter although the exporter's notes part them, or pairs
            "A=B" of initializers of equal values that become one.
        untie: initializers of which each module that reads them gets its own.
        output: names of the outputs that have a loss; without, the first output of floats, or the
            loss that the model computes itself.
        loss: of all of them or by output: "auto", "cross-entropy", "nll", "mse", "l1",
            "smooth-l1", "huber", "bce", "own", or "module:function".
        class_dim: the dimension that classes lie on, of all of them or by output.
        batch_norm: "training" normalises batches by their own statistics, "frozen" by the running
            ones, which then stay as they are; None does as the file says.

    Raises:
        FileError: if the file is missing or no ONNX model.
        OptionError: if an output cannot have the loss that was chosen.
        ModelError: if the model cannot be bound or planned.
        OptionError: if `batch_norm` is none of these.
    """
    from planner.artefacts.losses import LossOptions
    from planner.artefacts.profile import BatchNorm
    from planner.model import load

    if batch_norm not in (None, BatchNorm.TRAINING, BatchNorm.FROZEN):
        raise OptionError(f"batch_norm: expected training or frozen, got {batch_norm!r}")
    choices = LossOptions((output,) if isinstance(output, str) else tuple(output), loss, class_dim)
    return load(
        Path(path),
        batch=batch,
        dimensions=dims or {},
        train=train,
        freeze=freeze,
        tie=tie,
        untie=untie,
        batch_norm=None if batch_norm is None else BatchNorm(batch_norm),
        loss=choices,
    )


def inspect(
    path: File,
    *,
    batch: int | None = None,
    dims: Mapping[str, int] | None = None,
    tie: Sequence[str] = (),
    untie: Sequence[str] = (),
) -> "Inspection":
    """What an ONNX file holds: operators, parameters, what is trained and why; torch is not loaded,
    weights in external data are not read.

    Args:
        path: of the file.
        batch, dims, tie, untie: see `read_model`; without sizes the structure alone is told.

    Raises:
        FileError: if the file is missing or no ONNX model.
    """
    from planner.model.inspection import inspect as inspected

    return inspected(
        Path(path), _supported(), batch=batch, dimensions=dims or {}, tie=tie, untie=untie
    )


def _supported() -> frozenset[str]:
    """The operator types that plans can have."""
    if "planner.operators.table" in sys.modules:
        return frozenset(sys.modules["planner.operators.table"].OPERATORS)
    # The table itself loads torch, which takes seconds.
    return keys_of(Path(__file__).parents[1] / "operators/table.py", "OPERATORS")


def profile(
    model: "File | Model",
    *,
    batch: int | None = None,
    dims: Mapping[str, int] | None = None,
    train: Sequence[str] = (),
    freeze: Sequence[str] = (),
    tie: Sequence[str] = (),
    untie: Sequence[str] = (),
    output: str | Sequence[str] = (),
    loss: str | Mapping[str, str] | None = None,
    class_dim: int | Mapping[str, int] | None = None,
    batch_norm: str | None = None,
    device: str = "cpu",
    engine: str | None = None,
    dtype: str | None = None,
    threads: int = 1,
    repetitions: int | None = None,
    budget_s: float = 1.0,
    cache: bool = True,
    contention: bool = True,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
    effort: "Callable[[Effort], None]" = lambda effort: None,
) -> "Profile":
    """The costs of each operator of a model: forward and backward time, and memory.

    Args:
        model: an ONNX file, or a model that `read_model` has read.
        batch, dims, train, freeze, tie, untie, output, loss, class_dim, batch_norm: see
            `read_model`, which gets them; only with a file.
        device: "cpu", "cuda" or "cuda:N" to measure here, or a type of device to compute for.
        engine: "torch", "onnxruntime" or "analytic"; None measures with torch on devices that are
            here, and computes for others.
        dtype: floating-point type of the computation, "float32", "bfloat16" or "float16"; None
            takes the model's own.
        threads: CPU threads.
        repetitions: minimum number of timed runs per operator; None takes the engine's own.
        budget_s: time for each different operator.
        cache: whether measurements made on this machine are reused, and new ones stored.
        contention: whether to measure how much processes on a CPU's cores slow each other, which
            takes some 12 s once per machine.
        seed: of the synthetic inputs.
        progress: called with the number of operators done, and of all.
        effort: called once with the effort of the measurement, where the engine knows it.

    Raises:
        FileError: if the file is missing or no ONNX model.
        ModelError: if the model cannot be bound or planned.
        OptionError: if the options contradict each other, or the device is not there.
    """
    from planner.profilers.engines import Measuring, engine_for, profile_with
    from planner.support.paths import relative

    chosen = engine_for(device, engine)
    how = Measuring(
        threads=threads,
        dtype=dtype,
        repetitions=repetitions,
        budget_s=budget_s,
        seed=seed,
        cached=cache,
        contention=contention,
    )
    if isinstance(model, str | os.PathLike):
        model = read_model(
            model, batch=batch, dims=dims, train=train, freeze=freeze, tie=tie, untie=untie,
            output=output, loss=loss, class_dim=class_dim, batch_norm=batch_norm,
        )  # fmt: skip
    elif (
        any((batch, dims, train, freeze, tie, untie, output, loss, batch_norm))
        or class_dim is not None
    ):
        raise ValueError(
            "batch, dims, train, freeze, tie, untie, output, loss, class_dim and batch_norm are for"
            " a file; this model is read already"
        )
    place = relative(model.path, Path())
    return profile_with(chosen, model, place, device, how, progress, effort)


def profile_path(
    model: File, *, device: str = "cpu", engine: str | None = None, dtype: str | None = None
) -> Path:
    """The usual file of a profile, in ./profiles: MODEL.json where it was measured by PyTorch on
    this CPU in float32, and with the device, type and engine in its name else.

    Args:
        model: an ONNX file, or a profile that is to be rescaled.
        device, engine, dtype: see `profile`.

    Raises:
        OptionError: if the device is not there.
    """
    from planner.profilers.engines import profile_file

    stem = Path(model).stem
    return Path("profiles") / profile_file(stem, device, engine, dtype)


def rescale(profiles: "File | Profile | Sequence[Profile]", device: str) -> "tuple[Profile, ...]":
    """The profiles as they would be on another type of device.

    Args:
        profiles: of one model; all of one type of device.
        device: a type in the planner's table, such as "V100-SXM2-16GB".

    Raises:
        OptionError: if the type is unknown, or nothing is known of the profiles' own.
        FileError: if the file is no profile.
    """
    from planner.clusters.yaml.read import shipped_device_type
    from planner.profilers.analytic import rescale as rescaled

    kind = shipped_device_type(device)
    given, _ = _profiles(profiles)
    own = shipped_device_type(given[0].device_type)
    return tuple(rescaled(one, kind, own) for one in given)


def compare_engines(
    model: "Model",
    profile: "Profile",
    *,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> "tuple[EngineComparison, RooflineFit]":
    """Forward times of a profile, those of ONNX Runtime, which is run for it, and those computed
    from FLOPs and bytes at speeds that are fitted to the profile.

    Args:
        model: the profile's.
        profile: measured by torch on this machine's CPU in the model's own type.
        progress: called with the number of runs done, and of all.

    Raises:
        OptionError: if the profile was made in another way.
    """
    from planner.artefacts.graph import main_dtype
    from planner.profilers.engines import compare_with_others

    own = profile.dtype == main_dtype(model.graph)
    if profile.engine != "torch" or profile.device_type != "cpu" or not own:
        raise OptionError(
            "--compare: expected a profile by --engine torch on --device cpu in the model's own"
            f" type, got one by {profile.engine} on {profile.device_type} in {profile.dtype}"
        )
    return compare_with_others(model, profile, seed=seed, progress=progress)


def read_profile(path: File) -> "Profile":
    """The profile in a file of any known format; of several that of the largest microbatch."""
    return read_profiles(path)[-1]


def read_profiles(path: File) -> "tuple[Profile, ...]":
    """All profiles in a file of any known format, ascending by the size of the microbatch."""
    from planner.artefacts.formats.any import read_any_profiles

    return tuple(read_any_profiles(Path(path)))


def newest_profile(folder: File = "profiles", *, model: File | None = None) -> Path:
    """The profile in a folder that was modified last.

    Args:
        folder: with the profiles.
        model: an ONNX file; the profile is one of this model.

    Raises:
        FileError: if there is none, or if there are several models to choose from.
    """
    from planner.artefacts import files

    model_hash = None
    if model is not None:
        from planner.model import hash_of

        model_hash = hash_of(Path(model))
    return files.newest_profile(Path(folder), model_hash)


def find_profile(name: File) -> Path:
    """The file that a name of a profile stands for: itself, one in ./profiles, or one that ships.

    Args:
        name: such as "profiles/gpt2.json" or "gpt2".

    Raises:
        FileError: if there is none; it lists the profiles in ./profiles and those that ship.
    """
    from planner.artefacts import files

    return files.find_profile(os.fspath(name))


def write_profile(profile: "Profile", path: File) -> None:
    """Writes a profile as JSON."""
    write_profiles((profile,), path)


def write_profiles(profiles: "Sequence[Profile]", path: File) -> None:
    """Writes profiles of one model into one JSON file.

    Args:
        profiles: ascending by the size of the microbatch.
    """
    from planner.artefacts import files

    files.write_profiles(profiles, Path(path))


def check_outputs(
    written: Mapping[str, File],
    read: Mapping[str, File | None],
    strategy: File | None = None,
    checkpoint: File | None = None,
) -> None:
    """Refuses to overwrite files that are read, and such as the planner did not write.

    Args:
        written: paths of the outputs by their kinds: "profile", "strategy", "annotated model",
            "trace", "picture", "topology", "table", "calibration", "exported model", "trained
            model" or "state dict".
        read: the files that are read, by what they are; None for those that were not given.
        strategy: is read, too, and so are the model and the profile that it names.
        checkpoint: is read, too, and so is the model that it names.

    Raises:
        OptionError: if a file would be overwritten that must not be.
        FileError: if a path cannot be written, or the strategy or checkpoint cannot be read.
    """
    from planner.api.lookup import files_named
    from planner.api.outputs import kind_called
    from planner.support import outputs
    from planner.training.checkpoints.folder import find

    inputs = {what: Path(path) for what, path in read.items() if path is not None}
    if strategy is not None:
        inputs["strategy"] = Path(strategy)
        outputs.check_inputs([Path(path) for path in written.values()], inputs)
        named = files_named(read_strategy(strategy), Path(strategy))
        inputs |= {f"strategy's {what}": path for what, path in named.items()}
    if checkpoint is not None:
        inputs["checkpoint's model"] = find(Path(checkpoint)).model_path
    outputs.check_outputs(
        [(Path(path), kind_called(kind)) for kind, path in written.items()], inputs
    )


def other_question(path: File, artefacts: "Sequence[Profile] | Plan") -> str | None:
    """A line for people about a file that is to be overwritten: in what its profile or strategy
    differs from the new one, such as another microbatch size; None where there is nothing to say.

    Args:
        artefacts: to be written there.
    """
    from planner.artefacts import files

    return files.other_question(Path(path), artefacts)


# ------------------------------------------------------------------------------ topologies


def read_topology(name: File, gpus: int | None = None, *, pruned: bool = False) -> "Topology":
    """The topology in a file, in ./topologies, or among the presets.

    Args:
        name: such as "cluster.yaml" or "p3".
        gpus: number of devices to take, the first ones; None takes all.
        pruned: whether switches are left out that lead to none of the devices taken.

    Raises:
        FileError: if there is no such topology, or its file is malformed.
        TopologyError: if it has fewer devices.
    """
    from planner.artefacts.topology import take
    from planner.clusters.places import without_dead_ends
    from planner.clusters.yaml import read

    whole = read.read_topology(find_topology(name), gpus)
    if gpus is None:
        return whole
    part = take(whole, gpus)
    return without_dead_ends(part) if pruned else part


def find_topology(name: File) -> Path:
    """The file that a name of a topology stands for: itself, one in ./topologies, or a preset.

    Raises:
        FileError: if there is none; it lists the presets.
    """
    from planner.clusters.yaml import read

    return read.find_topology(os.fspath(name))


def write_topology(topology: "Topology", path: File, comments: Sequence[str] = ()) -> None:
    """Writes a topology as YAML.

    Args:
        comments: lines at the top of the file.
    """
    from planner.clusters.yaml import write

    write.write_topology(topology, Path(path), comments)


def import_topology(
    path: File,
    *,
    form: str | None = None,
    device: str | None = None,
    types: Mapping[str, str] | None = None,
    inside: float | str | None = None,
    between: float | str | None = None,
) -> "Topology":
    """The cluster that a file in another format describes.

    Args:
        form: "nvidia-smi", "astra-sim" or "hostfile"; None decides by the content.
        device: the type of all devices that `types` leaves out.
        types: types of devices by host (hostfile) or by device (nvidia-smi).
        inside: for a hostfile, the rate between a device and its host, in bytes per s or as text
            such as "12 GB/s".
        between: for a hostfile, the rate between a host and the network.

    Raises:
        FileError: if the file is missing or malformed.
        OptionError: if a type is unknown or missing, or an option is for another format.
    """
    from planner.clusters.formats import importing

    rates = _rate(inside), _rate(between)
    return importing.import_topology(Path(path), form, device, types, *rates)


def probe(
    name: str,
    *,
    device: str = "auto",
    largest: int | str = "256 MiB",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> "Probed | None":
    """Measures the cluster that torchrun has started ranks on; every rank calls it.

    Args:
        name: of the topology.
        device: "cpu" measures with gloo, "cuda" with nccl, "auto" chooses.
        largest: size of the largest transfer.
        progress: called on rank 0 with the number of measurements done, and of all.

    Returns:
        The topology and its measurements on rank 0, None elsewhere.

    Raises:
        LaunchError: if this process is no rank, or there is no GPU for it.
        TopologyError: on rank 0, if the measurements make no sense.
        Stopped: on a rank that has lost another one.
    """
    from planner.launcher import probe as probing
    from planner.support.units import parse_bytes

    size_bytes = parse_bytes(largest) if isinstance(largest, str) else largest
    return probing.probe(name, device=device, largest_bytes=size_bytes, progress=progress)


def start_probe(nproc: int, arguments: Sequence[str] = ()) -> int:
    """Runs `planner topology probe` in processes of this host, and waits for them.

    Args:
        arguments: options of the command, as on the command line.

    Returns:
        The exit code: 0, or 1 if a rank failed and said why.
    """
    from planner.launcher import processes

    return processes.start_ranks(["topology", "probe", *arguments], nproc)


# ------------------------------------------------------------------------------ plans


def read_strategy(path: File) -> "Plan":
    """The plan in a strategy file: the strategy, its prediction and its certificate."""
    from planner.artefacts.files import read_plan

    return read_plan(Path(path))


def write_strategy(
    plan: "Plan",
    path: File,
    model: "File | Model | None" = None,
    *,
    profile: File | None = None,
) -> tuple[Path, ...]:
    """Writes a plan as strategy JSON, and beside it the model with the stage of every operator.

    Args:
        path: ends in .json; the annotated model has the same name and ends in .onnx.
        model: the plan's, read or not; None writes the strategy alone.
        profile: the file of the plan's profile, which the strategy then names for `simulate`.

    Returns:
        The files written, the strategy first.

    Raises:
        FileError: if a file cannot be written, or the model is not the plan's.
        OptionError: if the annotated model would replace a file that is none.
    """
    from planner.api.lookup import with_paths
    from planner.artefacts.files import plan_bytes, write_plan

    target = Path(path)
    plan = with_paths(plan, target.parent, None if profile is None else Path(profile), None)
    if model is None:
        write_plan(plan, target)
        return (target,)
    from planner.model.annotated import ANNOTATED_FILE, write_partition
    from planner.support.outputs import check_outputs

    if isinstance(model, str | os.PathLike):
        model = read_model(model, dims=plan.dimensions)
    elif model.dimensions != plan.dimensions:
        model = read_model(model.path, dims=plan.dimensions)
    _check_model(model, plan.model_hash, str(target))
    plan = with_paths(plan, target.parent, None, model.path)
    partition = target.with_suffix(".onnx")
    # Its name is not the caller's, so it may be that of another file.
    check_outputs([(partition, ANNOTATED_FILE)], {"model": model.path})
    write_partition(model, plan, partition, {target: plan_bytes(plan)})
    return target, partition


def find_model(
    profile: "Profile", path: File | None = None, *, name: str = "the profile"
) -> "Model | None":
    """The model that a profile was made for; None if it is not where the profile says.

    Args:
        path: of the ONNX file; None takes the profile's, from the current folder.
        name: of the profile, for messages.

    Raises:
        FileError: if the file is missing, or holds another model.
    """
    if path is None and (profile.model_path is None or not Path(profile.model_path).is_file()):
        return None
    place = Path(str(profile.model_path)) if path is None else Path(path)
    try:
        model = read_model(place, dims=profile.dimensions)
    except ModelError as error:
        raise FileError(
            f"{name}: was not made for {place}, or with another version of it: {error}"
        ) from error
    _check_model(model, profile.model_hash, name)
    return model


def _check_model(model: "Model", expected_hash: str | None, name: str) -> None:
    """Refuses a model that a profile or plan was not made for.

    Args:
        expected_hash: of the right one.
        name: of the profile or plan, for the message.
    """
    if model.hash != expected_hash:
        raise FileError(
            f"{name}: made for model {str(expected_hash)[:12]}, but {model.path} is"
            f" {model.hash[:12]}; run: planner profile {model.path}"
        )


@dataclass(frozen=True, slots=True)
class Plans:
    """The answer to `solve` or `compare`: every solver's plan, judged by one simulator.

    Attributes:
        comparison: a row for each solver and size of the microbatch.
        problems: that were solved, ascending by the size of the microbatch.
        cost_model: by which plans are compared.
        changes: of the topology, in words.
        before: the same without the changes; None without any, and from `compare`.
        refinement: what came of measuring parts; None where that was not asked for.
    """

    comparison: "SolverComparison"
    problems: "tuple[Problem, ...]"
    cost_model: str = "planner"
    changes: tuple[str, ...] = ()
    before: "Plans | None" = None
    refinement: "Refinement | None" = None

    def __repr__(self) -> str:
        """One line: the fields hold the profiles and every plan."""
        rows = len(self.comparison.rows)
        asked = f"of {rows} row{'s' * (rows != 1)}, {self.num_devices} devices"
        if self.plan is None:
            return f"<Plans {asked}: no strategy fits>"
        return f"<Plans {asked}: {self.plan.solver}, {_iteration(self.plan)}>"

    @property
    def best(self) -> "SolverRow | None":
        """The row with the best plan; None if no strategy fits."""
        return self.comparison.best

    @property
    def plan(self) -> "Plan | None":
        """The best plan; None if no strategy fits."""
        return None if self.best is None else self.best.plan

    @property
    def num_devices(self) -> int:
        """Devices of the topology."""
        return len(self.problems[-1].topology.devices)


def solve(
    profile: "File | Profile | Sequence[Profile]",
    *,
    topology: "File | Topology" = "local.yaml",
    gpus: int | None = None,
    training: Training = Training(),
    search: Search = Search(),
    solvers: Sequence[str] = (),
    cost_model: str = "planner",
    what_if: WhatIf = WhatIf(),
    calibration: "bool | Calibration" = True,
    time_limit_s: float = 10.0,
    refine: bool = False,
    model: File | None = None,
    progress: Callable[[str], None] = lambda solver: None,
) -> Plans:
    """Strategies for a profiled model on some devices, and how good the best one is at least.

    Args:
        profile: of several sizes of the microbatch of one model, or those of a file, the best is
            chosen.
        topology, gpus: see `read_topology`.
        training: how the model is trained.
        search: how strategies are searched for.
        solvers: keys of `SOLVERS`; none asks `portfolio()`.
        cost_model: "planner", or "pipedream", whose optimizer alone is asked then; its plan has
            the schedule pipedream.
        what_if: changes of the topology; the present one is planned for too.
        calibration: see `simulate`.
        time_limit_s: limit of work for all solvers together, in seconds of an ordinary core, so
            plans do not depend on how busy this machine is. The present and the changed topology
            get half each.
        refine: whether split operators of the best plan are measured at their local shapes, until
            no plan is better by these times. `Plans.refinement.into` gives the profiles with them.
        model: the ONNX file that is measured then, if it is not where the profile says.
        progress: called with the name of each solver before it starts.

    Raises:
        FileError: if a file is missing or malformed.
        OptionError: if options contradict each other, the profile or the topology.
        TopologyError: if the topology has fewer devices.
    """
    from planner.artefacts.profile import has_rules
    from planner.planning.portfolio import under_pipedream
    from planner.planning.problems import changed_cluster, problems_for, sized
    from planner.planning.sizes import compare_between

    if cost_model not in ("planner", "pipedream"):
        raise OptionError(f"unknown cost model {cost_model!r}; known: planner, pipedream")
    check_cost_model(cost_model, training, search, solvers)
    if refine and (cost_model != "planner" or what_if != WhatIf()):
        raise OptionError(
            "--refine is for --cost-model planner, and for the topology as it is; drop --set,"
            " --drop and --add-host"
        )
    profiles, path = _profiles(profile)
    known = _calibration(calibration, path, profiles)
    refining = _Refining(profiles, model, progress) if refine else None
    profiles = sized(profiles, training)

    def planned(problems: "tuple[Problem, ...]") -> Plans:
        if cost_model == "pipedream":
            progress(cost_model)
            return Plans(under_pipedream(problems[-1]), problems, cost_model)
        asked = tuple(solvers) or portfolio(splits=has_rules(problems[-1].profile))
        names = with_given(asked, problems[-1].options)
        if refining is None:
            return Plans(*compare_between(problems, profiles, names, limit_s, progress))
        made = compare_between(problems, profiles, names, limit_s, progress, refining.refined)
        return Plans(*made, refinement=refining.done)

    limit_s = time_limit_s if what_if == WhatIf() else time_limit_s / 2
    present = problems_for(profiles, _topology(topology, gpus), training, search, known)
    if what_if == WhatIf():
        return planned(present)
    changed = changed_cluster(present[-1].topology, what_if)
    before = planned(present)
    after = planned(tuple(replace(one, topology=changed.topology) for one in present))
    return replace(after, changes=changed.changes, before=before)


class _Refining:
    """Measures parts of operators for `solve`.

    Args:
        profiles: of one model.
        model: its ONNX file; None takes the profiles'.
        progress: called with what is done.

    Raises:
        FileError: if parts can be measured and the model is not there, or is another one.
    """

    def __init__(
        self, profiles: "Sequence[Profile]", model: File | None, progress: Callable[[str], None]
    ) -> None:
        from planner.profilers.parts import obstacle

        self._progress = progress
        self._reason = next(filter(None, map(obstacle, profiles)), None)
        self.done: Refinement | None = None
        place = model or profiles[-1].model_path
        if self._reason is None:
            if place is None or not Path(place).is_file():
                raise FileError(
                    f"--refine: {place or 'the model'} is not there, and parts of its operators are"
                    " measured; give it with --model FILE"
                )
            self._path = Path(place)

    def refined(self, of_sizes: "Sequence[Attempts]") -> "Sequence[Attempts]":
        """The attempts, judged again with measured times; `done` has what came of it."""
        from planner.planning.refine import nothing, refine

        if self._reason is not None:
            self.done = nothing(self._reason)
            return of_sizes
        made, self.done = refine(of_sizes, self._measured)
        return made

    def _measured(self, profile: "Profile", wanted: "Wanted") -> "MeasuredParts":
        from planner.profilers.origin import profiled_model
        from planner.profilers.parts import measure_parts

        self._progress("measuring parts")
        return measure_parts(profiled_model(profile, self._path), profile, wanted)


def compare(
    profile: "File | Profile | Sequence[Profile]",
    *,
    topology: "File | Topology" = "local.yaml",
    gpus: int | None = None,
    training: Training = Training(),
    search: Search = Search(),
    solvers: Sequence[str] = (),
    what_if: WhatIf = WhatIf(),
    calibration: "bool | Calibration" = True,
    time_limit_s: float = 10.0,
    progress: Callable[[str], None] = lambda solver: None,
) -> Plans:
    """Every solver's strategy, also where an earlier one is nearly as good as possible.

    Args:
        profile: of several sizes of the microbatch, the largest is taken, or the training's.
        topology, gpus: see `read_topology`.
        training: how the model is trained.
        search: how strategies are searched for.
        solvers: keys of `SOLVERS`; none asks `automatic()`.
        what_if: changes of the topology, which alone is planned for then.
        calibration: see `simulate`.
        time_limit_s: limit of work for each solver, in seconds of an ordinary core.
        progress: called with the name of each solver before it starts.

    Raises:
        FileError: if a file is missing or malformed.
        OptionError: if options contradict each other, the profile or the topology.
        TopologyError: if the topology has fewer devices.
    """
    from planner.artefacts.profile import has_rules
    from planner.planning import portfolio as judging
    from planner.planning.problems import changed_cluster, problems_for, sized

    profiles, path = _profiles(profile)
    known = _calibration(calibration, path, profiles)
    chosen = sized(profiles, training)[-1:]
    (problem,) = problems_for(chosen, _topology(topology, gpus), training, search, known)
    changes: tuple[str, ...] = ()
    if what_if != WhatIf():
        changed = changed_cluster(problem.topology, what_if)
        problem, changes = replace(problem, topology=changed.topology), changed.changes
    asked = tuple(solvers) or automatic(splits=has_rules(problem.profile))
    names = with_given(asked, problem.options)
    comparison = judging.compare(problem, names, time_limit_s, progress, thorough=True)
    return Plans(comparison, (problem,), changes=changes)


def solve_under(
    cost_model: str,
    profile: "File | Profile | Sequence[Profile]",
    *,
    topology: "File | Topology" = "local.yaml",
    gpus: int | None = None,
    training: Training = Training(),
    search: Search = Search(),
    bandwidth: float | str | None = None,
    time_limit_s: float = 10.0,
) -> "ForeignComparison":
    """Plans by another planner's cost model and its own solvers; no strategy comes of them.

    Args:
        cost_model: "dnn-partitioning" or "piper".
        profile: a file of that planner's, which brings its own devices, or any other profile, which
            is seen as equal devices over the topology's slowest path.
        topology: only for other profiles.
        gpus: number of devices, instead of the file's.
        training: `device_memory`, `global_batch` and `recompute` override the file's.
        search: how plans are searched for; without pins and own stages.
        bandwidth: between devices, instead of a Piper file's, in bytes per s or as text.
        time_limit_s: limit of processor time for all searches together.

    Raises:
        FileError: if a file is missing or malformed.
        OptionError: if options contradict each other or the cost model.
    """
    from planner.artefacts.calibration import Calibration
    from planner.artefacts.formats.any import DNN_PARTITIONING, PIPER, detect
    from planner.artefacts.formats.dnn_partitioning import read_dnn_partitioning
    from planner.artefacts.formats.piper import read_piper
    from planner.artefacts.problem import switches_of
    from planner.planning.other_cost_models import (
        ForeignModel,
        ForeignOptions,
        solve_foreign,
        solve_profile,
    )
    from planner.planning.problems import choice, options_of, problems_for
    from planner.solvers.netsplit.options import NetSplit

    model, own = choice(ForeignModel, "cost model", cost_model), options_of(training, search)
    check_cost_model(cost_model, training, search)
    if bandwidth is not None and model is not ForeignModel.PIPER:
        raise OptionError("--bandwidth is for --cost-model piper; give a --topology instead")
    netsplit = switches_of(own, NetSplit)
    options = ForeignOptions(
        num_devices=gpus,
        memory_bytes=own.device_memory_bytes,
        batch=training.global_batch,
        bandwidth_bytes_per_s=_rate(bandwidth),
        recompute=own.recompute,
        max_downsets=own.max_downsets,
        exact=own.exact,
        contiguous=netsplit.contiguous,
        time_limit_s=time_limit_s,
        seed=own.seed,
        engine=netsplit.engine,
    )
    if model is ForeignModel.PIPER and not netsplit.contiguous:
        raise OptionError("--no-contiguous is not for --cost-model piper, whose stages are layers")
    if isinstance(profile, str | os.PathLike):
        path = Path(profile)
        form = detect(path)
        if model is ForeignModel.DNN_PARTITIONING and form == DNN_PARTITIONING:
            return solve_foreign(read_dnn_partitioning(path), options)
        if model is ForeignModel.PIPER and form == PIPER:
            return solve_foreign(read_piper(path), options)
    profiles, _ = _profiles(profile)
    place = _topology(topology, gpus)
    problems = problems_for(profiles, place, training, search, Calibration())
    return solve_profile(problems[-1], model, options)


def check_cost_model(
    cost_model: str,
    training: Training = Training(),
    search: Search = Search(),
    solvers: Sequence[str] = (),
) -> None:
    """Refuses options that the solvers under another cost model than the planner's would ignore.

    Raises:
        OptionError: if there are any.
    """
    if cost_model == "planner":
        return
    given = ["pin"] if search.pins else []
    # Solvers that are asked only where their own options are given have no say here.
    needing = {solver.options for solver in SOLVERS.values() if solver.needs_options}
    for own in search.switches:
        if type(own) in needing:
            fields = option_fields(type(own))
            given += [one.name for one in fields if getattr(own, one.name) != one.default]
    if given:
        raise OptionError(f"--{given[0]} is for --cost-model planner, not for {cost_model}")
    if cost_model == "pipedream":
        if set(solvers) - {"pipedream"}:
            raise OptionError(
                "--cost-model pipedream asks only the solver pipedream; drop --solver"
            )
        if training.schedule == "gpipe":
            raise OptionError(
                "--cost-model pipedream plans for --schedule pipedream; drop --schedule gpipe"
            )
        return
    if solvers:
        raise OptionError(f"--cost-model {cost_model} has solvers of its own; drop --solver")
    if training.microbatch_size is not None:
        raise OptionError("--microbatch-size is for --cost-model planner or pipedream")


def sensitivity(plans: Plans) -> "tuple[Gain, ...]":
    """How much faster the best plan is if a kind of link or a type of device is twice as fast, the
    most first; nothing without a plan.
    """
    from planner.planning import sensitivity as gains

    if plans.best is None or plans.plan is None:
        return ()
    size = plans.best.microbatch_size
    problem = next(one for one in plans.problems if one.profile.microbatch_size == size)
    return gains.sensitivity(problem, plans.plan.strategy)


def pipedream_report(plans: Plans) -> "PipeDreamReport | None":
    """PipeDream's own figures of its plan for the largest microbatch; None if it has none."""
    from planner.solvers.pipedream.costs import PipeDreamReport

    reports = [row.report for row in plans.comparison.rows]
    own = [report for report in reports if isinstance(report, PipeDreamReport)]
    return own[-1] if own else None


def is_compiled() -> bool:
    """Whether the search is compiled for this version; if not, the first plan takes up to a minute
    longer.
    """
    from planner.support.jit import compiled_before

    return compiled_before()


# ------------------------------------------------------------------------------ simulation


@dataclass(frozen=True, slots=True)
class Simulation:
    """One simulated iteration.

    Attributes:
        problem: the profile, the topology and the options that were simulated with.
        plan: the strategy with its prediction; None if the stages given do not fit.
        account: timeline, waits and critical path; None without a plan, and where an iteration has
            more than `MAX_ACTIONS` actions.
        num_actions: of the iteration.
        reason: why there is no plan; None if there is one.
    """

    problem: "Problem"
    plan: "Plan | None"
    account: "Account | None" = None
    num_actions: int = 0
    reason: str | None = None

    def __repr__(self) -> str:
        """One line: the fields hold the profile and every action."""
        if self.plan is None:
            return f"<Simulation: {self.reason}>"
        return f"<Simulation of {self.num_actions} actions: {_iteration(self.plan)}>"

    @property
    def names(self) -> dict[int, str]:
        """The names of the devices used, by index."""
        return {} if self.plan is None else {d.device: d.name for d in self.plan.prediction.devices}

    def described(self) -> "Account":
        """The account.

        Raises:
            OptionError: if there is none.
        """
        if self.account is None:
            raise OptionError(
                self.reason
                or f"an iteration has {self.num_actions} actions, too many for a picture or a"
                " trace; take fewer --microbatches"
            )
        return self.account


def simulate(
    strategy: "File | Plan",
    *,
    profile: "File | Profile | Sequence[Profile] | None" = None,
    topology: "File | Topology | None" = None,
    microbatches: int | None = None,
    device_memory: int | str | None = None,
    reserve: int | str = "1 GiB",
    what_if: WhatIf = WhatIf(),
    calibration: "bool | Calibration" = True,
) -> Simulation:
    """One iteration of a strategy.

    Args:
        strategy: a strategy file, or a plan.
        profile: that the strategy was made for; None takes the file that the strategy names, if it
            is there, else the newest in ./profiles.
        topology: None finds the strategy's own by its name; another one may be given.
        microbatches: per iteration; None takes the strategy's.
        device_memory, reserve: see `Training`.
        what_if: changes of the topology.
        calibration: corrections of times; True takes those beside the profile's file, if there are
            any, and False none.

    Raises:
        FileError: if a file is missing or malformed, or the profile or topology is not the
            strategy's.
        OptionError: if a change of the topology makes no sense.
    """
    from planner.api.lookup import find_profiles, profile_of, topology_of
    from planner.planning.problems import replayed
    from planner.resharding.checks import check_fits

    if isinstance(strategy, str | os.PathLike):
        plan, name = read_strategy(strategy), os.fspath(strategy)
    else:
        plan, name = strategy, "the strategy"
    if profile is not None:
        profiles, path = _profiles(profile)
    elif isinstance(strategy, str | os.PathLike):
        path, profiles = find_profiles(plan, Path(strategy))
    else:
        from planner.artefacts import files

        profiles, path = _profiles(files.newest_profile(Path("profiles"), plan.model_hash))
    own = profile_of(plan, name, profiles, "the profile given" if path is None else str(path))
    check_fits(plan, name, own.graph)
    given = os.fspath(topology) if isinstance(topology, str | os.PathLike) else topology
    place, is_own = topology_of(plan, name, given)
    training = Training(microbatches=microbatches, device_memory=device_memory, reserve=reserve)
    known = _calibration(calibration, path, profiles)
    problem, result = replayed(plan, own, place, is_own, training, known)
    return _simulated(problem, plan.solver, result, what_if)


def simulate_stages(
    profile: "File | Profile | Sequence[Profile]",
    *,
    cuts: Sequence[str] = (),
    replicas: Sequence[int] = (),
    topology: "File | Topology" = "local.yaml",
    gpus: int | None = None,
    training: Training = Training(),
    what_if: WhatIf = WhatIf(),
    calibration: "bool | Calibration" = True,
) -> Simulation:
    """One iteration of your own stages.

    Args:
        profile: of several sizes of the microbatch, the largest is taken, or the training's.
        cuts: the last operator of each stage but the last.
        replicas: the number of devices of each stage; none gives one each.
        topology, gpus: see `read_topology`.
        training: how the model is trained.
        what_if: changes of the topology.
        calibration: see `simulate`.

    Raises:
        FileError: if a file is missing or malformed.
        OptionError: if an operator is unknown, or options contradict each other.
    """
    from planner.planning.problems import problems_for, sized
    from planner.solvers.manual import Manual
    from planner.solvers.manual import solve as solve_stages

    profiles, path = _profiles(profile)
    search = Search(switches=(Manual(tuple(cuts), tuple(replicas)),))
    place, known = _topology(topology, gpus), _calibration(calibration, path, profiles)
    chosen = sized(profiles, training)[-1:]
    (problem,) = problems_for(chosen, place, training, search, known)
    return _simulated(problem, "manual", solve_stages(problem, 0.0), what_if)


def _simulated(problem: "Problem", solver: str, result: "Result", what_if: WhatIf) -> Simulation:
    """The strategy of a result, simulated as it is."""
    from planner.costs.bounds import lower_bound_s
    from planner.planning.judge import as_plan, judge_unchanged
    from planner.planning.problems import changed_cluster
    from planner.simulator.account import account

    if what_if != WhatIf():
        problem = replace(problem, topology=changed_cluster(problem.topology, what_if).topology)
    if result.strategy is None:
        return Simulation(problem, None, reason=result.reason)
    verdict, num_actions = judge_unchanged(problem, result.strategy)
    plan = as_plan(problem, solver, result, verdict, lower_bound_s(problem))
    described = account(problem, result.strategy) if num_actions <= MAX_ACTIONS else None
    return Simulation(problem, plan, described, num_actions)


def write_trace(simulation: Simulation, path: File) -> None:
    """Writes a simulated iteration as a trace, to be opened with Perfetto.

    Raises:
        OptionError: if it has too many actions.
        FileError: if the file cannot be written.
    """
    from planner.simulator.collectives import collectives
    from planner.simulator.traces import write

    timeline = simulation.described().timeline
    assert simulation.plan is not None, "what is described has a plan"
    inside = collectives(simulation.problem, simulation.plan.strategy, timeline)
    write.write_trace(timeline, simulation.names, Path(path), inside=inside)


def write_svg(artefact: "Simulation | Topology", path: File) -> None:
    """Writes a picture: of a simulated iteration the actions of every device, of a topology its
    devices and links.

    Raises:
        OptionError: if an iteration has too many actions.
        FileError: if the file cannot be written.
    """
    if isinstance(artefact, Simulation):
        from planner.reports.drawing.gantt_svg import gantt_svg

        picture = gantt_svg(artefact.described().timeline, artefact.names)
    else:
        from planner.reports.drawing.topology_svg import svg

        picture = svg(artefact)
    write_text(picture, path)


def write_text(text: str, path: File) -> None:
    """Writes text so that nobody ever sees half of it."""
    from planner.support.writing import write_atomically

    write_atomically(Path(path), text.encode())


# ------------------------------------------------------------------------------ runs


def launch(
    strategy: File,
    *,
    model: File | None = None,
    loss: str | Mapping[str, str] | None = None,
    class_dim: int | Mapping[str, int] | None = None,
    device: str = "auto",
    trace: File | None = None,
    track_memory: bool = False,
    checkpoint: File | None = None,
    checkpoint_every: int | None = None,
    checkpoint_keep: int = 3,
    resume: File | None = None,
    report: Callable[[str], None] = lambda line: None,
    progress: Callable[[int, int, float | None], None] = lambda done, total, loss: None,
    **how: "Unpack[TrainingOptions]",
) -> "LaunchReport | None":
    """Trains as a strategy says. Every rank that torchrun starts calls it; a strategy for one
    device needs no torchrun.

    Args:
        strategy: the file; the model is looked for relative to its folder.
        model: the ONNX file, if it is not where the strategy says.
        loss: of all outputs that the profile gave one, or by output: see `read_model`; None takes
            the profile's.
        class_dim: the dimension that classes lie on, of all of them or by output.
        device: "auto", "cpu" or "cuda".
        trace: file to write a measured iteration to.
        track_memory: whether memory is watched in one more step, which is slow.
        checkpoint: folder for checkpoints; one is written at the end.
        checkpoint_every: steps from one checkpoint to the next; None writes that one only.
        checkpoint_keep: number of checkpoints that stay, the newest ones.
        resume: a checkpoint, or a folder with some, to go on from; it may be that of another
            strategy of the same model.
        report: called with a line for people on a rank that idles.
        progress: called on rank 0 after each step with the number of steps done, that of all, and
            the loss where it is known.
        how: the training itself: the options of the command line, in its words, such as `steps`,
            `learning_rate` (--lr), `lr_schedule`, `weight_decay`, `optimizer`, `clip`, `nan`,
            `dtype`, `data`, `epochs`, `shuffle`, `eval_data`, `eval_every`, `metrics`, `log`,
            `seed` and `threads`; `planner.launcher.settings.Settings` describes them. `read_config`
            reads them, and the arguments above, from a file that `config` names.

    Returns:
        Predicted beside measured times on rank 0, None elsewhere.

    Raises:
        PlannerError: if files, options and processes do not fit each other.
        Stopped: on a rank that has lost another one.
    """
    from planner.artefacts.losses import LossOptions
    from planner.training import run
    from planner.training.checkpoints.keeping import Keeping

    return run.launch(
        Path(strategy),
        model_path=None if model is None else Path(model),
        loss=LossOptions(functions=loss, class_dims=class_dim),
        device=device,
        trace=None if trace is None else Path(trace),
        track_memory=track_memory,
        keeping=Keeping(
            None if checkpoint is None else Path(checkpoint),
            checkpoint_every,
            checkpoint_keep,
            None if resume is None else Path(resume),
        ),
        report=report,
        progress=progress,
        **how,
    )


def read_config(path: File) -> dict[str, Any]:
    """The options of a training in a YAML file, as keyword arguments of `launch`:

        planner.launch("strategy.json", **planner.read_config("train.yaml"))

    Keys are the options of the command line, with - or _ inside; paths are relative to the folder
    of the file. `config`, the name of the file and the hash of its content, is added: ranks that
    have read different files refuse to train.

    Raises:
        FileError: if the file is missing, no YAML, or has unknown options or wrong values.
    """
    from planner.training import config

    return config.read_config(Path(path))


def trainer(
    strategy: "File | Plan",
    model: File | None = None,
    *,
    loss: str | Mapping[str, str] | None = None,
    class_dim: int | Mapping[str, int] | None = None,
    device: str = "auto",
    metrics: Sequence[str] = (),
    checkpoint: File | None = None,
    checkpoint_keep: int = 3,
    resume: File | None = None,
    **how: "Unpack[LoopOptions]",
) -> "LoopTrainer":
    """A training as a strategy says, in a loop of your own. Every rank that torchrun starts runs
    the whole script; a strategy for one device needs no torchrun.

        with planner.trainer("strategy.json", learning_rate=0.1) as trainer:
            for batch in loader:
                loss = trainer.step(batch)
            trainer.save("run")

    Args:
        strategy: the file, or a plan.
        model: the ONNX file, if it is not where the strategy says; a plan needs it.
        loss, class_dim, device: see `launch`.
        metrics: "module:function"s of (output, target) for `LoopTrainer.evaluate`.
        checkpoint: folder that `LoopTrainer.save` writes to, and that a training that torchrun has
            restarted goes on from.
        checkpoint_keep: number of checkpoints that stay, the newest ones.
        resume: a checkpoint, or a folder with some, to go on from.
        how: `learning_rate`, `lr_schedule`, `weight_decay`, `optimizer`, `clip`, `nan`, `dtype`,
            `seed`, `threads` and `hang_timeout`, as of `launch`.

    Raises:
        PlannerError: if files, options and processes do not fit each other.
        Stopped: on a rank that has lost another one.
    """
    from planner.artefacts.losses import LossOptions
    from planner.launcher.settings import Settings
    from planner.training import own_loop
    from planner.training.checkpoints.keeping import Keeping
    from planner.training.joining import Asked

    plan, path = _plan_and_path(strategy, model)
    keeping = Keeping(
        folder=None if checkpoint is None else Path(checkpoint),
        keep=checkpoint_keep,
        resume=None if resume is None else Path(resume),
    )
    asked = Asked(
        plan, path, None if model is None else Path(model), LossOptions((), loss, class_dim),
        device, Settings(**how, tells=True), keeping,
    )  # fmt: skip
    return own_loop.begin(asked, tuple(metrics))


def _plan_and_path(strategy: "File | Plan", model: File | None) -> "tuple[Plan, Path]":
    """A plan, and how messages call it."""
    from planner.artefacts.files import read_plan

    if isinstance(strategy, str | os.PathLike):
        return read_plan(Path(strategy)), Path(strategy)
    if model is None:
        raise OptionError(
            "trainer: expected the ONNX file of the plan, which does not say where it is; give"
            " model, or the strategy as a file"
        )
    return strategy, Path("the plan")


def measure(
    plans: Plans,
    model: "File | Model",
    *,
    steps: int,
    progress: Callable[[int, str], None] = lambda done, solver: None,
) -> "Generator[Trial, None, None]":
    """Launches the plan of every solver on this host, one after the other, on synthetic data.

    A plan that needs more processes or another device than there are, or that fails while it runs,
    has a reason instead of times. Equal plans are run once.

    Args:
        plans: of `compare`.
        model: their ONNX file, read or not.
        steps: steps of each plan that are timed, after one that warms up.
        progress: called before each plan with the number of plans before it and its solver.

    Yields:
        A trial for each plan, as soon as it is there.

    Raises:
        OptionError: if there are no steps.
    """
    from planner.training.trials import Candidate, trials

    if steps < 1:
        raise OptionError(f"steps: expected 1 or more, got {steps}")
    path = Path(model) if isinstance(model, str | os.PathLike) else model.path
    candidates = [
        Candidate(row.solver, row.plan, row.shortage is None)
        for row in plans.comparison.rows
        if row.plan is not None
    ]
    return trials(candidates, path.absolute(), steps, progress)


def write_weights(
    checkpoint: File,
    path: File | None,
    state_dict: File | None = None,
    *,
    model: File | None = None,
    form: str = "evaluation",
) -> "Weights":
    """Writes the ONNX file that was trained, with the weights and running statistics of a
    checkpoint, or a state dict, or both.

    Args:
        checkpoint: its folder, or a folder with several, of which the newest whole one is taken.
        path: of the new ONNX file; weights of 1.8 GB or more are written to PATH.data beside it.
        state_dict: file for a dict of tensors by names of initializers, by torch.save.
        model: the ONNX file that was trained, if it is not where the checkpoint says.
        form: "evaluation" normalises by running statistics and drops nothing; "training" keeps the
            form of the file.

    Raises:
        OptionError: if the form is none of these, or no file is to be written.
        FileError: if there is no whole checkpoint, the model is not there or another one, or a file
            cannot be written.
        ModelError: if the model cannot hold the weights, or has no evaluation form.
    """
    from planner.training.checkpoints import into_onnx as weights
    from planner.training.checkpoints.folder import find

    if form not in tuple(weights.Form):
        raise OptionError(f"form: expected {' or '.join(weights.Form)}, got {form!r}")
    if path is None and state_dict is None:
        raise OptionError("expected a file to write, got none; give -o FILE.onnx, or --state-dict")
    return weights.write_weights(
        find(Path(checkpoint)),
        None if path is None else Path(path),
        None if state_dict is None else Path(state_dict),
        model_path=None if model is None else Path(model),
        form=weights.Form(form),
    )


def start_launch(strategy: File, nproc: int, arguments: Sequence[str] = ()) -> int:
    """Runs `planner launch` in processes of this host, and waits for them.

    Args:
        nproc: number of processes, at least the strategy's devices.
        arguments: options of the command, as on the command line.

    Returns:
        The exit code: 0, or 1 if a rank failed and said why.

    Raises:
        FileError: if the strategy cannot be read.
        LaunchError: if there are too few processes, or a rank was killed.
    """
    from planner.launcher import processes

    return processes.start_launch(Path(strategy), nproc, arguments)


def read_trace(path: File) -> "Trace":
    """The iteration in a trace file of the planner, predicted or measured."""
    from planner.simulator.traces import read

    return read.read_trace(Path(path))


def compare_traces(predicted: "File | Trace", measured: "File | Trace") -> "TraceComparison":
    """Where two traces of one strategy differ.

    Raises:
        FileError: if a file is missing, malformed, or no trace of the planner.
        OptionError: if they are traces of different strategies.
    """
    from planner.simulator.traces import comparison

    return comparison.compare_traces(_trace(predicted), _trace(measured))


def write_overlay(predicted: "File | Trace", measured: "File | Trace", path: File) -> None:
    """Writes two traces of one strategy into one, each device twice, for Perfetto.

    Raises:
        FileError: if a file is missing, malformed, or no trace, or cannot be written.
    """
    from planner.simulator.traces import comparison, write

    write.write_trace(*comparison.overlay(_trace(predicted), _trace(measured)), Path(path))


def calibrate(
    traces: Sequence[File],
    *,
    profiles: "Sequence[Profile]",
    topologies: "Sequence[File | Topology]" = ("local.yaml",),
) -> "CheckedCalibration":
    """Corrections of predicted times, fitted to measured traces, with the error before and after.

    Args:
        traces: written by `launch`, all on devices of one type.
        profiles: among them those of the runs.
        topologies: among them those of the runs.

    Raises:
        FileError: if a file is missing or malformed, or a trace was not measured.
        OptionError: if the profile or topology of a run is missing.
    """
    from planner.clusters.yaml.read import device_table
    from planner.simulator.traces import calibrate as calibration
    from planner.simulator.traces.runs import read_runs

    if not traces:
        raise OptionError("no trace is given; expected at least one")
    paths, places = [Path(path) for path in traces], [_topology(one, None) for one in topologies]
    return calibration.calibrate(read_runs(paths, profiles, places, dict(device_table())))


def read_calibration(profile: File, profiles: "Sequence[Profile]") -> "Calibration":
    """The corrections that stand beside a profile; without any, those that change nothing.

    Args:
        profile: the profile's file.
        profiles: that the file holds.

    Raises:
        FileError: if they are malformed, or were made for another profile.
    """
    from planner.artefacts import files
    from planner.artefacts.calibration import Calibration

    known = files.read_calibration(Path(profile), profiles)
    return Calibration() if known is None else known.calibration


def calibration_path(profile: File) -> Path:
    """Where corrections of a profile stand.

    Args:
        profile: the profile's file.
    """
    from planner.artefacts import files

    return files.calibration_path(Path(profile))


def write_calibration(
    fitted: "CheckedCalibration", profile: File, profiles: "Sequence[Profile]"
) -> Path:
    """Writes corrections beside a profile, where `solve`, `compare` and `simulate` find them.

    Args:
        profile: the profile's file.
        profiles: that the file holds.

    Returns:
        The file written.
    """
    from planner.artefacts import files
    from planner.artefacts.calibration import CalibrationFile

    path = files.calibration_path(Path(profile))
    written = CalibrationFile(
        profiles=tuple(map(files.artefact_hash, profiles)),
        calibration=fitted.calibration,
        error_before=fitted.error_before,
        error_after=fitted.error_after,
        left_out=fitted.left_out,
    )
    files.write_calibration(written, path)
    return path


# ------------------------------------------------------------------------------ formats


def convert(
    source: File, target: File, *, to: str | None = None, profile: File | None = None
) -> tuple[Path, ...]:
    """Writes a profile in another format, or a strategy as PipeDream's graph.txt with the stage of
    every node, and a picture of it for Graphviz.

    Args:
        source: a profile in any known format, or a strategy; its content decides.
        target: the file to write.
        to: "pipedream" or "planner"; None writes the planner's JSON where the target ends in .json.
        profile: that a strategy was made for; None takes the target, if it is a graph.txt, else the
            newest profile in ./profiles.

    Returns:
        The files written.

    Raises:
        FileError: if a file is missing or malformed, or the profile is not the strategy's.
        OptionError: if the arguments contradict each other.
    """
    from planner.api import conversion as formats

    own = None if profile is None else Path(profile)
    return formats.convert(Path(source), Path(target), to, own)


# ------------------------------------------------------------------------------ arguments


def _iteration(plan: "Plan") -> str:
    """The time of a plan's iteration, for people."""
    from planner.support.units import format_seconds

    return f"{format_seconds(plan.prediction.iteration_s)} per iteration"


def _rate(rate: float | str | None) -> float | None:
    """A rate in bytes per s, from text with a unit or as it is."""
    from planner.support.units import parse_rate

    return parse_rate(rate) if isinstance(rate, str) else rate


def _profiles(
    given: "File | Profile | Sequence[Profile]",
) -> "tuple[tuple[Profile, ...], Path | None]":
    """The profiles, and their file if they come from one."""
    if isinstance(given, str | os.PathLike):
        path = find_profile(given)
        return read_profiles(path), path
    from planner.artefacts.profile import Profile, ProfileSet

    profiles = (given,) if isinstance(given, Profile) else tuple(given)
    if not profiles:
        raise OptionError("no profile is given; expected at least one")
    ascending = sorted(profiles, key=lambda one: one.microbatch_size)
    try:
        return ProfileSet(tuple(ascending)).profiles, None
    except ValueError as error:
        raise OptionError(str(error)) from None


def _calibration(
    choice: "bool | Calibration", path: Path | None, profiles: "Sequence[Profile]"
) -> "Calibration":
    """The corrections to apply."""
    from planner.artefacts.calibration import Calibration

    if isinstance(choice, Calibration):
        return choice
    return read_calibration(path, profiles) if choice and path is not None else Calibration()


def _topology(given: "File | Topology", gpus: int | None) -> "Topology":
    """The topology, or its first devices."""
    from planner.artefacts.topology import take

    if isinstance(given, str | os.PathLike):
        return read_topology(given, gpus)
    return given if gpus is None else take(given, gpus)


def _trace(given: "File | Trace") -> "Trace":
    """The trace, or that in a file."""
    return read_trace(given) if isinstance(given, str | os.PathLike) else given
