"""The eleven real models through profile, solve and the annotated file, as the command line does
it. Slow: `make test-all`.
"""

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from click.testing import CliRunner

import cli
from planner.artefacts.files import read_plan
from tests.support.models import LIGHT_MODELS, MODELS, cached

CACHE = Path(__file__).parents[2] / ".cache" / "models"


def run(*arguments):
    result = CliRunner().invoke(cli.main, list(arguments))
    assert result.exit_code == 0, result.output
    return result


def outputs(path, feeds):
    """What ONNX Runtime computes, without optimizations."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return session.run(None, feeds)


def feeds_of(name):
    rng = np.random.default_rng(0)
    if name in LIGHT_MODELS:
        proto = onnx.load(cached(name, CACHE), load_external_data=False)
        (image,) = proto.graph.input
        shape = [1, *(d.dim_value for d in image.type.tensor_type.shape.dim[1:])]
        return {image.name: rng.normal(size=shape).astype(np.float32)}
    return {"input_ids": rng.integers(0, 1000, (1, 16))}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_goes_through_profile_and_solve_and_keeps_its_outputs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = cached(name, CACHE)
    bound = ["--batch", "1", *([] if name in LIGHT_MODELS else ["--dim", "seq=16"])]
    run("profile", str(model), *bound, "--repetitions", "1")
    found = json.loads(
        run("solve", "--gpus", "8", "--topology", "p3.yaml", "--json", "--solver", "even",
            "--solver", "antichain").stdout
    )  # fmt: skip
    assert found["gap"] >= 0
    assert found["partition"] == "strategy.onnx"

    annotated = onnx.load("strategy.onnx", load_external_data=False)
    onnx.checker.check_model("strategy.onnx")
    plan = read_plan(Path("strategy.json"))
    stages = {n: s for s, stage in enumerate(plan.strategy.stages) for n in stage.operators}
    written = {
        node.name: node.device_configurations[0].pipeline_stage for node in annotated.graph.node
    }
    assert stages.items() <= written.items()
    assert set(written.values()) <= set(range(len(plan.strategy.stages)))
    feeds = feeds_of(name)
    for ours, original in zip(
        outputs("strategy.onnx", feeds), outputs(str(model), feeds), strict=True
    ):
        np.testing.assert_array_equal(ours, original)
