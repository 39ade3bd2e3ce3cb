"""How far profiles can be trusted: operators beside the whole step, the cache (20 minutes).

Also computed beside measured times, and the memory that profiling takes.

    python -m tests.bench.profile [--only sums,cache,analytic,memory] [--models NAME,...] [--write]

Every measurement is a process of its own with one thread. With --write the tables go into
docs/profiles.md, between its markers.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from planner.artefacts.files import read_profile
from planner.costs.stage_memory import memory_of
from planner.profilers.cache import processor
from planner.profilers.summary import summary
from tests.support.models import MODELS, cached, gpt2

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "profiles.md"
BUILT = Path(tempfile.gettempdir()) / "planner-bench-models"

# Microbatches that take about a second per step on one core.
SIZES = {
    "resnet50": ["--batch", "4"],
    "inception_v1": ["--batch", "8"],
    "inception_v2": ["--batch", "8"],
    "densenet121": ["--batch", "4"],
    "vgg19": ["--batch", "1"],
    "alexnet": ["--batch", "8"],
    "squeezenet": ["--batch", "8"],
    "shufflenet": ["--batch", "16"],
    "zfnet512": ["--batch", "2"],
    "gpt2": ["--batch", "2", "--dim", "seq=128"],
    "bert": ["--batch", "2", "--dim", "seq=128"],
}
PARTS = ("sums", "cache", "analytic", "memory")


TRAINING = """
import sys
from pathlib import Path
import torch
from planner.model.load import load
from planner.operators import synthetic, to_torch
torch.set_num_threads(1)
batch, *dims = (text for text in sys.argv[2:] if not text.startswith("--"))
model = load(Path(sys.argv[1]), batch=int(batch),
             dimensions={n: int(k) for n, _, k in (d.partition("=") for d in dims)})
module = to_torch(model)
inputs = synthetic.inputs(model, seed=0, microbatch=0)
for _ in range(3):
    outputs = module(*(inputs[name] for name in module.input_names))
    output = outputs[module.output_names.index(model.graph.outputs[0])]
    torch.autograd.backward(output, torch.randn_like(output))
    del outputs, output
"""
"""A process that trains the whole model and does nothing else."""


WATCHED = """
import runpy, sys
from pathlib import Path
peak, *sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    lines = Path("/proc/self/status").read_text().splitlines()
    Path(peak).write_text(next(line.split()[1] for line in lines if line.startswith("VmHWM")))
