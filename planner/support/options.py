"""Options: what a user may choose, declared once as a field of a frozen dataclass.

    @dataclass(frozen=True, slots=True)
    class Training(Options):
        microbatches: int | None = option("Microbatches per iteration.", least=1, metavar="M")
        reserve: int = option("Memory left free.", 2**30, parse=parse_bytes, words="a size")

The command line (`planner.commands.options.takes`), YAML files (`planner.training.config`), Python
(the constructor) and the handshake of the ranks (`planner.launcher.rendezvous`) read these fields.
The type of a field says which values it takes; None is one of them where the default is None:

    bool, int, float, str, Path  that type. It is strict: True is no number, 2.5 is no count
    StrEnum                      a member or its value
    object                       text, or any object of Python
    tuple[X, ...]                several; a single X is taken for a tuple of one
    Mapping[str, X]              an X by name
    X | Mapping[str, X]          one X for all outputs of a model, or an X by output

X may be a type of options itself: its value is a mapping with their names as keys.
"""

import math
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from enum import Enum, StrEnum
from pathlib import Path
from types import MappingProxyType, NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from planner.support.errors import OptionError, UnitError, shown


class Form(Enum):
    """How many values an option has."""

    ONE = "one"
    SEVERAL = "several"
    BY_NAME = "by name"
    BY_OUTPUT = "one for all outputs, or one by output"


def option(
    help: str,
    default: Any = None,
    *,
    flag: str = "",
    former: str = "",
    metavar: str = "",
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    choices: tuple[str, ...] = (),
    parse: Callable[[str], Any] | None = None,
    words: str = "",
    shown: str = "",
    separator: str = "",
    per_rank: bool = False,
) -> Any:
    """A field of a type of options.

    Args:
        help: one or two sentences for the user; without, only Python has the option.
        default: the value of an option that is not given.
        flag: its name on the command line, where this is not the field's.
        former: an earlier name of the field, by which it can still be given; no text shows it.
        metavar: the value in help texts; empty takes the type's name.
        least: smallest number.
        above: all numbers are larger.
        most: largest number.
        choices: the texts to choose from; those of a StrEnum are known.
        parse: text -> value; a ValueError or UnitError says what was expected.
        words: what is expected, for messages; empty for plain types.
        shown: the default in words, where help texts do not show the value.
        separator: between several values in one text; empty repeats the option instead.
        per_rank: whether ranks of one launch may have different values.
    """
    facts = {name: value for name, value in locals().items() if name != "default"}
    return field(default=default, metadata={"option": facts})


@dataclass(frozen=True, slots=True)
class Option:
    """A field of a type of options; see `option`.

    Attributes:
        name: of the field, and of the keyword argument.
        type: of one value.
        form: see `Form`.
        default: see `option`; the others too.
    """

    name: str
    type: type
    form: Form
    default: Any
    help: str
    flag: str
    former: str
    metavar: str
    least: float | None
    above: float | None
    most: float | None
    choices: tuple[str, ...]
    parse: Callable[[str], Any] | None
    words: str
    shown: str
    separator: str
    per_rank: bool

    @property
    def item(self) -> str:
        """One value, in words for messages."""
        if self.words or self.choices:
            return self.words or f"one of {', '.join(self.choices)}"
        number = {int: "a whole number", float: "a finite number"}.get(self.type)
        if number is None:
            return {bool: "true or false", str: "text", Path: "a path"}.get(self.type, "a value")
        if self.above is not None:
            return f"{number} above {self.above:g}"
        if self.most is not None:
            return f"{number} from {self.least:g} to {self.most:g}"
        return number if self.least is None else f"{number} of at least {self.least:g}"

    @property
    def expected(self) -> str:
        """All that it takes, in words for messages."""
        return {
            Form.ONE: self.item,
            Form.SEVERAL: f"{self.item}, or a list of such",
            Form.BY_NAME: f"a mapping from names to {self.item}",
            Form.BY_OUTPUT: f"{self.item}, or a mapping from outputs to such",
        }[self.form]


