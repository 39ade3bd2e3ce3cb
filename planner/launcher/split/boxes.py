"""Parts of tensors that cross stages: out of one stage, and into the next.

A stage has its local part of a tensor, which is the whole where it is not split. What is sent is a
box of the whole tensor, and lies within that part.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from planner.artefacts import graph as graphs
from planner.artefacts.graph import Graph, tensors_by_name
from planner.artefacts.sharding import Box, tile
from planner.artefacts.strategy import Stage, Strategy, operator_indices
from planner.launcher.feed import torch_dtype
from planner.launcher.split.part import place_of
from planner.schedules.actions import Receive, Send


@dataclass(frozen=True, slots=True)
class Boxes:
    """The boxes of one device.

    Attributes:
        tensors: of the graph, with the types of elements that they have where they cross stages.
        tiles: by stage and tensor, the part that this device has of it; whole tensors are left out.
    """

    tensors: Mapping[str, graphs.Tensor]
    tiles: Mapping[tuple[int, str], Box]

    def shape(self, action: Send | Receive) -> tuple[int, ...]:
        """The shape of what an action moves."""
        if action.box is None:
            return self.tensors[action.tensor].shape
        return tuple(stop - start for start, stop in action.box)

    def dtype(self, action: Send | Receive) -> torch.dtype:
        """The type of the elements that an action moves."""
        return torch_dtype(self.tensors[action.tensor])

    def cut(self, action: Send, made: Tensor) -> Tensor:
        """What is sent of the local part of a tensor."""
        inside = self._inside(action)
        return made if inside is None else made[inside]

    def put(self, arrived: dict[str, Tensor], action: Receive, tensor: Tensor) -> None:
        """Puts what has come into the local part of its tensor; parts of one place add up."""
        name, inside = action.tensor, self._inside(action)
        if inside is None:
            arrived[name] = arrived[name].add_(tensor) if name in arrived else tensor
            return
        if name not in arrived:
            tile_of = self.tiles.get((action.stage, name))
            whole = self.tensors[name].shape
            shape = whole if tile_of is None else [stop - start for start, stop in tile_of]
            arrived[name] = tensor.new_zeros(shape)
        arrived[name][inside] += tensor

    def _inside(self, action: Send | Receive) -> tuple[slice, ...] | None:
        """Where a box is in the local part of its tensor; None where it is all of that."""
        whole = tuple((0, size) for size in self.tensors[action.tensor].shape)
        have = self.tiles.get((action.stage, action.tensor), whole)
        box = whole if action.box is None else action.box
        if box == have:
            return None
        return tuple(
            slice(start - first, stop - first)
            for (start, stop), (first, _) in zip(box, have, strict=True)
        )


def boxes_of(strategy: Strategy, graph: Graph, device: int) -> Boxes:
    """The boxes of a device.

    Args:
        graph: with the types of elements that tensors have where they cross stages.
    """
    tiles: dict[tuple[int, str], Box] = {}
    for s, stage in enumerate(strategy.stages):
        if stage.sharding is not None and device in stage.devices:
            tiles |= {(s, name): box for name, box in _tiles(stage, graph, device)}
    return Boxes(tensors_by_name(graph), tiles)


def _tiles(stage: Stage, graph: Graph, device: int) -> list[tuple[str, Box]]:
    """The parts of the tensors at the edge of a stage."""
    assert stage.sharding is not None
    index_of, (_, index) = operator_indices(graph), place_of(stage, device)
    made = {n for name in stage.operators for n in graph.operators[index_of[name]].outputs}
    whole = ("R",) * len(stage.sharding.mesh)
    found = []
    for name, tensor in tensors_by_name(graph).items():
        specs = stage.sharding.outputs if name in made else stage.sharding.inputs
        spec = specs.get(name, whole)
        found.append((name, tile(tensor.shape, spec, stage.sharding.mesh, index)))
    return found
