"""Every function of `planner` refuses values of wrong types by one message, as the commands do."""

import re
from inspect import Parameter, isfunction, signature

import pytest

import planner
from planner import api
from planner.artefacts.options import LossOptions, ModelOptions
from planner.clusters.options import Importing
from planner.launcher.options import Loop, Probing
from planner.profilers.options import Measuring
from planner.support.arguments import checks_arguments
from planner.support.errors import OptionError, PlannerError
from planner.support.options import declared
from planner.training.options import Checkpoints, Launching, WeightsOptions
from tests.support.builders import cluster, graph_of, profile_of, unit_type

FUNCTIONS = {name: getattr(planner, name) for name in api.__all__}
FUNCTIONS = {name: function for name, function in FUNCTIONS.items() if isfunction(function)}
PARAMETERS = [
    (name, parameter.name)
    for name, function in FUNCTIONS.items()
    for parameter in signature(function).parameters.values()
    if parameter.kind is not Parameter.VAR_KEYWORD and parameter.annotation is not object
]
KEYWORDS = {
    "inspect": (ModelOptions,),
    "read_model": (ModelOptions, LossOptions),
    "profile": (Measuring, ModelOptions, LossOptions),
    "profile_sizes": (Measuring, ModelOptions, LossOptions),
    "launch": (Loop, LossOptions, Launching, Checkpoints),
    "trainer": (Loop, LossOptions, Launching, Checkpoints),
    "probe": (Probing,),
    "import_topology": (Importing,),
    "write_weights": (WeightsOptions,),
}


def fitting(parameter):
    """A value of a parameter's type. Of an artefact, the name of its class is enough."""
    kind = str(parameter.annotation)
    if "Sequence[" in kind:
        return []
    if "Mapping[" in kind:
        return {}
    if "File" in kind or "PathLike" in kind or parameter.annotation is str:
        return "none"
    if parameter.annotation is int:
        return 2
    if isinstance(parameter.annotation, type):
        return object.__new__(parameter.annotation)
    name = re.findall(r"\w+", kind.removesuffix("'>"))[-1]
    return type(name, (), {})()


def required(function):
    """Arguments that fit, for all parameters without a default."""
    return {
        one.name: fitting(one)
        for one in signature(function).parameters.values()
        if one.default is Parameter.empty and one.kind is not Parameter.VAR_KEYWORD
    }


@pytest.mark.parametrize(("name", "parameter"), PARAMETERS)
def test_a_value_of_no_type_is_refused_by_its_parameter(name, parameter):
    function = FUNCTIONS[name]
    for wrong in (object(), type("Stranger", (), {})):
        if callable(wrong) and "Callable" in str(signature(function).parameters[parameter]):
            continue
        with pytest.raises(OptionError, match=f"^{parameter}: expected .*, got <"):
            function(**{**required(function), parameter: wrong})


def test_functions_with_keywords_are_all_tested():
    kinds = {
        name: [one.kind for one in signature(function).parameters.values()]
        for name, function in FUNCTIONS.items()
    }
    assert {name for name, of in kinds.items() if Parameter.VAR_KEYWORD in of} == {*KEYWORDS}


@pytest.mark.parametrize("name", KEYWORDS)
def test_a_keyword_of_a_wrong_type_is_refused_by_its_option(name):
    function = FUNCTIONS[name]
    for kind in KEYWORDS[name]:
        for field, one in declared(kind).items():
            if one.type is object or field in ("reports_loss", "config"):
                continue
            try:
                function(**{**required(function), field: object()})
            except OptionError as error:
                assert f"{one.flag}: expected" in str(error) or f"{field}: expected" in str(error)
            except TypeError as error:  # a field that this function does not have
                assert f"unexpected keyword argument '{field}'" in str(error)
            else:
                pytest.fail(f"{name}({field}=object()) is taken")


@pytest.mark.parametrize("kind", [planner.Training, planner.Search, planner.WhatIf])
def test_types_of_options_refuse_wrong_values(kind):
    for field in declared(kind):
        with pytest.raises(OptionError, match=r"expected .*, got <object"):
            kind(**{field: object()})


