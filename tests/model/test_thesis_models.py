"""The networks of NetSplit's experiments, and Inception-v3: sizes that papers and other libraries
print, small ones against ONNX Runtime.
"""

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper

from planner.artefacts.graph import producers
from planner.model.load import ReadOptions, load
from planner.operators.convert import to_torch
from tests.bench.placement_cases import CASES, PUBLISHED, megabytes, three
from tests.support.inception import inception_v3
from tests.support.thesis_models import NETWORKS, amoebanet_d, deeplab_v3, unet, wide_resnet


def read(folder, proto, batch=1):
    path = folder / "net.onnx"
    path.write_bytes(proto.SerializeToString())
    return load(path, ReadOptions(batch=batch))


def num_trained(graph):
    return sum(p.bytes for p in graph.parameters if p.trainable) // 4


@pytest.mark.parametrize(("proto", "expected"), [
    # torchvision's wide_resnet50_2 and wide_resnet101_2; milesial's Pytorch-UNet with 2 classes.
    (lambda: wide_resnet((3, 4, 6, 3)), 68_883_240),
    (lambda: wide_resnet((3, 4, 23, 3)), 126_886_696),
    (unet, 31_037_698),
    # torchvision's inception_v3 has 27,161,264, of which 3,326,696 are of the auxiliary head.
    (inception_v3, 23_834_568),
])  # fmt: skip
def test_networks_have_as_many_parameters_as_elsewhere(tmp_path, proto, expected):
    assert num_trained(read(tmp_path, proto()).graph) == expected


@pytest.mark.parametrize(("layers", "filters", "millions"), [(18, 208, 82), (18, 416, 318)])
def test_amoebanet_has_as_many_parameters_as_gpipe_prints(tmp_path, layers, filters, millions):
    found = num_trained(read(tmp_path, amoebanet_d(layers, filters)).graph)
    assert found / 1e6 == pytest.approx(millions, rel=0.01)


def test_networks_have_about_the_memory_and_nodes_that_the_thesis_prints(tmp_path):
    for name, nodes, bytes_ in (("amoebanet-d", 0.02, 0.02), ("u-net", 0.5, 0.05)):
        graph = read(tmp_path, NETWORKS[name](), 128).graph
        assert len(graph.operators) == pytest.approx(PUBLISHED[name].nodes, rel=nodes)
        assert megabytes(graph) == pytest.approx(PUBLISHED[name].megabytes, rel=bytes_)


def test_an_output_stride_of_8_keeps_tensors_of_a_stride_of_16_twice_as_wide(tmp_path):
    sides = []
    for stride in (8, 16):
        graph = read(tmp_path, deeplab_v3((1, 1, 1, 1), output_stride=stride)).graph
        shapes = {t.name: t.shape for t in graph.tensors}
        joined = next(o for o in graph.operators if o.type == "Concat")
        assert shapes[graph.outputs[0]] == (1, 21, 224, 224)
        sides.append(shapes[joined.outputs[0]][2:])
    assert sides == [(28, 28), (14, 14)]


@pytest.mark.parametrize("proto", [
    lambda: unet(2, 3),
    pytest.param(lambda: amoebanet_d(3, 16), marks=pytest.mark.slow),
    pytest.param(lambda: amoebanet_d(3, 16, folded=True), marks=pytest.mark.slow),
    pytest.param(inception_v3, marks=pytest.mark.slow),
    pytest.param(lambda: wide_resnet((1, 1, 1, 1)), marks=pytest.mark.slow),
    pytest.param(lambda: deeplab_v3((1, 1, 1, 1)), marks=pytest.mark.slow),
])  # fmt: skip
def test_small_networks_agree_with_onnx_runtime_and_train(tmp_path, proto):
    model = read(tmp_path, filled(proto()), 2)
    (shape,) = (t.shape for t in model.graph.tensors if t.name == "image")
    image = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    session = onnxruntime.InferenceSession(tmp_path / "net.onnx")
    (expected,) = session.run(None, {"image": image})
    module = to_torch(model)
    (made,) = module(torch.from_numpy(image))
    np.testing.assert_allclose(made.detach().numpy(), expected, atol=1e-4 * expected.std())
    made.square().mean().backward()
    assert all(p.grad is not None and p.grad.any() for p in module.parameters())


def filled(proto):
    """The same with random weights inside, that keep what flows near 1."""
    random = np.random.default_rng(0)
    for tensor in proto.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            shape = tuple(tensor.dims)
            values = random.uniform(0.9, 1.1, shape) if len(shape) == 1 else (
                random.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))
            )  # fmt: skip
            tensor.CopyFrom(numpy_helper.from_array(values.astype(np.float32), tensor.name))
    return proto


def test_every_operator_is_used_and_every_tensor_has_its_size(tmp_path):
    for build in NETWORKS.values():
        graph = read(tmp_path, build()).graph
        read_anywhere = {name for o in graph.operators for name in o.inputs} | {*graph.outputs}
        assert {*producers(graph)} <= read_anywhere


def test_the_benchmark_has_the_published_figures_and_the_right_devices():
    leads = [f"{published.lead:.1%}" for published in PUBLISHED.values()]
    assert leads == ["14.7%", "6.4%", "4.4%", "13.7%"]
    assert [(case.network, case.batch) for case in CASES if case.published] == [
        ("amoebanet-d", 64), ("wide-resnet-152", 64), ("u-net", 128), ("deeplab-v3", 48)
    ]  # fmt: skip
    assert len({case.key for case in CASES}) == len(CASES)
    topology = three()
    behind = {link.source: link.target for link in topology.links if link.source.startswith("gpu")}
    far, *near = (behind[device.name] for device in topology.devices)
    assert near == [near[0]] * 2 != [far] * 2
