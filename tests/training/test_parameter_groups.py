"""Groups of parameters beside the same groups of PyTorch's optimizers, in float64."""

import json
from dataclasses import replace

import pytest
import torch
import yaml

from planner.artefacts.files import read_plan
from planner.launcher.options import Loop, ParameterGroup
from planner.launcher.rendezvous import _values, differences
from planner.launcher.seating import RankFacts
from planner.launcher.trained_groups import _names_of, settings, trained_groups
from planner.model.load import ReadOptions, load
from planner.model.trainable import Choice
from planner.support.errors import FileError, OptionError
from planner.training.options import options_of
from tests.support.checkpoint_runs import tensors_of
from tests.support.commands import run
from tests.support.group_runs import (
    DECAY,
    GROUPS,
    HALF,
    RATE,
    by_torch,
    launched,
    run_all,
    write_model,
    write_plans,
)

TOGETHER = ("pipeline", "replicas", "split", "zero1", "zero2", "zero3")


@pytest.fixture(scope="module", params=["adamw", pytest.param("momentum", marks=pytest.mark.slow)])
def told(request, tmp_path_factory):
    """The folder of all launches on two ranks, their losses, and PyTorch's loop."""
    folder = tmp_path_factory.mktemp(request.param)
    write_plans(folder, write_model(folder), request.param)
    launches = {
        **{name: {"strategy": name, "keep": name} for name in TOGETHER},
        "trainer": {
            "strategy": "zero1", "keep": "trainer", "own_loop": True, "learning_rate": 1.0
        },
        "begun": {"strategy": "zero2", "keep": "begun", "steps": HALF},
        "resumed": {"strategy": "pipeline", "keep": "resumed", "resume": "begun"},
        "resumed on zero3": {"strategy": "zero3", "keep": "resumed on zero3", "resume": "begun"},
        "flow of two": {
            "strategy": "flow of two", "keep": "flow of two", "clip": None, "nan": None
        },
    }  # fmt: skip
    return folder, run_all(folder, launches), lambda **how: by_torch(request.param, **how)


