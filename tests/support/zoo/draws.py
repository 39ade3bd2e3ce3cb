"""The numbers that the launcher draws, fed to the module's own forward pass.

PyTorch draws in the order in which the module runs, and the operators of an exported file stand in
the same order. So the next draw of the module is given the numbers of the next random operator, and
has to be of its kind and shape.
"""

from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from planner.graph import tensors_by_name
from planner.model.modes import is_dropout, trains
from planner.operators import randomness

aten = torch.ops.aten
NORMAL = {aten.randn.default, aten.randn_like.default}
UNIFORM = {aten.rand.default, aten.rand_like.default}
KINDS = {
    "Dropout": {aten.bernoulli_.float},
    "RandomNormal": NORMAL, "RandomNormalLike": NORMAL,
    "RandomUniform": UNIFORM, "RandomUniformLike": UNIFORM,
}  # fmt: skip


def random_nodes(model):
    """The operators of a model that draw, in order."""
    return [
        node for node in model.nodes
        if node.type in KINDS and (not is_dropout(node) or trains(node, model.values))
    ]  # fmt: skip


class Fed(TorchDispatchMode):
    """Gives draws the numbers of operators, one after the other.

    Attributes:
        left: the operators that nothing was drawn for yet.
    """

    def __init__(self, model):
        super().__init__()
        self.shapes = {n: t.shape for n, t in tensors_by_name(model.graph).items()}
        self.left = random_nodes(model)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function not in {aten.bernoulli_.float, *NORMAL, *UNIFORM}:
            assert "generator" not in kwargs if kwargs else True, f"{function} is not fed"
            return function(*args, **(kwargs or {}))
        node = self.left.pop(0)
        assert function in KINDS[node.type], f"{function} where the file has {node}"
        shape = self.shapes[node.outputs[0]]
        if node.type == "Dropout":
            mask, kept = (*args, 0.5)[:2]  # torch leaves the default out
            assert mask.numel() == torch.Size(shape).numel(), f"{node}: {tuple(mask.shape)}"
            return mask.copy_(randomness.dropout_mask(node.name, mask.shape, 1 - kept))
        draw = randomness.standard_normal if function in NORMAL else randomness.standard_uniform
        return draw(node.name, shape)


@contextmanager
def fed(model, seed, step, microbatch):
    """A context in which a module draws what the launcher draws for a microbatch."""
    with randomness.drawing(seed, step, microbatch), Fed(model) as mode:
        yield
    assert not mode.left, f"nothing was drawn for {[node.name for node in mode.left]}"
