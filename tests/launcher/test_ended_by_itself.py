"""Ranks that code of the user ends: one message names rank, stage, step, place and exit code."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from planner.support.errors import LaunchError
from planner.support.named import function_named
from tests.launcher.test_launch import write_case
from tests.support.launch_worker import Case

CLI = str(Path(__file__).resolve().parents[2] / "cli.py")
MINE = """
import ctypes, os, sys, torch
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, get_worker_info

def end(place):
    if (place, os.environ.get("RANK")) == ("{place}", "1"):
        {way}

def by_step(step, microbatch, inputs):
    if step == 3:
        end("data")
    shape, dtype = inputs["ids"]
    return {{"ids": torch.zeros(shape, dtype=dtype)}}, torch.zeros(shape, dtype=torch.int64)

class Samples(Dataset):
    def __len__(self):
        return 160

    def __getitem__(self, i):
        if get_worker_info() is not None:
            end("sample")
        return torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)

def dataset():
    end("dataset")
    return Samples()

def loader():
    return DataLoader(Samples(), batch_size=8, num_workers=1)

def metric(output, target):
    end("metric")
    return 1.0

def loss(output, target):
    end("loss")
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())
"""
BY_STEP, DATASET = ["--data", "mine:by_step"], ["--data", "mine:dataset"]
EVALUATED = [
    *DATASET,
    "--eval-data",
    "mine:dataset",
    "--eval-every",
    "2",
    "--metric",
    "mine:metric",
]
BY_OS = "code that it ran has ended the process, by os._exit for example"
BY_PYTHON = "SystemExit: "
# The place and the way, the options; what it was doing, the exit code, and the cause.
ENDS = {
    ("data", "os._exit(3)"): (BY_STEP, "while reading data for step 3", 3, BY_OS),
    ("data", "os._exit(0)"): (BY_STEP, "while reading data for step 3", 0, BY_OS),
    ("data", "ctypes.CDLL(None).exit(4)"): (BY_STEP, "while reading data for step 3", 4, BY_OS),
    ("data", "sys.exit(1)"): (BY_STEP, "while reading data for step 3", 1, BY_PYTHON),
    ("data", "sys.exit(0)"): (BY_STEP, "while reading data for step 3", 0, BY_PYTHON),
    ("dataset", "sys.exit('no luck')"): (DATASET, "while reading data for step 0", 1, BY_PYTHON),
    ("dataset", "os._exit(0)"): (DATASET, "while reading data for step 0", 0, BY_OS),
    ("metric", "os._exit(3)"): (EVALUATED, "in the evaluation before step 2", 3, BY_OS),
    ("loss", "os._exit(3)"): (
        [*BY_STEP, "--loss", "mine:loss"], "at 1F0 of step 0", 3, BY_OS,
    ),
}  # fmt: skip
IN_THE_DEFAULT_SUITE = {("data", "os._exit(3)"), ("data", "sys.exit(0)")}


def said(folder, place, way, options):
    """The only error of a launch of two ranks."""
    write_case(folder, Case((1, 1), 4))
    (folder / "cli.py").unlink()
    (folder / "mine.py").write_text(MINE.format(place=place, way=way))
    done = subprocess.run(
        [sys.executable, CLI, "launch", "strategy.json", "--nproc", "2", "--steps", "6", *options],
        cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    (error,) = (line for line in done.stderr.splitlines() if line.startswith("Error: "))
    return error


@pytest.mark.parametrize(
    ("place", "way"),
    [
        pytest.param(*one, marks=() if one in IN_THE_DEFAULT_SUITE else pytest.mark.slow)
        for one in ENDS
    ],
)
def test_a_rank_that_ends_by_itself_is_named_with_its_exit_code(tmp_path, place, way):
    options, doing, code, cause = ENDS[place, way]
    assert said(tmp_path, place, way, options).startswith(
        f"Error: rank 1 (stage 1) ended by itself with exit code {code} {doing}: {cause}"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("os._exit(3)", "RuntimeError: DataLoader worker"),
        ("sys.exit(0)", "RuntimeError: SystemExit: 0"),
    ],
)
def test_a_worker_that_ends_is_said_with_the_microbatch(tmp_path, way, words):
    error = said(tmp_path, "sample", way, ["--data", "mine:loader"])
    assert error.startswith("Error: --data mine:loader: step 0, microbatch 0: ")
    assert words in error


def test_a_module_that_exits_is_no_success(tmp_path):
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(0)")
    with pytest.raises(LaunchError, match=r"--data .*leaves.py:data: SystemExit: 0"):
        function_named(f"{tmp_path / 'leaves.py'}:data", "--data", LaunchError)
