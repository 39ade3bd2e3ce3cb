"""Options of all commands: each is a declared field, and a wrong value is a usage error."""

import click
import pytest
from click.testing import CliRunner
from torch.distributed.run import get_args_parser

import cli
from planner.artefacts.options import LossOptions, Training
from planner.artefacts.strategy import ScheduleName
from planner.commands.options import default_text, takes
from planner.support.options import Options, declared

# Files that a command writes, and what all commands have.
NOT_DECLARED = {
    "--json", "--operators", "--nproc", "--config", "--output", "-o", "--csv", "--svg",
    "--state-dict",
}  # fmt: skip


def commands(group=cli.main, path=()):
    """All commands by their names."""
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


COMMANDS = dict(commands())


def kinds(of=Options):
    """All types of options of the planner."""
    for kind in of.__subclasses__():
        if kind.__module__.startswith("planner."):
            yield kind


FIELDS = {
    (one.flag, one.name, one.help): one for kind in kinds() for one in declared(kind).values()
}


@pytest.mark.parametrize("name", COMMANDS, ids=" ".join)
def test_every_option_of_a_command_is_a_declared_field(name):
    options = [one for one in COMMANDS[name].params if isinstance(one, click.Option)]
    others = set()
    for one in options:
        words = one.help.partition("  [default: ")[0]
        if (one.opts[0], one.name, words) not in FIELDS:
            others.add(one.opts[-1])
    assert others <= NOT_DECLARED


def test_torchrun_leaves_the_options_of_launch_to_it():
    """Its parser takes unambiguous prefixes of its own options, and refuses others, wherever they
    stand. --nproc is for launches without torchrun.
    """
    parser = get_args_parser()
    for option in COMMANDS["launch",].params:
        for flag in {option.opts[0], *option.secondary_opts} - {"strategy", "--nproc"}:
            command = ["planner", "launch", "strategy.json", flag, "value"]
            assert parser.parse_args(["--no-python", *command]).training_script_args == command[1:]


def test_the_former_flag_of_an_option_is_taken_and_not_shown():
    text = CliRunner().invoke(cli.main, ["launch", "--help"]).output
    assert "--log-file PATH" in text
    assert "--log " not in text
    (option,) = (one for one in COMMANDS["launch",].params if one.name == "log_file")
    assert option.opts == ["--log-file", "--log"]


GROUPS = {(): cli.main, ("topology",): cli.main.commands["topology"]}


@pytest.mark.parametrize("name", {**COMMANDS, **GROUPS}, ids=" ".join)
def test_a_help_page_fits_a_terminal_of_80_columns(name):
    text = CliRunner().invoke(cli.main, [*name, "--help"], terminal_width=80).output
    assert [line for line in text.splitlines() if len(line) > 80] == []
    assert "..." not in text.replace("N...]", "").replace("[ARGS]...", "").replace("TRACE...", "")


def test_a_time_limit_without_a_unit_is_answered_with_a_fitting_example():
    said = CliRunner().invoke(cli.main, ["solve", "--time-limit", "5"]).output
    assert "expected a time such as '30 s', got '5'" in said


def test_every_declared_field_with_help_is_an_option_of_a_command():
    flags = {
        (one.opts[0], one.name)
        for command in COMMANDS.values()
        for one in command.params
        if isinstance(one, click.Option)
    }
    assert {(flag, name) for flag, name, words in FIELDS if words} <= flags


@pytest.mark.parametrize("name", COMMANDS, ids=" ".join)
def test_help_texts_are_sentences_with_a_default(name):
    for one in COMMANDS[name].params:
        if isinstance(one, click.Option):
            words = one.help.partition("  [")[0]
            assert words[0].isupper() or words.partition(":")[0] in WITHOUT_CAPITAL, words
            assert words.endswith("."), words
            assert "so many" not in words and "; may be repeated" not in words, words


WITHOUT_CAPITAL = {"hostfile", "zero", "megatron", "pipedream", "pesto", "netsplit"} | {
    "netsplit and --cost-model dnn-partitioning"
}


def test_a_command_gets_one_value_of_the_type():
    @click.command()
    @takes(Training, "training", only=["schedule", "reserve"])
    @takes(LossOptions, "losses", without=["output"], shown={"loss": "the profile's"})
    def command(training, losses):
        click.echo(repr((training, losses)))

    given = ["--schedule", "gpipe", "--reserve", "2 KiB", "--loss", "a=mse", "--class-dim", "1"]
    printed = CliRunner().invoke(command, given).output
    expected = Training(schedule="gpipe", reserve=2048), LossOptions((), {"a": "mse"}, 1)
    assert printed == repr(expected) + "\n"
    assert "[default: the profile's]" in CliRunner().invoke(command, ["--help"]).output
    assert "--microbatches" not in CliRunner().invoke(command, ["--help"]).output
    for wrong, message in (
        (["--schedule", "zigzag"], f"expected one of {', '.join(ScheduleName)}, got 'zigzag'"),
        (["--reserve", "2"], "expected a size such as '80 GiB', got '2'"),
        (["--class-dim", "a=x"], "a: expected a whole number, got 'x'"),
    ):
        done = CliRunner().invoke(command, wrong)
        assert done.exit_code == 2
        assert f"Invalid value for '{wrong[0]}': {message}" in done.output


def test_defaults_of_a_help_text_are_those_of_the_fields():
    known = declared(Training)
    assert default_text(known["schedule"]) == "1f1b"
    assert default_text(known["reserve"]) == "1 GiB"
    assert default_text(known["global_batch"]) == ""
    assert default_text(known["vertical_sync"]) == ""
