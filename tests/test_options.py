"""Options: which values a declared field takes, and what is said of others."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import pytest

from planner.artefacts.options import LossOptions, ModelOptions, Search, Training
from planner.artefacts.strategy import ScheduleName
from planner.launcher.options import Loop
from planner.support.errors import OptionError
from planner.support.options import Options, checked, declared, given, option, options_from
from planner.support.units import parse_bytes


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, slots=True)
class Sample(Options):
    """One option of every kind."""

    flag: bool = option("A flag.", False)
    count: int | None = option("A count.", least=1)
    share: float = option("A share.", 0.5, above=0, most=None)
    level: int = option("A level.", 1, least=1, most=3)
    size: int = option("A size.", 0, parse=parse_bytes, words="a size", least=0)
    colour: Colour = option("A colour.", Colour.RED)
    type: str | None = option("A type.", choices=("a", "b"))
    name: str = option("A name.", "x", flag="--call-it")
    place: Path | None = option("A place.")
    thing: object = option("Anything.")
    names: tuple[str, ...] = option("Names.", ())
    counts: tuple[int, ...] = option("Counts.", (), least=1, separator=",")
    sizes: Mapping[str, int] | None = option("Sizes.", metavar="NAME=N", least=1)
    loss: str | Mapping[str, str] | None = option("A loss.", metavar="[OUTPUT=]LOSS")


OPTIONS = declared(Sample)

TAKEN = [
    ("flag", True, True),
    ("count", None, None),
    ("count", 3, 3),
    ("share", 2, 2.0),
    ("size", "2 KiB", 2048),
    ("size", 7, 7),
    ("colour", "blue", Colour.BLUE),
    ("colour", Colour.BLUE, Colour.BLUE),
    ("type", "a", "a"),
    ("place", "here", Path("here")),
    ("place", Path("here"), Path("here")),
    ("thing", len, len),
    ("thing", True, True),
    ("names", "a,b", ("a,b",)),
    ("names", ["a", "b"], ("a", "b")),
    ("counts", "1, 2", (1, 2)),
    ("counts", 3, (3,)),
    ("sizes", {"a": 1}, {"a": 1}),
    ("loss", "mse", "mse"),
    ("loss", {"a": "mse"}, {"a": "mse"}),
]


@pytest.mark.parametrize(("name", "value", "taken"), TAKEN)
def test_a_value_in_range_is_taken_as_the_type_of_its_field(name, value, taken):
    found = getattr(Sample(**{name: value}), name)
    assert (type(found), found) == (type(taken), taken)


REFUSED = [
    ("flag", 1, "--flag: expected true or false, got 1"),
    ("count", True, "--count: expected a whole number of at least 1, got True"),
    ("count", 2.5, "--count: expected a whole number of at least 1, got 2.5"),
    ("count", 2.0, "--count: expected a whole number of at least 1, got 2.0"),
    ("count", "2", "--count: expected a whole number of at least 1, got '2'"),
    ("count", 0, "--count: expected a whole number of at least 1, got 0"),
    ("share", True, "--share: expected a finite number above 0, got True"),
    ("share", 0, "--share: expected a finite number above 0, got 0"),
    ("share", float("nan"), "--share: expected a finite number above 0, got nan"),
    ("share", 10**400, "--share: expected a finite number above 0, got a number of more than 60"),
    ("share", None, "--share: expected a finite number above 0, got nothing"),
    ("level", 4, "--level: expected a whole number from 1 to 3, got 4"),
    ("size", "2", "--size: expected a size such as '80 GiB', got '2'"),
    ("size", -1, "--size: expected a size, got -1"),
    ("size", 1.5, "--size: expected a size, got 1.5"),
    ("colour", "green", "--colour: expected one of red, blue, got 'green'"),
    ("type", "c", "--type: expected one of a, b, got 'c'"),
    ("name", "", "--call-it: expected text, got ''"),
    ("name", "a\0", "--call-it: expected text, got 'a\\x00'"),
    ("place", 3, "--place: expected a path, got 3"),
    ("names", 3, "--names: expected text, or a list of such, got 3"),
    ("names", ["a", 3], "--names: expected text, got 3"),
    ("counts", "1,0", "--counts: expected a whole number of at least 1, got '0'"),
    ("counts", "1,,2", "--counts: expected a whole number of at least 1, got ''"),
    ("sizes", {"a": 0}, "--sizes: a: expected a whole number of at least 1, got 0"),
    ("sizes", {3: 1}, "--sizes: expected a mapping from names to a whole number of at least 1"),
    ("sizes", 3, "--sizes: expected a mapping from names to a whole number of at least 1, got 3"),
    ("loss", 3, "--loss: expected text, or a mapping from outputs to such, got 3"),
    ("loss", {"a": 3}, "--loss: a: expected text, got 3"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "message"), REFUSED)
def test_any_other_value_is_an_error_that_says_what_was_expected(name, value, message):
    with pytest.raises(OptionError) as error:
        Sample(**{name: value})
    assert str(error.value).startswith(message)


ON_THE_LINE = [
    ("count", "3", 3),
    ("share", "1e-3", 0.001),
    ("sizes", ("a=1", "b=c=2"), {"a": 1, "b=c": 2}),
    ("loss", ("mse",), "mse"),
    ("loss", ("a=mse", "b=l1"), {"a": "mse", "b": "l1"}),
]


@pytest.mark.parametrize(("name", "text", "value"), ON_THE_LINE)
def test_text_of_the_command_line_stands_for_numbers_and_pairs(name, text, value):
    assert checked(OPTIONS[name], text, typed=False) == value


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("count", "three", "expected a whole number of at least 1, got 'three'"),
        ("sizes", ("a",), "expected NAME=N, got 'a'"),
        ("sizes", ("a=0",), "a: expected a whole number of at least 1, got '0'"),
        ("sizes", ("a=1", "a=2"), "a is given more than once"),
        ("loss", ("mse", "l1"), "expected it once, or once for each output as OUTPUT"),
    ],
)
def test_other_text_of_the_command_line_is_an_error(name, text, message):
    with pytest.raises(ValueError, match=message):
        checked(OPTIONS[name], text, typed=False)


def test_an_option_knows_its_flag():
    assert (OPTIONS["name"].flag, OPTIONS["count"].flag) == ("--call-it", "--count")
    assert declared(Search)["max_downsets"].flag == "--max-downsets"


def test_a_field_that_is_no_option_is_a_mistake_of_the_programmer():
    @dataclass(frozen=True, slots=True)
    class Wrong(Options):
        count: int = field(default=1)

    with pytest.raises(KeyError, match="option"):
        Wrong()


def test_the_options_that_are_given_are_those_that_are_not_as_by_default():
    assert given(Training()) == {}
    assert given(Training(schedule="gpipe", microbatches=2)) == {
        "microbatches": 2,
        "schedule": ScheduleName.GPIPE,
    }


def test_keyword_arguments_go_to_the_type_that_has_the_field():
    how = {"batch": 2, "loss": "mse"}
    assert options_from("read", how, ModelOptions, LossOptions) == [
        ModelOptions(batch=2),
        LossOptions(loss="mse"),
    ]
    for name, without in (("size", ()), ("batch", ("batch",))):
        with pytest.raises(
            TypeError, match=rf"read\(\) got an unexpected keyword argument '{name}'"
        ):
            options_from("read", {name: 1}, ModelOptions, LossOptions, without=without)


def test_a_field_has_its_former_name_too():
    assert options_from("launch", {"log": "a"}, Loop) == [Loop(log_file=Path("a"))]
    with pytest.raises(TypeError, match=r"launch\(\) got 'log_file' and its former name 'log'"):
        options_from("launch", {"log": "a", "log_file": "b"}, Loop)


@pytest.mark.parametrize("count", [True, 2.5, "4"])
def test_a_count_of_microbatches_is_a_whole_number(count):
    with pytest.raises(OptionError, match="--microbatches: expected a whole number of at least 1"):
        Training(microbatches=count)
