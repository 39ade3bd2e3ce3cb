"""What `make bench-truth` writes into docs/truth.md, and its picture: figures of many rows, and
names of rows.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby

from planner.reports.tables import percent, signed
from tests.bench.solvers import table
from tests.support.measured import assumptions
from tests.support.measured.predict import LeftOut, Predicted
from tests.support.measured.rows import PUBLISHED, TABLES, Row
from tests.support.measured.scores import Score, below_peak, score
from tests.support.scatter import Scatter, picture

SOURCES = (
    "source", "rows", "MAPE", "bias", "pairs in order", "regret", "memory", "do not fit",
    "below the bound", "below the peak's",
)  # fmt: skip
MODELS = (
    "model", "devices", "questions", "rows", "MAPE", "bias", "pairs in order", "regret",
    "largest regret",
)  # fmt: skip
Answer = Predicted | LeftOut


def parts(answers: Sequence[Answer], skipped: Sequence[Row]) -> Mapping[str, str]:
    """By the names of their markers, the parts of the page.

    Args:
        answers: to all rows that were asked for.
        skipped: rows that were not, because their source is large.
    """
    made = [one for one in answers if isinstance(one, Predicted)]
    left_out = [(one.row, one.reason) for one in answers if isinstance(one, LeftOut)]
    return {
        "sources": sources(made),
        "models": models(made),
        "refused": _named([one.row for one in made if not one.fits]) or "None.",
        "bound": _named([one.row for one in made if one.row.iteration_s < one.bound_s]) or "None.",
        "peak": _named([one.row for one in answers if below_peak(one)]) or "None.",
        "without-peak": _named([one.row for one in answers if one.peak_bound_s is None]) or "None.",
        "left-out": _by_reason(left_out),
        "skipped": _named(skipped) or "None.",
        "assumptions": _assumptions(),
    }


def sources(made: Sequence[Predicted]) -> str:
    """The errors of each source, of published.csv and of all; and of those whose plan is known."""
    groups = _groups(made, lambda one: one.row.source)
    groups[PUBLISHED] = [one for one in made if one.row.source not in TABLES]
    groups[f"{PUBLISHED}, known"] = [one for one in groups[PUBLISHED] if one.row.known]
    groups |= {"all": list(made), "all, known": [one for one in made if one.row.known]}
    return str(
        table(SOURCES, [[name, *_of_source(score(some))] for name, some in groups.items() if some])
    )


def _of_source(one: Score) -> list[str]:
    return [
        str(one.rows),
        percent(one.mape),
        signed(one.bias),
        f"{one.in_order} of {one.pairs}" if one.pairs else "-",
        _percent(one.regret),
        "-" if one.memory is None else f"{one.memory:.2f}",
        str(one.unfit),
        str(one.below_bound),
        str(one.below_peak),
    ]


def models(made: Sequence[Predicted]) -> str:
    """The errors of each model of which several plans were measured for one question."""
    groups = _groups(made, _model)
    scores = {name: score(some) for name, some in groups.items()}
    return str(
        table(
            MODELS,
            [[name, _devices(groups[name]), *_of_model(one)]
             for name, one in scores.items() if one.questions],
        )
    )  # fmt: skip


def _of_model(one: Score) -> list[str]:
    return [
        str(one.questions),
        str(one.rows),
        percent(one.mape),
        signed(one.bias),
        f"{one.in_order} of {one.pairs}" if one.pairs else "-",
        _percent(one.regret),
        _percent(one.largest_regret),
    ]


def _percent(share: float | None) -> str:
    return "-" if share is None else percent(share)


def _model(one: Predicted) -> str:
    network = one.row.network
    assert network is not None
    return f"{one.row.source}, {network.layers} x {network.width}, {network.kind}"


def _devices(some: Sequence[Predicted]) -> str:
    counts = sorted({one.row.num_devices for one in some})
    span = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"{span} {', '.join(sorted({one.row.device for one in some}))}"


def _groups(
    some: Sequence[Predicted], key: Callable[[Predicted], str]
) -> dict[str, list[Predicted]]:
    return {
        name: [one for one in some if key(one) == name] for name in dict.fromkeys(map(key, some))
    }


# ------------------------------------------------------------------------------- names


def _by_reason(left_out: Sequence[tuple[Row, str]]) -> str:
    reasons = dict.fromkeys(reason for _, reason in left_out)
    lines = [
        f"- {reason}: {_named([row for row, why in left_out if why == reason])}"
        for reason in reasons
    ]
    return "\n".join(lines) or "None."


def _named(some: Sequence[Row]) -> str:
    """Names of rows by their sources; of lines of a table, and of numbered ones, the numbers.

    >>> from types import SimpleNamespace as Named
    >>> _named([Named(source="s", name=f"{n}: x") for n in (2, 3, 4, 7)])
    's 2 to 4, 7'
    """
    names: dict[str, list[str]] = {}
    for row in some:
        own = row.name.partition(":")[0]
        names.setdefault(row.source, []).append(own.removeprefix(f"{row.source}-"))
    return "; ".join(f"{source} {', '.join(_runs(own))}" for source, own in names.items())


def _runs(names: Sequence[str]) -> Iterator[str]:
    """Names, those of successive lines together."""
    if not all(re.fullmatch("[1-9][0-9]*", name) for name in names):
        yield from names
        return
    lines = sorted(map(int, names))
    for _, group in groupby(enumerate(lines), key=lambda pair: pair[1] - pair[0]):
        run = [line for _, line in group]
        yield str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}"


# ------------------------------------------------------------------------ assumptions


def _assumptions() -> str:
    """The list in the docstring of `assumptions.py`, and the tables that it names."""
    assert assumptions.__doc__ is not None
    written = assumptions.__doc__[assumptions.__doc__.index("\n- ") + 1 :].strip()
    sources = ("UNFUSED", "DROPPED", "FLOAT32_GRADIENTS", "AUTOCAST", "FUSED_LOSSES", "IN_LINE",
               "LAUNCH_BLOCKING", "SEQUENCE_PARALLEL")  # fmt: skip
    tables = {name: ", ".join(sorted(getattr(assumptions, name))) for name in sources} | {
        "SHARING": _pairs(assumptions.SHARING),
        "RATES": f"{_pairs(assumptions.RATES)}; all others: {assumptions.USUAL_RATE}",
        "WHOLE_HOSTS": str(assumptions.WHOLE_HOSTS),
        "HOSTS": _pairs({f"{n} {kind}": name for (kind, n), name in assumptions.HOSTS.items()}),
        "NVLINKS": _pairs(
            {source: f"{share:.2f}" for source, share in assumptions.NVLINKS.items()}
        ),
        "REPORTED": _pairs(
            {kind: f"{size / 1e9:.1f} GB" for kind, size in assumptions.REPORTED.items()}
        ),
        "CARDS": _pairs({source: _card(one) for source, one in assumptions.CARDS.items()}),
    }
    return "\n".join([written, *(f"- `{name}`: {text}." for name, text in tables.items())])


def _pairs(some: Mapping[str, str]) -> str:
    return ", ".join(f"{key}: {text}" for key, text in some.items())


def _card(one: assumptions.Card) -> str:
    words = f"{one.memory_bytes / 1e9:g} GB"
    if one.bandwidth_bytes_per_s is not None:
        words += f" at {one.bandwidth_bytes_per_s / 1e12:g} TB/s"
    return words if one.speed == 1 else f"{words}, {one.speed:g} of the FLOP/s"


# ----------------------------------------------------------------------------- picture


def drawn(made: Sequence[Predicted]) -> str:
    """Predicted over measured times and memory, as the text of an SVG file."""
    times: dict[str, list[tuple[float, float]]] = {}
    memory: dict[str, list[tuple[float, float]]] = {}
    for one in made:
        row = one.row
        times.setdefault(row.source, []).append((row.iteration_s, one.iteration_s))
        if row.memory_bytes is not None and one.memory_ratio is not None:
            pair = (row.memory_bytes / 1e9, one.memory_ratio * row.memory_bytes / 1e9)
            memory.setdefault(row.source, []).append(pair)
    plots = [Scatter("Time of an iteration", "s", times)]
    if memory:
        plots.append(Scatter("Memory of the fullest device", "GB", memory))
    return picture("Predicted and measured", plots)
