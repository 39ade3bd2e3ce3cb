"""The four networks of NetSplit's experiments (thesis, Nanjing 2023) without weights: AmoebaNet-D,
Wide ResNet-152, U-Net, and DeepLab-V3 on Wide ResNet-152; images of 224 x 224, batch symbolic.

    python -m tests.support.thesis_models amoebanet-d amoebanet-d.onnx

The weights are external data in a file that nobody has to write: planning reads their shapes only.
A convolution has a batch normalization behind it and no bias, or, where these are folded, a bias.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto, helper

from tests.support.models import Flow

SIDE = 224
# (state that is read, operation): two of each pair are added up to the next state. States 0 and 1
# are the outputs of the cell before and of that before it.
NORMAL = (
    ((1, "conv1x1"), (1, "maxpool3")),
    ((1, "none"), (0, "conv1x7_7x1")),
    ((0, "conv1x1"), (0, "conv1x7_7x1")),
    ((2, "maxpool3"), (2, "none")),
    ((1, "avgpool3"), (5, "conv1x1")),
)
REDUCTION = (
    ((0, "maxpool2"), (0, "maxpool3")),
    ((2, "none"), (1, "conv3x3")),
    ((2, "conv1x7_7x1"), (2, "maxpool3")),
    ((3, "none"), (1, "maxpool2")),
    ((2, "avgpool3"), (3, "conv1x1")),
)
# The states that a cell joins.
NORMAL_JOINS, REDUCTION_JOINS = (0, 3, 4, 6), (4, 5, 6)


class ConvNet(Flow):
    """A network of convolutions; what its methods return is the name of a tensor.

    Args:
        folded: whether normalizations are folded into the convolutions before them, as exporters
            do for inference: the convolution has a bias instead.
        trains: whether batch normalizations take the statistics of the batch.
    """

    def __init__(self, name: str, *, folded: bool = False, trains: bool = False) -> None:
        super().__init__(name)
        self.channels, self.folded, self.trains = {"image": 3}, folded, trains

    def conv(
        self,
        x: str,
        channels: int,
        kernel: tuple[int, int] = (1, 1),
        stride: tuple[int, int] = (1, 1),
        dilation: int = 1,
        *,
        padded: bool = True,
    ) -> str:
        """A convolution that pads by half its kernel or not at all, and its batch normalization."""
        held = [self.weight(f"w{len(self.nodes)}", channels, self.channels[x], *kernel)]
        if self.folded:
            held.append(self.weight(f"b{len(self.nodes)}", channels))
        pads = [dilation * (k // 2) * padded for k in kernel]
        made = self.add(
            "Conv", x, *held, kernel_shape=kernel, strides=stride, dilations=[dilation] * 2,
            pads=[*pads, *pads],
        )  # fmt: skip
        self.channels[made] = channels
        return made if self.folded else self.norm(made, channels)

    def norm(self, x: str, channels: int) -> str:
        """Batch normalization, by running means or by those of the batch."""
        held = [self.weight(f"{part}{len(self.nodes)}", channels) for part in "gbmv"]
        made = self.add("BatchNormalization", x, *held, training_mode=int(self.trains))
        if self.trains:
            self.nodes[-1].output.extend(f"{made}_{part}" for part in ("mean", "var"))
        self.channels[made] = channels
        return made

    def same(self, kind: str, x: str, *more: str, **attributes: object) -> str:
        """An operator that keeps the channels of its first input."""
        made = self.add(kind, x, *more, **attributes)
        self.channels[made] = self.channels[x]
        return made

    def joined(self, parts: Sequence[str]) -> str:
        """All channels of the parts."""
        made = self.add("Concat", *parts, axis=1)
        self.channels[made] = sum(self.channels[x] for x in parts)
        return made

    def pool(self, kind: str, x: str, kernel: int, stride: int, *, padded: bool = True) -> str:
        """A pool that pads by half its kernel, or not at all if that is even."""
        pad = [kernel // 2 if padded and kernel % 2 else 0] * 4
        sizes = {"kernel_shape": [kernel] * 2, "strides": [stride] * 2}
        return self.same(kind, x, pads=pad, **sizes)

    def relu_conv(self, x: str, channels: int, *kernels: tuple[int, ...]) -> str:
        """Convolutions, each behind a Relu: (channels, height, width, stride down, across)."""
        for wide, high, across, *stride in (*kernels, (channels, 1, 1, 1, 1)):
            x = self.conv(self.same("Relu", x), wide, (high, across), (stride[0], stride[1]))
        return x

    def classes(self, x: str, num_classes: int) -> str:
        """Logits per image."""
        flat = self.add("Flatten", self.add("GlobalAveragePool", x))
        head = self.weight("head", self.channels[x], num_classes)
        return self.add("Gemm", flat, head, self.weight("bias", num_classes))

    def trained(self, result: str, *shape: int, side: int = SIDE) -> ModelProto:
        """The model of what one image becomes."""
        float32 = onnx.TensorProto.FLOAT
        return self.model(
            helper.make_tensor_value_info("image", float32, ["N", 3, side, side]),
            helper.make_tensor_value_info(result, float32, ["N", *shape]),
        )


def amoebanet_d(layers: int = 18, filters: int = 208, *, folded: bool = False) -> ModelProto:
    """AmoebaNet-D: cells that read the two before them and add up five pairs of branches, after a
    stem of two reductions, with two more among them.

    Source: Real et al., AAAI 2019; joined states and sizes as in Huang et al., GPipe, NeurIPS 2019.

    Args:
        layers: normal cells, a multiple of 3.
        filters: four times the channels of the stem; GPipe's sizes begin at 208.
        folded: whether normalizations are folded into the convolutions.
    """
    net = ConvNet("amoebanet-d", folded=folded)
    channels = filters // 4
    last = net.conv(net.same("Relu", "image"), channels, (3, 3), (2, 2))
    before, halved, number = last, False, 0
    kinds = [True, True, *([False] * (layers // 3) + [True]) * 3][:-1]
    for number, reduces in enumerate(kinds):
        net.scope = f"cell{number}."
        channels *= 2 if reduces else 1
        before, last = last, _cell(net, last, before, channels, reduces=reduces, halved=halved)
        halved = reduces
    net.scope = ""
    return net.trained(net.classes(last, 1000), 1000)


def _cell(
    net: ConvNet, last: str, before: str, channels: int, *, reduces: bool, halved: bool
) -> str:
    """One cell.

    Args:
        halved: whether `last` has half the side of `before`.
    """
    states = [net.relu_conv(last, channels)]
    if halved:
        states.append(_halved(net, before, channels))
    else:
        same = net.channels[before] == channels
        states.append(before if same else net.relu_conv(before, channels))
    for pair in REDUCTION if reduces else NORMAL:
        made = [_operation(net, what, states[i], 2 if reduces and i < 2 else 1) for i, what in pair]
        states.append(net.same("Add", *made))
    return net.joined([states[i] for i in (REDUCTION_JOINS if reduces else NORMAL_JOINS)])


def _operation(net: ConvNet, what: str, x: str, stride: int) -> str:
    """One of the operations of a cell, which keep the channels."""
    channels = net.channels[x]
    narrow = channels // 4
    match what:
        case "none":
            return x if stride == 1 else _halved(net, x, channels)
        case "avgpool3":
            return net.pool("AveragePool", x, 3, stride)
        case "maxpool3" | "maxpool2":
            return net.pool("MaxPool", x, int(what[-1]), stride)
        case "conv1x1":
            return net.conv(net.same("Relu", x), channels, (1, 1), (stride, stride))
        case "conv3x3":
            return net.relu_conv(x, channels, (narrow, 1, 1, 1, 1), (narrow, 3, 3, stride, stride))
    return net.relu_conv(
        x, channels, (narrow, 1, 1, 1, 1), (narrow, 1, 7, 1, stride), (narrow, 7, 1, stride, 1)
    )


def _halved(net: ConvNet, x: str, channels: int) -> str:
    """Half the side: every other pixel, and those one further down and across, half of the channels
    from each.
    """
    x = net.same("Relu", x)
    shift = net.constant("shift", np.array([0, 0, -1, -1, 0, 0, 1, 1]))
    parts = []
    for picked in (x, net.same("Pad", x, shift)):
        held = [net.weight(f"w{len(net.nodes)}", channels // 2, net.channels[x], 1, 1)]
        if net.folded:
            held.append(net.weight(f"b{len(net.nodes)}", channels // 2))
        parts.append(net.add("Conv", picked, *held, kernel_shape=[1, 1], strides=[2, 2]))
        net.channels[parts[-1]] = channels // 2
    joined = net.joined(parts)
    return joined if net.folded else net.norm(joined, channels)


def wide_resnet(blocks: Sequence[int] = (3, 8, 36, 3), widening: int = 2) -> ModelProto:
    """ResNet-152 whose bottlenecks are twice as wide.

    Source: He et al., CVPR 2016; Zagoruyko and Komodakis, BMVC 2016.

    Args:
        blocks: bottlenecks per stage.
        widening: of the 3 x 3 convolutions.
    """
    net = ConvNet("wide-resnet-152")
    return net.trained(net.classes(_encoder(net, blocks, widening, 32), 1000), 1000)


def _encoder(net: ConvNet, blocks: Sequence[int], widening: int, output_stride: int) -> str:
    """The convolutions of a residual network. Where its side would be less than the image's over
    the output stride, it dilates instead.
    """
    x = net.same("Relu", net.conv("image", 64, (7, 7), (2, 2)))
    x, shrunk, dilation = net.pool("MaxPool", x, 3, 2), 4, 1
    for stage, count in enumerate(blocks):
        out, stride, before = 256 * 2**stage, 1, dilation
        if stage > 0:
            if shrunk < output_stride:
                stride, shrunk = 2, 2 * shrunk
            else:
                dilation *= 2
        for block in range(count):
            net.scope = f"stage{stage}.{block}."
            narrow, step = 64 * 2**stage * widening, (stride, stride) if block == 0 else (1, 1)
            y = net.same("Relu", net.conv(x, narrow))
            y = net.conv(y, narrow, (3, 3), step, before if block == 0 else dilation)
            y = net.conv(net.same("Relu", y), out)
            x = net.conv(x, out, (1, 1), step) if block == 0 else x
            x = net.same("Relu", net.same("Add", y, x))
    net.scope = ""
    return x


def widened_resnet(
    layers: int = 50, channels: int = 160, widening: int = 2, *, trains: bool = True
) -> ModelProto:
    """Alpa's wide residual network: its stem has more channels, and of a bottleneck only the 3 x 3
    convolution's output is wider than that.

    Source: Zheng et al., OSDI 2022; sizes as in alpa/model/wide_resnet of its repository.

    Args:
        layers: 50, 101 or 152.
        channels: of the stem, and of the first stage's narrow tensors; twice as many at each stage.
        widening: of the output of the 3 x 3 convolutions.
        trains: whether batch normalizations take the statistics of the batch.
    """
    net = ConvNet("wide-resnet", trains=trains)
    x = net.same("Relu", net.conv("image", channels, (7, 7), (2, 2)))
    x = net.pool("MaxPool", x, 3, 2)
    for stage, count in enumerate(_BOTTLENECKS[layers]):
        narrow, step = channels * 2**stage, (2, 2) if stage else (1, 1)
        for block in range(count):
            net.scope = f"stage{stage}.{block}."
            y = net.same("Relu", net.conv(x, narrow))
            y = net.conv(y, widening * narrow, (3, 3), (1, 1) if block else step)
            y = net.conv(net.same("Relu", y), 4 * narrow)
            x = x if block else net.conv(x, 4 * narrow, (1, 1), step)
            x = net.same("Relu", net.same("Add", y, x))
    net.scope = ""
    return net.trained(net.classes(x, 1024), 1024)


_BOTTLENECKS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
"""Per stage, by the number of layers."""


def unet(channels: int = 64, levels: int = 5, num_classes: int = 2) -> ModelProto:
    """U-Net, padded so that images keep their side.

    Source: Ronneberger, Fischer and Brox, MICCAI 2015.

    Args:
        channels: at the full side; twice as many at each half of it.
        levels: different sides.
    """
    net, x = ConvNet("u-net"), "image"
    skips = []
    for level in range(levels):
        net.scope = f"down{level}."
        x = _twice(net, net.pool("MaxPool", x, 2, 2) if level else x, channels * 2**level)
        skips.append(x)
    for level in reversed(range(levels - 1)):
        net.scope = f"up{level}."
        wide = channels * 2**level
        held = net.weight("up", 2 * wide, wide, 2, 2)
        x = net.add("ConvTranspose", x, held, net.weight("bias", wide),
                    kernel_shape=[2, 2], strides=[2, 2])  # fmt: skip
        net.channels[x] = wide
        x = _twice(net, net.joined([skips[level], x]), wide)
    net.scope = ""
    head = net.weight("head", num_classes, channels, 1, 1)
    result = net.add("Conv", x, head, net.weight("bias", num_classes), kernel_shape=[1, 1])
    return net.trained(result, num_classes, SIDE, SIDE)


def _twice(net: ConvNet, x: str, channels: int) -> str:
    for _ in range(2):
        x = net.same("Relu", net.conv(x, channels, (3, 3)))
    return x


def deeplab_v3(
    blocks: Sequence[int] = (3, 8, 36, 3),
    widening: int = 2,
    output_stride: int = 16,
    num_classes: int = 21,
) -> ModelProto:
    """DeepLab-V3 on a wide residual network: five views of its last tensor, of which three are
    dilated and one is the mean of the image.

    Source: Chen et al., arXiv 1706.05587, section 3.3.

    Args:
        blocks, widening: as `wide_resnet` takes them.
        output_stride: side of the image over that of the encoder's last tensor, 8 or 16.
    """
    net = ConvNet("deeplab-v3")
    x, side = _encoder(net, blocks, widening, output_stride), SIDE // output_stride
    rates = [96 // output_stride * k for k in (1, 2, 3)]
    views = [net.same("Relu", net.conv(x, 256))]
    views += [net.same("Relu", net.conv(x, 256, (3, 3), dilation=rate)) for rate in rates]
    mean = net.same("Relu", net.conv(net.same("GlobalAveragePool", x), 256))
    views.append(_resized(net, mean, side))
    x = net.same("Relu", net.conv(net.joined(views), 256))
    x = net.same("Relu", net.conv(x, 256, (3, 3)))
    head = net.weight("head", num_classes, 256, 1, 1)
    x = net.add("Conv", x, head, net.weight("bias", num_classes), kernel_shape=[1, 1])
    net.channels[x] = num_classes
    return net.trained(_resized(net, x, SIDE // side), num_classes, SIDE, SIDE)


def _resized(net: ConvNet, x: str, factor: int) -> str:
    """Bilinear, `factor` times the side."""
    scales = net.constant(f"times{factor}", np.array([1, 1, factor, factor], np.float32))
    return net.same("Resize", x, "", scales, mode="linear")


# In the sizes that come nearest to the nodes and the memory that the thesis prints.
NETWORKS: Mapping[str, Callable[[], ModelProto]] = {
    "amoebanet-d": partial(amoebanet_d, 18, 256, folded=True),
    "wide-resnet-152": wide_resnet,
    "u-net": partial(unet, 32),
    "deeplab-v3": deeplab_v3,
}


def main() -> None:
    """Write one of the networks to a file."""
    parser = argparse.ArgumentParser(description="Write a network of NetSplit's experiments.")
    parser.add_argument("name", choices=NETWORKS)
    parser.add_argument("out", type=Path, help="such as u-net.onnx")
    options = parser.parse_args()
    options.out.write_bytes(NETWORKS[options.name]().SerializeToString())


if __name__ == "__main__":
    main()
