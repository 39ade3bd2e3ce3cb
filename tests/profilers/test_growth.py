"""Computed profiles that are good for any size: the profile of a size equals the one that is
computed from the model with that batch.
"""

import json
import subprocess
import sys
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import pytest

from planner import api
from planner.api.lookup import profile_of
from planner.artefacts.files import (
    artefact_hash,
    read_plan,
    read_profile,
    shipped,
    to_plain,
    write_profile,
)
from planner.artefacts.graph import MAX_TENSOR_BYTES
from planner.artefacts.growth import Growing, GrowingKernel, Growth, Rates, Work, on_line
from planner.artefacts.profile import Source
from planner.artefacts.topology import DeviceType
from planner.clusters.yaml.read import shipped_device_type
from planner.model.load import ReadOptions, load, resized
from planner.profilers.analytic import Computed, computed, rescale
from planner.profilers.efficiencies import rates_of
from planner.profilers.growth import with_growth
from planner.profilers.interpolate import interpolated, span
from planner.profilers.rules import split_rules, with_rules
from planner.reports.profile import profile_lines
from planner.support.errors import FileError, ModelError, OptionError
from tests.profilers.test_profilers import read
from tests.support.commands import run
from tests.support.models import MODELS, bert, gpt2, light, llama

A100 = shipped_device_type("A100-SXM4-80GB")
T4 = shipped_device_type("T4")
TINY = {
    "gpt2": partial(gpt2, layers=1, width=128, vocabulary=300),
    "bert": partial(bert, layers=1, width=128, vocabulary=300),
    "llama": partial(llama, 2, 64, 4, 96, 200, seed=0),
    "squeezenet": partial(light, "squeezenet"),
    "resnet50 in training": partial(light, "resnet50", train=True),
}
SEQUENCES = ("gpt2", "bert", "llama")
SIZES = (1, 2, 4, 5, 16)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def path_of(tmp_path_factory):
    """The file of a model, written once."""

    @cache
    def written(name):
        path = tmp_path_factory.mktemp("models") / "model.onnx"
        path.write_bytes({**MODELS, **TINY}[name]().SerializeToString())
        return path

    return written


def costs(model, kind=A100, dtype=None):
    return computed(model, model_path="model.onnx", kind=kind, dtype=dtype)


def growing(model, dtype=None, *, rules=False, compute=costs):
    own = costs(model, dtype=dtype)
    if rules:
        own = replace(own, profile=with_rules(own.profile, model))
    return with_growth(
        own,
        model,
        rates_of(A100, own.profile.dtype),
        compute=partial(compute, dtype=dtype),
        rules_of=split_rules,
    )


def check_sizes(path, dimensions, dtype):
    """Of operators times, FLOPs, bytes and stash; of tensors shapes; views; losses."""
    models = {n: load(path, ReadOptions(batch=n, dimensions=dimensions)) for n in SIZES}
    due = {n: costs(model, dtype=dtype).profile for n, model in models.items()}
    for own in (growing(models[1], dtype), growing(models[4], dtype)):
        assert own.warnings == ()
        assert span([own]) == (1, None)
        for size in SIZES:
            assert replace(interpolated([own], size), growth=None) == due[size]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("gpt2", None), ("gpt2", "bfloat16"), ("bert", None), ("llama", "bfloat16"),
     ("squeezenet", None), ("resnet50 in training", "float16")],
)  # fmt: skip
def test_a_size_by_lines_is_the_size_computed_from_the_model(name, dtype, path_of):
    check_sizes(path_of(name), {"seq": 80} if name in SEQUENCES else {}, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_so_it_is_of_whole_transformers(name, tmp_path):
    path = tmp_path / "model.onnx"
    path.write_bytes(MODELS[name]().SerializeToString())
    check_sizes(path, {"seq": 80}, "bfloat16")


def test_blocks_of_rules_are_as_many_as_samples(path_of):
    models = {
        n: load(path_of("gpt2"), ReadOptions(batch=n, dimensions={"seq": 16})) for n in (1, 4, 6)
    }
    due = split_rules(models[6])
    assert any("/6" in one.line for rules in due for one in rules)
    for own in (growing(models[1], rules=True), growing(models[4], rules=True)):
        assert tuple(one.rules for one in interpolated([own], 6).operators) == due
        single = interpolated([own], 1).operators
        for found, rules in zip(single, split_rules(models[1]), strict=True):
            assert {*rules} <= {*found.rules}
            assert not any("/1" in one.line for one in found.rules)
