"""Options of a training from a file: beside the command line, and what is wrong in one."""

import json
import os
from pathlib import Path
from threading import Thread

import click
import pytest

import planner
from planner.artefacts.files import read_plan
from planner.artefacts.options import LossOptions
from planner.commands.launch import launch as command
from planner.launcher.options import Loop
from planner.launcher.rendezvous import _values, differences
from planner.launcher.seating import RankFacts
from planner.support.errors import FileError
from planner.support.options import declared
from planner.support.reading import MAX_OPTIONS_BYTES
from planner.training.config import OF_PROCESSES, OPTIONS, read_config
from planner.training.options import Checkpoints, Launching, options_of
from tests.support.commands import run
from tests.support.mode_runs import net, profile_of, write_strategy

HERE = "tests.support.datasets"
TRAINING = f"""
data: {HERE}:samples
steps: 3
lr: 0.05
lr-schedule: cosine
weight_decay: 0.01
clip: 1
shuffle: false
loss: {{logits: cross-entropy}}
eval_data: {HERE}:samples
metric: [tests.training.test_evaluation:largest]
log_file: log.jsonl
"""
ON_THE_LINE = (
    "--data", f"{HERE}:samples", "--steps", "3", "--lr", "0.05", "--lr-schedule", "cosine",
    "--weight-decay", "0.01", "--clip", "1", "--no-shuffle", "--loss", "logits=cross-entropy",
    "--eval-data", f"{HERE}:samples", "--metric", "tests.training.test_evaluation:largest",
)  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a strategy for one process, and the file in a folder of its own."""
    folder = tmp_path_factory.mktemp("config")
    net(folder / "net.onnx")
    write_strategy(folder / "alone.json", profile_of(folder / "net.onnx"), (1,))
    (folder / "own").mkdir()
    (folder / "own" / "train.yaml").write_text(TRAINING)
    return folder


def trained(folder, *options):
    """The report of a launch, as JSON."""
    return json.loads(run("launch", str(folder / "alone.json"), *options, "--json").stdout)


# ------------------------------------------------------------------------------ the options


def test_a_file_has_the_options_of_the_command():
    options = {
        one.opts[0].removeprefix("--").replace("-", "_"): one
        for one in command.params
        if isinstance(one, click.Option)
    }
    assert options.keys() == OPTIONS.keys() | OF_PROCESSES
    assert {key: one.name for key, one in OPTIONS.items()} == {
        key: options[key].name for key in OPTIONS
    }


def test_every_option_of_a_file_is_an_argument_of_launch():
    options_of("launch", {one.name: one.default for one in OPTIONS.values()})
    with pytest.raises(TypeError, match="unexpected keyword argument 'stepz'"):
        options_of("launch", {"stepz": 1})


def test_the_ranks_compare_the_options_of_a_file_but_for_those_that_are_a_ranks_own(made):
    options = options_of("launch", {})
    values = _values(read_plan(made / "alone.json"), options, several_hosts=False)
    compared = {name.removeprefix("option ") for name in values if name.startswith("option ")}
    in_file = {one.name for one in OPTIONS.values()}
    of_a_rank = {"log_file", "threads", "hang_timeout", "model", "trace", "checkpoint", "resume"}
    assert compared == in_file - of_a_rank | {"config", "output"}
    kinds = (Loop, LossOptions, Launching, Checkpoints)
    marked = {n for kind in kinds for n, one in declared(kind).items() if one.per_rank}
    assert marked == of_a_rank | {"reports_loss"}


@pytest.mark.parametrize(
    ("name", "mine", "other"),
    [
        ("steps", 3, 4),
        ("learning_rate", 0.1, 0.2),
        ("loss", {"a": "mse"}, {"a": "l1"}),
        ("device", "cpu", "auto"),
        ("checkpoint_every", 1, 2),
    ],
)
def test_ranks_with_another_value_of_an_option_do_not_run_the_same(made, name, mine, other):
    plan = read_plan(made / "alone.json")
    hellos = [
        RankFacts(_values(plan, options_of("launch", {name: one}), several_hosts=False), "b 1")
        for one in (mine, other)
    ]
    assert differences(hellos) == [
        f"option {name}: rank 0 has {str(mine)!r}, rank 1 on b has {str(other)!r}"
    ]


def test_a_file_is_the_command_line(made):
    by_file = trained(made, "--config", str(made / "own" / "train.yaml"))
    by_options = trained(made, *ON_THE_LINE)
    for name in ("steps", "loss", "losses", "evaluations"):
        assert by_file[name] == by_options[name]
    assert by_options["evaluations"][0]["largest"]
    assert (made / "own" / "log.jsonl").is_file(), "paths are relative to the file"


def test_a_file_is_the_arguments_of_launch(made):
    given = planner.read_config(made / "own" / "train.yaml")
    report = planner.launch(made / "alone.json", **given)
    assert list(report.loss) == trained(made, *ON_THE_LINE)["loss"]


def test_the_command_line_wins_over_the_file(made):
    given = ("--config", str(made / "own" / "train.yaml"))
    report = trained(made, *given, "--epochs", "1", "--lr", "0.2", "--shuffle")
    assert report["steps"] == 3, "two whole steps of 41 samples and a shorter one"
    (note,) = (one for one in report["notes"] if one.startswith("options of train.yaml"))
    assert note.endswith("; replaced on the command line: --steps, --lr, --shuffle")
    assert "--clip" in note.partition(";")[0]
    assert report["loss"] != trained(made, *given, "--steps", "2")["loss"]


def test_ranks_with_other_files_do_not_run_the_same(made):
    plan = read_plan(made / "alone.json")

    def hello(name):
        return RankFacts(_values(plan, [Loop(config=name)], several_hosts=False), "b 1")

    names = []
    for more in ("", "seed: 1\n"):
        path = made / "train.yaml"
        path.write_text(TRAINING + more)
        names.append(read_config(path)["config"])
    assert differences([hello(one) for one in names]) == [
        f"option config: rank 0 has {names[0]!r}, rank 1 on b has {names[1]!r}"
    ]


# ------------------------------------------------------------------------------ mistakes

WRONG = [
    ("steps: ten", "line 1: steps: expected a whole number of at least 1, got 'ten'"),
    ("\nsteps: 3.0", "line 2: steps: expected a whole number of at least 1, got 3.0"),
    ("steps: true", "line 1: steps: expected a whole number of at least 1, got True"),
    ("lr: fast", "line 1: lr: expected a finite number of at least 0, got 'fast'"),
    ("lr: .nan", "line 1: lr: expected a finite number of at least 0, got nan"),
    ("lr: .inf", "line 1: lr: expected a finite number of at least 0, got inf"),
    ("clip: 0", "line 1: clip: expected a finite number above 0, got 0"),
    ("shuffle: no", "line 1: shuffle: expected true or false, got 'no'"),
    ("nan: ignore", "line 1: nan: expected one of stop, skip, got 'ignore'"),
    ("data: mine", "line 1: data: expected module:function, got 'mine'"),
    ("metric: [a:b, c]", "line 1: metric: expected module:function, got 'c'"),
    ("metric: 3", "line 1: metric: expected module:function, or a list of such, got 3"),
    ("loss: {y: 3}", "line 1: loss: y: expected text, got 3"),
    ("loss: {3: mse}", "line 1: loss: expected text, or a mapping from outputs to such, got a map"),
    ("log_file: {}", "line 1: log_file: expected a path, got a mapping"),
    ('log_file: "a\\0b"', "line 1: log_file: expected a path, got 'a\\x00b'"),
    ('log_file: "\\ud800"', "line 1: log_file: expected a path, got '\\ud800'"),
    ("seed:", "line 1: seed: expected a whole number, got nothing; leave the line out"),
    ("learning_rate: 1", "line 1: learning_rate: unknown option; did you mean lr?"),
    ("lr-shedule: x", "line 1: lr-shedule: unknown option; did you mean lr_schedule?"),
    ("zzz: 1", "line 1: zzz: unknown option; known: steps, epochs, optimizer"),
    ("7: 1", "line 1: 7: unknown option"),
    ("nproc: 2", "line 1: nproc: no option of a file; give it on the command line"),
    ("lr_schedule: a\nlr-schedule: b", "line 2: lr-schedule: given twice, by two spellings"),
    ("log_file: a\nlog: b", "line 2: log: given twice, by two spellings"),
    ("steps: 1\nsteps: 2", "line 2: this is no YAML: found duplicate key"),
    ("steps: [1", "line 1: this is no YAML"),
    ("- steps", "expected options, got a list; write options of `planner launch`"),
    ("", "expected options of a training, the file is empty"),
    ("#" * (MAX_OPTIONS_BYTES + 1), "expected at most 256 KiB"),
]


@pytest.mark.parametrize(("text", "message"), WRONG, ids=[one[:20] for one, _ in WRONG])
def test_a_wrong_file_is_told_with_line_and_option(tmp_path, text, message):
    path = tmp_path / "train.yaml"
    path.write_text(text)
    with pytest.raises(FileError) as error:
        read_config(path)
    assert str(error.value).startswith(f"{path}: {message}")


def test_all_mistakes_are_told_at_once_by_the_command(made):
    path = made / "wrong.yaml"
    path.write_text("epoch: 3\nlr: low\n")
    said = run("launch", str(made / "alone.json"), "--config", str(path), code=1).output
    assert said.splitlines() == [
        f"Error: {path}: line 1: epoch: unknown option; did you mean epochs?",
        f"{path}: line 2: lr: expected a finite number of at least 0, got 'low'",
    ]


def test_options_of_a_file_that_contradict_each_other_are_told_with_file_and_line(made):
    path = made / "both.yaml"
    path.write_text("steps: 3\nlr: 0.1\nepochs: 2\n")
    said = run("launch", str(made / "alone.json"), "--config", str(path), code=1).output
    assert said == (
        f"Error: {path}: line 3: epochs: line 1 has steps; expected one of the two, leave one out\n"
    )
    path.write_text("eval_every: 2\n")
    said = run("launch", str(made / "alone.json"), "--config", str(path), code=1).output
    assert "--eval-every: there is no data to evaluate on" in said
    assert " ".join(said.split()).endswith("(with the options of both.yaml)")


def test_the_log_is_given_by_its_former_key_too(tmp_path):
    path = tmp_path / "train.yaml"
    path.write_text("log: a.jsonl\n")
    assert read_config(path)["log_file"] == tmp_path / "a.jsonl"


def test_a_file_that_is_not_there_is_named(made):
    said = run("launch", str(made / "alone.json"), "--config", "none.yaml", code=1).output
    assert said == "Error: none.yaml: there is no such file\n"


def test_the_log_may_not_replace_the_file(made):
    path = made / "self.yaml"
    path.write_text("log_file: self.yaml\n")
    said = run("launch", str(made / "alone.json"), "--config", str(path), code=1).output
    assert "self.yaml" in said
    assert path.read_text() == "log_file: self.yaml\n"


def test_paths_in_a_pipe_are_relative_to_the_current_folder(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    writer = Thread(target=(tmp_path / "pipe").write_text, args=("log_file: a.jsonl\n",))
    writer.start()
    assert read_config(tmp_path / "pipe")["log_file"] == Path("a.jsonl")
    writer.join()
