"""Runs a command of the planner as a user would."""

from click.testing import CliRunner

from cli import main


def run(*arguments, code=0):
    """The result of `planner ARGUMENTS`, which must end with the given code."""
    result = CliRunner().invoke(main, list(arguments))
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result
