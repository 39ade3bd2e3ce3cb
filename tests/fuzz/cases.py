"""A case: files to lie in an empty folder, and the commands to run there."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Link:
    """A symbolic link."""

    target: str


@dataclass(frozen=True, slots=True)
class Pipe:
    """A named pipe that nobody writes to."""


@dataclass(frozen=True, slots=True)
class Folder:
    """An empty folder where a file is expected."""


Content = bytes | Link | Pipe | Folder


@dataclass(frozen=True, slots=True)
class Case:
    """One case.

    Attributes:
        files: by name.
        commands: arguments of `planner`, one after the other, until one fails.
        what: was done to the files, in words.
    """

    files: Mapping[str, Content]
    commands: tuple[tuple[str, ...], ...]
    what: str


def lay_out(files: Mapping[str, Content], folder: Path) -> None:
    """Writes the files of a case into a folder."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        match content:
            case Link(target):
                path.symlink_to(target)
            case Pipe():
                os.mkfifo(path)
            case Folder():
                path.mkdir()
            case bytes():
                path.write_bytes(content)
