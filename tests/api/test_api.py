"""The functions of `planner`: what they load, what they are called, and the page about them."""

import importlib
import inspect
import json
import pkgutil
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

import planner
from planner import api
from planner.artefacts.calibration import Calibration, CalibrationFile
from planner.artefacts.files import artefact_hash, calibration_path, write_calibration
from planner.clusters.yaml.read import read_topology
from planner.support.errors import FileError, OptionError, TopologyError
from planner.support.units import format_seconds
from tests.support.builders import cluster, graph_of, profile_of, unit_type
from tests.support.commands import chain_on_two_hosts, run

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "api.md").read_text()
FUNCTIONS = ("export", "profile", "solve", "compare", "simulate", "convert", "calibrate", "launch")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a profile of six operators and two hosts of two T4."""
    monkeypatch.chdir(tmp_path)
    chain_on_two_hosts(tmp_path)
    return tmp_path


def chain(num_operators=4):
    """A profile of a chain on devices of the type that clusters of tests have."""
    feeds = [[i - 1] if i else [] for i in range(num_operators)]
    graph = graph_of(feeds, [1000] * num_operators, [10**6] * num_operators)
    return replace(profile_of(graph, [0.01] * num_operators), device_type="unit")


# ------------------------------------------------------------------------------ names


def test_importing_the_planner_loads_next_to_nothing():
    code = (
        "import sys, planner\n"
        "before = sorted(name for name in sys.modules if name.startswith('planner'))\n"
        "planner.solve\n"
        "heavy = {'numpy', 'torch', 'numba', 'onnx', 'pydantic', 'networkx', 'click', 'rich'}\n"
        "print(before, sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    loaded = ["planner", *(f"planner.support{name}" for name in ("", ".errors", ".version"))]
    assert done.stdout == f"{loaded} []\n"


def test_no_module_hides_a_function():
    for module in pkgutil.walk_packages(planner.__path__, "planner."):
        importlib.import_module(module.name)
    for name in FUNCTIONS:
        assert inspect.isfunction(getattr(planner, name)), name


def test_every_public_function_of_the_api_is_a_name_of_the_planner():
    own = {
        name
        for name, value in vars(api).items()
        if getattr(value, "__module__", "").startswith(f"{api.__name__}.") and name[0] != "_"
    }
    assert {"solve", "export", "launch"} < own <= set(planner.__all__)
    assert set(planner.__all__) <= set(dir(planner))
    for name in set(planner.__all__) - {"__version__", "PlannerError"}:
        assert getattr(planner, name) is getattr(api, name)


def test_a_name_that_there_is_not_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'planner' has no attribute 'slove'"):
        planner.slove  # noqa: B018


# ------------------------------------------------------------------------------ the page


def blocks(text):
    """The Python blocks of a page, one after the other."""
    return "\n".join(re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE))


def test_the_page_shows_every_function():
    shown = set(re.findall(r"planner\.(\w+)", blocks(PAGE)))
    functions = {name for name in planner.__all__ if inspect.isfunction(getattr(planner, name))}
    # Ranks call the one; the other needs a problem of the contest.
    assert functions - shown == {"probe", "solve_contest"}
    assert "`probe`" in PAGE and "solve_contest" in PAGE


def test_the_blocks_of_the_page_run_in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.delitem(sys.modules, "nets", raising=False)  # of another test
    alone, several = PAGE.split("## Several processes")
    assert several
    exec(blocks(alone), {})
    written = {path.name for path in tmp_path.iterdir()}
    assert {"strategy.json", "strategy.onnx", "trace.json", "both.json", "graph.txt"} <= written


@pytest.mark.slow
def test_all_blocks_of_the_page_run_in_an_empty_folder(tmp_path):
    subprocess.run([sys.executable, "-c", blocks(PAGE)], cwd=tmp_path, check=True)
    assert read_topology(tmp_path / "measured.yaml").links


# ------------------------------------------------------------------------------ functions


def test_solve_gives_the_command_s_strategy(folder):
    given = ["--topology", "pair.yaml", "--gpus", "3", "--optimizer", "adam", "--pin", "op0=gpu0"]
    given[-1] = f"{planner.read_profile('profiles/chain.json').graph.operators[0].name}=gpu0"
    run("solve", *given)
    name = given[-1].partition("=")[0]
    plans = planner.solve(
        "profiles/chain.json",
        topology="pair.yaml",
        gpus=3,
        training=planner.Training(optimizer="adam"),
        search=planner.Search(pins=((name, "gpu0"),)),
    )
    planner.write_strategy(plans.plan, "mine.json", profile="profiles/chain.json")
    assert Path("mine.json").read_bytes() == Path("strategy.json").read_bytes()


def test_artefacts_and_their_files_are_the_same_arguments(folder):
    read = planner.read_profile("profiles/chain.json"), planner.read_topology("pair.yaml")
    from_files = planner.solve("profiles/chain.json", topology="pair.yaml", solvers=["even"])
    from_artefacts = planner.solve(read[0], topology=read[1], solvers=["even"])
    assert from_files.plan == from_artefacts.plan
    planner.write_strategy(from_files.plan, "strategy.json")
    found = planner.simulate("strategy.json")
    given = planner.simulate(from_files.plan, profile=read[0], topology=read[1])
    assert found.plan == given.plan
    assert found.plan.prediction == from_files.plan.prediction


def test_gpus_takes_the_first_devices_of_a_topology_that_is_read():
    topology = cluster([unit_type()] * 4)
    assert planner.solve(chain(), topology=topology, gpus=2, solvers=["even"]).num_devices == 2


def test_a_choice_that_there_is_not_lists_those_that_there_are():
    topology = cluster([unit_type()] * 2)
    with pytest.raises(
        OptionError, match="--optimizer: expected one of sgd, momentum, adam, adamw, got 'lion'"
    ):
        planner.solve(chain(), topology=topology, training=planner.Training(optimizer="lion"))
    with pytest.raises(OptionError, match="unknown cost model 'alpa'"):
        planner.solve(chain(), topology=topology, cost_model="alpa")


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda: planner.Training(microbatches=0),
            "--microbatches: .* number of at least 1, got 0",
        ),
        (
            lambda: planner.Training(global_batch=-8),
            "--global-batch: .* number of at least 1, got -8",
        ),
        (
            lambda: planner.Training(microbatches=True),
            "--microbatches: .* number of at least 1, got True",
        ),
        (
            lambda: planner.Training(global_batch=2.5),
            "--global-batch: .* number of at least 1, got 2.5",
        ),
        (lambda: planner.Training(reserve=2.5), "--reserve: expected a size .*, got 2.5"),
        (
            lambda: planner.Training(device_memory=True),
            "--device-memory: expected a size .*, got True",
        ),
        (lambda: planner.Training(device_memory=-5), "--device-memory: expected a size .*, got -5"),
        (lambda: planner.solve(()), "no profile is given"),
        (lambda: planner.calibrate([], profiles=[]), "no trace is given"),
        (lambda: planner.convert("a", "b", to="c"), "unknown format 'c'; known: pipedream, plan"),
        (lambda: planner.import_topology("a", form="b"), "--from: expected one of nvidia-smi, "),
        (lambda: planner.profile("a.onnx", engine="b"), "--engine: expected one of torch, onnx"),
        (
            lambda: planner.read_topology("p3", 0),
            "gpus: expected a whole number of at least 1, got 0",
        ),
    ],
)
def test_an_argument_that_makes_no_sense_is_refused(call, said):
    with pytest.raises(planner.PlannerError, match=said):
        call()


def test_sizes_are_bytes_or_text():
    topology = cluster([unit_type(memory=10**9)] * 2)
    limits = [
        planner.solve(
            chain(), topology=topology, solvers=["single"],
            training=planner.Training(device_memory=size, reserve=0),
        ).problems[0].training.device_memory
        for size in (2**29, "512 MiB")
    ]  # fmt: skip
    assert limits == [2**29, 2**29]
    with pytest.raises(planner.PlannerError, match="such as '80 GiB'"):
        planner.solve(chain(), topology=topology, training=planner.Training(reserve="1"))


def sized(size, **changes):
    """The chain for microbatches of some size."""
    return replace(chain(), microbatch_size=size, **changes)


def test_profiles_of_several_sizes_may_be_given_in_any_order():
    topology, training = cluster([unit_type()] * 2), planner.Training(microbatches=4)
    profiles = [sized(1), sized(4)]
    plans = [
        planner.solve(given, topology=topology, solvers=["even"], training=training).plan
        for given in (profiles, profiles[::-1])
    ]
    assert plans[0] == plans[1]
    assert plans[0].microbatch_size * plans[0].strategy.num_microbatches == 16


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (sized(4, model_hash="1" * 64), "expected one model_hash for all"),
        (sized(4, device_type="other"), "expected one device_type for all"),
        (sized(4, tie=("w",)), "expected one tie for all"),
        (sized(1), "expected ascending microbatch sizes"),
    ],
)
def test_profiles_that_do_not_go_together_are_refused(other, reason):
    with pytest.raises(OptionError, match=f"profiles: {reason}"):
        planner.solve([sized(1), other], topology=cluster([unit_type()] * 2), solvers=["even"])


def test_where_nothing_fits_there_is_no_plan():
    topology = cluster([unit_type(memory=10)] * 2)
    training = planner.Training(reserve=0)
    plans = planner.solve(chain(), topology=topology, solvers=["even"], training=training)
    assert plans.plan is None
    assert repr(plans) == "<Plans of 1 row, 2 devices: no strategy fits>"
    assert plans.best is None
    assert planner.sensitivity(plans) == ()


def test_answers_are_one_line_in_a_notebook():
    topology = cluster([unit_type()] * 2)
    plans = planner.solve(chain(), topology=topology, solvers=["single"])
    simulation = planner.simulate(plans.plan, profile=chain(), topology=topology)
    time = f"{format_seconds(plans.plan.prediction.iteration_s)} per iteration"
    assert repr(plans) == f"<Plans of 1 row, 2 devices: single, {time}>"
    assert repr(simulation) == f"<Simulation of {simulation.num_actions} actions: {time}>"


def test_progress_hears_of_every_solver():
    heard = []
    topology = cluster([unit_type()] * 2)
    planner.compare(chain(), topology=topology, solvers=["single", "even"], progress=heard.append)
    assert heard == ["single", "even"]


@pytest.mark.parametrize(
    ("search", "option"),
    [
        (planner.Search(pins=(("op0", "gpu0"),)), "--pin"),
        (planner.Search(switches=planner.own_options({"replicas": (1, 1)})), "--replicas"),
    ],
)
def test_other_cost_models_refuse_what_they_would_ignore(search, option):
    topology = cluster([unit_type()] * 2)
    for ask in (
        lambda: planner.solve(chain(), topology=topology, search=search, cost_model="pipedream"),
        lambda: planner.solve_under("piper", chain(), topology=topology, search=search),
    ):
        with pytest.raises(OptionError, match=f"{option} is for --cost-model planner"):
            ask()


def test_changes_are_planned_beside_the_present_cluster(folder):
    plans = planner.solve(
        "profiles/chain.json",
        topology="pair.yaml",
        solvers=["data-parallel"],
        what_if=planner.WhatIf(drop=("gpu3",)),
    )
    assert (plans.before.num_devices, plans.num_devices) == (4, 3)
    assert plans.changes == ("without gpu3",)
    samples = [
        one.problems[0].num_microbatches * one.problems[0].profile.microbatch_size
        for one in (plans.before, plans)
    ]
    assert samples[0] == samples[1]


def test_a_strategy_is_simulated_on_the_profile_that_it_was_made_for(folder):
    plan = planner.solve("profiles/chain.json", topology="pair.yaml", solvers=["even"]).plan
    with pytest.raises(FileError, match="the strategy: made for profile"):
        planner.simulate(plan, profile=chain(), topology="pair.yaml")
    small = planner.read_topology("pair.yaml", 2)
    with pytest.raises(FileError, match="the topology pair: has 2 devices, the strategy's need 4"):
        planner.simulate(plan, topology=small)


def test_corrections_beside_a_profile_are_applied_unless_they_are_refused(folder):
    path = Path("profiles/chain.json")
    slow = Calibration(device_type="T4", runs=1, models=1, forward=2.0, backward=2.0)
    hashes = tuple(map(artefact_hash, planner.read_profiles(path)))
    write_calibration(CalibrationFile(hashes, slow, 0.1, 0.1, "run"), calibration_path(path))

    def iteration_s(ask, **more):
        answer = ask(topology="pair.yaml", **more)
        return answer.plan.prediction.iteration_s

    solve = partial(planner.solve, solvers=["single"])
    stages = partial(planner.simulate_stages, replicas=[1])
    profile = planner.read_profile(path)
    for ask in (solve, partial(planner.compare, solvers=["single"]), stages):
        plain_s = iteration_s(ask, profile=path, calibration=False)
        assert iteration_s(ask, profile=path) > 1.9 * plain_s
        assert iteration_s(ask, profile=profile) == plain_s
        assert iteration_s(ask, profile=profile, calibration=slow) > 1.9 * plain_s
    assert planner.read_calibration(path, [profile]) == slow


def test_stages_that_do_not_fit_say_why():
    topology = cluster([unit_type(memory=10)] * 2)
    training = planner.Training(reserve=0)
    simulation = planner.simulate_stages(
        chain(), replicas=[1], topology=topology, training=training
    )
    assert simulation.plan is None
    assert simulation.reason
    with pytest.raises(OptionError):
        planner.write_svg(simulation, "none.svg")


def test_a_model_that_is_another_one_is_refused(folder):
    from tests.commands.test_cli import mlp

    mlp(folder / "three.onnx", layers=3)
    mlp(folder / "four.onnx", layers=4)
    profile = planner.profile("three.onnx", device="T4")
    plan = planner.solve(profile, topology="pair.yaml", solvers=["single"]).plan
    with pytest.raises(FileError, match=r"strategy\.json: made for model"):
        planner.write_strategy(plan, "strategy.json", model="four.onnx")
    assert not Path("strategy.json").exists()
    strategy, annotated = planner.write_strategy(plan, "sub/strategy.json", model="three.onnx")
    assert annotated.is_file()
    assert json.loads(strategy.read_text())["model_path"] == "../three.onnx"


def test_a_topology_that_is_not_sound_is_refused_as_its_file_would_be():
    profile, sound = profile_of(graph_of([[], [0]]), [1.0] * 2), cluster([unit_type()] * 2)
    unknown = replace(sound.devices[1], type="T1000")
    wrong = replace(sound, devices=(sound.devices[0], unknown), hosts=sound.hosts * 2)
    with pytest.raises(TopologyError) as error:
        planner.solve(profile, topology=wrong)
    assert str(error.value).splitlines() == [
        "host: the name is used twice",
        "devices[1].type: unknown device type 'T1000'; known: unit",
    ]
