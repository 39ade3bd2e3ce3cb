"""Parameters and buffers of a module as initializers of its exported graph: ties kept, names those
of the module, and the `ModuleRecord` for the file.
"""

from collections.abc import Iterable, Mapping
from importlib.metadata import version

import onnx_ir as ir
from torch import Tensor, nn

from planner.model.record import ModuleRecord, TensorRecord
from planner.support.version import __version__

SOFTWARE = ("torch", "onnxscript", "onnx-ir", "onnx")
"""Distributions whose versions are recorded, beside the planner's."""


def named_once(named: Iterable[tuple[str, Tensor]]) -> dict[str, tuple[Tensor, tuple[str, ...]]]:
    """Each tensor once by its first name, with its other names.

    Args:
        named: `named_parameters(remove_duplicate=False)`, or that of buffers.
    """
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for name, tensor in named:
        names.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    return {first: (tensors[key], tuple(others)) for key, (first, *others) in names.items()}


def held_names(module: nn.Module) -> frozenset[str]:
    """All names of the module's parameters and buffers, aliases too."""
    return frozenset(
        name
        for named in (module.named_parameters, module.named_buffers)
        for name, _ in named(remove_duplicate=False)
    )


def tie(graph: ir.Graph, module: nn.Module) -> None:
    """Gives every tensor of the module one initializer, with the tensor's first name.

    torch's exporter names a tied weight after the last of its names.
    """
    for named in (module.named_parameters, module.named_buffers):
        for first, (_, others) in named_once(named(remove_duplicate=False)).items():
            present = [name for name in (first, *others) if name in graph.initializers]
            if not present:
                continue
            kept, *copies = (graph.initializers[name] for name in present)
            for copy in copies:
                ir.convenience.replace_all_uses_with(copy, kept)
                del graph.initializers[str(copy.name)]
            if kept.name != first:
                del graph.initializers[str(kept.name)]
                kept.name = first
                graph.initializers[first] = kept


def record_of(module: nn.Module, graph: ir.Graph) -> ModuleRecord:
    """The module, and the initializers that hold its tensors.

    Args:
        graph: the exported graph after `tie`.
    """
    kind = type(module)
    return ModuleRecord(
        module=f"{kind.__module__}.{kind.__qualname__}",
        training=module.training,
        parameters=_records(named_once(module.named_parameters(remove_duplicate=False)), graph),
        buffers=_records(named_once(module.named_buffers(remove_duplicate=False)), graph),
        versions={"planner": __version__, **{name: version(name) for name in SOFTWARE}},
    )


def _records(
    tensors: Mapping[str, tuple[Tensor, tuple[str, ...]]], graph: ir.Graph
) -> tuple[TensorRecord, ...]:
    return tuple(
        TensorRecord(
            name=name,
            initializer=name if name in graph.initializers else None,
            shape=tuple(tensor.shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
            requires_grad=isinstance(tensor, nn.Parameter) and tensor.requires_grad,
            aliases=others,
        )
        for name, (tensor, others) in tensors.items()
    )
