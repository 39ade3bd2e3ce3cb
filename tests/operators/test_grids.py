"""Regions of images, against ONNX Runtime."""

from itertools import product

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import helper

from planner.operators import grids

X = np.random.default_rng(0).standard_normal((2, 3, 8, 9)).astype(np.float32)
BOXES = np.array([[0, 0, 5, 5], [2, 1, 7, 6], [3, 3, 4, 4], [1, 0, 14, 12]], np.float32)
IMAGES = np.array([0, 1, 1, 0])


def by_runtime(kind, *inputs, **attributes):
    names = [f"x{i}" for i in range(len(inputs))]
    given = dict(zip(names, inputs, strict=True))
    graph = helper.make_graph(
        [helper.make_node(kind, names, ["y"], **attributes)],
        "graph",
        [
            helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
            for n, a in given.items()
        ],
        [onnx.ValueInfoProto(name="y")],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 16)], ir_version=8)
    session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, given)[0])


def tensors(*arrays):
    return tuple(map(torch.from_numpy, arrays))


def test_max_roi_pool_is_that_of_onnx_runtime():
    rois = np.concatenate([IMAGES[:, None].astype(np.float32), BOXES], 1)
    expected = by_runtime("MaxRoiPool", X, rois, pooled_shape=[3, 2], spatial_scale=0.5)
    made = grids.max_roi_pool(*tensors(X, rois), (3, 2), 0.5)
    torch.testing.assert_close(made, expected)


@pytest.mark.parametrize(
    ("mode", "ratio", "how"),
    list(product(("avg", "max"), (0, 2), ("half_pixel", "output_half_pixel"))),
)
def test_roi_align_is_that_of_onnx_runtime(mode, ratio, how):
    attributes = {
        "mode": mode, "output_height": 3, "output_width": 2, "sampling_ratio": ratio,
        "spatial_scale": 0.5, "coordinate_transformation_mode": how,
    }  # fmt: skip
    expected = by_runtime("RoiAlign", X, BOXES, IMAGES, **attributes)
    made = grids.roi_align(*tensors(X, BOXES, IMAGES), **attributes, version=16)
    torch.testing.assert_close(made, expected)


def test_a_region_that_is_longer_than_the_image_is_an_error():
    x, boxes, images = tensors(X, BOXES * 4, IMAGES)
    with pytest.raises(RuntimeError, match="give it a sampling_ratio"):
        grids.roi_align(x, boxes, images, "avg", 3, 2, 0, 1.0, version=10)
