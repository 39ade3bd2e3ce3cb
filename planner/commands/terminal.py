"""Lines, tables, charts, progress: with colour and as wide as the terminal, or plain in a pipe.

Names come from files and may hold anything. So all text passes `printable`, and none of it is
markup to rich.
"""

import logging
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from planner.support.printable import printable, printable_lines

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as RichTable

    from planner.reports.simulation import Span
    from planner.reports.tables import Table

# Styles of the spans of a Gantt chart.
STYLES = {
    "forward": "black on blue", "backward": "black on green", "all-reduce": "black on yellow",
    "step": "black on magenta", "posting": "red", "transfer": "cyan", "legend": "dim",
}  # fmt: skip
# Width of tables where there is no terminal to ask.
PIPED_WIDTH = 160
# Of a message, and characters of each.
MAX_LINES, MAX_LINE = 20, 1000
# Longer words may be broken in tables.
MAX_WORD = 30


def console(*, stderr: bool = False) -> "Console":
    """Colour and the terminal's width on a terminal; neither in a pipe."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, width=None if stream.isatty() else PIPED_WIDTH, highlight=False)


def say(line: str, *, err: bool = False) -> None:
    """Prints a line for people, with control codes and line breaks escaped; on a terminal it is
    broken between words, so that none is cut.

    Args:
        err: whether it goes to standard error.
    """
    say_lines(printable(line), err=err)


def say_note(note: str | None) -> None:
    """Prints a note on standard error, if there is one."""
    if note is not None:
        say(f"note: {note}", err=True)


def say_lines(text: str, *, err: bool = False) -> None:
    """The same for a text whose line breaks are meant."""
    stream = sys.stderr if err else sys.stdout
    text = printable_lines(text)
    if stream.isatty():
        width = shutil.get_terminal_size().columns
        text = "\n".join(wrapped(line, width) for line in text.splitlines())
    click.echo(text, err=err)


def shortened(message: str) -> str:
    """A message of as many lines as people read, without the middle of lines that are too long.
    A file may have thousands of mistakes and names of any length. The last line may be advice.

    >>> print(shortened("\\n".join(f"line {i}: wrong" for i in range(99))).splitlines()[-3:])
    ['line 17: wrong', 'and 80 more lines', 'line 98: wrong']
    """
    lines = [
        line if len(line) <= MAX_LINE else f"{line[: MAX_LINE - 300]} .. {line[-300:]}"
        for line in message.split("\n")
    ]
    left_out = len(lines) - MAX_LINES
    if left_out > 1:
        lines[MAX_LINES - 2 : -1] = [f"and {left_out + 1} more lines"]
    return "\n".join(lines)


def wrapped(line: str, width: int) -> str:
    """A line broken between words; a command is continued with a backslash, as shells have it.

    >>> print(wrapped("note: the times are of another type of device", 30))
    note: the times are of another
      type of device
    >>> print(wrapped("run it: planner launch strategy.json --nproc 2", 30))
    run it: planner launch \\
        strategy.json --nproc 2
    """
    if len(line) <= width:
        return line
    before, is_command = _command(line)
    room = width - 2 if is_command else width
    parts = textwrap.wrap(
        line,
        room,
        subsequent_indent="    " if is_command else "  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    if not is_command:
        return "\n".join(parts)
    # Only what belongs to the command is continued, not the words before it.
    text, done = "", 0
    for part in parts[:-1]:
        done += len(part.strip()) + 1
        text += part + (" \\\n" if done > len(before) else "\n")
    return text + parts[-1]


def _command(line: str) -> tuple[str, bool]:
    """The words before a command in a line, and whether there is one."""
    for start in ("torchrun ", "planner "):
        before, mark, _ = line.partition(f": {start}")
        if mark:
            return before + ": ", True
        if line.startswith(start):
            return "", True
    return line, False


def show(table: "Table") -> None:
    """Prints a table; where it is too wide, with heads of several lines, then with fewer columns,
    which are named below it, then in parts. So no number is broken, and a name only where a part
    of two columns is too wide.
    """
    screen = console()
    roomy = screen.options.update(width=10 * PIPED_WIDTH)

    def fits(table: "Table", *, tall: bool = True) -> bool:
        return screen.measure(draw(table, tall=tall), options=roomy).minimum <= screen.width

    tall, missing = not fits(table, tall=False), []
    for column in sorted((c for c in table.columns if c.gives_way), key=lambda c: c.gives_way):
        if not tall or fits(table):
            break
        table = table.only([one for one in table.columns if one is not column])
        missing.append(column.head or "")
    for part in table.parts(fits) if tall else [table]:
        screen.print(draw(part, tall=tall, folds=tall and not fits(part)))
    if missing:
        say(f"not shown, for lack of room: {', '.join(missing)} (in a wider terminal, or --json)")


def draw(table: "Table", *, tall: bool, folds: bool = False) -> "RichTable":
    """A table for rich. Only text after the first column is wrapped.

    Args:
        tall: whether heads are no wider than the cells below them, as far as words allow.
        folds: whether the names in the first column may be broken.
    """
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    title = Text(table.title, style="table.title") if table.title else None
    drawn = RichTable(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for index, (column, head) in enumerate(zip(table.columns, table.heads, strict=True)):
        width = max((len(row[index]) for row in table.rows), default=0)
        if tall:
            head = textwrap.fill(head, max(1, width), break_long_words=False)
        whole = not column.left or (index == 0 and not folds)
        # Other text is wrapped between words, so it needs room for its longest one.
        words = [word for row in table.rows for word in row[index].split()]
        least = width if whole else min(MAX_WORD, max(map(len, words), default=0))
        drawn.add_column(
            Text(head),
            justify="left" if column.left else "right",
            no_wrap=whole,
            min_width=max(least, *map(len, head.splitlines() if whole else head.split()), 1),
            overflow="fold" if column.left else "ellipsis",
        )
    for index, row in enumerate(table.rows):
        drawn.add_row(*map(Text, row), style="bold green" if index == table.marked else None)
    return drawn


def show_chart(lines: "Callable[[int], Sequence[Sequence[Span]]]") -> None:
    """Draws a chart as wide as the terminal.

    Args:
        lines: its lines, for a number of columns.
    """
    from rich.text import Text

    screen = console()
    for spans in lines(screen.width):
        line = Text()
        for text, kind in spans:
            line.append(text, style=STYLES.get(kind, ""))
        screen.print(line, overflow="crop", no_wrap=True)


@contextmanager
def bar(title: str) -> Iterator[Callable[..., None]]:
    """A progress bar with the time left, on standard error; silent where that is no terminal. It
    is told the work done, all work, and words to be shown behind the title. It begins anew when
    less is done than before.
    """
    if not sys.stderr.isatty():
        yield lambda done, total, text="": None
        return
    from rich.progress import Progress, TextColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        *Progress.get_default_columns()[1:],
    )
    with Progress(*columns, console=console(stderr=True), transient=True) as progress:
        task = progress.add_task(printable(title), total=None)

        def tick(done: int, total: int, text: str = "") -> None:
            if done < progress.tasks[0].completed:
                progress.reset(task)
            progress.update(task, completed=done, total=total, description=printable(title + text))

        yield tick


class SolverLog(logging.Handler):
    """Messages of solvers: warnings as lines on standard error, others as the state of the work."""

    def __init__(self, show_state: Callable[[str], None]) -> None:
        super().__init__(logging.INFO)
        self.show_state = show_state

    def emit(self, record: logging.LogRecord) -> None:
        """Shows one message."""
        if record.levelno >= logging.WARNING:
            say(f"warning: {record.getMessage()}", err=True)
        else:
            self.show_state(record.getMessage())


@contextmanager
def spinner() -> Iterator[Callable[[str], None]]:
    """Shows which solver is at work and its state, on standard error; only warnings, where that is
    no terminal. It gives the callback for the name of the solver.
    """
    if not sys.stderr.isatty():
        with listening(lambda state: None, logging.WARNING):
            yield lambda name: None
        return
    from rich.text import Text

    with console(stderr=True).status("Solving") as status:
        at_work = [""]

        def begin(name: str) -> None:
            at_work[0] = name
            status.update(Text(printable(f"Solving: {name}")))

        def state_of(state: str) -> None:
            status.update(Text(printable(f"Solving: {at_work[0]}: {state}")))

        with listening(state_of, logging.INFO):
            yield begin


@contextmanager
def listening(show_state: Callable[[str], None], level: int) -> Iterator[None]:
    """Shows the messages of solvers meanwhile, from a level on."""
    logger, handler = logging.getLogger("planner.solvers"), SolverLog(show_state)
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
