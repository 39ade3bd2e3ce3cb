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


class OtherDrawsError(AssertionError):
    """The operators of the file draw other numbers than the module."""


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
            return function(*args, **(kwargs or {}))
        if not self.left:
            raise OtherDrawsError(f"{function}, and the file has no more operators that draw")
        node = self.left.pop(0)
        shape = self.shapes[node.outputs[0]]
        if function not in KINDS[node.type]:
            raise OtherDrawsError(f"{function} where the file has {node.name}")
        if node.type == "Dropout":
            mask, kept = (*args, 0.5)[:2]  # torch leaves the default out
            if mask.numel() != torch.Size(shape).numel():
                raise OtherDrawsError(f"{node.name}: {shape}, the module has {tuple(mask.shape)}")
            return mask.copy_(randomness.dropout_mask(node.name, mask.shape, 1 - kept))
        draw = randomness.standard_normal if function in NORMAL else randomness.standard_uniform
        return draw(node.name, shape, _dtype(args, kwargs or {}))


def _dtype(args, kwargs):
    """The type of the numbers that a call draws."""
    like = args[0].dtype if isinstance(args[0], torch.Tensor) else torch.get_default_dtype()
    return kwargs.get("dtype") or like


@contextmanager
def fed(model, seed, step, microbatch):
    """A context in which a module draws what the launcher draws for a microbatch."""
    with randomness.drawing(seed, step, microbatch), Fed(model) as mode:
        yield
    if mode.left:
        raise OtherDrawsError(f"the module draws nothing for {[node.name for node in mode.left]}")
