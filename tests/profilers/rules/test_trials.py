"""Operators that end the process in which they are run on parts: a profile, and a line about it."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from torch import Tensor

from planner import api
from planner.artefacts.files import read_profile
from planner.artefacts.sharding import AxisRule
from planner.launcher.failures.monitor import CLI
from planner.model.load import load
from planner.operators import register
from planner.profilers.rules import split_rules
from planner.profilers.rules.discover import _Trials, operators_of
from planner.support import forked
from planner.support.caches import CacheFolder
from tests.profilers.rules.test_discovery import fused
from tests.support.commands import run
from tests.support.one_operator import rules_of

pytestmark = pytest.mark.usefixtures("unregistered")
ROWS = 64
"""Of the models here; trials are smaller."""
WORDS = "operators that ended the process in which they were run on parts are planned whole: "
ONE_SIZE = (
    f"good for microbatches of {ROWS} only: model.onnx: the batch of {ROWS} is written into the"
    " file; export it with a symbolic first dimension for others"
)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def saved(*kinds, width=6):
    """A product, one operator after the other, and an activation, as a file."""
    names = [f"h{i}" for i in range(len(kinds) + 1)]
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h0"], "product")]
    nodes += [
        helper.make_node(kind, [names[i]], [names[i + 1]], f"it {i}", domain="my.domain")
        for i, kind in enumerate(kinds)
    ]
    nodes.append(helper.make_node("Relu", [names[-1]], ["y"], "last"))
    graph = helper.make_graph(
        nodes, "graph",
        [helper.make_tensor_value_info("x", 1, [ROWS, width])],
        [helper.make_tensor_value_info("y", 1, None)],
        [numpy_helper.from_array(np.ones((width, width), np.float32), "w")],
    )  # fmt: skip
    sets = [helper.make_opsetid("", 20), helper.make_opsetid("my.domain", 1)]
    onnx.save(helper.make_model(graph, opset_imports=sets, ir_version=10), "model.onnx")
    return load(Path("model.onnx"))


def fragile(end):
    """A function that ends its process where it does not run at the model's size."""

    def function(x: Tensor) -> Tensor:
        if not x.is_meta and x.shape[0] < ROWS:
            end()
        return torch.tanh(x)

    return function


def kill(number):
    return lambda: os.kill(os.getpid(), number)


def by_operator(profile):
    return {
        operator.name: {one.line for one in cost.rules}
        for operator, cost in zip(profile.graph.operators, profile.operators, strict=True)
    }


class Limited(torch.autograd.Function):
    """Forward the identity; backward a limit of the norm, of which each part would have its own."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient / gradient.norm().clamp(min=1.0)


def test_an_operator_with_a_backward_pass_of_its_own_is_whole():
    def limited(x: Tensor) -> Tensor:
        return Limited.apply(x) if x.device.type != "meta" else x

    register("Limited", limited, domain="my.domain")
    register("Sound", torch.tanh, domain="my.domain")
    found = by_operator(api.profile(saved("Sound", "Limited").path, device="T4", budget_s=0.01))
    assert found["it 1"] == set()
    assert found["it 0"] == {"S0->S0", "S1->S1"}


@pytest.mark.parametrize(("end", "words"), [
    (kill(signal.SIGKILL), "SIGKILL"), (lambda: os._exit(3), "exit code 3"),
])  # fmt: skip
@pytest.mark.parametrize("device", ["cpu", "T4"])
def test_an_operator_that_ends_its_process_is_whole_and_said(device, end, words):
    register("Fragile", fragile(end), domain="my.domain")
    register("Sound", torch.tanh, domain="my.domain")
    saved("Sound", "Fragile", "Sound")
    made = api.profile("model.onnx", device=device, budget_s=0.01)
    assert [one for one in made.warnings if "process" in one and "whole:" in one] == [
        f"{WORDS}my.domain.Fragile ({words})"
    ]
    found = by_operator(made)
    assert found.pop("it 1") == set()
    register("Other", torch.tanh, domain="my.domain")
    saved("Sound", "Other", "Sound")
    sound = by_operator(api.profile("model.onnx", device=device, budget_s=0.01))
    assert sound.pop("it 1") == {"S0->S0", "S1->S1"}
    assert found == sound


MODULE = f"""
import os
import signal