def declared(kind: type["Options"]) -> Mapping[str, Option]:
    """The options that a type declares, by the names of its fields."""
    if kind in _DECLARED:
        return _DECLARED[kind]
    hints = get_type_hints(kind)
    made = {}
    for one in fields(kind):  # type: ignore[arg-type]  # every subclass is a dataclass
        facts = {**one.metadata["option"]}
        form, item = _form(hints[one.name])
        if issubclass(item, StrEnum):
            facts["choices"] = tuple(member.value for member in item)
        facts["flag"] = facts["flag"] or f"--{one.name.replace('_', '-')}"
        made[one.name] = Option(one.name, item, form, one.default, **facts)
    return _DECLARED.setdefault(kind, MappingProxyType(made))


def _form(hint: Any) -> tuple[Form, type]:
    """The form of an option and the type of one value."""
    united = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    kinds = [kind for kind in united if kind is not NoneType]
    if len(kinds) == 2:
        return Form.BY_OUTPUT, kinds[0]
    (kind,) = kinds
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is tuple and arguments[1:] == (...,):
        return Form.SEVERAL, get_origin(arguments[0]) or arguments[0]
    if origin is not None and issubclass(origin, Mapping):
        return Form.BY_NAME, arguments[1]
    return Form.ONE, kind


_DECLARED: dict[type, Mapping[str, Option]] = {}


class Options:
    """The base of all types of options: a value out of range is an `OptionError`."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for name, one in declared(type(self)).items():
            try:
                value = checked(one, getattr(self, name))
            except (ValueError, UnitError) as error:
                raise OptionError(f"{one.flag}: {error}") from None
            object.__setattr__(self, name, value)


def checked(one: Option, value: Any, *, typed: bool = True) -> Any:
    """The value of an option, as the planner computes with it.

    Args:
        typed: whether numbers are numbers, as in Python and YAML. On the command line they are
            text, and values with a name are texts such as "sequence=128".

    Raises:
        ValueError: if it is of another type or out of range; it says what was expected.
        UnitError: the same, for text without a unit.
    """
    if value is None and one.default is None:
        return None
    if one.form in (Form.BY_NAME, Form.BY_OUTPUT) and not typed:
        value = _by_name(one, value)
    if one.form is Form.SEVERAL and isinstance(value, str) and one.separator:
        value, typed = [text.strip() for text in value.split(one.separator)], False
    if one.form is Form.SEVERAL and isinstance(value, list | tuple):
        return tuple(_single(one, item, one.item, typed=typed) for item in value)
    if one.form in (Form.BY_NAME, Form.BY_OUTPUT) and isinstance(value, Mapping):
        if not all(isinstance(name, str) and _is_text(name) for name in value):
            raise ValueError(f"expected {one.expected}, got {shown(value)}")
        return {name: _named(one, name, item, typed=typed) for name, item in value.items()}
    if one.form is Form.BY_NAME:
        raise ValueError(f"expected {one.expected}, got {shown(value)}")
    single = _single(one, value, one.expected, typed=typed)
    return (single,) if one.form is Form.SEVERAL else single


def _by_name(one: Option, texts: Any) -> Any:
    """Texts NAME=VALUE, or pairs of both, by name; the only value if it has no name."""
    pairs = [(*text.rpartition("=")[::2],) if isinstance(text, str) else text for text in texts]
    names = [name for name, _ in pairs]
    if one.form is Form.BY_OUTPUT and names == [""]:
        return pairs[0][1]
    if one.form is Form.BY_OUTPUT and ("" in names or len({*names}) < len(names)):
        raise ValueError("expected it once, or once for each output as OUTPUT=VALUE")
    for name, value in pairs:
        if not name:
            raise ValueError(f"expected {one.metavar}, got {value!r}")
        if names.count(name) > 1:
            raise ValueError(f"{name} is given more than once")
    return dict(pairs)


def _named(one: Option, name: str, value: Any, *, typed: bool) -> Any:
    try:
        return _single(one, value, one.item, typed=typed)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _single(one: Option, value: Any, expected: str, *, typed: bool) -> Any:
    """One value, of the right type and in its range."""
    if isinstance(value, str) and one.parse is not None:
        read = one.parse(value)
    elif isinstance(value, Mapping) and issubclass(one.type, Options):
        read = options_in(one.type, value)
    else:
        try:
            read = _converted(one, value, typed=typed)
        except (ValueError, OverflowError):
            read = None
    if not _fits(one, read):
        raise ValueError(f"expected {expected}, got {shown(value)}")
    return read


def options_in(kind: type[Options], values: Mapping[Any, Any]) -> Options:
    """A value of a type of options, from a mapping with the names of its fields.

    Raises:
        ValueError: if there is no field of a name, or a value is wrong.
    """
    known = declared(kind)
    for name in values:
        if name not in known:
            near = get_close_matches(str(name), known, n=1)
            advice = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
            raise ValueError(f"unknown key {shown(name)}; {advice}")
    try:
        return kind(**values)
    except OptionError as error:
        raise ValueError(str(error)) from None


def _converted(one: Option, value: Any, *, typed: bool) -> Any:
    """A value in the option's type, where it is given in another one that stands for it."""
    if isinstance(value, str) and value in one.choices:
        return one.type(value)
    if isinstance(value, str) and one.type in (int, float) and not typed:
        return one.type(value)
    if isinstance(value, str | os.PathLike) and one.type is Path:
        return Path(os.fsdecode(os.fsencode(value))) if _is_text(os.fspath(value)) else None
    return float(value) if one.type is float and type(value) is int else value


