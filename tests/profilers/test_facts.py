import onnx
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from planner.artefacts.growth import Work
from planner.artefacts.operator_types import OPERATOR_TYPES, OperatorType
from planner.model.load import ReadOptions, load
from planner.operators import parameters, synthetic, to_torch
from planner.profilers.facts import facts
from planner.profilers.measured import measure
from planner.profilers.runnable import RunnableOperator, observe
from planner.support.errors import OperatorError
from tests.profilers.test_profilers import attention, read, residual
from tests.support.models import LIGHT_MODELS, MODELS, cached, deep_transformer

FLOAT = 4  # bytes
SEQUENCE = 16


def observed(model):
    """The stash of every operator, from running them on the CPU one after the other."""
    held = parameters(model, [p.name for p in model.graph.parameters])
    values = synthetic.inputs(model, seed=0, microbatch=0)
    found = []
    for i, operator in enumerate(model.graph.operators):
        module = to_torch(model, [i], values=held)
        unit = RunnableOperator(
            forward=module.forward,
            inputs=module.input_names,
            outputs=module.output_names,
            parameters={name: held[name] for name in operator.parameters},
            weights={},
            constants=tuple(module.buffers()),
        )
        outputs, stash = observe(unit, values)
        for name, output in zip(unit.outputs, outputs, strict=True):
            values[name] = output.detach().requires_grad_(output.requires_grad)
        found.append(stash)
    return found


def comparable(stash):
    return set(stash.tensors), stash.private_bytes, set(stash.views)


def counted(run):
    """FLOPs by torch's own count."""
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def by_name(model):
    operators = model.graph.operators
    return dict(zip([o.outputs[0] for o in operators], facts(model), strict=True))


# ---- what autograd keeps


@pytest.mark.parametrize("build", [residual, attention])
def test_the_stash_is_the_one_of_a_real_run(build, tmp_path):
    model = build(tmp_path)
    found = [comparable(one.stash) for one in facts(model)]
    assert found == [comparable(one) for one in observed(model)]
    assert any(tensors for tensors, _, _ in found)
    assert any(views for _, _, views in found) == (build is attention)


@pytest.mark.parametrize("name", ["squeezenet", "shufflenet"])
def test_the_stash_of_a_real_network_is_the_one_of_a_real_run(name, tmp_path):
    model = load(cached(name, tmp_path), ReadOptions(batch=1))
    assert [comparable(f.stash) for f in facts(model)] == [comparable(s) for s in observed(model)]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(MODELS) - {"squeezenet", "shufflenet"}))
def test_the_stash_of_every_model_is_the_one_of_a_real_run(name, tmp_path):
    sizes = {} if name in LIGHT_MODELS else {"dimensions": {"seq": SEQUENCE}}
    model = load(cached(name, tmp_path), ReadOptions(batch=1, **sizes))
    assert [comparable(f.stash) for f in facts(model)] == [comparable(s) for s in observed(model)]


def test_fused_attention_keeps_what_it_keeps_on_the_cpu(tmp_path):
    text = """<ir_version: 11, opset_import: ["" : 23]>
    agraph (float[2,5,8] x) => (float[2,5,8] y) {
        q = MatMul (x, w)
        y = Attention <q_num_heads = 2, kv_num_heads = 2> (q, q, x)
    }"""
    proto = onnx.parser.parse_model(text)
    weight = torch.rand(8, 8).numpy()
    proto.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    path = tmp_path / "model.onnx"
    path.write_bytes(proto.SerializeToString())
    model = load(path)
    product, fused = facts(model)
    assert [comparable(f.stash) for f in (product, fused)] == [
        comparable(s) for s in observed(model)
    ]
    forward, backward = (
        [kernel.flops for kernel in kernels if kernel.work is Work.ATTENTION]
        for kernels in (fused.kernels, fused.backward_kernels)
    )
    scores = 2 * (2 * 2 * 5 * 5 * 4)  # batch, heads, 5 queries, 5 keys, width
    assert forward == [2 * scores]
    assert backward == [5 * scores]