import torch

import planner


def fragile(x: torch.Tensor) -> torch.Tensor:
    if not x.is_meta and x.shape[0] < {ROWS}:
        os.kill(os.getpid(), signal.SIGSEGV)
    return torch.tanh(x)


def aborting(x: torch.Tensor) -> torch.Tensor:
    if not x.is_meta and x.shape[0] < {ROWS}:
        os.abort()
    return torch.tanh(x)


planner.operators.register("Fragile", fragile, domain="my.domain")
planner.operators.register("Aborting", aborting, domain="my.domain")
"""


def test_signals_of_the_processor_have_names(tmp_path):
    """In a program of its own: pytest's handler would print a traceback."""
    register("Fragile", torch.tanh, domain="my.domain")
    register("Aborting", torch.tanh, domain="my.domain")
    saved("Fragile", "Aborting")
    (tmp_path / "mine.py").write_text(MODULE)
    command = [sys.executable, str(CLI), "profile", "model.onnx", "--device", "T4"]
    done = subprocess.run(
        [*command, "--operators", "mine", "-o", "profile.json"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    warning = f"{WORDS}my.domain.Aborting (SIGABRT), my.domain.Fragile (SIGSEGV)"
    assert " ".join(done.stderr.split()) == f"warning: {warning} warning: {ONE_SIZE}"
    assert read_profile(tmp_path / "profile.json").warnings == (warning, ONE_SIZE)


def test_the_command_says_it_and_the_file_has_it():
    register("Fragile", fragile(lambda: os._exit(7)), domain="my.domain")
    saved("Fragile", "Fragile")
    result = run("profile", "model.onnx", "--device", "T4", "-o", "profile.json")
    line = f"{WORDS}my.domain.Fragile (exit code 7)"
    assert " ".join(result.stderr.split()).count(f"warning: {line}") == 1
    assert json.loads(Path("profile.json").read_text())["warnings"] == [line, ONE_SIZE]


def test_an_old_profile_says_it_when_it_gets_its_rules(caplog):
    register("Fragile", fragile(lambda: os._exit(7)), domain="my.domain")
    saved("Fragile")
    made = api.profile("model.onnx", device="T4")
    bare = replace(
        made, warnings=(), operators=tuple(replace(one, rules=()) for one in made.operators)
    )
    api.write_profiles([bare], "old.json")
    api.convert("old.json", "new.json")
    assert read_profile(Path("new.json")) == replace(made, warnings=made.warnings[:1])
    assert caplog.messages == [f"{WORDS}my.domain.Fragile (exit code 7)"]


def test_of_an_operator_that_ends_its_process_nothing_is_kept():
    function, ends = fragile(kill(signal.SIGKILL)), []
    register("Fragile", function, domain="my.domain")
    model = saved("Fragile")
    first = split_rules(model, warn=ends.append)
    assert split_rules(model, warn=ends.append) == first
    assert ends == [f"{WORDS}my.domain.Fragile (SIGKILL)"] * 2


def test_what_was_found_before_the_end_of_a_process_is_kept(monkeypatch):
    register("Fragile", fragile(kill(signal.SIGKILL)), domain="my.domain")
    model = saved("Fragile")
    ends = []
    starts, fork = [], os.fork
    monkeypatch.setattr(os, "fork", lambda: starts.append("") or fork())
    split_rules(model, warn=ends.append)
    assert len(starts) == 2  # the second one for what comes after the operator
    split_rules(model, warn=ends.append)
    assert len(starts) == 3  # for the operator alone


def test_an_operator_that_ends_its_process_in_blocks_is_whole():
    """Its rules without blocks have been found by then."""

    def function(x: Tensor) -> Tensor:
        if not x.is_meta and x.shape[1] in (12, 18):  # two and three parts of three blocks
            os._exit(5)
        return torch.tanh(x)

    ends = []
    register("Fragile", function, domain="my.domain")
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], "product"),
        helper.make_node("Fragile", ["h"], ["g"], "it", domain="my.domain"),
        helper.make_node("Split", ["g"], ["a", "b", "c"], "split", axis=1, num_outputs=3),
    ]
    graph = helper.make_graph(
        nodes, "graph",
        [helper.make_tensor_value_info("x", 1, [ROWS, 8])],
        [helper.make_tensor_value_info(name, 1, None) for name in "abc"],
        [numpy_helper.from_array(np.ones((8, 24), np.float32), "w")],
    )  # fmt: skip
    sets = [helper.make_opsetid("", 20), helper.make_opsetid("my.domain", 1)]
    onnx.save(helper.make_model(graph, opset_imports=sets, ir_version=10), "model.onnx")
    model = load(Path("model.onnx"))
    product, it, split = split_rules(model, warn=ends.append)
    assert it == ()
    assert ends == [f"{WORDS}my.domain.Fragile (exit code 5)"]
    assert "S1/3->S1,S1,S1" in {one.line for one in split}
    assert "S0,R->S0" in {one.line for one in product}


