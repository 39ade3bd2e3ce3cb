"""`Problem`: the question to a solver, and `Result`: its answer."""

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from planner.artefacts.calibration import UNCALIBRATED, Calibration
from planner.artefacts.options import Search, Training
from planner.artefacts.profile import Profile
from planner.artefacts.strategy import Strategy
from planner.artefacts.topology import DeviceType, Topology

Switches = TypeVar("Switches")


class Status(StrEnum):
    """A solver's verdict on its own space."""

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"
    UNKNOWN = "unknown"


def switches_of(search: Search, kind: type[Switches]) -> Switches:
    """One solver's own options; their defaults where none are given.

    Args:
        kind: their type.
    """
    return next((one for one in search.switches if isinstance(one, kind)), kind())


@dataclass(frozen=True, slots=True)
class Problem:
    """The question to a solver.

    Attributes:
        profile: the costs of the operators.
        topology: the devices; all may be used.
        num_microbatches: M, per iteration.
        training: how the model is trained.
        search: how strategies are searched for.
        measured_on: the type of device that the profile was made on; None if it is not known.
        calibration: corrections learnt from measured runs.
        any_size: whether the same question is asked for microbatches of all other sizes.
    """

    profile: Profile
    topology: Topology
    num_microbatches: int
    training: Training = Training()
    search: Search = Search()
    measured_on: DeviceType | None = None
    calibration: Calibration = UNCALIBRATED
    any_size: bool = False


@dataclass(frozen=True, slots=True)
class Result:
    """A solver's answer.

    Attributes:
        status: of its own space.
        strategy: None exactly if the status is infeasible or unknown.
        bound_s: no strategy in its space is better, by its own objective; None if it has no bound.
        space: the space that status and bound speak of.
        reason: why there is no strategy, or why it leaves devices idle.
        reproducible: False where the brake or the user cut the search.
        others: strategies that are nearly as good by the solver's own objective; the judge may
            find one of them better.
        report: the solver's own figures, for the user; they may be there without a strategy.
        unfit: whether the strategy is a plan even if it does not fit by the planner's count, since
            the solver was asked to count as it was published.
        short_of_memory: whether there may be a strategy where devices have more memory.
        work_s: the work of the search, in seconds of an ordinary core: counted, not measured.
    """

    status: Status
    strategy: Strategy | None
    bound_s: float | None = None
    space: str = ""
    reason: str | None = None
    reproducible: bool = True
    others: tuple[Strategy, ...] = ()
    report: object | None = None
    unfit: bool = False
    short_of_memory: bool = False
    work_s: float = 0.0

    def __post_init__(self) -> None:
        if (self.strategy is None) != (self.status in (Status.INFEASIBLE, Status.UNKNOWN)):
            raise ValueError(f"status {self.status} and strategy contradict each other")