def causal(folder, more=""):
    """Attention with the kernels of both passes, of one product's queries, keys and values."""
    text = f"""<ir_version: 11, opset_import: ["" : 23]>
    agraph (float[2,5,8] x{more and ", float[5,5] m"}) => (float[2,5,8] y) {{
        q = MatMul (x, w)
        y = Attention <q_num_heads = 2, kv_num_heads = 2, is_causal = 1> (q, q, q{more})
    }}"""
    proto = onnx.parser.parse_model(text)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(torch.rand(8, 8).numpy(), "w"))
    path = folder / "model.onnx"
    path.write_bytes(proto.SerializeToString())
    _, fused = facts(load(path))
    return [[(one.work, one.flops) for one in side if one.flops >= 2 * 2 * 2 * 2 * 5 * 5 * 4 // 2]
            for side in (fused.kernels, fused.backward_kernels)]  # fmt: skip


def test_causal_attention_has_kernels_of_its_own_that_count_all_products(tmp_path):
    scores = 2 * (2 * 2 * 5 * 5 * 4)  # batch, heads, 5 queries, 5 keys, width
    forward, backward = causal(tmp_path)
    assert forward == [(Work.CAUSAL_ATTENTION, 2 * scores)]
    assert backward == [(Work.CAUSAL_ATTENTION_BACKWARD, 5 * scores)]


def test_a_kernel_with_a_mask_computes_all_products(tmp_path):
    forward, backward = causal(tmp_path, ", m")
    assert [work for work, _ in (*forward, *backward)] == [Work.ATTENTION, Work.ATTENTION]


def test_gradients_that_are_views_are_known(tmp_path):
    text = """agraph (float[2,4] x) => (float[2,4] y) <int64[2] shape = {4, 2}> {
        a = MatMul (x, w)
        b = Relu (a)
        c = Transpose (b)
        d = Add (c, c)
        e = Reshape (d, shape)
        f = Transpose (e)
        g = Sigmoid (f)
        h = Concat <axis = 1> (f, g)
        y = MatMul (h, v)
    }"""
    model = read(tmp_path, text, {"w": (4, 4), "v": (8, 4)})
    found = {(view.tensor, view.base) for one in facts(model) for view in one.gradient_views}
    # That of c is a sum of two; those of b, d and e only lie differently, f's and g's are parts.
    assert found == {("b", "c"), ("d", "e"), ("e", "f"), ("f", "h"), ("g", "h")}
    profile = measure(model, model_path=None, repetitions=1, budget_s=0.0, cached=False)
    assert {(view.tensor, view.base) for view in profile.gradient_views} == found


# ---- FLOPs and bytes


def test_flops_are_those_that_torch_counts(tmp_path):
    model = residual(tmp_path)
    held = parameters(model, [p.name for p in model.graph.parameters])
    values = synthetic.inputs(model, seed=0, microbatch=0)
    module = to_torch(model, values=held)
    output, *_ = module(*values.values())
    forward = counted(lambda: module.forward(*values.values()))
    backward = counted(lambda: output.sum().backward())
    found = [
        one
        for operator, one in zip(model.graph.operators, facts(model), strict=True)
        if operator.type == "Conv"
    ]
    kernels = [k for f in found for k in f.backward_kernels if "convolution" in k.work]
    assert sum(one.flops for one in found) == forward
    assert sum(kernel.flops for kernel in kernels) == backward


def test_a_product_reads_two_matrices_and_writes_one_and_its_backward_twice_that(tmp_path):
    text = "agraph (float[6,4] x) => (float[6,5] y) { h = Relu (x) a = MatMul (h, w) y = Relu (a) }"
    _, product, relu = facts(read(tmp_path, text, {"w": (4, 5)}))
    moved = 6 * 4 + 4 * 5 + 6 * 5
    assert (product.flops, product.bytes_moved) == (2 * 6 * 4 * 5, moved * FLOAT)
    # No gradient is asked for of h, which no parameter is in: only the weight's, which is added
    # to that of the microbatches before.
    assert product.backward_flops == 2 * 6 * 4 * 5 + 4 * 5
    assert product.backward_bytes == (moved + 3 * 4 * 5) * FLOAT
    assert [kernel.work for kernel in product.backward_kernels] == [Work.PRODUCT, Work.UPDATE]
    assert (relu.flops, relu.bytes_moved) == (6 * 5, 2 * 6 * 5 * FLOAT)
    assert relu.backward_bytes == 3 * 6 * 5 * FLOAT


def test_both_gradients_of_a_product_are_counted_where_both_are_needed(tmp_path):
    text = "agraph (float[6,4] x) => (float[6,5] y) { a = MatMul (x, v) y = MatMul (a, w) }"
    first, second = facts(read(tmp_path, text, {"v": (4, 4), "w": (4, 5)}))
    assert second.backward_flops == 2 * second.flops + 4 * 5
    assert first.backward_flops == first.flops + 4 * 4


def test_a_view_moves_nothing_and_what_picks_moves_what_it_picks(tmp_path):
    text = """agraph (int64[3] ids, float[3,8] x) => (float[3,4] y)
    <int64[2] shape = {3, 8}, int64[2] halves = {4, 4}> {
        e = Gather (table, ids)
        r = Reshape (e, shape)
        m = Mul (r, x)
        a, b = Split <axis = 1> (m, halves)
        y = Add (a, b)
    }"""
    found = by_name(read(tmp_path, text, {"table": (1000, 8)}))
    assert found["r"].kernels == found["a"].kernels == ()
    assert (found["r"].flops, found["r"].bytes_moved) == (0, 0)
    rows = 3 * 8 * FLOAT
    assert 2 * rows < found["e"].bytes_moved < 3 * rows + 200  # and the indices, several times
    assert found["e"].backward_bytes > 1000 * 8 * FLOAT  # the gradient is a whole table
    assert [kernel.work for kernel in found["a"].backward_kernels] == [Work.COPY]


def test_a_broadcast_operand_is_read_once(tmp_path):
    text = "agraph (float[6,4] x) => (float[6,4] y) { a = Add (x, b) y = Mul (a, s) }"
    add, scale = facts(read(tmp_path, text, {"b": 4, "s": (6, 1)}))
    assert add.bytes_moved == (6 * 4 + 4 + 6 * 4) * FLOAT
    assert scale.bytes_moved == (6 * 4 + 6 + 6 * 4) * FLOAT
    assert Work.REDUCTION in [kernel.work for kernel in add.backward_kernels]


def test_operators_that_no_gradient_reaches_cost_nothing_backward(tmp_path):
    model = attention(tmp_path)
    tensors = {tensor.name: tensor for tensor in model.graph.tensors}
    for operator, one in zip(model.graph.operators, facts(model), strict=True):
        if not any(tensors[name].gradient for name in operator.outputs):
            assert one.backward_kernels == (), operator
    reached = [one for one in facts(model) if one.backward_kernels]
    assert len(reached) > 5


def test_gradients_of_a_tensor_that_two_operators_read_are_summed_where_the_second_one_arrives(
    tmp_path,
):
    text = """agraph (float[6,4] x) => (float[6,4] y) {
        a = MatMul (x, w) b = Relu (a) c = Sigmoid (a) y = Mul (b, c)
    }"""
    found = by_name(read(tmp_path, text, {"w": (4, 4)}))
    sums = [k for k in found["b"].backward_kernels if k.bytes == 3 * 6 * 4 * FLOAT]
    assert len(found["c"].backward_kernels) == 1
    assert len(sums) == len(found["b"].backward_kernels) == 2  # its own, and the sum


def test_groups_of_a_convolution_divide_its_flops_both_ways(tmp_path):
    text = """agraph (float[1,8,6,6] x) => (float[1,8,6,6] y) {
        a = Relu (x)
        y = Conv <pads = [1,1,1,1], group = 4> (a, w)
    }"""
    _, grouped = facts(read(tmp_path, text, {"w": (8, 2, 3, 3)}))
    assert grouped.flops == 2 * 8 * 6 * 6 * 2 * 9
    assert grouped.backward_flops == grouped.flops + 8 * 2 * 9
    assert grouped.kernels[0].work is Work.FEW_CHANNELS


# ---- large models, and what cannot be done


def test_seven_billion_parameters_whose_data_is_not_there(tmp_path):
    path = tmp_path / "large.onnx"
    path.write_bytes(deep_transformer(layers=32, width=4096, sequence=1024).SerializeToString())
    model = load(path, ReadOptions(batch=1))
    found = facts(model)
    num_weights = sum(p.bytes for p in model.graph.parameters) / FLOAT
    assert num_weights > 6.5e9
    # Twice per weight and token, but for the embedding, which is looked up; and attention.
    assert sum(one.flops for one in found) == pytest.approx(2 * 1024 * num_weights, rel=0.05)
    assert 1.95 < sum(f.backward_flops for f in found) / sum(f.flops for f in found) < 2.05


def test_an_operator_that_needs_numbers_is_named(tmp_path, monkeypatch):
    model = read(tmp_path, "agraph (float[6,4] x) => (float[6,5] y) { y = MatMul (x, w) }",
                 {"w": (4, 5)})  # fmt: skip

    def peeks(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a @ b * (1 if a.is_meta else float(a.sum()))

    monkeypatch.setitem(OPERATOR_TYPES, "MatMul", OperatorType(peeks))
    with pytest.raises(OperatorError, match=r"MatMul .*cannot run it without.*measure the model"):
        facts(model)


def test_an_operator_that_is_unknown_is_named(tmp_path, monkeypatch):
    model = read(tmp_path, "agraph (float[6,4] x) => (float[6,5] y) { y = MatMul (x, w) }",
                 {"w": (4, 5)})  # fmt: skip
    monkeypatch.delitem(OPERATOR_TYPES, "MatMul")
    with pytest.raises(OperatorError, match=r"MatMul .* is not supported"):
        facts(model)
