"""Which tensor of a PyTorch module a node reads, by the notes of torch's exporter.

The exporter names an initializer after one of the tensors that it stands for, or not at all
(`val_58`); the call that a node came from names the tensors that were meant:

    LayerNormalization(x, ln_1.weight, ln_1.bias)       the file's names: those of another module
        from layer_norm(%x, [32], %p_ln_2_weight, %p_ln_2_bias)           the module's own names

A name that begins with p_ is a parameter, with b_ a buffer, with c_ a constant in the module's
code. Any other name that no node of the file makes was computed by the exporter from these.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from onnx import NodeProto

from planner.artefacts.operator_types import facts
from planner.model.scopes import Scope, scope_of


class OriginKind(StrEnum):
    """The sort of a module's tensor."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    CONSTANT = "constant"
    COMPUTED = "computed"


@dataclass(frozen=True, slots=True)
class Origin:
    """A tensor of a module.

    Attributes:
        kind: its sort.
        name: its path in the module, as far as it is known; of a computed one, the exporter's; ""
            for a constant of the exporter's own.
    """

    kind: OriginKind
    name: str


@dataclass(frozen=True, slots=True)
class Read:
    """An input of a node.

    Attributes:
        node: index of the node.
        position: of the input.
        origin: the tensor that was meant; None where nothing says it.
    """

    node: int
    position: int
    origin: Origin | None


_PREFIXES = {"p_": OriginKind.PARAMETER, "b_": OriginKind.BUFFER, "c_": OriginKind.CONSTANT}
_OWN = -1  # an input that the exporter's way of writing the call brought in

# Torch's call and the ONNX operator -> position of an input -> argument of the call.
_ROLES: Mapping[tuple[str, str], Mapping[int, int]] = {
    ("linear", "Gemm"): {0: 0, 1: 1, 2: 2},
    ("linear", "MatMul"): {0: 0, 1: 1},
    ("linear", "Transpose"): {0: 1},
    ("linear", "Add"): {0: 2, 1: 2},
    ("addmm", "Gemm"): {0: 1, 1: 2, 2: 0},
    ("addmm", "MatMul"): {0: 1, 1: 2},
    ("conv", "Conv"): {0: 0, 1: 1, 2: 2},
    ("conv", "ConvTranspose"): {0: 0, 1: 1, 2: 2},
    ("embedding", "Gather"): {0: 0, 1: 1},
    ("layer_norm", "LayerNormalization"): {0: 0, 1: 2, 2: 3},
    ("rms_norm", "RMSNormalization"): {0: 0, 1: 2},
    ("rms_norm", "Mul"): {0: 2, 1: 2},
    ("batch_norm", "BatchNormalization"): {0: 0, 1: 1, 2: 2, 3: 3, 4: 4},
    ("instance_norm", "InstanceNormalization"): {0: 0, 1: 1, 2: 2},
    ("group_norm", "GroupNormalization"): {0: 0, 1: 2, 2: 3},
    ("group_norm", "InstanceNormalization"): {0: 0, 1: _OWN, 2: _OWN},
    ("group_norm", "Mul"): {0: 2, 1: 2},
    ("group_norm", "Add"): {0: 3, 1: 3},
    ("prelu", "PRelu"): {0: 0, 1: 1},
}  # fmt: skip
_BINARY = {
    "add": "Add", "sub": "Sub", "mul": "Mul", "div": "Div", "pow": "Pow", "matmul": "MatMul",
    "mm": "MatMul", "bmm": "MatMul",
}  # fmt: skip
_FAMILIES = ("batch_norm", "layer_norm", "group_norm", "instance_norm", "rms_norm", "conv")


class Origins:
    """Says which tensors of the module the nodes of a file read.

    Args:
        nodes: of the file.
        inputs: names of the graph's inputs.
        held: names of the initializers.
    """

    def __init__(
        self, nodes: Sequence[NodeProto], inputs: Iterable[str], held: Iterable[str]
    ) -> None:
        self.scopes = [scope_of(node) for node in nodes]
        self.made = {name for node in nodes for name in node.output} | {*inputs}
        paths = {scope.module for scope in self.scopes if scope.module}
        # The exporter writes a path in lower case, with underscores for dots.
        self.paths = {flat(path): path for path in sorted(paths)}
        self.held = {flat(name): name for name in held}

    def of(self, node: NodeProto, index: int, position: int) -> Origin | None:
        """The tensor of the module that a node reads at a position; None where nothing says it."""
        scope, name = self.scopes[index], node.input[position]
        role = _role_of(scope, node.op_type, position)
        if role == _OWN:
            return Origin(OriginKind.CONSTANT, "")
        argument = _argument(scope, role)
        if argument and argument not in self.made:
            return self.origin(argument)
        open_names = [one for one in dict.fromkeys(scope.names) if one not in self.made]
        own = [one for one in open_names if one == name or one[2:] == flat(name)]
        choice = own or open_names
        return self.origin(choice[0]) if len(choice) == 1 else None

    def bias(self, node: NodeProto, index: int) -> Origin | None:
        """The bias that the exporter left out of a node because it was zero; None for none."""
        scope, position = self.scopes[index], facts(node.op_type).bias
        if position is None or (len(node.input) > position and node.input[position]):
            return None
        role = _role_of(scope, node.op_type, position)
        name = _argument(scope, role)
        origin = self.origin(name) if name and name not in self.made else None
        return origin if origin is not None and origin.kind is OriginKind.PARAMETER else None

    def origin(self, argument: str) -> Origin:
        """The tensor that an argument of a call stands for."""
        kind = _PREFIXES.get(argument[:2])
        if kind is None:
            return Origin(OriginKind.COMPUTED, argument)
        return Origin(kind, self.path(argument[2:]))

    def path(self, name: str) -> str:
        """The path of a tensor in the module: h_0_ln_weight -> h.0.ln.weight."""
        if name in self.held:
            return self.held[name]
        for end in reversed([i for i, letter in enumerate(name) if letter == "_"]):
            if name[:end] in self.paths:
                return f"{self.paths[name[:end]]}.{name[end + 1 :]}"
        return name

    def named(self) -> set[Origin]:
        """All parameters and buffers that the calls of the file name."""
        names = {name for scope in self.scopes for name in scope.names if name not in self.made}
        return {self.origin(name) for name in names if name[:2] in _PREFIXES}


def flat(path: str) -> str:
    """A path as the exporter's names have it.

    >>> flat("bert.encoder.LayerNorm.weight")
    'bert_encoder_layernorm_weight'
    """
    return re.sub(r"\W", "_", path).lower()


def _argument(scope: Scope, role: int | None) -> str:
    """The one name in an argument of a call; "" where there is none, or several."""
    names = scope.arguments[role] if role is not None and role < len(scope.arguments) else ()
    return names[0] if len(names) == 1 else ""


def _role_of(scope: Scope, operator: str, position: int) -> int | None:
    """The argument of the call that a position of the operator stands for; None if unknown."""
    call = next((family for family in _FAMILIES if family in scope.call), scope.call)
    if _BINARY.get(call) == operator:
        return position
    return _ROLES.get((call, operator), {}).get(position)


def reads(
    nodes: Sequence[NodeProto], names: Collection[str], origins: Origins
) -> dict[str, list[Read]]:
    """Where the nodes read some tensors.

    Args:
        nodes: of the file.
        names: of initializers.
    """
    found: dict[str, list[Read]] = {}
    for i, node in enumerate(nodes):
        for position, name in enumerate(node.input):
            if name in names:
                origin = origins.of(node, i, position)
                found.setdefault(name, []).append(Read(i, position, origin))
    return found
