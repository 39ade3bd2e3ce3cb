"""Modules and functions that the user names."""

import sys

import pytest

from planner.support.errors import OptionError
from planner.support.named import check_named, function_named, module_named


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with modules; afterwards, sys.path and the loaded modules are as before."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    loaded = {*sys.modules}
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "named_neighbour.py").write_text("VALUE = 7\n")
    (inside / "named_nets.py").write_text(
        "import named_neighbour\ndef net():\n    return named_neighbour.VALUE\nnumber = 3\n"
    )
    (inside / "my-net.v2.py").write_text("def net():\n    return __name__\n")
    (tmp_path / "named_nets.py").write_text("def net():\n    return 'here'\n")
    (inside / "__init__.py").write_text("raise RuntimeError('is run')\n")
    (tmp_path / "named_star.py").write_text("from os.path import *\n")
    (tmp_path / "named_wrong.py").write_text("def f(:\n")
    yield tmp_path
    for name in {*sys.modules} - loaded:
        del sys.modules[name]


def test_a_file_in_another_folder_imports_its_neighbours(folder):
    assert function_named("inside/named_nets.py:net", "factory", OptionError)() == 7
    assert (
        function_named(f"{folder}/inside/my-net.v2.py:net", "factory", OptionError)() == "my-net.v2"
    )


def test_two_files_of_one_name_are_two_modules(folder):
    assert function_named("inside/named_nets.py:net", "factory", OptionError)() == 7
    assert function_named("named_nets.py:net", "factory", OptionError)() == "here"
    assert function_named("inside/named_nets.py:net", "factory", OptionError)() == 7


def test_a_file_is_run_once(folder):
    assert module_named("named_nets.py", "it", OptionError) is module_named(
        "named_nets.py", "it", OptionError
    )
    assert module_named("named_nets", "it", OptionError) is sys.modules["named_nets"]


def test_a_file_that_fails_may_be_mended_and_named_again(folder):
    for _ in range(2):
        with pytest.raises(OptionError, match=r"it named_wrong.py: SyntaxError"):
            module_named("named_wrong.py", "it", OptionError)


@pytest.mark.parametrize(
    "name",
    ["named_nets:net", "inside/named_nets.py:net", "inside.named_nets:number", "named_star:join",
     "os.path:join", "math:sqrt"],
)  # fmt: skip
def test_a_function_is_looked_for_without_running_its_module(folder, name):
    before = {*sys.modules}
    check_named(name, "--loss", OptionError)
    assert {*sys.modules} == before


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("named_nets:nett", "--loss named_nets:nett: named_nets has no 'nett'; did you mean net?"),
        ("named_none:f", "--loss named_none:f: there is no module 'named_none' here or installed"),
        ("named_nets.inner:f", "there is no module 'named_nets.inner'"),
        ("inside.none:f", "there is no module 'inside.none'"),
        ("inside/none.py:f", "--loss inside/none.py:f: there is no file inside/none.py"),
        ("named_wrong:f", "--loss named_wrong:f: SyntaxError"),
        ("f", "--loss: expected module:function, got 'f'"),
    ],
)
def test_what_is_not_there_is_named(folder, name, said):
    with pytest.raises(OptionError) as error:
        check_named(name, "--loss", OptionError)
    assert said in str(error.value)


def test_a_file_that_is_not_there_is_named(folder):
    with pytest.raises(OptionError, match=r"factory none.py:f: there is no file none.py"):
        function_named("none.py:f", "factory", OptionError)
