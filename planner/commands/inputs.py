"""The files that `solve`, `compare` and `simulate` plan for."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from planner import api
from planner.commands.terminal import say, spinner

if TYPE_CHECKING:
    from planner.api import Calibration, Plans, Profile, Topology


@dataclass(frozen=True, slots=True)
class InputNames:
    """The options that name the files.

    Attributes:
        profile: None stands for the newest in ./profiles, if all are of one model.
        gpus: number of devices to take; None takes all.
        topology: a file, one in ./topologies, or a preset.
    """

    profile: Path | None
    gpus: int | None
    topology: str

    def read(self, *, calibrated: bool, quiet: bool, model: Path | None = None) -> "Inputs":
        """The files, read.

        Args:
            calibrated: whether the corrections beside the profile are taken.
            model: the ONNX file, which the newest profile has to be of; None takes any.
            quiet: whether standard output is not for people.
        """
        path = self.profile or api.newest_profile(model=model)
        profiles = api.read_profiles(path)
        if self.profile is None:
            say(f"profile {path}, the newest in profiles/", err=quiet)
        topology_path = api.find_topology(self.topology)
        calibration = api.read_calibration(path, profiles) if calibrated else False
        topology = api.read_topology(topology_path, self.gpus)
        return Inputs(profiles, path, topology, topology_path, calibration)


@dataclass(frozen=True, slots=True)
class Inputs:
    """The files that a command plans for.

    Attributes:
        profiles: ascending by the size of the microbatch.
        profile_path: their file.
        topology: its first devices, if only some were asked for.
        topology_path: its file.
        calibration: corrections of times; False for none.
    """

    profiles: "tuple[Profile, ...]"
    profile_path: Path
    topology: "Topology"
    topology_path: Path
    calibration: "Calibration | bool"


def planned(ask: "Callable[..., Plans]", inputs: Inputs) -> "Plans":
    """The answer for these files, while the solver at work is shown.

    Args:
        ask: `solve` or `compare`, with all else.
    """
    say_if_compiling(len(inputs.topology.devices))
    with spinner() as progress:
        return ask(
            inputs.profiles,
            topology=inputs.topology,
            calibration=inputs.calibration,
            progress=progress,
        )


def say_if_compiling(num_devices: int | None) -> None:
    """Says why the first solve of a version takes longer. On one device nothing is searched.

    Args:
        num_devices: that are planned for; None where it is not known.
    """
    if num_devices != 1 and not api.is_compiled():
        say("compiling the search, once per version: up to a minute", err=True)
