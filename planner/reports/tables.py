"""`Column`: a figure of rows, for tables, JSON and CSV; `Table`: text for people."""

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from planner.support.printable import printable, printable_lines

Row = TypeVar("Row")
Whole = TypeVar("Whole")
# Rows of a long table; JSON and files have all.
MAX_ROWS = 24


@dataclass(frozen=True, slots=True)
class Column(Generic[Row]):
    """A figure of a row: raw under `key` in JSON and CSV, as text under `head` in a table.

    Attributes:
        key: its name in JSON and CSV; "" if it is in neither.
        value: the figure of a row; None if the row has none.
        head: the line above its cells; None if it is in no table.
        text: the figure as text; a row without the figure has an empty cell.
        left: whether cells are aligned to the left, as words are; numbers are aligned to the right.
        gives_way: its turn, from 1 on, among the columns that leave a table that is too wide; 0 for
            a column that stays.
        sparse: whether a table in which no row has the figure is shown without the column.
    """

    key: str
    value: Callable[[Row], Any]
    head: str | None = None
    text: Callable[[Any], str] = str
    left: bool = False
    gives_way: int = 0
    sparse: bool = False

    def of(self, row_of: Callable[[Whole], Row | None]) -> "Column[Whole]":
        """The same figure of something that has one such row, or none."""

        def value(whole: Whole) -> Any:
            row = row_of(whole)
            return None if row is None else self.value(row)

        return Column(self.key, value, self.head, self.text, self.left, self.gives_way, self.sparse)


@dataclass(frozen=True, slots=True)
class Table:
    """A table for people, without control codes and line breaks in its words.

    Attributes:
        title: the line above the table.
        columns: what is in the cells of each column.
        rows: the rows, each with one cell per column.
        marked: index of a row that is highlighted, or None.
    """

    title: str
    columns: tuple[Column[Any], ...]
    rows: tuple[tuple[str, ...], ...]
    marked: int | None = None

    @property
    def heads(self) -> tuple[str, ...]:
        """The line above the cells of each column."""
        return tuple(printable(column.head or "") for column in self.columns)

    def only(self, columns: Sequence[Column[Any]]) -> "Table":
        """The same table with some of its columns, which keep their order."""
        kept = [i for i, column in enumerate(self.columns) if column in columns]
        return replace(
            self,
            columns=tuple(self.columns[i] for i in kept),
            rows=tuple(tuple(row[i] for i in kept) for row in self.rows),
        )

    def parts(self, fits: Callable[["Table"], bool]) -> Iterator["Table"]:
        """The table, in parts that fit: each has the first column, and as many of the others as
        there is room for, at least one. The first part has the title.
        """
        part = self
        while len(part.columns) > 2 and not fits(part):
            part = part.only(part.columns[:-1])
        yield part
        if rest := self.columns[len(part.columns) :]:
            yield from replace(self.only([self.columns[0], *rest]), title="").parts(fits)


def table(
    title: str, rows: Sequence[Row], columns: Iterable[Column[Row]], marked: int | None = None
) -> Table:
    """The columns that have a head, as text.

    >>> table("T", [1, 2], [Column("", lambda n: n, "n"), Column("", lambda n: None, "")]).rows
    (('1', ''), ('2', ''))
    """
    cells = [
        (column, ["" if value is None else printable(column.text(value)) for value in values])
        for column in columns
        if column.head is not None
        for values in [[column.value(row) for row in rows]]
    ]
    shown = [one for one in cells if any(one[1]) or not one[0].sparse]
    return Table(
        printable(title),
        tuple(column for column, _ in shown),
        tuple(zip(*(texts for _, texts in shown), strict=True)),
        marked,
    )


def first_rows(
    title: str, rows: Sequence[Row], noun: str, place: str = "--json", most: int = MAX_ROWS
) -> tuple[str, Sequence[Row]]:
    """A title that says how many rows there are and which place has all, and the first rows.

    >>> first_rows("T", "abc", "letters", most=2), first_rows("T", "ab", "letters", most=2)
    (('T (the first 2 of 3 letters; --json has all)', 'ab'), ('T', 'ab'))
    """
    if len(rows) <= most:
        return title, rows
    return f"{title} (the first {most} of {len(rows)} {noun}; {place} has all)", rows[:most]


def chosen(columns: Iterable[Column[Row]], keys: str) -> tuple[Column[Row], ...]:
    """The columns with these keys, in the order of the keys.

    Raises:
        KeyError: if there is no such column.
    """
    by_key = {column.key: column for column in columns}
    return tuple(by_key[key] for key in keys.split())


def json_row(row: Row, columns: Iterable[Column[Row]]) -> dict[str, Any]:
    """The figures that have a key, by their keys."""
    return {column.key: column.value(row) for column in columns if column.key}


def json_rows(rows: Iterable[Row], columns: Sequence[Column[Row]]) -> list[dict[str, Any]]:
    """An object for each row."""
    return [json_row(row, columns) for row in rows]


def csv_text(rows: Iterable[Row], columns: Sequence[Column[Row]]) -> str:
    r"""A line of keys and one for each row, empty where it has no figure; control codes in words
    are escaped.

    >>> csv_text([1], [Column("n", lambda n: n), Column("of", lambda n: None)])
    'n,of\n1,\n'
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(column.key for column in columns)
    for row in rows:
        values = [column.value(row) for column in columns]
        writer.writerow(printable_lines(v) if isinstance(v, str) else v for v in values)
    return text.getvalue()


def percent(share: float) -> str:
    """A share with one digit.

    >>> percent(0.1234)
    '12.3 %'
    """
    return f"{100 * share:.1f} %"


def signed(change: float) -> str:
    """A relative change with one digit.

    >>> signed(0.1234), signed(-0.5)
    ('+12.3 %', '-50.0 %')
    """
    return f"{100 * change:+.1f} %"


def count(number: int, noun: str, plural: str = "") -> str:
    """A number of things.

    >>> count(1, "step"), count(2, "step"), count(2, "class", "classes")
    ('1 step', '2 steps', '2 classes')
    """
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def listed(names: Sequence[str], most: int) -> str:
    """Names, of many the first ones.

    >>> listed("abc", 3), listed("abc", 2)
    ('a, b, c', 'a, b and 1 more')
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def device_runs(devices: Iterable[int]) -> str:
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
