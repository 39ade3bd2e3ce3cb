"""Inception-v3 without weights and without its auxiliary head; images of 299 x 299, batch symbolic.

Source: Szegedy et al., CVPR 2016; channels as in torchvision's `inception_v3`.
"""

from collections.abc import Sequence

from onnx import ModelProto

from tests.support.thesis_models import ConvNet

SIDE = 299
Kernel = tuple[int, int]
# Channels and kernel of one convolution.
Step = tuple[int, Kernel]
ONE, THREE, ACROSS, DOWN = (1, 1), (3, 3), (1, 7), (7, 1)


def inception_v3() -> ModelProto:
    """A stem of five convolutions, and eleven blocks of three to six branches."""
    net = ConvNet("inception-v3")
    x = _conv(net, "image", (32, THREE), stride=2, padded=False)
    x = _conv(net, x, (32, THREE), padded=False)
    x = net.pool("MaxPool", _conv(net, x, (64, THREE)), 3, 2, padded=False)
    x = _conv(net, _conv(net, x, (80, ONE)), (192, THREE), padded=False)
    x = net.pool("MaxPool", x, 3, 2, padded=False)
    for number, pooled in enumerate((32, 64, 64)):
        net.scope = f"a{number}."
        branches = [[(64, ONE)], [(48, ONE), (64, (5, 5))], [(64, ONE), (96, THREE), (96, THREE)]]
        x = net.joined([*_chains(net, x, branches), _pooled(net, x, pooled)])
    net.scope = "b."
    x = _halved(net, x, [[(384, THREE)], [(64, ONE), (96, THREE), (96, THREE)]])
    for number, c in enumerate((128, 160, 160, 192)):
        net.scope = f"c{number}."
        far = [(c, ONE), (c, DOWN), (c, ACROSS), (c, DOWN), (192, ACROSS)]
        branches = [[(192, ONE)], [(c, ONE), (c, ACROSS), (192, DOWN)], far]
        x = net.joined([*_chains(net, x, branches), _pooled(net, x, 192)])
    net.scope = "d."
    far = [(192, ONE), (192, ACROSS), (192, DOWN), (192, THREE)]
    x = _halved(net, x, [[(192, ONE), (320, THREE)], far])
    for number in range(2):
        net.scope = f"e{number}."
        near = _conv(net, x, (384, ONE))
        far_end = _conv(net, _conv(net, x, (448, ONE)), (384, THREE))
        forks = [_conv(net, end, (384, k)) for end in (near, far_end) for k in ((1, 3), (3, 1))]
        x = net.joined([_conv(net, x, (320, ONE)), *forks, _pooled(net, x, 192)])
    net.scope = ""
    return net.trained(net.classes(x, 1000), 1000, side=SIDE)


def _conv(net: ConvNet, x: str, step: Step, stride: int = 1, *, padded: bool = True) -> str:
    """A convolution, its normalization and a Relu."""
    return net.same("Relu", net.conv(x, *step, (stride, stride), padded=padded))


def _chains(net: ConvNet, x: str, branches: Sequence[Sequence[Step]]) -> list[str]:
    """The ends of convolutions in a row, a row for each branch."""
    ends = []
    for branch in branches:
        end = x
        for step in branch:
            end = _conv(net, end, step)
        ends.append(end)
    return ends


def _pooled(net: ConvNet, x: str, channels: int) -> str:
    """The branch of an average pool and a convolution."""
    return _conv(net, net.pool("AveragePool", x, 3, 1), (channels, ONE))


def _halved(net: ConvNet, x: str, branches: Sequence[Sequence[Step]]) -> str:
    """A block whose branches end with half the side, beside a maximum pool."""
    ends = _chains(net, x, [branch[:-1] for branch in branches])
    last = [
        _conv(net, end, branch[-1], 2, padded=False)
        for end, branch in zip(ends, branches, strict=True)
    ]
    return net.joined([*last, net.pool("MaxPool", x, 3, 2, padded=False)])
