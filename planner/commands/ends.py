"""How commands end: exit codes, and the library's and the system's errors as click's."""

import errno
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import click

from planner.commands.printing import say, say_lines
from planner.commands.signals import STOPPED, TERMINATED, WORDS, Terminated, tidying_up
from planner.errors import PlannerError, Stopped

NO_PLAN = 3
FAILED = 1


class Mistake(click.ClickException):
    """An error whose message is broken between words on a terminal."""

    def show(self, file: IO[Any] | None = None) -> None:
        """Prints it on standard error, or into a file."""
        if file is None:
            say_lines(f"Error: {self.format_message()}", err=True)
        else:
            super().show(file)


class Commands(click.Group):
    """Turns the library's errors, and the system's, into click's, in this one place."""

    def invoke(self, ctx: click.Context) -> Any:
        """Runs a command."""
        try:
            with warnings_of_caches(), tidying_up():
                return super().invoke(ctx)
        except PlannerError as error:
            raise Mistake(str(error)) from error
        except (KeyboardInterrupt, click.Abort) as end:
            code = TERMINATED if isinstance(end, Terminated) else STOPPED
            click.echo(WORDS[code], err=True)
            ctx.exit(code)
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise  # the reader of our output has closed it, which click handles
            abandon_output()
            where = "" if error.filename is None else f"{error.filename}: "
            raise Mistake(f"{where}{error.strerror or error}") from error


class Warnings(logging.Handler):
    """Warnings as lines on standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        """Shows one."""
        say(f"warning: {record.getMessage()}", err=True)


@contextmanager
def warnings_of_caches() -> Iterator[None]:
    """Shows meanwhile what is wrong with caches, once for all ranks."""
    logger = logging.getLogger("planner.support.caches")
    handler = Warnings(logging.WARNING if os.environ.get("RANK", "0") == "0" else logging.CRITICAL)
    before, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = before


def abandon_output() -> None:
    """Keeps Python from writing to standard output again when it ends, if it takes no more: on a
    full disk, for example.
    """
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def ranks_leave_at_once() -> Iterator[None]:
    """Ends a rank of torchrun without Python's own clean-up. Gloo's threads may still be about to
    release tensors, for which they need Python. If Python is ending by then, the process is aborted
    (https://github.com/pytorch/pytorch/issues/38228), and torchrun calls the run failed.
    """
    try:
        yield
    except SystemExit as end:
        if "RANK" not in os.environ or not isinstance(end.code, int):
            raise
        abandon_output()
        sys.stderr.flush()
        os._exit(end.code)


@contextmanager
def one_of_several() -> Iterator[None]:
    """Ends a rank quietly if another one says why: the one that failed, or the first one after
    Ctrl-C.
    """
    ctx = click.get_current_context()
    try:
        yield
    except Stopped:
        ctx.exit(FAILED)
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            raise
        ctx.exit(STOPPED)
