"""Profiles as tests want them."""

from pathlib import Path

from planner.artefacts.formats.any import read_any_profiles
from planner.artefacts.profile import Profile


def read_any_profile(path: Path) -> Profile:
    """The profile in a file of any known format; of several that for the largest microbatch."""
    return read_any_profiles(path)[-1]