def _is_text(text: str) -> bool:
    return bool(text) and "\0" not in text


def _fits(one: Option, value: Any) -> bool:
    """Whether a value is of the right type and in its range."""
    if not isinstance(value, one.type) or (isinstance(value, bool) and one.type is not bool):
        return one.type is object and value is not None
    if isinstance(value, str):
        return value in one.choices if one.choices else _is_text(value)
    if not isinstance(value, int | float) or one.type is bool:
        return True
    return (
        (isinstance(value, int) or math.isfinite(value))
        and (one.least is None or value >= one.least)
        and (one.above is None or value > one.above)
        and (one.most is None or value <= one.most)
    )


def given(options: Options) -> dict[str, Any]:
    """The options that are not as by default, by name."""
    values = {
        name: (getattr(options, name), one.default) for name, one in declared(type(options)).items()
    }
    return {name: value for name, (value, default) in values.items() if value != default}


def typed_as(one: Option, value: Any) -> str:
    """An option as it is typed: its flag, with the value where this is one of some choices."""
    if one.type is bool and value is False:
        return f"--no-{one.flag.removeprefix('--')}"
    return f"{one.flag} {value}" if one.choices else one.flag


def options_from(
    function: str, how: Mapping[str, Any], *kinds: type[Options], without: Collection[str] = ()
) -> list[Any]:
    """Keyword arguments of a function as a value of each type whose fields they are.

    Args:
        function: its name, for the message.
        without: names of fields that the function does not take.

    Raises:
        TypeError: if no type has a field of that name.
        OptionError: if a value is wrong.
    """
    known = [declared(kind).keys() - {*without} for kind in kinds]
    new = {one.former: name for kind in kinds for name, one in declared(kind).items() if one.former}
    for name in how:
        if not any(new.get(name, name) in names for names in known):
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
        if new.get(name) in how:
            raise TypeError(f"{function}() got {new[name]!r} and its former name {name!r}")
    how = {new.get(name, name): value for name, value in how.items()}
    return [
        kind(**{name: how[name] for name in how if name in names})
        for kind, names in zip(kinds, known, strict=True)
    ]
