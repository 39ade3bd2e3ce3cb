"""Options of a training in a YAML file -> keyword arguments of `planner.launch`.

    data: mine:digits        # the keys are the options of `planner launch`, with - or _ inside
    epochs: 40
    lr: 0.1
    lr_schedule: cosine
    loss: {logits: cross-entropy}
    checkpoint: run          # beside this file

A file has any of the options but those that say what a process does (--nproc, --json, --config) and
--operators, which `profile` and `solve` take, too. Paths are relative to the folder of the file, as
in strategies and topologies; modules are found as on the command line.
"""

import hashlib
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from planner.artefacts.options import LossOptions
from planner.clusters.yaml.schema import key_lines, yaml_of
from planner.launcher.options import Loop
from planner.support.errors import FileError, shown
from planner.support.options import Option, checked, declared
from planner.support.reading import MAX_OPTIONS_BYTES, read_text
from planner.training.options import Checkpoints, Launching

HASH_DIGITS = 12
ADVICE = "write options of `planner launch`, such as lr: 0.1, a line each"


def _key_of(one: Option) -> str:
    """The key of an option in a file."""
    return one.flag.removeprefix("--").replace("-", "_")


OPTIONS: Mapping[str, Option] = {
    _key_of(one): one
    for kind in (Loop, LossOptions, Launching, Checkpoints)
    for one in declared(kind).values()
    if one.help and one.name != "output"  # which is the strategy's
}
"""The options that a file may have, by their keys."""
FORMER = {one.former: key for key, one in OPTIONS.items() if one.former}
"""The keys of options by those that they had before."""
OF_PROCESSES = frozenset({"nproc", "json", "config", "operators"})
"""Options that stand on the command line alone."""


def read_config(path: Path) -> dict[str, Any]:
    """The keyword arguments of `planner.launch` in a file, and `config`, which names the file and
    the hash of its content for the handshake of the ranks.

    Raises:
        FileError: if it is missing, no YAML, or has unknown options or wrong values; all of them.
    """
    text = read_text(path, "options of a training", ADVICE, MAX_OPTIONS_BYTES)
    plain = yaml_of(text, path)
    if not isinstance(plain, dict):
        raise FileError(f"{path}: expected options, got {shown(plain)}; {ADVICE}")
    lines = key_lines(text)
    values: dict[str, Any] = {}
    wrong: list[tuple[int, str]] = []
    for key, value in plain.items():
        try:
            one = _option(key)
            if one.name in values:
                raise ValueError("given twice, by two spellings of its name")
            values[one.name] = _placed(_value(one, value), path)
        except ValueError as error:
            name = key if isinstance(key, str) else shown(key)
            line = lines.get(name, 0)
            place = f"{path}: line {line}: " if line else f"{path}: "
            wrong.append((line, f"{place}{name}: {error}"))
    if "steps" in values and "epochs" in values:
        first, last = sorted((lines.get(name, 0), name) for name in ("steps", "epochs"))
        message = (
            f"{last[1]}: line {first[0]} has {first[1]}; expected one of the two, leave one out"
        )
        wrong.append((last[0], f"{path}: line {last[0]}: {message}"))
    if wrong:
        raise FileError("\n".join(message for _, message in sorted(wrong)))
    digest = hashlib.sha256(text.encode()).hexdigest()[:HASH_DIGITS]
    return {**values, "config": f"{path.name} {digest}"}


def _option(key: object) -> Option:
    """The option that a key names, in which - and _ are the same."""
    name = key.replace("-", "_") if isinstance(key, str) else ""
    name = FORMER.get(name, name)
    if name in OPTIONS:
        return OPTIONS[name]
    if name in OF_PROCESSES:
        raise ValueError("no option of a file; give it on the command line")
    keys = {**{one.name: key for key, one in OPTIONS.items()}, **{key: key for key in OPTIONS}}
    near = get_close_matches(name, keys, n=1)
    if near:
        raise ValueError(f"unknown option; did you mean {keys[near[0]]}?")
    raise ValueError(f"unknown option; known: {', '.join(OPTIONS)}")


def _value(one: Option, value: object) -> Any:
    if value is None:
        raise ValueError(
            f"expected {one.expected}, got nothing; leave the line out for the usual one"
        )
    return checked(one, value)


def _placed(value: Any, path: Path) -> Any:
    """A value whose paths are relative to the file. A pipe stands in no folder of the user."""
    return path.parent / value if isinstance(value, Path) and path.is_file() else value