PROFILE = profile_of(graph_of([[], [0], [1]]), [1.0] * 3)
PAIR = cluster([unit_type()] * 2)
WRONG = [
    ("gpus", "2", "gpus: expected a whole number of at least 1, got '2'"),
    ("gpus", 2.5, "gpus: expected a whole number of at least 1, got 2.5"),
    ("gpus", 0, "gpus: expected a whole number of at least 1, got 0"),
    ("gpus", True, "gpus: expected a whole number of at least 1, got True"),
    ("topology", 5, "topology: expected a path or a Topology, got 5"),
    ("topology", None, "topology: expected a path or a Topology, got nothing"),
    ("training", {}, "training: expected a Training, got a mapping"),
    ("search", None, "search: expected a Search, got nothing"),
    ("time_limit_s", "5", "time_limit_s: expected a time such as"),
    ("time_limit_s", -1, 'time_limit_s: expected a time such as "30 s", got -1'),
    ("time_limit_s", float("nan"), 'time_limit_s: expected a time such as "30 s", got nan'),
    ("time_limit_s", None, 'time_limit_s: expected a time such as "30 s", got nothing'),
    ("solvers", "singel", "unknown solver 'singel'; known: single"),
    ("solvers", [], "solvers: expected at least one name, got none"),
    ("solvers", [3], "solvers: expected text, got 3"),
    ("calibration", "yes", "calibration: expected true or false or a Calibration, got 'yes'"),
    ("progress", 3, "progress: expected a function, got 3"),
    ("what_if", ["a"], "what_if: expected a WhatIf, got a list"),
]


@pytest.mark.parametrize(("name", "value", "said"), WRONG)
@pytest.mark.parametrize("function", [planner.solve, planner.compare])
def test_wrong_arguments_of_a_search_are_named(function, name, value, said):
    with pytest.raises(OptionError, match=f"^{re.escape(said)}"):
        function(PROFILE, **{"topology": PAIR, name: value})


def test_one_solver_and_a_time_with_a_unit_are_taken_as_on_the_command_line():
    plans = planner.solve(PROFILE, topology=PAIR, solvers="single", time_limit_s="5 s")
    assert [row.solver for row in plans.comparison.rows] == ["single"]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: planner.simulate(None), "strategy: expected a path or a Plan or Inputs, got"),
        (lambda: planner.inspect(3), "path: expected a path, got 3"),
        (
            lambda: planner.calibrate("t.json", profiles=[PROFILE]),
            "traces: expected a list (each item: a path), got",
        ),
        (
            lambda: planner.calibrate([1], profiles=[PROFILE]),
            "traces: expected a list (each item: a path), got a list",
        ),
        (lambda: planner.solve([PROFILE, 3]), "profile: expected a path or a Profile or a list"),
        (lambda: planner.start_launch("s", True), "nproc: expected a whole number, got True"),
        (lambda: planner.start_launch("s", 2.0), "nproc: expected a whole number, got 2.0"),
        (lambda: planner.check_outputs({"trace": 3}, {}), "written: expected a mapping from text"),
        (lambda: planner.solve_under("piper", PROFILE, bandwidth=-1), "bandwidth: expected a rate"),
        (lambda: planner.own_options([1]), "values: expected a mapping from text to a value, got"),
    ],
)
def test_wrong_arguments_of_others_are_named(call, said):
    with pytest.raises(PlannerError, match=f"^{re.escape(said)}"):
        call()


def test_a_function_that_is_called_without_an_argument_says_so_as_python_does():
    with pytest.raises(TypeError, match="missing a required argument: 'path'"):
        planner.inspect()
    with pytest.raises(TypeError, match="unexpected keyword argument 'gpu'"):
        planner.solve(PROFILE, gpu=2)


def test_arguments_are_given_on_as_they_are():
    def pair(first: int, *, last: "float | None" = None, **more: object) -> object:
        return first, last, more

    checking = checks_arguments(pair, {})
    assert checking(1, last=2, also=3) == (1, 2, {"also": 3})
    assert checking.__doc__ == pair.__doc__
