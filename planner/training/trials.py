"""`planner compare --run`: the plans of all solvers, launched on this host one after the other.

Each plan becomes a `Trial`: the times of its iterations, or the reason why there are none. A plan
that this host cannot run as it was planned is not started. A plan that fails while it runs does not
keep the others from running. Equal plans of several solvers are run once. The strategies, and the
output of the ranks, are in a folder that is removed at the end.
"""

import json
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from planner.artefacts.files import write_plan
from planner.artefacts.plan import Plan
from planner.clusters.yaml.schema import available_cores
from planner.launcher.failures.monitor import start_ranks
from planner.profilers.devices import gpu_names, is_of_type
from planner.support.errors import LaunchError

CPU = "cpu"
WARM_UP_STEPS = 1
"""Steps before the timed ones; the report of a launch leaves out as many."""


class Candidate(NamedTuple):
    """A plan to run.

    Attributes:
        solver: that made it.
        plan: the plan.
        fits: whether it fits by the planner's count.
    """

    solver: str
    plan: Plan
    fits: bool


@dataclass(frozen=True, slots=True)
class Trial:
    """A solver's plan, as it ran. Throughputs are those of a plan that did.

    Attributes:
        solver: name of the solver.
        plan: its plan.
        iterations_s: time of each timed iteration; empty where the plan did not run.
        reason: why it did not run; None where it did.
        same_as: the solver whose equal plan was run instead; None where this one was.
        notes: reasons why prediction and measurement may differ.
    """

    solver: str
    plan: Plan
    iterations_s: tuple[float, ...] = ()
    reason: str | None = None
    same_as: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def throughput(self) -> float:
        """Samples per s, over all timed iterations together."""
        return len(self.iterations_s) * self._samples / sum(self.iterations_s)

    @property
    def least_throughput(self) -> float:
        """Samples per s of the slowest iteration."""
        return self._samples / max(self.iterations_s)

    @property
    def most_throughput(self) -> float:
        """Samples per s of the fastest iteration."""
        return self._samples / min(self.iterations_s)

    @property
    def _samples(self) -> int:
        return self.plan.microbatch_size * self.plan.strategy.num_microbatches


@dataclass(frozen=True, slots=True)
class Host:
    """What a host can run plans on.

    Attributes:
        num_cores: CPU cores that this process may use.
        gpus: CUDA's names of the GPUs, by index.
    """

    num_cores: int
    gpus: tuple[str, ...]


def trials(
    candidates: Sequence[Candidate],
    model_path: Path,
    steps: int,
    progress: Callable[[int, str], None] = lambda done, solver: None,
) -> Generator[Trial, None, None]:
    """Runs the plans, and gives a trial for each as soon as it is there.

    Args:
        model_path: the plans' ONNX file.
        steps: timed steps of each plan.
        progress: called before each plan with the number of plans before it and its solver.
    """
    host = _this_host([one.plan for one in candidates])
    ran: dict[object, Trial] = {}
    with TemporaryDirectory(prefix="planner-") as folder:
        for done, (solver, plan, fits) in enumerate(candidates):
            progress(done, solver)
            trial, content = Trial(solver, plan), (plan.strategy, plan.ranks)
            reason = obstacle(plan, host) if fits else "its plan does not fit"
            if reason is not None:
                yield replace(trial, reason=reason)
            elif content in ran:
                first = ran[content]
                yield replace(first, solver=solver, plan=plan, same_as=first.solver)
            else:
                ran[content] = _run(trial, model_path, steps, Path(folder))
                yield ran[content]


def _this_host(plans: Sequence[Plan]) -> Host:
    """What is here. GPUs are looked for if a plan needs one: that loads torch."""
    types = {device.type for plan in plans for device in plan.prediction.devices}
    return Host(available_cores(), gpu_names() if types - {CPU} else ())


def obstacle(plan: Plan, host: Host) -> str | None:
    """Why a host cannot run a plan as it was planned; None if it can."""
    hosts = dict.fromkeys(plan.hosts)
    if len(hosts) > 1:
        return f"planned for {len(hosts)} hosts ({', '.join(hosts)}); this is one"
    type_of = {device.device: device.type for device in plan.prediction.devices}
    types = [type_of[device] for device in plan.ranks]
    if {*types} == {CPU}:
        if len(types) <= host.num_cores:
            return None
        return f"needs {len(types)} processes; this host has {_number(host.num_cores, 'core')}"
    if CPU in types:
        return f"planned for {' and '.join(sorted({*types}))}; a launch computes on either"
    if len(types) > len(host.gpus):
        needed = _number(len(types), f"{types[0]} GPU")
        return f"needs {needed}; this host has {_number(len(host.gpus), 'GPU')}"
    for index, (type_, name) in enumerate(zip(types, host.gpus, strict=False)):
        if not is_of_type(name, type_):
            return f"planned for {type_}; GPU {index} of this host is {name}"
    return None


def _number(number: int, what: str) -> str:
    return f"{number or 'no'} {what}{'s' * (number != 1)}"


def _run(trial: Trial, model_path: Path, steps: int, folder: Path) -> Trial:
    """The trial with its times, or with the reason why the launch failed."""
    path = folder / "strategy.json"
    write_plan(trial.plan, path)
    on_cpu = all(device.type == CPU for device in trial.plan.prediction.devices)
    arguments = ["--model", str(model_path), "--steps", str(WARM_UP_STEPS + steps),
                 "--device", CPU if on_cpu else "cuda", "--json"]  # fmt: skip
    printed, errors = folder / "printed", folder / "errors"
    with printed.open("wb") as out, errors.open("wb") as err:
        try:
            command = ["launch", str(path), *arguments]
            code = start_ranks(command, len(trial.plan.ranks), (out, err))
        except LaunchError as error:
            return replace(trial, reason=str(error))
    if code:
        words = errors.read_text(errors="replace").replace(f"{path}: ", "")
        return replace(trial, reason=cause(words) or f"the launch ended with code {code}")
    report = json.loads(printed.read_text().splitlines()[-1])
    timed_s = tuple(report["iterations_s"][WARM_UP_STEPS:])
    return replace(trial, iterations_s=timed_s, notes=tuple(report["notes"]))


def cause(words: str) -> str:
    r"""The error in what ranks have printed: the message, or the last line of a traceback.

    >>> cause("note: slow\nError: net.onnx: not there;\n  give --model FILE\n")
    'net.onnx: not there;\n  give --model FILE'
    >>> cause("Traceback (most recent call last):\n  ...\nValueError: no\n")
    'ValueError: no'
    """
    lines = words.strip().splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith("Error: ")]
    if starts:
        return "\n".join(lines[starts[0] :]).removeprefix("Error: ")
    return lines[-1] if lines else ""
