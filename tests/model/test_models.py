"""The Llama of `tests.support.models`, which is too large for its weights: small ones agree with
ONNX Runtime, and the large one is planned for without weights.
"""

import numpy as np
import onnxruntime
import pytest
import torch

from planner.model.load import ReadOptions, load
from planner.operators.convert import to_torch
from tests.support.models import llama


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "llama.onnx"
    path.write_bytes(llama(2, 64, 4, 176, 1000, seed=0).SerializeToString())
    return path


def test_a_small_llama_agrees_with_onnx_runtime_and_trains(small):
    model = load(small, ReadOptions(batch=2, dimensions={"seq": 16}))
    tokens = np.random.default_rng(0).integers(0, 1000, (2, 16))
    session = onnxruntime.InferenceSession(small, providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, {"tokens": tokens})
    module = to_torch(model)
    (made,) = module(torch.from_numpy(tokens))
    np.testing.assert_allclose(made.detach().numpy(), expected, atol=1e-5)
    assert 0.5 < expected.std() < 2
    made.square().mean().backward()
    assert all(p.grad is not None and p.grad.any() for p in module.parameters())


def test_all_weights_of_a_llama_are_trained_and_angles_are_constants(small):
    model = load(small, ReadOptions(batch=2, dimensions={"seq": 16}))
    shapes = {p.name: p.shape for p in model.graph.parameters if not p.trainable}
    assert sorted(shapes.values()) == [(16, 8), (16, 8)]
    # 16 operators in a layer, the embedding, the last normalization and the head.
    assert len(model.graph.operators) == 2 * 16 + 3


def test_a_llama_of_seven_billion_parameters_is_read_without_its_weights(tmp_path):
    path = tmp_path / "llama7b.onnx"
    path.write_bytes(llama().SerializeToString())
    assert path.stat().st_size < 200_000
    graph = load(path, ReadOptions(batch=1, dimensions={"seq": 2048})).graph
    trained = sum(p.bytes for p in graph.parameters if p.trainable) // 4
    # Two tables of tokens; per layer four, three and two; the last normalization.
    layer = 4 * 4096**2 + 3 * 4096 * 11_008 + 2 * 4096
    assert trained == 2 * 32_000 * 4096 + 32 * layer + 4096 == 6_738_415_616
