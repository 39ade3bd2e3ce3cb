"""The numbers that the launcher draws, fed to the module's own forward pass.

PyTorch draws in the order in which the module runs, and the operators of an exported file stand in
the same order. So the next draw of the module is given the numbers of the next random operator, and
has to be of its kind and shape.
"""

from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from planner.artefacts.graph import tensors_by_name
from planner.model.modes import is_dropout, trains
from planner.operators import randomness

aten = torch.ops.aten
NORMAL = {aten.randn.default, aten.randn_like.default}
UNIFORM = {aten.rand.default, aten.rand_like.default}
BERNOULLI = {aten.bernoulli.default, aten.bernoulli_.float}
FROM_UNIFORM = {*UNIFORM, *BERNOULLI, aten.exponential_.default}
KINDS = {
    "Dropout": {aten.bernoulli_.float}, "Bernoulli": BERNOULLI,
    "RandomNormal": NORMAL, "RandomNormalLike": NORMAL,
    "RandomUniform": FROM_UNIFORM, "RandomUniformLike": FROM_UNIFORM,
}  # fmt: skip
DRAWS = frozenset.union(*map(frozenset, KINDS.values()))


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
        self.tensors = tensors_by_name(model.graph)
        self.left = random_nodes(model)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function not in DRAWS:
            return function(*args, **(kwargs or {}))
        if not self.left:
            raise OtherDrawsError(f"{function}, and the file has no more operators that draw")
        node = self.left.pop(0)
        made = self.tensors[node.outputs[0]]
        if function not in KINDS[node.type]:
            raise OtherDrawsError(f"{function} where the file has {node.name}")
        if node.type == "Dropout":
            mask, kept = (*args, 0.5)[:2]  # torch leaves the default out
            if mask.numel() != torch.Size(made.shape).numel():
                raise OtherDrawsError(
                    f"{node.name}: {made.shape}, the module has {tuple(mask.shape)}"
                )
            return mask.copy_(randomness.dropout_mask(node.name, mask.shape, 1 - kept))
        draw = randomness.standard_normal if function in NORMAL else randomness.standard_uniform
        drawn = draw(node.name, made.shape, getattr(torch, made.dtype))
        if function in {*NORMAL, *UNIFORM}:
            return drawn
        if function is aten.bernoulli.default:
            return (drawn < args[0]).to(args[0].dtype)
        if function is aten.bernoulli_.float:
            return args[0].copy_(drawn < (*args, 0.5)[1])
        return args[0].copy_(_exponential(drawn, *args[1:]))


def _exponential(uniform, rate=1.0):
    """Exponential draws from uniform ones, as torch's decomposition makes them."""
    small = torch.finfo(uniform.dtype).eps / 2
    return torch.where(uniform >= 1 - small, -small, uniform.log()) / -rate


@contextmanager
def fed(model, seed, step, microbatch):
    """A context in which a module draws what the launcher draws for a microbatch."""
    with randomness.random_operators(seed, step, microbatch), Fed(model) as mode:
        yield
    if mode.left:
        raise OtherDrawsError(f"the module draws nothing for {[node.name for node in mode.left]}")
