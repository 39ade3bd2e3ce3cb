"""`planner inspect`: what a file holds, without its weights."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper

import cli
import planner
from planner.artefacts.growth import Work
from planner.model.flops import flops_of
from planner.model.load import Node, ReadOptions, load
from planner.model.weights import ModelFile
from planner.profilers.facts import facts
from tests.support.models import light, llama
from tests.support.one_operator import model_of

ROOT = Path(__file__).parents[2]
WIDTH, LAYERS = 4096, 45


def large(folder):
    """A chain of 45 products of 64 MiB, 2.8 GiB of weights in a file full of holes."""
    tensors, nodes, offset, hidden = [], [], 0, "x"

    def weight(name, *shape):
        nonlocal offset
        tensor = TensorProto(
            name=name, dims=shape, data_type=TensorProto.FLOAT, data_location=TensorProto.EXTERNAL
        )
        length = 4 * int(np.prod(shape))
        for key, value in (("location", "big.data"), ("offset", offset), ("length", length)):
            tensor.external_data.add(key=key, value=str(value))
        offset += length
        tensors.append(tensor)
        return name

    for i in range(LAYERS):
        product = [hidden, weight(f"h.{i}.weight", WIDTH, WIDTH)]
        nodes.append(helper.make_node("MatMul", product, [f"m{i}"], name=f"product{i}"))
        total = [f"m{i}", weight(f"h.{i}.bias", WIDTH)]
        nodes.append(helper.make_node("Add", total, [f"a{i}"], name=f"sum{i}"))
        hidden = f"a{i}"
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", WIDTH])
            for name in ("x", hidden)]  # fmt: skip
    graph = helper.make_graph(nodes, "big", ends[:1], ends[1:], tensors)
    opset = helper.make_opsetid("", 18)
    path = folder / "big.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[opset], ir_version=9), path)
    with (folder / "big.data").open("wb") as file:
        file.truncate(offset)
    return path


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read there")
def test_a_file_of_3_gb_takes_little_memory_and_no_torch(tmp_path):
    code = (
        "import resource, sys, cli\n"
        "cli.main(['inspect', sys.argv[1], '--batch', '2', '--json'], standalone_mode=False)\n"
        "times = resource.getrusage(resource.RUSAGE_SELF)\n"
        "lines = open('/proc/self/status').read().splitlines()\n"
        "peak_kib = next(line.split()[1] for line in lines if line.startswith('VmHWM'))\n"
        "print(peak_kib, times.ru_utime + times.ru_stime, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(large(tmp_path))], cwd=ROOT, capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    text, last = done.stdout.strip().splitlines()
    peak_kib, cpu_s, has_torch = last.split()
    assert int(peak_kib) < 500 * 1024
    assert float(cpu_s) < 5
    assert has_torch == "False"
    found = json.loads(text)
    assert found["trained_elements"] == LAYERS * (WIDTH**2 + WIDTH)
    assert found["flops"] == LAYERS * 2 * 2 * WIDTH**2
    assert found["dimensions"] == {"N": 2}


def test_without_sizes_the_structure_is_told_alone_and_a_file_is_read_once(tmp_path, monkeypatch):
    path = tmp_path / "llama.onnx"
    path.write_bytes(
        llama(layers=2, width=64, heads=4, inner=96, vocabulary=50).SerializeToString()
    )
    reads, read = [], ModelFile.proto
    monkeypatch.setattr(ModelFile, "proto", lambda own: reads.append(own) or read(own))
    bare = planner.inspect(path)
    whole = planner.inspect(path, batch=1, dims={"seq": 8})
    assert len(reads) == 2
    assert "--dim" in bare.unbound
    assert whole.unbound == ""
    assert [one.name for one in bare.inputs] == ["tokens"]
    assert bare.inputs[0].shape == ("batch", "seq")
    kept = {one.name for one in bare.parameters if one.choice.trained}
    assert kept == {one.name for one in whole.parameters if one.choice.trained}
    assert all(one.flops is None for one in bare.operators)


def test_what_plans_cannot_have_is_named_with_its_nodes(tmp_path):
    body = "(float[2, 3] x) => (float[2, 3] y) { a = Mul(x, w) y = own.Strange(a) }"
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 18, "own": 1]> m {body}')
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(3, np.float32), "w"))
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    found = planner.inspect(path)
    assert found.unsupported == ("own.Strange: Strange_1",)
    assert "own.Strange" in found.unbound
    result = CliRunner().invoke(cli.main, ["inspect", str(path)])
    assert result.exit_code == 0
    assert "not supported: own.Strange: Strange_1" in result.stdout


@pytest.mark.parametrize("name", ["squeezenet", "llama"])
def test_flops_are_those_of_the_kernels_that_torch_runs(tmp_path, name):
    path = tmp_path / "model.onnx"
    proto = light(name) if name != "llama" else llama(2, 64, 4, 96, 50, seed=0)
    path.write_bytes(proto.SerializeToString())
    model = load(path, ReadOptions(batch=2, dimensions={"seq": 8} if name == "llama" else {}))
    shapes = {t.name: t.shape for t in (*model.graph.tensors, *model.graph.parameters)}
    for node, fact in zip(model.nodes, facts(model), strict=True):
        if node.type in ("MatMul", "Conv", "Gemm", "Attention"):
            # Attention also scales and hides, which is not counted.
            assert flops_of(node, shapes) == pytest.approx(fact.flops, rel=0.01), node.name


def counted(kind, *inputs, **how):
    """The FLOPs of one operator, and those of the products and convolutions that torch runs."""
    model = model_of(kind, *inputs, **how)
    shapes = {t.name: t.shape for t in (*model.graph.tensors, *model.graph.parameters)}
    i = next(i for i, node in enumerate(model.nodes) if node.name == "it")
    products = (Work.PRODUCT, Work.BATCHED_PRODUCT, Work.UNALIGNED_PRODUCT, Work.CONVOLUTION,
                Work.SMALL_WINDOW, Work.FEW_CHANNELS)  # fmt: skip
    kernels = (*products, Work.ATTENTION)
    run = sum(one.flops for one in facts(model)[i].kernels if one.work in kernels)
    return flops_of(model.nodes[i], shapes), run


@pytest.mark.parametrize(("equation", "shapes", "flops"), [
    ("ij,jk->ik", [(2, 3), (3, 5)], 2 * 2 * 3 * 5),
    ("ij,jk", [(2, 3), (3, 5)], 2 * 2 * 3 * 5),
    ("bhqd,bhkd->bhqk", [(2, 4, 5, 8), (2, 4, 6, 8)], 2 * 2 * 4 * 5 * 6 * 8),
    ("...ij, jk -> ...ik", [(7, 2, 3), (3, 5)], 2 * 7 * 2 * 3 * 5),
    ("...ij,...jk", [(7, 2, 3), (1, 3, 5)], 2 * 7 * 2 * 3 * 5),
    ("ij,jk,kl->il", [(2, 3), (3, 5), (5, 7)], 2 * 2 * 3 * 5 + 2 * 2 * 5 * 7),
    ("ija,jk->ik", [(2, 3, 9), (3, 5)], 2 * 2 * 3 * 5),  # a is summed up before
    ("ij,ij->", [(2, 3), (2, 3)], 2 * 2 * 3),
    ("iij,jk->ik", [(2, 2, 3), (3, 5)], 2 * 2 * 3 * 5),  # a diagonal
    ("ij->ji", [(2, 3)], 0),
    ("i,j->ij", [(2,), (3,)], 0),  # a Mul
])  # fmt: skip
def test_einsum_counts_its_products(equation, shapes, flops):
    products, run = counted("Einsum", *shapes, equation=equation)
    assert products == flops
    assert run == flops


@pytest.mark.parametrize(("kind", "shapes", "attributes", "flops"), [
    # (2, 8, 16) times (16, 48); then 8 x 8 scores of each of 2 heads of 8, and their mixing.
    ("Attention", [(2, 8, 16), (16, 48), (48,)], {"num_heads": 2}, 24_576 + 8_192),
    ("Attention", [(2, 8, 16), (16, 48)], {"num_heads": 2}, 24_576 + 8_192),
    ("FusedMatMul", [(100, 8), (100, 4)], {"transA": 1}, 6_400),
    ("FusedConv", [(1, 2, 5, 5), (3, 2, 3, 3)], {"activation": "Relu"}, 2 * 27 * 18),
    ("FusedGemm", [(2, 3), (4, 3)], {"activation": "Relu", "transB": 1}, 2 * 2 * 3 * 4),
    ("MultiHeadAttention", [(2, 5, 8), (2, 6, 8), (2, 6, 8)], {"num_heads": 2}, 2 * 2 * 5 * 6 * 16),
])  # fmt: skip
def test_operators_of_onnx_runtime_are_counted_by_their_own_inputs(kind, shapes, attributes, flops):
    made = counted(kind, *shapes, domain="com.microsoft", **attributes)
    assert made == (flops, flops)


@pytest.mark.parametrize(("kind", "shapes", "how", "flops"), [
    ("Attention", [(2, 4, 5, 8), (2, 2, 6, 8), (2, 2, 6, 3), None, (2, 2, 7, 8), (2, 2, 7, 3)],
     {"version": 23}, 2 * 2 * 4 * 5 * 13 * 11),
    ("Attention", [(2, 5, 32), (2, 6, 16), (2, 6, 6)],
     {"version": 23, "q_num_heads": 4, "kv_num_heads": 2}, 2 * 2 * 4 * 5 * 6 * 11),
    ("DeformConv", [(1, 2, 5, 5), (4, 2, 3, 3), (1, 18, 3, 3)], {}, 2 * 4 * 9 * 18),
])  # fmt: skip
def test_operators_of_onnx_are_counted_as_torch_runs_them(kind, shapes, how, flops):
    assert counted(kind, *shapes, **how) == (flops, flops)


def test_an_operator_of_another_domain_is_not_counted_as_its_namesake():
    node = Node("n", "MatMul", "own", 1, ("a", "b"), ("y",), {})
    assert flops_of(node, {"a": (2, 3), "b": (3, 4), "y": (2, 4)}) == 0
