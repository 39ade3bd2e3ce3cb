"""The zoo on the user's way: every network exported by `planner export` and by torch's default,
profiled, solved and launched on two processes, and its losses beside PyTorch's.

    python -m tests.bench.zoo [--write] [NAME ...]

Rows are kept in .cache/zoo, so that a run can be continued: without names, the networks that have
no row yet are run. `--write` writes the table into docs/models.md.
"""

import argparse
import json
import shutil
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import torch

import planner
from planner.model.record import read_record
from tests.support.zoo import ZOO, build, draws, journey, reference

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".cache" / "zoo"
DOCUMENT = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- make bench-zoo: begin -->", "<!-- make bench-zoo: end -->"


@dataclass
class Way:
    """How far one file of a network came.

    Attributes:
        reached: the steps that worked.
        error: of the step that did not.
        trained: the number of trained tensors.
        difference: the largest relative difference of a loss to PyTorch's; None if unknown.
    """

    reached: list[str] = field(default_factory=list)
    error: str = ""
    trained: int | None = None
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


def run(name: str) -> Row:
    """One network, both ways."""
    module, _ = build(name)
    named = module.named_parameters(remove_duplicate=False)
    ties = sum(count > 1 for count in Counter(id(one) for _, one in named).values())
    left_out: dict[str, int] = {}
    ours = way(name, journey.export_by_planner, left_out)
    default = way(name, journey.export_by_torch, {})
    return Row(len(list(module.parameters())), ties, left_out, ours, default)


def way(name: str, export: Callable[[str, Path], object], left_out: dict[str, int]) -> Way:
    """A network by one exporter; the step that fails is in the table."""
    folder = FOLDER / name / export.__name__
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    path, made = folder / "model.onnx", Way()
    try:
        travel(name, export, path, made, left_out)
    except Exception as error:  # whatever it is, it is in the table
        (folder / "error.txt").write_text(traceback.format_exc())
        made.error = shortened(error)
    return made


def travel(name, export, path, made, left_out):
    """All steps; those that worked are noted."""
    export(name, path)
    made.reached.append("export")
    model = planner.read_model(path)
    made.trained = sum(one.trainable for one in model.graph.parameters)
    left_out.update(reasons(model))
    made.reached.append("read")
    profile = journey.profiled(path)
    made.reached.append("profile")
    if journey.solved(profile).plan is None:
        raise planner.PlannerError("no plan fits")
    plan = journey.two_stages(profile)
    made.reached.append("solve")
    losses = journey.launched(name, path, plan)
    made.reached.append("launch")
    if ZOO[name].draws and len(draws.random_nodes(model)) == 0:
        return  # the exporter left the draws out: there is nothing to feed to the module
    feeding = partial(draws.fed, model, plan.seed) if ZOO[name].draws else None
    wanted, _ = reference.train(name, feeding)
    made.difference = max(abs(a - b) / abs(b) for a, b in zip(losses, wanted, strict=True))


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
        " difference | remarks |",
        "|---|---|---|---|---|---|---|---|---|",
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
        number(row.ours.trained),
        number(row.default.trained),
        last(row.ours),
        last(row.default),
        "" if row.ours.difference is None else f"{row.ours.difference:.0e}",
        "; ".join(remarks(name, row)),
    )
    return f"| {' | '.join(cells)} |"


def number(count):
    return "" if count is None else str(count)


def last(made: Way) -> str:
    """The last step that worked."""
    return made.reached[-1] if made.reached else "nothing"


def remarks(name: str, row: Row) -> list[str]:
    """What a reader has to know about a network."""
    found = [f"{count} not trained: {reason}" for reason, count in row.left_out.items()]
    if not ZOO[name].training:
        found.append("in evaluation mode")
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


def write(rows: dict[str, Row]) -> None:
    """The table into the document, between its markers."""
    text = DOCUMENT.read_text()
    head, rest = text.split(BEGIN)
    DOCUMENT.write_text(f"{head}{BEGIN}\n{table(rows)}\n{END}{rest.split(END)[1]}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the table into docs/models.md")
    parser.add_argument("names", nargs="*", metavar="NAME")
    options = parser.parse_args()
    torch.set_num_threads(1)
    known = read_rows()
    for name in options.names or [name for name in ZOO if name not in known]:
        row = run(name)
        (FOLDER / name / "row.json").write_text(json.dumps(asdict(row), indent=1))
        say(line(name, row))
    rows = read_rows()
    print(table(rows))
    if options.write:
        write(rows)


if __name__ == "__main__":
    main()
