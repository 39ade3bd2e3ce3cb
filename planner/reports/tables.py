"""`Table`: a table of plain text for people; and figures as text."""

from dataclasses import dataclass, replace

from planner.support.printable import printable as printable
from planner.support.printable import printable_lines as printable_lines


@dataclass(frozen=True, slots=True)
class Table:
    """A table for people.

    Attributes:
        title: the line above the table.
        columns: heads of the columns; a head that starts with ">" aligns its column to the right.
        rows: the rows, each with one cell per column.
        marked: index of a row that is highlighted, or None.
        optional: heads of columns that are left out where there is no room, in this order.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    marked: int | None = None
    optional: tuple[str, ...] = ()

    @property
    def printable(self) -> "Table":
        """The same table with control codes and line breaks in its cells escaped."""
        return replace(
            self,
            title=printable(self.title),
            rows=tuple(tuple(map(printable, row)) for row in self.rows),
        )

    def without(self, head: str) -> "Table":
        """The same table without a column."""
        kept = [i for i, column in enumerate(self.columns) if column != head]
        return replace(
            self,
            columns=tuple(self.columns[i] for i in kept),
            rows=tuple(tuple(row[i] for i in kept) for row in self.rows),
        )


def percent(share: float) -> str:
    """A share with one digit.

    >>> percent(0.1234)
    '12.3 %'
    """
    return f"{100 * share:.1f} %"


def count(number: int, what: str) -> str:
    """A number of things.

    >>> count(1, "step"), count(2, "step")
    ('1 step', '2 steps')
    """
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def device_runs(devices: tuple[int, ...]) -> str:
    """Indices of devices as text, with runs shortened.

    >>> device_runs((0, 1, 2, 5))
    '0-2 5'
    """
    runs: list[list[int]] = []
    for d in sorted(devices):
        if runs and d == runs[-1][-1] + 1:
            runs[-1].append(d)
        else:
            runs.append([d])
    return " ".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)
