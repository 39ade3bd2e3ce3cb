"""The files that `solve`, `compare` and `simulate` plan for."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from planner.api import Calibration, Profile, Topology


@dataclass(frozen=True, slots=True)
class InputNames:
    """The options that name the files.

    Attributes:
        profile: None stands for the newest in ./profiles.
        gpus: number of devices to take; None takes all.
        topology: a file, one in ./topologies, or a preset.
    """

    profile: Path | None
    gpus: int | None
    topology: str

    def read(self, *, calibrated: bool, quiet: bool) -> "Inputs":
        """The files, read.

        Args:
            calibrated: whether the corrections beside the profile are taken.
            quiet: whether standard output is not for people.
        """
        from planner import api

        path = self.profile or api.newest_profile()
        profiles = api.read_profiles(path)
        if self.profile is None:
            click.echo(f"profile {path}, the newest in profiles/", err=quiet)
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


def say_if_compiling() -> None:
    """Says why the first solve of a version takes longer."""
    from planner import api

    if not api.is_compiled():
        click.echo("compiling the search, once per version: some 10 to 20 s", err=True)
