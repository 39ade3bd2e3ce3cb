"""Paths as they are written into files."""

import os
from pathlib import Path


def relative(path: Path, folder: Path) -> str:
    """A path as seen from a folder, with forward slashes."""
    return Path(os.path.relpath(path.resolve(), folder.resolve())).as_posix()
