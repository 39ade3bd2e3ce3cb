"""40 epochs of two small networks by the planner and by PyTorch's loops (10 minutes).

The losses of all steps, and the evaluation after each epoch, stand beside each other.

    python -m tests.bench.convergence [--epochs N] [--tasks NAME,...] [--write]

All processes are on CPUs, in float64. With --write, tables go into docs/training.md and the picture
into docs/training.svg. It ends with an error where a curve is not what that page says.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch

from tests.bench.solvers import ROOT, machine, put, table
from tests.support.charts import Chart, Look, picture
from tests.support.convergence.curves import Curves, apart
from tests.support.convergence.networks import TASKS
from tests.support.convergence.replay import ages, replayed
from tests.support.convergence.rivals import RIVALS, feeding_of, trained_by
from tests.support.convergence.samples import STEPS_PER_EPOCH
from tests.support.convergence.ways import WAYS, exported, launched, planned

DOCUMENT, PICTURE = ROOT / "docs" / "training.md", ROOT / "docs" / "training.svg"
EPOCHS, LOSS_LIMIT, POINTS_LIMIT = 40, 1e-5, 0.5
BEGUN = 2  # epochs that the charts of accuracies leave out, because they are much lower
LOOP, DDP, USUAL, REPLAY = "loop", "ddp", "ddp-usual", "replay"


@dataclass(frozen=True)
class Row:
    """A way to train.

    Attributes:
        title: what the tables call it.
        look: of its lines.
        equals: the row whose losses and evaluations it has to have; None for what trains otherwise.
        of_losses_only: whether only the losses are compared, because running statistics differ.
    """

    title: str
    look: Look
    equals: str | None = None
    of_losses_only: bool = False


ROWS: Mapping[str, Row] = {
    DDP: Row("DistributedDataParallel", Look("#c9cfd6", 7)),
    LOOP: Row("PyTorch's loop", Look("#8a939d", 3.5), DDP, of_losses_only=True),
    "data-parallel": Row("launch, data parallel", Look("#1f5fa8"), DDP),
    "pipeline": Row("launch, pipeline", Look("#c2511d", 1.5, "6 4"), LOOP),
    "placement": Row("launch, NetSplit's placement", Look("#3a7d3a", 1.5, "2 3"), LOOP),
    REPLAY: Row("PipeDream's rule, replayed", Look("#dcb7e4", 5)),
    "pipedream": Row("launch, asynchronous", Look("#8b2fa0", 1.5), REPLAY),
    USUAL: Row("DistributedDataParallel, one part per rank", Look("#b8860b", 1.5, "8 3 2 3")),
}
"""The accuracies of all launches are compared with that of the first one."""


def trained(task: str, num_epochs: int, folder: Path) -> dict[str, Curves]:
    """The curves of all rows."""
    folder.mkdir()
    model = exported(task, folder)
    strategies = planned(task, model)
    curves = {}
    for name in ROWS:
        began_s = time.perf_counter()
        if name in WAYS:
            curves[name] = launched(TASKS[task], WAYS[name], strategies[name], num_epochs)
        elif name == REPLAY:
            feeding = feeding_of(TASKS[task], RIVALS[LOOP], model)
            age = ages(strategies["pipedream"], model)
            curves[name] = replayed(TASKS[task], num_epochs, feeding, age)
        else:
            curves[name] = trained_by(name, task, num_epochs, folder)
        took_s = time.perf_counter() - began_s
        print(f"{task}, {name}: {curves[name].accuracies[-1]:.4f}, {took_s:.0f} s", flush=True)
    return curves


def difference(name: str, curves: Mapping[str, Curves]) -> float | None:
    """The largest difference to the row that one has to equal; None if there is none."""
    row, own = ROWS[name], curves[name]
    if row.equals is None:
        return None
    other = curves[row.equals]
    losses = apart(own.losses, other.losses)
    return losses if row.of_losses_only else max(losses, judged_apart(own, other))


def judged_apart(one: Curves, other: Curves) -> float:
    """The largest difference of a loss of the evaluation."""
    return apart(one.judged_losses, other.judged_losses)


def points(one: Curves, other: Curves) -> float:
    """The difference of the final accuracies, in points."""
    return 100 * abs(one.accuracies[-1] - other.accuracies[-1])


def failures(task: str, curves: Mapping[str, Curves]) -> list[str]:
    """What is not as the page says."""
    found = []
    for name, row in ROWS.items():
        by, off = difference(name, curves), points(curves[name], curves[DDP])
        if row.equals is not None and not (by is not None and by <= LOSS_LIMIT):
            found.append(f"{task}: {row.title}: {by} from {ROWS[row.equals].title}")
        if name in WAYS and not off <= POINTS_LIMIT:
            found.append(f"{task}: {row.title}: its accuracy is {off:.2f} points off")
    return found


def lines(curves: Mapping[str, Curves]) -> str:
    """The table of one task."""
    head = [
        "way", "loss, last epoch", "loss of the evaluation", "accuracy", "points to the first row",
        "has to equal", "largest difference to that",
    ]  # fmt: skip
    rows = []
    for name, row in ROWS.items():
        own, by = curves[name], difference(name, curves)
        rows.append([
            row.title, f"{fmean(own.losses[-STEPS_PER_EPOCH:]):.5f}",
            f"{own.judged_losses[-1]:.5f}", f"{100 * own.accuracies[-1]:.2f} %",
            f"{points(own, curves[DDP]):.2f}", "" if row.equals is None else said(row),
            "" if by is None else f"{by:.1e}",
        ])  # fmt: skip
    return str(table(head, rows))


def said(row: Row) -> str:
    """What a row has to equal."""
    return f"{ROWS[row.equals or DDP].title}{', losses' if row.of_losses_only else ''}"


def charts(task: str, curves: Mapping[str, Curves]) -> Sequence[Chart]:
    """Losses, accuracies and differences of one task."""
    losses, shares, differences = {}, {}, {}
    for name, own in curves.items():
        row = ROWS[name]
        losses[row.title] = per_epoch(own.losses, fmean)
        shares[row.title] = [(i + 1.0, 100 * one) for i, one in enumerate(own.accuracies)][BEGUN:]
        if row.equals is not None:
            other = curves[row.equals].losses
            by = [abs(a - b) for a, b in zip(own.losses, other, strict=True)]
            differences[row.title] = per_epoch(by, max)
    low, high = span(losses)
    return (
        Chart(f"{task}: loss", "epoch", losses, (low, high), logarithmic=high > 20 * low),
        Chart(f"{task}: accuracy in %", "epoch", shares, span(shares)),
        Chart(
            f"{task}: difference of a loss to its equal", "epoch", differences, (1e-17, 1e-3),
            logarithmic=True, mark=(LOSS_LIMIT, "1e-5"),
        ),
    )  # fmt: skip


Points = list[tuple[float, float]]


def per_epoch(values: Sequence[float], figure: Callable[[Sequence[float]], float]) -> Points:
    """One number of the steps of each epoch."""
    starts = range(0, len(values), STEPS_PER_EPOCH)
    return [(i + 1.0, figure(values[a : a + STEPS_PER_EPOCH])) for i, a in enumerate(starts)]


def span(lines: Mapping[str, Points]) -> tuple[float, float]:
    """The least and the largest y."""
    values = [y for line in lines.values() for _, y in line]
    return min(values), max(values)


def main() -> None:
    """All tasks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=EPOCHS, help="at least 4 to be drawn")
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--write", action="store_true", help="write docs/training.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        found = {
            task: trained(task, options.epochs, Path(temporary) / task)
            for task in options.tasks.split(",")
        }
    text = f"{machine()}.\n\n" + "\n\n".join(f"**{t}**\n\n{lines(c)}" for t, c in found.items())
    print(text)
    wrong = [one for task, curves in found.items() for one in failures(task, curves)]
    if options.write and not wrong:
        put(DOCUMENT, "convergence", text)
        looks = {row.title: row.look for row in ROWS.values()}
        rows = [charts(task, curves) for task, curves in found.items()]
        PICTURE.write_text(picture("Losses and accuracies of training", rows, looks))
    sys.exit("\n".join(wrong) or None)


if __name__ == "__main__":
    main()
