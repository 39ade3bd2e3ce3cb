"""The rows that are predicted: all of a small source, and of a large one whole questions.

Rows with one question are compared with each other (order and regret), so a question is taken with
all its rows or not at all: each nth, in the order of the table, where all rows are n times as many
as are asked for.
"""

from collections.abc import Sequence
from itertools import count
from math import ceil

from tests.support.measured.rows import Row

MOST = 120
"""Rows of a source that are about as many as this; all of them take hours."""


def sampled(all_rows: Sequence[Row], most: int = MOST) -> list[Row]:
    """Some rows of each source, in their order; the same for the same tables.

    Args:
        most: about this number of rows of each source.
    """
    sources = dict.fromkeys(row.source for row in all_rows)
    return [
        row
        for name in sources
        for row in _some([one for one in all_rows if one.source == name], most)
    ]


def _some(rows: Sequence[Row], most: int) -> list[Row]:
    numbers = dict(zip(dict.fromkeys(row.question for row in rows), count(), strict=False))
    step = ceil(len(rows) / most)
    return [row for row in rows if numbers[row.question] % step == 0]
