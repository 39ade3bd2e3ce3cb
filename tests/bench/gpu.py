"""What a plan for one GPU of this machine predicts, beside what its training takes.

    python -m tests.bench.gpu [--models resnet50,gpt2,bert] [--steps N] [--device cuda:0]

Each model is planned twice, with times measured on the GPU and with times computed by the roofline
of its type, and each plan is trained in float32, without a calibration. Nothing else should use the
GPU meanwhile. Peak memory is predicted without the reserve, and measured of the process.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from planner.profilers.devices import device_type
from tests.support.models import cached, light

ROOT = Path(__file__).parents[2]
MICROBATCHES = 4
SUBJECTS = {
    "resnet50": ("--batch", "32"),
    "gpt2": ("--batch", "4", "--dim", "seq=512"),
    "bert": ("--batch", "16", "--dim", "seq=128"),
}
"""Options of the profile, by model."""
TOPOLOGY = """
format: planner-topology/1
name: one-gpu
device: {type}
levels:
  - {{name: gpu, count: 1, bandwidth: 1 GB/s, latency: 1 us}}
"""


def planner(folder: Path, *arguments: str) -> str:
    """The output of `planner ARGUMENTS` in a folder."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "cli.py"), *arguments], cwd=folder, capture_output=True,
        text=True, check=False, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"planner {' '.join(arguments)}: {done.stderr}")
    return done.stdout


def launched(folder: Path, model: str, device: str, steps: int) -> dict[str, Any]:
    """The report of a training whose operator times are those of a device, or of a type."""
    planner(
        folder, "profile", f"{model}.onnx", "--device", device, *SUBJECTS[model], "-o", "p.json"
    )
    planner(
        folder, "solve", "--profile", "p.json", "--gpus", "1", "--topology", "gpu.yaml",
        "--microbatches", str(MICROBATCHES), "-o", "s.json",
    )  # fmt: skip
    out = planner(folder, "launch", "s.json", "--steps", str(steps), "--json")
    report: dict[str, Any] = json.loads(out.splitlines()[-1])
    return report


def row(model: str, times: str, report: dict[str, Any]) -> str:
    """A line of the table."""
    (stage,) = report["stages"]
    ratios = [
        report["predicted_iteration_s"] / report["measured_iteration_s"],
        stage["predicted_forward_s"] / stage["measured_forward_s"],
        stage["predicted_backward_s"] / stage["measured_backward_s"],
    ]
    peaks = report["predicted_live_bytes"][0] / 2**30, report["peak_bytes"][0] / 2**30
    return (
        f"| {model} | {times} | {report['predicted_iteration_s'] * 1e3:.1f} |"
        f" {report['measured_iteration_s'] * 1e3:.1f} | "
        + " | ".join(f"{ratio:.3f}" for ratio in ratios)
        + f" | {peaks[0]:.2f} | {peaks[1]:.2f} |"
    )


def main() -> None:
    """Profiles, plans and trains the models, and prints a row for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(SUBJECTS))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", default="cuda:0")
    given = parser.parse_args()
    kind = device_type(given.device)
    print(f"one {kind}, {MICROBATCHES} microbatches, {given.steps} steps\n")
    print("| model | times | predicted, ms | measured, ms | ratio | forward | backward |"
          " predicted peak, GiB | measured |")  # fmt: skip
    print("|---|---|---:|---:|---:|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "gpu.yaml").write_text(TOPOLOGY.format(type=kind))
        for model in given.models.split(","):
            train = partial(light, model, train=True) if model == "resnet50" else None
            cached(model, folder, train)
            for times, device in {"measured": given.device, "computed": kind}.items():
                report = launched(folder, model, device, given.steps)
                print(row(model, times, report), flush=True)


if __name__ == "__main__":
    main()
