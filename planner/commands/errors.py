"""How commands end: exit codes, and the library's and the system's errors as click's. Of several
ranks, one shows its error.
"""

import errno
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any, NoReturn

import click

from planner import api
from planner.commands.signals import STOPPED, TERMINATED, WORDS, Terminated, tidying_up
from planner.commands.terminal import say, say_lines, shortened
from planner.support.errors import PlannerError, Preempted, Stopped

NO_PLAN = 3
FAILED = 1


class Mistake(click.ClickException):
    """An error whose message is broken between words on a terminal, and is not endless."""

    def show(self, file: IO[Any] | None = None) -> None:
        """Prints it on standard error, or into a file."""
        if file is None:
            say_lines(f"Error: {shortened(self.format_message())}", err=True)
        else:
            super().show(file)


class Listed(click.Group):
    """A group whose help has a whole sentence for each of its commands."""

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        """Adds a command, with the first sentence of its help for the list."""
        sentence = " ".join((cmd.help or "").split("\n\n")[0].split()).partition(". ")[0]
        cmd.short_help = f"{sentence.removesuffix('.')}."
        super().add_command(cmd, name)


class Commands(Listed):
    """Turns the library's errors, and the system's, into click's, in this one place."""

    def invoke(self, ctx: click.Context) -> Any:
        """Runs a command."""
        try:
            with words_of_caches(), tidying_up():
                return super().invoke(ctx)
        except PlannerError as error:
            _fail(ctx, Mistake(str(error)), error)
        except click.ClickException as error:
            _fail(ctx, error, error.__cause__)
        except (KeyboardInterrupt, click.Abort) as end:
            code = TERMINATED if isinstance(end, Terminated) else STOPPED
            click.echo(WORDS[code], err=True)
            ctx.exit(code)
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise  # the reader of our output has closed it, which click handles
            _abandon_output()
            where = "" if error.filename is None else f"{error.filename}: "
            _fail(ctx, Mistake(f"{where}{error.strerror or error}"), error)


def _fail(ctx: click.Context, error: click.ClickException, cause: BaseException | None) -> NoReturn:
    """Shows an error: click does, but of several ranks only the first one."""
    rank = api.rank.current_rank()
    if rank is None:
        raise error from cause
    with rank.reporter_lock() as is_reporter:
        if is_reporter:
            error.show()
    ctx.exit(error.exit_code)


class Said(logging.Handler):
    """Warnings and notes as lines on standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        """Shows one."""
        kind = "warning" if record.levelno >= logging.WARNING else "note"
        say(f"{kind}: {record.getMessage()}", err=True)


@contextmanager
def words_of_caches() -> Iterator[None]:
    """Shows meanwhile what is wrong with caches, and that kernels are compiled: one rank does."""
    logger = logging.getLogger("planner.support.caches")
    handler = Said(logging.INFO if os.environ.get("RANK", "0") == "0" else logging.CRITICAL)
    propagate, level, logger.propagate = logger.propagate, logger.level, False
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate


def _abandon_output() -> None:
    """Keeps Python from writing to standard output again when it ends, if it takes no more: on a
    full disk, for example.
    """
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def ranks_leave_at_once() -> Iterator[None]:
    """Makes a process that was started as a rank one of several, and ends it without Python's own
    clean-up. Gloo's threads may still be about to release tensors, for which they need Python. If
    Python is ending by then, the process is aborted
    (https://github.com/pytorch/pytorch/issues/38228), and torchrun calls the run failed.
    """
    rank = api.rank.enter()
    try:
        yield
    except SystemExit as end:
        if rank is None or not isinstance(end.code, int):
            raise
        _abandon_output()
        sys.stderr.flush()
        rank.leave(end.code)


@contextmanager
def one_of_several() -> Iterator[None]:
    """Ends a rank quietly if another one says why: the one that failed, the launcher, or the first
    one after Ctrl-C. A rank that was killed cannot say why; under torchrun another one does.
    """
    ctx, rank = click.get_current_context(), api.rank.current_rank()
    try:
        yield
    except Preempted as end:
        if rank is not None:
            rank.end_work()
        if rank is None or rank.rank == 0:
            say(str(end), err=True)
        ctx.exit(TERMINATED)
    except Stopped:
        if rank is None:
            raise
        with rank.reporter_lock(of_an_end=True) as is_reporter:
            if is_reporter:
                Mistake(rank.lost_rank_message()).show()
        rank.end_children_of_lost_ranks()
        ctx.exit(api.rank.LEFT)
    except KeyboardInterrupt:
        if rank is None or (rank.rank == 0 and not rank.has_launcher):
            raise
        ctx.exit(STOPPED)