"""
"""Runs a script and writes the peak of its resident memory, in KiB, into a file. The system's own
figure for the parent would include the parent's memory at the start.
"""


def run(
    script: Path, options: Sequence[str], folder: Path, **environment: str
) -> tuple[bytes, int, float]:
    """The output of a script, its peak memory in bytes, and its time in s."""
    peak = folder / "peak"
    command = [sys.executable, "-c", WATCHED, str(peak), str(script), *options]
    begin = time.perf_counter()
    done = subprocess.run(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment},
        check=True,
    )
    return done.stdout, int(peak.read_text()) * 1024, time.perf_counter() - begin


def profiled(model: Path, options: Sequence[str], folder: Path, cache: Path) -> dict[str, Any]:
    """The object of `planner profile --json`, with the peak memory of its process."""
    path = folder / f"{model.stem}.json"
    command = ["profile", str(model), *options, "-o", str(path), "--json"]
    output, peak_bytes, time_s = run(ROOT / "cli.py", command, folder, XDG_CACHE_HOME=str(cache))
    return {**json.loads(output), "peak_bytes": peak_bytes, "took_s": time_s, "path": path}


def sums(names: Sequence[str], folder: Path) -> tuple[list[str], dict[str, dict[str, Any]]]:
    """The sum of the operators over the whole step; and the profiles' objects, by name."""
    lines = [
        "| model | microbatch | operators, sum | whole step | sum / whole | drift |"
        " not known to 3 % |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    objects = {}
    for name in names:
        with tempfile.TemporaryDirectory() as cache:
            one = profiled(cached(name, BUILT), SIZES[name], folder, Path(cache))
        objects[name] = one
        profile = read_profile(one["path"])
        known = summary(profile)
        total_s = sum(o.forward_s + o.backward_s for o in profile.operators)
        unsure_s = sum(o.forward_s + o.backward_s for o in profile.operators if o.interval > 0.03)
        lines.append(
            f"| {name} | {' '.join(SIZES[name]).replace('--batch ', '').replace('--dim ', '')} |"
            f" {known.sum_s:.3f} s | {known.whole_s:.3f} s | {known.sum_per_whole:.3f} |"
            f" {one['drift']:+.1%} | {unsure_s / total_s:.0%} |"
        )
        print(lines[-1], flush=True)
    return lines, objects


def cache_savings(folder: Path) -> list[str]:
    """The time of a second profile, of the same model and of one with twice the layers."""
    lines = [
        "| model | profile | different operators | timed | operators took | start-up |"
        " whole model |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    models = {
        "resnet50": (cached("resnet50", BUILT), SIZES["resnet50"]),
        "gpt2, 4 layers": (cached("gpt2-4", BUILT, partial(gpt2, layers=4)), SIZES["gpt2"]),
        "gpt2, 8 layers": (cached("gpt2-8", BUILT, partial(gpt2, layers=8)), SIZES["gpt2"]),
    }
    runs = [("resnet50", "first"), ("resnet50", "second"), ("gpt2, 4 layers", "first"),
            ("gpt2, 4 layers", "second"), ("gpt2, 8 layers", "after 4 layers")]  # fmt: skip
    with tempfile.TemporaryDirectory() as cache:
        for name, which in runs:
            model, options = models[name]
            for _ in range(5):  # measurements of a busy machine are not kept
                one = profiled(model, options, folder, Path(cache))
                (effort,) = one["effort"]
                if which != "first" or effort["kept"]:
                    break
            start_s = one["took_s"] - effort["operators_s"] - effort["whole_s"]
            lines.append(
                f"| {name} | {which} | {effort['num_classes']} | {effort['num_timed']} |"
                f" {effort['operators_s']:.2f} s | {start_s:.1f} s | {effort['whole_s']:.1f} s |"
            )
            print(lines[-1], flush=True)
    return lines


def memory(names: Sequence[str], folder: Path) -> list[str]:
    """Peak memory of profiling beside that of a process that trains the model."""
    lines = [
        "| model | predicted, without libraries | process that trains | `planner profile` |"
        " beyond training |",
        "|---|---:|---:|---:|---:|",
    ]
    training = folder / "training.py"
    training.write_text(TRAINING)
    for name in names:
        model, options = cached(name, BUILT), [*SIZES[name], "--budget", "10ms"]
        with tempfile.TemporaryDirectory() as cache:
            one = profiled(model, options, folder, Path(cache))
        needs = memory_of(read_profile(one["path"]), range(one["num_operators"]))
        predicted = (
            needs.static.parameter
            + needs.static.trainable
            + needs.kept_bytes
            + needs.backward_workspace_bytes
        )
        _, trains, _ = run(training, [str(model), *SIZES[name]], folder)
        sizes = (predicted, trains, one["peak_bytes"], one["peak_bytes"] - trains)
        lines.append(f"| {name} | {' | '.join(f'{size / 2**20:.0f} MiB' for size in sizes)} |")
        print(lines[-1], flush=True)
    return lines


def analytic(objects: dict[str, dict[str, Any]]) -> list[str]:
    """Computed times beside measured ones, the device's two constants fitted."""
    from tests.bench.profile_analytic import rows

    lines = [
        "| model | rank correlation | median error | error of nine tenths at most |",
        "|---|---:|---:|---:|",
    ]
    measured = {name: read_profile(one["path"]) for name, one in objects.items()}
    models = {name: cached(name, BUILT) for name in objects}
    for name, correlation, middle, most in rows(models, measured):
        lines.append(f"| {name} | {correlation:.3f} | {middle:.0%} | {most:.0%} |")
        print(lines[-1], flush=True)
    return lines


def write(part: str, lines: Sequence[str]) -> None:
    """Put a table between its markers in the document."""
    text = DOCUMENT.read_text()
    begin, end = f"<!-- {part} -->\n", f"<!-- end of {part} -->"
    head, rest = text.split(begin)
    _, tail = rest.split(end)
    DOCUMENT.write_text(head + begin + "\n".join(lines) + "\n" + end + tail)


def main() -> None:
    """Print the tables, and write them where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--models", default=",".join(SIZES))
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    parts, names = options.only.split(","), options.models.split(",")
    assert {*parts} <= {*PARTS} and {*names} <= {*MODELS}
    load = os.getloadavg()[0]
    machine = (
        f"{processor()}, {os.cpu_count()} cores, PyTorch {torch.__version__},"
        f" {datetime.now(UTC).date().isoformat()}, load before {load:.1f}."
    )
    print(machine)
    tables = {"machine": [machine]}
    with tempfile.TemporaryDirectory() as folder:
        objects: dict[str, dict[str, Any]] = {}
        if {*parts} & {"sums", "analytic"}:
            tables["sums"], objects = sums(names, Path(folder))
        if "cache" in parts:
            tables["cache"] = cache_savings(Path(folder))
        if "memory" in parts:
            tables["memory"] = memory(names, Path(folder))
        if "analytic" in parts:
            tables["analytic"] = analytic(objects)
    if options.write:
        for part, lines in tables.items():
            if part in (*parts, "machine"):
                write(part, lines)


if __name__ == "__main__":
    main()
