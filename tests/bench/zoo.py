"""The zoo of networks on the user's way, beside PyTorch (an hour).

Every network is exported by `planner export` and by torch's default, profiled, solved and launched
on two processes, and its losses stand beside PyTorch's.

    python -m tests.bench.zoo [--write] [NAME ...]
    python -m tests.bench.zoo --checks [--write] [NAME ...]

The second compares gradients only, and prints how long that takes beside the export.

Rows of the first are kept in .cache/zoo, so that a run can be continued: without names, the
networks that have no row yet are run. `--write` writes the table into docs/models.md.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import torch

import planner
from planner.model.record import read_record
from tests.support.zoo import ZOO, build, draws, journey, pipeline, reference

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".cache" / "zoo"
DOCUMENT = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- make bench-zoo: begin -->", "<!-- make bench-zoo: end -->"
BEGIN_CHECKS, END_CHECKS = "<!-- gradient checks: begin -->", "<!-- gradient checks: end -->"
TOGETHER = 10  # networks that one start of torchrun launches
EXPORTS = {"ours": journey.export_by_planner, "default": journey.export_by_torch}


@dataclass
class Way:
    """How far one file of a network came.

    Attributes:
        reached: the steps that worked.
        error: of the step that did not.
        trained: the number of trained tensors.
        warned: whether reading it gives a warning.
        difference: the largest relative difference of a loss to PyTorch's; None if unknown.
    """

    reached: list[str] = field(default_factory=list)
    error: str = ""
    trained: int | None = None
    warned: bool = False
    difference: float | None = None


@dataclass
class Row:
    """A network.

    Attributes:
        tensors: parameters of the module.
        ties: parameters with several names.
        left_out: reasons why parameters are not trained, with their number.
        ours: by `planner export`.
        default: by torch's default.
    """

    tensors: int
    ties: int
    left_out: dict[str, int]
    ours: Way
    default: Way


def say(line):
    """Prints a line of progress."""
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


def start(name: str) -> Row:
    """A network exported, profiled and solved both ways, and its launches prepared."""
    module, _ = build(name)
    named = module.named_parameters(remove_duplicate=False)
    ties = sum(count > 1 for count in Counter(id(one) for _, one in named).values())
    row = Row(len(list(module.parameters())), ties, {}, Way(), Way())
    attempt(name, "ours", row)
    attempt(name, "default", row)
    return row


def attempt(name: str, way: str, row: Row) -> None:
    """A network by one exporter, as far as the launch; the step that fails is in the table."""
    folder = place(name, way)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        travel(name, way, row)
    except Exception as error:  # whatever it is, it is in the table
        (folder / "error.txt").write_text(traceback.format_exc())
        getattr(row, way).error = shortened(error)


def travel(name: str, way: str, row: Row) -> None:
    """All steps before the launch; those that worked are noted."""
    made, path = getattr(row, way), place(name, way) / "model.onnx"
    EXPORTS[way](name, path)
    made.reached.append("export")
    model = pipeline.read(name, path)
    made.trained = sum(one.trainable for one in model.graph.parameters)
    made.warned = bool(model.warnings)
    if way == "ours":
        row.left_out = dict(reasons(model))
    made.reached.append("read")
    profile = journey.profiled(name, path)
    made.reached.append("profile")
    if journey.solved(profile).plan is None:
        raise planner.PlannerError("no plan fits")
    journey.prepared(name, path, journey.two_stages(profile))
    made.reached.append("solve")


def launch(rows: dict[str, Row]) -> None:
    """Launches everything that is prepared, and compares it with PyTorch."""
    ready = [
        (n, w) for n, row in rows.items() for w in EXPORTS if "solve" in way_of(row, w).reached
    ]
    results = journey.launched([place(name, way) for name, way in ready])
    for (name, way), losses in zip(ready, results, strict=True):
        made = way_of(rows[name], way)
        if isinstance(losses, str):
            made.error = f"launch: {losses}"[:160]
        else:
            made.reached.append("launch")
            made.difference = difference(name, place(name, way), losses)


def way_of(row: Row, way: str) -> Way:
    made = getattr(row, way)
    assert isinstance(made, Way)
    return made


def place(name: str, way: str) -> Path:
    """The folder of a network by one exporter."""
    return FOLDER / name / way


def difference(name: str, folder: Path, losses: list[float]) -> float | None:
    """The largest relative difference to PyTorch's losses; None where the file draws other numbers
    than the module, because the exporter left some out.
    """
    model = pipeline.read(name, folder / "model.onnx")
    seed = planner.read_strategy(folder / "strategy.json").seed
    try:
        feeding = partial(draws.fed, model, seed) if ZOO[name].draws else None
        wanted, _ = reference.train(name, feeding)
    except draws.OtherDrawsError:
        return None
    return max(abs(a - b) / abs(b) for a, b in zip(losses, wanted, strict=True))


def reasons(model) -> Counter:
    """Why parameters of the module are not trained."""
    record = read_record(model.proto)
    if record is None:
        return Counter()
    trained = {one.name for one in model.graph.parameters if one.trainable}
    return Counter(
        model.choices[one.initializer].reason
        if one.initializer in model.choices
        else "no output depends on it"
        for one in record.parameters
        if one.initializer not in trained
    )


def shortened(error: Exception) -> str:
    """The first line of a message, without the folder."""
    cause = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    lines = [line for line in str(cause).splitlines() if line.strip()] or [type(cause).__name__]
    return lines[0].replace(f"{FOLDER}/", "").replace("|", "/")[:160]


# ------------------------------------------------------------------------------ the table


def table(rows: dict[str, Row]) -> str:
    """The rows as Markdown, and a line that counts them."""
    lines = [
        "| network | tensors | tied | trained | trained, default | comes to | comes to, default |"
        " difference | difference, default | remarks |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *(line(name, row) for name, row in rows.items()),
    ]
    return f"{summary(rows)}\n\n" + "\n".join(lines)


def summary(rows: dict[str, Row]) -> str:
    """How many networks come how far."""
    ours = sum("launch" in row.ours.reached for row in rows.values())
    exported = [row for row in rows.values() if "export" in row.default.reached]
    default = sum("launch" in row.default.reached for row in exported)
    close = [row.ours.difference for row in rows.values() if row.ours.difference is not None]
    right = sum(one <= 1e-5 for one in close)
    return (
        f"{len(rows)} networks. By `planner export`, {ours} are launched, and the losses of {right}"
        f" equal PyTorch's to 1e-5 (the largest difference is {max(close):.1e}). By torch's"
        f" default, {len(exported)} are exported and {default} of them launched."
    )


def line(name: str, row: Row) -> str:
    """One row."""
    cells = (
        name,
        str(row.tensors),
        str(row.ties or ""),
        trained(row.ours),
        trained(row.default),
        last(row.ours),
        last(row.default),
        apart(row.ours),
        apart(row.default),
        "; ".join(remarks(name, row)),
    )
    return f"| {' | '.join(cells)} |"


def trained(made: Way) -> str:
    """The number of trained tensors."""
    return "" if made.trained is None else f"{made.trained}{', warned' if made.warned else ''}"


def apart(made: Way) -> str:
    """The difference of the losses."""
    return "" if made.difference is None else f"{made.difference:.0e}"


def last(made: Way) -> str:
    """The last step that worked."""
    return made.reached[-1] if made.reached else "nothing"


def remarks(name: str, row: Row) -> list[str]:
    """What a reader has to know about a network."""
    found = [f"{count} not trained: {reason}" for reason, count in row.left_out.items()]
    if ZOO[name].draws:
        found.append("draws numbers")
    if row.ours.error:
        found.append(f"planner export: {row.ours.error}")
    if row.default.error:
        found.append(f"default: {row.default.error}")
    return found


# ------------------------------------------------------------------------------ rows on the disk


def read_rows() -> dict[str, Row]:
    """The rows of earlier runs, in the order of the zoo."""
    rows = {}
    for name in ZOO:
        file = FOLDER / name / "row.json"
        if file.is_file():
            content = json.loads(file.read_text())
            ways = {key: Way(**content.pop(key)) for key in ("ours", "default")}
            rows[name] = Row(**content, **ways)
    return rows


def write(text: str, begin: str, end: str) -> None:
    """A table into the document, between its markers."""
    whole = DOCUMENT.read_text()
    head, rest = whole.split(begin)
    DOCUMENT.write_text(f"{head}{begin}\n{text}\n{end}{rest.split(end)[1]}")


# ------------------------------------------------------------------------------ gradient checks


@dataclass
class Check:
    """The export of a network with and without a comparison of gradients and outputs.

    Attributes:
        export_s: CPU time of `planner.export` with `check=False`, in s.
        checked_s: the same with the comparison.
        outcome: the largest difference of a gradient, or why there is none.
    """

    export_s: float
    checked_s: float
    outcome: str


def checked(name: str, path: Path) -> Check:
    """A network exported twice."""
    seconds, outcome = [], ""
    for check in (False, True):
        module, inputs = build(name)
        begin = time.process_time()
        try:
            done = planner.export(module, inputs, path, check=check)
            if check:
                made = done.gradients
                outcome = made.reason or f"{made.difference:.0e}"
        except planner.PlannerError as error:
            outcome = shortened(error)
        seconds.append(time.process_time() - begin)
    return Check(*seconds, outcome)


def check_table(checks: dict[str, Check]) -> str:
    """The rows, and the sums."""
    export_s = sum(one.export_s for one in checks.values())
    checked_s = sum(one.checked_s for one in checks.values())
    passed = sum("e" in one.outcome and "." not in one.outcome for one in checks.values())
    lines = [
        f"{len(checks)} networks, {passed} pass. Their exports take {export_s:.0f} s of CPU time,"
        f" with the comparison {checked_s:.0f} s: {checked_s / export_s:.2f} times as much.",
        "",
        "| network | export | with the comparison | largest difference of a gradient |",
        "|---|---|---|---|",
    ]
    for name, one in checks.items():
        lines.append(f"| {name} | {one.export_s:.1f} s | {one.checked_s:.1f} s | {one.outcome} |")
    return "\n".join(lines)


def check_all(names: Sequence[str]) -> str:
    """The table of some networks, after one that loads what every export loads."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        checked(next(iter(ZOO)), path)
        checks = {}
        for name in names:
            checks[name] = checked(name, path)
            say(f"{name}: {checks[name]}")
    return check_table(checks)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the table into docs/models.md")
    parser.add_argument("--checks", action="store_true", help="compare gradients only")
    parser.add_argument("names", nargs="*", metavar="NAME")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.checks:
        text = check_all(options.names or [*ZOO])
        write(text, BEGIN_CHECKS, END_CHECKS) if options.write else print(text)
        return
    known = read_rows()
    names = options.names or [name for name in ZOO if name not in known]
    for first in range(0, len(names), TOGETHER):
        rows = {name: start(name) for name in names[first : first + TOGETHER]}
        launch(rows)
        for name, row in rows.items():
            say(line(name, row))
            (FOLDER / name / "row.json").write_text(json.dumps(asdict(row), indent=1))
    if options.write:
        write(table(read_rows()), BEGIN, END)
    else:
        print(table(read_rows()))


if __name__ == "__main__":
    main()
