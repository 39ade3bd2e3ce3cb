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
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from planner.artefacts.files import read_text, said
from planner.artefacts.problem import Optimizer
from planner.clusters.yaml.schema import key_lines, yaml_of
from planner.launcher.settings import NanRule
from planner.support.errors import FileError
from planner.support.reading import MAX_OPTIONS_BYTES

HASH_DIGITS = 12
ADVICE = "write options of `planner launch`, such as lr: 0.1, a line each"


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of values.

    Attributes:
        words: say what is expected.
        read: the value for `planner.launch`; None where it is of another kind.
    """

    words: str
    read: Callable[[object], Any]


def _count(value: object) -> int | None:
    return value if type(value) is int and value >= 1 else None


def _whole(value: object) -> int | None:
    return value if type(value) is int else None


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 <= value <= sys.float_info.max else None


def _positive(value: object) -> float | None:
    return _number(value) or None


def _flag(value: object) -> bool | None:
    return value if isinstance(value, bool) else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value and "\0" not in value else None


def _path(value: object) -> Path | None:
    text = _text(value)
    try:
        return None if text is None else Path(os.fsdecode(os.fsencode(text)))
    except ValueError:  # half of a surrogate pair
        return None


def _function(value: object) -> str | None:
    text = _text(value)
    module, _, name = (text or "").partition(":")
    return text if module and name else None


def _functions(value: object) -> tuple[str, ...] | None:
    names = [_function(one) for one in (value if isinstance(value, list) else [value])]
    return tuple(one for one in names if one is not None) if all(names) else None


def _choice(*known: str) -> Kind:
    return Kind(f"one of {', '.join(known)}", lambda value: value if value in known else None)


def _by_output(kind: Kind) -> Kind:
    """One value, or one for each output."""

    def read(value: object) -> Any:
        if not isinstance(value, dict):
            return kind.read(value)
        values = {name: kind.read(one) for name, one in value.items()}
        sound = values and all(_text(n) and one is not None for n, one in values.items())
        return values if sound else None

    return Kind(f"{kind.words}, or a mapping from outputs to such", read)


COUNT = Kind("a whole number of at least 1", _count)
WHOLE = Kind("a whole number", _whole)
NUMBER = Kind("a finite number of at least 0", _number)
POSITIVE = Kind("a finite number above 0", _positive)
FLAG = Kind("true or false", _flag)
TEXT = Kind("text", _text)
PATH = Kind("a path", _path)
FUNCTION = Kind("module:function", _function)
FUNCTIONS = Kind("module:function, or a list of such", _functions)

KINDS: Mapping[str, Kind] = {
    "steps": COUNT,
    "epochs": COUNT,
    "optimizer": _choice(*Optimizer),
    "lr": NUMBER,
    "lr_schedule": TEXT,
    "weight_decay": NUMBER,
    "clip": POSITIVE,
    "nan": _choice(*NanRule),
    "dtype": _choice("float64", "float32", "bfloat16", "float16"),
    "data": FUNCTION,
    "shuffle": FLAG,
    "eval_data": FUNCTION,
    "eval_every": COUNT,
    "metric": FUNCTIONS,
    "log": PATH,
    "threads": COUNT,
    "seed": WHOLE,
    "loss": _by_output(TEXT),
    "class_dim": _by_output(WHOLE),
    "device": _choice("auto", "cpu", "cuda"),
    "hang_timeout": NUMBER,
    "model": PATH,
    "trace": PATH,
    "track_memory": FLAG,
    "checkpoint": PATH,
    "checkpoint_every": COUNT,
    "checkpoint_keep": COUNT,
    "resume": PATH,
}
"""The options that a file may have."""
ARGUMENTS: Mapping[str, str] = {"lr": "learning_rate", "metric": "metrics"}
"""Arguments of `planner.launch` that are not called after their option."""
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
        raise FileError(f"{path}: expected options, got {said(plain)}; {ADVICE}")
    lines = key_lines(text)
    values: dict[str, Any] = {}
    wrong: list[tuple[int, str]] = []
    for key, value in plain.items():
        option = key.replace("-", "_") if isinstance(key, str) else ""
        mistake = "given twice, with - and with _" if option in values else _mistake(option, value)
        if mistake is not None:
            name = key if isinstance(key, str) else said(key)
            line = lines.get(name, 0)
            place = f"{path}: line {line}: " if line else f"{path}: "
            wrong.append((line, f"{place}{name}: {mistake}"))
        else:
            values[option] = KINDS[option].read(value)
    if wrong:
        raise FileError("\n".join(message for _, message in sorted(wrong)))
    digest = hashlib.sha256(text.encode()).hexdigest()[:HASH_DIGITS]
    given = {ARGUMENTS.get(one, one): value for one, value in _placed(values, path)}
    return {**given, "config": f"{path.name} {digest}"}


def _mistake(option: str, value: object) -> str | None:
    """What is wrong with an option."""
    if option not in KINDS:
        return _unknown(option)
    if value is None:
        return f"expected {KINDS[option].words}, got nothing; leave the line out for the usual one"
    if KINDS[option].read(value) is None:
        return f"expected {KINDS[option].words}, got {said(value)}"
    return None


def _unknown(option: str) -> str:
    if option in OF_PROCESSES:
        return "no option of a file; give it on the command line"
    options = {**{name: name for name in KINDS}, **{ARGUMENTS[one]: one for one in ARGUMENTS}}
    near = get_close_matches(option, options, n=1)
    if near:
        return f"unknown option; did you mean {options[near[0]]}?"
    return f"unknown option; known: {', '.join(KINDS)}"


def _placed(values: Mapping[str, Any], path: Path) -> Iterator[tuple[str, Any]]:
    """Values with paths as seen from here. A pipe stands in no folder of the user."""
    folder = path.parent if path.is_file() else Path()
    for option, value in values.items():
        yield option, folder / value if KINDS[option] is PATH else value
