"""Tables, progress and the terminal: colour and its width there, neither in a pipe."""

import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as RichTable

    from planner.report import Table

# Width of tables where there is no terminal to ask.
PIPED_WIDTH = 160


def console(*, stderr: bool = False) -> "Console":
    """Colour and the terminal's width on a terminal; neither in a pipe."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, width=None if stream.isatty() else PIPED_WIDTH, highlight=False)


def show(table: "Table") -> None:
    """Prints a table; where it is too wide, with heads of several lines, then with fewer columns,
    so that no number and no name is broken.
    """
    screen = console()
    roomy = screen.options.update(width=10 * PIPED_WIDTH)
    drawn = draw(table, tall=False)
    for head in (None, *table.optional):
        if screen.measure(drawn, options=roomy).minimum <= screen.width:
            break
        table = table if head is None else table.without(head)
        drawn = draw(table, tall=True)
    screen.print(drawn)


def draw(table: "Table", *, tall: bool) -> "RichTable":
    """A table for rich. Only text after the first column is wrapped.

    Args:
        tall: whether heads are no wider than what is below them, as far as words allow.
    """
    from rich import box
    from rich.markup import escape
    from rich.table import Table as RichTable

    drawn = RichTable(title=table.title, title_justify="left", box=box.SIMPLE_HEAD)
    for index, column in enumerate(table.columns):
        is_number, head = column.startswith(">"), column.lstrip(">")
        width = max((len(row[index]) for row in table.rows), default=0)
        if tall:
            head = textwrap.fill(head, max(1, width), break_long_words=False)
        whole = is_number or index == 0
        drawn.add_column(
            escape(head),
            justify="right" if is_number else "left",
            no_wrap=whole,
            min_width=max(width, *map(len, head.splitlines() or [""])) if whole else None,
            overflow="ellipsis" if is_number else "fold",
        )
    for index, row in enumerate(table.rows):
        drawn.add_row(*map(escape, row), style="bold green" if index == table.marked else None)
    return drawn


@contextmanager
def bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar with the time left; silent where standard output is no terminal."""
    if not sys.stdout.isatty():
        yield lambda done, total: None
        return
    from rich.progress import Progress

    with Progress(console=console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


@contextmanager
def spinner() -> Iterator[Callable[[str], None]]:
    """Says which solver is at work; silent where standard output is no terminal."""
    if not sys.stdout.isatty():
        yield lambda name: None
        return
    with console(stderr=True).status("Solving") as status:
        yield lambda name: status.update(f"Solving: {name}")
