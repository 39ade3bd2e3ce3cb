"""NetSplit's plan for several microbatches, run on 2 processes of a quiet machine (minutes).

The plans of all other solvers stand beside it.

    python -m tests.bench.periodic [--steps N] [--write]

Two towers of different depths and a few layers on their sum, in 8 microbatches. The two halves of
the work are the longer tower, and the shorter one with the joint layers. In a pipeline, the second
half waits for the first. One microbatch alone is as fast with the joint layers on either device.
Replicas have to sum the gradients of all layers. The profile and the links are measured first. The
machine should do nothing else.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.bench.solvers import ROOT, machine, percent, put, table
from tests.support.mlp_towers import write_mlp_towers

DOCUMENT = ROOT / "docs" / "placements.md"
DEPTHS, JOINT, WIDTH, BATCH, MICROBATCHES = (4, 6), 2, 1536, 8, 8
STEPS = 10
HEAD = ["solver", "stages", "predicted samples/s", "measured", "least", "most", "error"]


def planner(folder: Path, *words: str) -> str:
    """The output of a command in a folder."""
    start = "from cli import start; start()"
    done = subprocess.run(
        [sys.executable, "-c", start, *words], cwd=folder, capture_output=True, text=True,
        check=False, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"planner {' '.join(words)}: {done.stderr}")
    return done.stdout


def compared(folder: Path, steps: int) -> dict[str, Any]:
    """What `planner compare --run` says, with profile and topology in a folder."""
    write_mlp_towers(folder / "model.onnx", DEPTHS, WIDTH, BATCH, JOINT)
    planner(folder, "profile", "model.onnx", "--batch", f"{BATCH}")
    planner(folder, "topology", "probe", "--nproc", "2", "-o", "here.yaml")
    return json.loads(
        planner(folder, "compare", "--topology", "here.yaml", "--microbatches", f"{MICROBATCHES}",
                "--run", f"{steps}", "--json")
    )  # fmt: skip


def rows(of_solvers: Sequence[dict[str, Any]]) -> list[list[str]]:
    """A line for each solver, the fastest measured first, those without a plan last."""
    lines = []
    for one in of_solvers:
        measured, predicted = one["measured"], one["throughput"]
        if measured is None:
            lines.append((0.0, [one["solver"], one["not_measured"], *["-"] * 5]))
            continue
        rate, same = measured["throughput"], measured.get("same_as")
        name = one["solver"] + (f" (the plan of {same})" if same else "")
        figures = (predicted, rate, measured["least_throughput"], measured["most_throughput"])
        shown = [f"{figure:.1f}" for figure in figures]
        lines.append((-rate, [name, one["num_stages"], *shown, percent(predicted / rate - 1, 1)]))
    return [line for _, line in sorted(lines, key=lambda one: one[0])]


def main() -> None:
    """Profile, probe, compare, run; print the table, and write it where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS, help="timed steps of each plan")
    parser.add_argument("--write", action="store_true", help="write the document")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        answer = compared(Path(folder), options.steps)
    order, lines = answer["order"], table(HEAD, rows(answer["compared"]))
    text = (
        f"{lines}\n\n{options.steps} steps each; in the order predicted:"
        f" {order['as_predicted']} of {order['pairs']} pairs of plans that differ. {machine()}"
    )
    print(text)
    if options.write:
        put(DOCUMENT, "periodic", text)


if __name__ == "__main__":
    main()
