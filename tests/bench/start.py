"""How long commands take for next to no work: medians of CPU and wall seconds (5 minutes).

    python -m tests.bench.start [--root CHECKOUT] [--repeat N] [--only NAME,NAME]

Each command runs in a process of its own, once before it is timed, so that bytecode, kernels and
measurements are there. CPU seconds are user and system time, child processes included; on a busy
machine they grow, too, though less than wall seconds. With --root, the commands of another checkout
run in turns with those of this one, with the packages of this environment, and its figures stand in
front. The model is a network of five operators on one device, the plans are for one device as well.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from tests.bench.strategies import children_s

ROOT = Path(__file__).parents[2]
NETS = """
import torch
from torch import nn

def small():
    layers = nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
    return nn.Sequential(*layers), torch.randn(8, 64)
"""
GPT2 = ["--profile", str(ROOT / "profiles/gpt2.json"), "--gpus", "1", "--topology", "p3"]
# The memory of an A100 is a little too small for it.
LLAMA = ["--profile", str(ROOT / "profiles/llama7b-a100.json"), "--gpus", "1",
         "--topology", "dgx-a100", "--device-memory", "96 GiB"]  # fmt: skip
# Here one device is within the bound; with 4 microbatches it is not, and searches follow.
ENOUGH = ["--microbatches", "32"]
LOCAL = ["--profile", "small.json", "--gpus", "1", "--topology", "local"]
# Commands by name, in an order in which each finds the files of those before it.
COMMANDS = {
    "help": ["--help"],
    "topology list": ["topology", "list"],
    "export": ["export", "nets:small", "-o", "small.onnx"],
    "inspect": ["inspect", "small.onnx"],
    "profile": ["profile", "small.onnx", "-o", "small.json"],
    "solve": ["solve", *LOCAL, "-o", "small-plan.json"],
    "solve gpt2": ["solve", *GPT2, "-o", "gpt2-plan.json"],
    "solve llama7b": ["solve", *LLAMA, *ENOUGH, "-o", "llama7b-plan.json"],
    "search llama7b": ["solve", *LLAMA, "-o", "searched-plan.json"],
    "compare gpt2": ["compare", *GPT2],
    "simulate gpt2": ["simulate", "gpt2-plan.json"],
    "launch": ["launch", "small-plan.json", "--nproc", "1", "--steps", "1"],
}


def seconds(root, folder, arguments):
    """CPU and wall time of a command of a checkout, in s."""
    environment = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{folder}"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, str(root / "cli.py"), *arguments]
    begin_s, before_s = time.monotonic(), children_s()
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{root}: planner {' '.join(arguments)}: {done.stderr}")
    return children_s() - before_s, time.monotonic() - begin_s


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--only", type=lambda text: text.split(","), default=[*COMMANDS])
    given = parser.parse_args()
    roots = [given.root.resolve(), ROOT] if given.root else [ROOT]
    print(f"{'command':16}{'CPU s':>{8 * len(roots)}}{'wall s':>{8 * len(roots)}}")
    with tempfile.TemporaryDirectory() as name:
        folders = {root: Path(name) / str(i) for i, root in enumerate(roots)}
        for folder in folders.values():
            folder.mkdir()
            (folder / "nets").with_suffix(".py").write_text(NETS)
        for what, arguments in COMMANDS.items():
            times = {root: [] for root in roots}
            turns = given.repeat + 1 if what in given.only else 1
            for _ in range(turns):
                for root in roots:
                    times[root].append(seconds(root, folders[root], arguments))
            if what in given.only:
                medians = [
                    [median(column) for column in zip(*times[r][1:], strict=True)] for r in roots
                ]
                cpu, wall = (
                    "".join(f"{one:8.2f}" for one in column)
                    for column in zip(*medians, strict=True)
                )
                print(f"{what:16}{cpu}{wall}", flush=True)


if __name__ == "__main__":
    main()
