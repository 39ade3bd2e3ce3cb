"""Networks with wide branches, whose downsets are too many to enumerate: NASNet-A's cells, and the
CNNs of the onnx package.
"""

from planner.artefacts.graph import Graph, Operator, Parameter, Tensor
from tests.support.models import light
from tests.support.rooflines import roofline_of, roofline_of_onnx

# Of the onnx package; densenet121 reads each tensor many times, the others have branches.
WIDE_CNNS = ("inception_v1", "inception_v2", "densenet121", "shufflenet")


def wide_profile(name, device="V100-SXM2-16GB", batch=32):
    """A profile by roofline of one of `WIDE_CNNS`, of "nasnet-CELLS", "towers" or "experts"."""
    kind, _, cells = name.partition("-")
    if kind in ("towers", "experts"):
        return roofline_of({"towers": towers, "experts": experts}[kind](batch), device, batch)
    if kind == "nasnet":
        return roofline_of(nasnet(int(cells), batch), device, batch)
    return roofline_of_onnx(light(name), device, batch)


def nasnet(cells, batch, channels=168, size=14):
    """Normal cells of NASNet-A at one resolution, as in Zoph et al., CVPR 2018, figure 4: each
    reads the two cells before it, and adds up five pairs of branches. A separable convolution is
    two times Relu, depthwise and pointwise convolution; batch normalization is left out, as if
    folded.
    """
    builder = _GraphBuilder(batch, channels, size)
    before = last = builder.conv("image", 1)
    for cell in range(cells):
        builder.scope = f"cell{cell}."
        p, h = (builder.conv(builder.relu(x), 1) for x in (before, last))
        pairs = (
            (builder.separable(h, 3), h),
            (builder.separable(p, 3), builder.separable(h, 5)),
            (builder.pool(h), p),
            (builder.pool(p), builder.pool(p)),
            (builder.separable(p, 5), builder.separable(p, 3)),
        )
        joined = builder.add("Concat", [builder.add("Add", pair) for pair in pairs], channels=5)
        before, last = last, builder.conv(joined, 1, channels=5)
    return builder.graph(last)


def towers(batch=8, depths=(8, 12), joint=4, channels=512, size=14):
    """Towers of convolutions beside each other over one image, and a trunk on all their results."""
    builder, ends = _GraphBuilder(batch, channels, size), []
    for t, depth in enumerate(depths):
        builder.scope = f"tower{t}."
        x = builder.conv("image", 1)
        for _ in range(depth):
            x = builder.conv(builder.relu(x), 3)
        ends.append(x)
    builder.scope = "joint."
    x = builder.conv(builder.add("Concat", ends, channels=len(ends)), 1, channels=len(ends))
    for _ in range(joint):
        x = builder.conv(builder.relu(x), 3)
    return builder.graph(x)


def experts(batch=8, layers=3, width=4, channels=512, size=14):
    """Layers whose experts, two convolutions each, all read the same tensor and are added up, as in
    a mixture of experts without routing.
    """
    builder = _GraphBuilder(batch, channels, size)
    x = builder.conv("image", 1)
    for layer in range(layers):
        builder.scope = f"layer{layer}."
        h = builder.conv(builder.relu(x), 3)
        for _ in range(width):
            inner = builder.conv(builder.relu(h), 3)
            x = builder.add("Add", [x, builder.conv(builder.relu(inner), 3)])
    return builder.graph(x)


class _GraphBuilder:
    """A graph that grows operator by operator; each method returns the name of the new tensor."""

    def __init__(self, batch, channels, size):
        self.batch, self.channels, self.size = batch, channels, size
        self.scope, self.operators, self.parameters = "", [], []
        self.tensors = [self._tensor("image", 1, False)]

    def _tensor(self, name, factor, gradient=True):
        shape = (self.batch, factor * self.channels, self.size, self.size)
        return Tensor(name, shape, "float32", gradient)

    def add(self, kind, inputs, weight=None, channels=1):
        name = f"{self.scope}{kind}_{len(self.operators)}"
        held = () if weight is None else (Parameter(f"{name}.weight", weight, "float32", True),)
        self.operators.append(
            Operator(name, kind, tuple(dict.fromkeys(inputs)), (name,),
                     tuple(p.name for p in held))
        )  # fmt: skip
        self.parameters += held
        self.tensors.append(self._tensor(name, channels))
        return name

    def relu(self, x):
        return self.add("Relu", [x])

    def pool(self, x):
        return self.add("AveragePool", [x])

    def conv(self, x, kernel, channels=1):
        width = self.channels
        return self.add("Conv", [x], (width, channels * width, kernel, kernel))

    def separable(self, x, kernel):
        for _ in range(2):
            x = self.add("Conv", [self.relu(x)], (self.channels, 1, kernel, kernel))
            x = self.conv(x, 1)
        return x

    def graph(self, result):
        return Graph(
            tuple(self.operators), tuple(self.tensors), tuple(self.parameters), ("image",),
            (result,),
        )  # fmt: skip