def assert_like_torch(folder, name, losses, expected):
    """Losses, and what a launch has kept, to 1e-9."""
    wanted, parameters, states = expected
    assert losses == pytest.approx(wanted[-len(losses) :], rel=1e-9)
    held = tensors_of(folder / name)
    for parameter, value in parameters.items():
        torch.testing.assert_close(held[f"parameters/{parameter}"], value, rtol=1e-9, atol=1e-12)
    for (parameter, word), value in states.items():
        found = held[f"optimizer/{parameter}/{word}"]
        torch.testing.assert_close(found, value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", [*TOGETHER, "trainer", "resumed", "resumed on zero3"])
def test_two_ranks_train_groups_as_torch_does(told, name):
    folder, losses, expected = told
    assert_like_torch(folder, name, losses[name], expected())


def test_one_process_trains_groups_as_torch_does(told):
    folder, _, expected = told
    assert_like_torch(folder, "alone", launched(folder, "alone", "alone"), expected())


def test_asynchronous_schedules_train_groups_as_torch_does(told):
    """Alone, each microbatch is a step; two replicas step together after one microbatch each."""
    folder, losses, expected = told
    alone = launched(folder, "flow", "flow", clip=None, nan=None)
    assert_like_torch(folder, "flow", alone, expected(asynchronous=True))
    assert_like_torch(folder, "flow of two", losses["flow of two"], expected(clip=None))


# -------------------------------------------------------------------- which parameters


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with strategies, and the model."""
    folder = tmp_path_factory.mktemp("groups")
    model = write_model(folder)
    write_plans(folder, model, "adamw")
    return folder, model


def groups_of(model, *groups):
    return [one.names for one in trained_groups(model, Loop(param_groups=groups))]


def test_the_first_group_that_matches_any_name_of_a_parameter_has_it(made):
    _, model = made
    assert _names_of(model)["words.weight"] == ("words.weight", "head.weight")
    norm, bias, head = ({"names": glob} for glob in ("norm.*", "*.bias", "head.weight"))
    names = ("norm.bias", "norm.weight"), ("down.bias", "up.bias"), ("words.weight",)
    assert groups_of(model, norm, bias, head) == [*names]
    first, second = groups_of(model, bias, norm)
    assert (first, second) == (("down.bias", "norm.bias", "up.bias"), ("norm.weight",))
    assert groups_of(model, {"names": "words.weight"}, head) == [("words.weight",), ()]
    assert groups_of(model, {"names": "NORM.*, *.bias"[7:]}) == [first]


def test_no_weight_decay_is_a_group_without_decay(made):
    loop = Loop(no_weight_decay=("*.bias", "norm.*"), weight_decay=0.5)
    assert settings(trained_groups(made[1], loop)) == dict.fromkeys(
        ("down.bias", "norm.bias", "norm.weight", "up.bias"), (1.0, 0.0)
    )


def test_a_file_without_a_record_has_the__names_of_the_exporter_s_notes(made):
    choices = {"up.weight": Choice(trained=True, reason="", parameter="first.weight")}
    model = replace(made[1], record=None, choices=choices)
    assert _names_of(model)["up.weight"] == ("up.weight", "first.weight")
    assert _names_of(model)["words.weight"] == ("words.weight",)


def test_initializers_that_were_tied_by_the_user_have_both_names(made):
    model = replace(made[1], tie=("up.weight", "norm.bias=other.bias"))
    assert _names_of(model)["norm.bias"] == ("norm.bias", "other.bias")
    assert groups_of(model, {"names": "other.*"}) == [("norm.bias",)]


def test_a_name_with_brackets_matches_itself(made, monkeypatch):
    _, model = made
    held = {name: (*names, f"{name}[0]") for name, names in _names_of(model).items()}
    monkeypatch.setattr("planner.launcher.trained_groups._names_of", lambda model: held)
    assert groups_of(model, {"names": ["up.bias[0]"]}) == [("up.bias",)]


# -------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(("how", "message"), [
    ({"no_weight_decay": ["norm.biass", "*.bias"]},
     "--no-weight-decay norm.biass: no trained parameter has such a name; near: norm.bias"),
    ({"no_weight_decay": ["Head.*"]},
     "--no-weight-decay Head.*: no trained parameter has such a name; near: head.weight"),
    ({"param_groups": [{"names": ["*.bias", "none"]}]},
     "--param-group none: no trained parameter has such a name; near: "),
    ({"param_groups": [{"names": "*", "lr": 1.0}]},
     "--param-group: unknown key 'lr'; known: names, lr_factor, weight_decay"),
    ({"param_groups": {"names": "*", "lr_facto": 1.0}},
     "--param-group: unknown key 'lr_facto'; did you mean lr_factor?"),
    ({"param_groups": [{"lr_factor": 1.0}]},
     "--param-group: names: expected a glob of names of parameters, got none"),
    ({"param_groups": [{"names": "*", "lr_factor": -1.0}]},
     "--param-group: lr_factor: expected a finite number of at least 0, got -1.0"),
    ({"param_groups": [{"names": "*", "weight_decay": True}]},
     "--param-group: weight_decay: expected a finite number of at least 0, got True"),
    ({"param_groups": 3}, "--param-group: expected NAMES[:lr_factor=X][:weight_decay=X], or a"),
    ({"param_groups": ["*.bias:weight_decay=none"]},
     "--param-group: weight_decay: expected a number, got 'none'"),
    ({"param_groups": ["*.bias:decay=0"]}, "--param-group: unknown key 'decay'; known: names"),
    ({"param_groups": ["*:lr_factor=1:lr_factor=2"]}, "--param-group: lr_factor is given twice"),
    ({"param_groups": ["*:lr_factor=2"], "no_weight_decay": ["*"]},
     "--no-weight-decay and --param-group: expected one of the two"),
])  # fmt: skip
def test_groups_that_make_no_sense_are_refused(made, how, message):
    with pytest.raises(OptionError) as error:
        launched(made[0], "alone", "refused", **{"param_groups": (), **how})
    assert str(error.value).startswith(message)


def test_a_group_of_frozen_parameters_is_refused(made):
    model = load(made[0] / "net.onnx", ReadOptions(freeze=["up.bias"]))
    with pytest.raises(OptionError, match=r"up\.\[b\]\*: matches only parameters that are not tr"):
        groups_of(model, {"names": "up.[b]*"})


def test_all_ranks_compare_their_groups(made):
    plan, hellos = read_plan(made[0] / "alone.json"), []
    for decay in (0.0, 0.5):
        how = {"param_groups": [{"names": "*.bias", "weight_decay": decay}]}
        values = _values(plan, options_of("launch", how), several_hosts=False)
        hellos.append(RankFacts(values, "b 1"))
    (line,) = differences(hellos)
    assert line.startswith("option param_groups: rank 0 has ") and "rank 1 on b has" in line


def test_a_training_goes_on_with_the_same_groups_alone(made):
    folder, _ = made
    launched(folder, "alone", "first", steps=1)
    for how, said in [
        ({"param_groups": ()}, r"'down.bias' was trained with lr_factor=1, weight_decay=0, and this"
         r" launch has lr_factor=1 \(6 such\); give the same --no-weight-decay and --param-group"),
        ({"param_groups": [*GROUPS[1:], GROUPS[0]]}, r"'words.weight' was .* lr_factor=0\.5, and"),
    ]:  # fmt: skip
        with pytest.raises(FileError, match=said):
            launched(folder, "alone", "second", resume="first", steps=2, **how)
    # Written otherwise, the groups are the same.
    again = ["head.*,words.*:lr_factor=0.5", "*.bias,norm.*:weight_decay=0",
             "up.weight:lr_factor=2:weight_decay=0.8", "down.weight"]  # fmt: skip
    launched(folder, "alone", "second", resume="first", steps=2, param_groups=again)


def test_a_checkpoint_of_before_there_were_groups_is_one_without(made):
    folder, _ = made
    launched(folder, "alone", "old", steps=1, param_groups=())
    path = folder / "old" / "step-00000001" / "checkpoint.json"
    record = json.loads(path.read_text())
    assert record["extras"].pop("param_groups") == {}
    path.write_text(json.dumps(record))
    launched(folder, "alone", "new", resume="old", steps=2, param_groups=())
    with pytest.raises(FileError, match=r"of other groups of parameters"):
        launched(folder, "alone", "newer", resume="old", steps=2)


# -------------------------------------------------------------------- how they are written


@pytest.mark.parametrize(("text", "group"), [
    ("*", ParameterGroup(("*",))),
    ("a.*, b:weight_decay=0", ParameterGroup(("a.*", "b"), weight_decay=0.0)),
    ("kernel:0:lr_factor=0.5", ParameterGroup(("kernel:0",), 0.5)),
    ("x=y", ParameterGroup(("x=y",))),
    ("a:weight_decay=1e-3:lr_factor=2", ParameterGroup(("a",), 2.0, 1e-3)),
])  # fmt: skip
def test_a_group_is_a_text_and_a_text_is_a_group(text, group):
    (found,) = Loop(param_groups=(text,)).param_groups
    assert found == group
    assert Loop(param_groups=(str(group),)).param_groups == (group,)


def test_ranks_get_the_groups_of_the_command(made, monkeypatch):
    started = []
    monkeypatch.setattr("planner.api.start_launch", lambda *given, **more: started.append(given))
    texts = ["head.*,words.*:lr_factor=0.5", "*.bias:weight_decay=0.0"]
    listed = [word for text in texts for word in ("--param-group", text)]
    for given in (listed, ["--no-weight-decay", "*.bias", "--no-weight-decay", "norm.*"]):
        run("launch", str(made[0] / "alone.json"), "--nproc", "1", *given)
        (_, _, arguments) = started.pop()
        at = arguments.index(given[0])
        assert arguments[at : at + 4] == given


def test_the_command_and_a_file_train_groups_and_say_which(made, tmp_path):
    folder, _ = made
    texts = ["head.*:lr_factor=0.5", "*.bias,norm.*:weight_decay=0",
             "up.*:lr_factor=2:weight_decay=0.8"]  # fmt: skip
    plain = ["--model", str(folder / "net.onnx"), "--steps", "3", "--lr", str(RATE),
             "--weight-decay", str(DECAY), "--clip", "0.5", "--lr-schedule", "linear:2:9",
             "--data", "tests.support.group_runs:data"]  # fmt: skip
    command = ["launch", str(folder / "alone.json"), *plain]
    wanted = by_torch("adamw")[0][:3]

    def losses(*more):
        found = json.loads(run(*command, *more, "--json").stdout)
        return found["loss"], found["param_groups"]

    listed = [word for text in texts for word in ("--param-group", text)]
    loss, groups = losses(*listed)
    assert loss == pytest.approx(wanted, rel=1e-9)
    assert groups == [
        {"names": ["head.*"], "num_parameters": 1, "num_elements": 384, "lr_factor": 0.5,
         "weight_decay": None},
        {"names": ["*.bias", "norm.*"], "num_parameters": 4, "num_elements": 80, "lr_factor": 1.0,
         "weight_decay": 0.0},
        {"names": ["up.*"], "num_parameters": 1, "num_elements": 512, "lr_factor": 2.0,
         "weight_decay": 0.8},
        {"names": [], "num_parameters": 1, "num_elements": 512, "lr_factor": 1.0,
         "weight_decay": None},
    ]  # fmt: skip
    for name, written in (("mappings", GROUPS), ("texts", texts)):
        (tmp_path / name).write_text(yaml.safe_dump({"param_group": written}))
        loss, _ = losses("--config", str(tmp_path / name))
        assert loss == pytest.approx(wanted, rel=1e-9)
    assert losses("--no-weight-decay", "*")[1][1:] == [
        {"names": [], "num_parameters": 0, "num_elements": 0, "lr_factor": 1.0,
         "weight_decay": None},
    ]  # fmt: skip
    assert losses()[1] == []
    said = run(*command, "--no-weight-decay", "*.bias", "--no-weight-decay", "norm.*").stdout
    assert (
        "\nparameter groups: *.bias norm.*: 4 parameters with 80 elements, weight decay 0;"
        " the rest: 3 parameters with 1408 elements\n"
    ) in said.replace("1,408", "1408")
