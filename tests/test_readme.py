"""Every command of the README runs: in its order, in one folder, with small models of the names it
uses. Files that a user brings along are made first; all others are made by the lines before.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from planner.artefacts.files import shipped
from planner.artefacts.formats.any import read_any_profiles
from planner.artefacts.formats.graph_txt import from_profile, to_text
from tests.clusters.test_imports import CUBE
from tests.planning.test_other_cost_models import DNN_FILE, PIPER_FILE

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()

NOT_RUN = {
    "make demo": "makes an environment of its own; its commands are other lines of the README",
    "make test": "runs this test",
}
"""Lines that are not run, and why."""

TIME_LIMIT_S = 300.0


def blocks():
    """(language, text) of every block of the README."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def commands(text):
    """The commands of a block, without what stands behind them."""
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        command = re.split(r"\s+(?:#|->)\s", line)[0].strip()
        if command:
            yield command


def test_every_line_that_is_not_run_stands_in_the_readme():
    lines = {command for language, text in blocks() if not language for command in commands(text)}
    assert NOT_RUN.keys() <= lines


def test_what_is_smaller_here_stands_in_the_readme():
    assert all(large in README for large in SMALL)
    assert BY_HAND in README
    assert OWN_LOOP in README
    assert {language for language, _ in blocks()} == {"", "python"}


def test_only_known_programs_are_called():
    programs = {
        shlex.split(command)[0]
        for language, text in blocks()
        if not language
        for command in commands(text)
    }
    assert programs <= {"planner", "torchrun", "make"}


def resnet50_as_text():
    profile = read_any_profiles(shipped("profiles") / "resnet50.json")[-1]
    return to_text(from_profile(profile)).encode()


def shown_after(words):
    """The indented text after some words of the README."""
    (text,) = re.findall(rf"{re.escape(words)}\n\n((?:    .*\n)+)", README)
    return textwrap.dedent(text)


BROUGHT = {
    "train.yaml": lambda: shown_after("reads them from YAML, here").encode(),
    "profiles/gpt2.json": (shipped("profiles") / "gpt2.json").read_bytes,
    "profiles/resnet50.json": (shipped("profiles") / "resnet50.json").read_bytes,
    "vgg16.txt": resnet50_as_text,
    "bert_l-3.json": json.dumps(DNN_FILE).encode,
    "bert32a100.json": json.dumps(PIPER_FILE).encode,
    "topo.txt": CUBE.encode,
    "hostfile": "w1 slots=2\nw2 slots=2\n".encode,
    "cli.py": (ROOT / "cli.py").read_bytes,
}
"""Files that a user brings along, made when a line first names them."""


def bring(command, folder):
    """Makes the files that a command names and a user brings along, where they are not there."""
    for name, content in BROUGHT.items():
        path = folder / name
        # A profile may be named by its stem alone.
        names = {name, path.stem} if name.startswith("profiles/") else {name}
        if names & {*command} and not path.exists():
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content())


def run(command, folder):
    """Runs a command of the README with this interpreter's programs; the end of its output."""
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIME_LIMIT_S,
    )
    return done.returncode, "\n".join(done.stdout.splitlines()[-8:])


NETS = """
import torch
import transformers


def model():
    layers = [torch.nn.Linear(64, 64) for _ in range(8)]
    return torch.nn.Sequential(*layers, torch.nn.Linear(64, 10)), torch.zeros(4, 64)


"""
"""The user's file nets.py, before the README's function."""

SMALL = {"GPT2Config(n_layer=6)": "GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=100)"}
"""What is smaller here than in the README."""

OWN_LOOP = "import torch\nfrom torch.utils.data import DataLoader"
"""The begin of the user's script train.py."""

BY_HAND = "torch.onnx.export(module, inputs"
"""The call of those who export by themselves; it runs in a folder of its own."""


def script(text, folder):
    """A Python block of the README as a program, and its folder; a function goes into nets.py."""
    for large, small in SMALL.items():
        text = text.replace(large, small)
    if text.startswith("def "):
        (folder / "nets.py").write_text(NETS + text)
        return "import nets", folder
    if text.startswith(OWN_LOOP):
        (folder / "train.py").write_text(text)
        return "", folder  # torchrun runs it
    if text.startswith(BY_HAND):
        by_hand = folder / "by_hand"
        by_hand.mkdir()
        before = "import torch\nmodule, inputs = torch.nn.Linear(8, 4), (torch.zeros(4, 8),)\n"
        return before + text, by_hand
    return "import planner\n" + text, folder


@pytest.mark.slow
def test_all_lines_run_in_their_order(tmp_path):
    (tmp_path / "nets.py").write_text(NETS)
    failed = []
    for language, text in blocks():
        place = tmp_path
        if language == "python":
            source, place = script(text, tmp_path)
            calls = {text.splitlines()[0]: [sys.executable, "-c", source]}
        else:
            calls = {line: shlex.split(line) for line in commands(text) if line not in NOT_RUN}
        for line, command in calls.items():
            bring(command, tmp_path)
            code, end = run(command, place)
            if code:
                failed.append(f"{line}\n  ended with {code}: {end}")
    assert not failed, "\n\n".join(failed)