def test_an_operator_that_has_ended_its_process_is_not_tried_again():
    register("Sound", torch.tanh, domain="my.domain")
    asked = []

    def process(question):
        asked.append(question)
        raise forked.EndedError("SIGBUS")

    trials = _Trials(operators_of(saved("Sound", "Sound")), CacheFolder(None), process)
    rules = [AxisRule((f"S{d}/3",), (f"S{d}/3",)) for d in (0, 1)]
    assert [trials.hold_in_blocks(1, one) for one in rules] == [False, False]
    assert trials.rules(2) == ()  # one class with the other
    assert asked == [(1, rules[0])]
    assert trials.ended == {trials.names[1]: "my.domain.Sound (SIGBUS)"}


def test_an_operator_that_does_not_end_is_ended(monkeypatch):
    monkeypatch.setattr(forked, "CPU_LIMIT_S", 1)

    def endless():
        while True:
            pass

    ends = []
    register("Fragile", fragile(endless), domain="my.domain")
    *_, it, last = split_rules(saved("Fragile"), warn=ends.append)
    assert it == ()
    assert {one.line for one in last} == {"S0->S0", "S1->S1"}
    assert ends == [f"{WORDS}my.domain.Fragile (SIGXCPU after 1 s of CPU time)"]


def test_whatever_a_function_raises_is_a_refusal():
    class OddError(Exception):
        pass

    def function(x: Tensor) -> Tensor:
        if x.shape[1] % 6:
            raise OddError
        return torch.tanh(x)

    ends = []
    register("Odd", function, domain="my.domain")
    _, it, _ = split_rules(saved("Odd"), warn=ends.append)
    assert {one.line for one in it} == {"S0->S0"}
    assert not ends


def test_a_function_that_no_other_interpreter_could_import_is_tried():
    factor = 2.0

    def doubled(x: Tensor) -> Tensor:
        return x * factor

    register("Doubled", doubled, domain="my.domain")
    _, it, _ = split_rules(saved("Doubled"))
    assert {one.line for one in it} == {"S0->S0", "S1->S1", "P->P"}


def test_rules_are_those_of_trials_in_this_process(tmp_path, monkeypatch):
    model = fused(tmp_path / "fused.onnx")
    apart = split_rules(model, cached=False)
    monkeypatch.setattr(forked, "FORKS", False)
    assert split_rules(model, cached=False) == apart


# ---- recurrent layers, of which torch reads what is not its own where parts do not fit


@pytest.mark.parametrize("layout", [0, 1])
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_layers_with_states_are_split_by_samples(kind, direction, layout, monkeypatch):
    """In this process, which they do not end."""
    monkeypatch.setattr(forked, "FORKS", False)
    d = 2 if direction == "bidirectional" else 1
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[kind]
    x, state = ((4, 5, 6), (4, d, 8)) if layout else ((5, 4, 6), (d, 4, 8))
    states = (state, state) if kind == "LSTM" else (state,)
    weights = ((d, gates * 8, 6), (d, gates * 8, 8), (d, 2 * gates * 8))
    more = {"linear_before_reset": 1} if kind == "GRU" else {}
    found = rules_of(
        kind, x, *weights, None, *states, held=(1, 2, 3), version=14, outputs=2,
        direction=direction, hidden_size=8, layout=layout, **more,
    )  # fmt: skip
    cut = "S0" if layout else "S1"
    given = [cut] * (1 + len(states)) + ["R"] * 3
    y = "S0" if layout else "S2"
    assert found == {f"{','.join(given)}->{y},{cut}"}
