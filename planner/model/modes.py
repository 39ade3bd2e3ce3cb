"""The mode of operators that compute something else in training than in evaluation.

BatchNormalization normalises by the statistics of the microbatch in training, and by its running
statistics in evaluation; Dropout drops elements in training only. The versions of the operators say
in different ways which one a node does:

    version            BatchNormalization trains   Dropout trains
    1 to 6             if `is_test` is 0           if `is_test` is 0
    7 to 11            if it has several outputs   never
    12 and 13          if it has several outputs   if the input `training_mode` is true
    from 14 on         if `training_mode` is 1     if the input `training_mode` is true
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np

from planner.artefacts.profile import BatchNorm


class ModeNode(Protocol):
    """A node, as far as its mode depends on it; `Node` in load.py is one."""

    @property
    def type(self) -> str:
        """The operator type without its domain."""

    @property
    def domain(self) -> str:
        """The domain, "" for ONNX's own."""

    @property
    def version(self) -> int:
        """The operator set's version."""

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names in formal order."""

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names in formal order."""

    @property
    def attributes(self) -> Mapping[str, object]:
        """By name."""


def is_batch_norm(node: ModeNode) -> bool:
    """Whether a node is ONNX's BatchNormalization."""
    return node.type == "BatchNormalization" and not node.domain


def is_dropout(node: ModeNode) -> bool:
    """Whether a node is ONNX's Dropout."""
    return node.type == "Dropout" and not node.domain


def trains(node: ModeNode, values: Mapping[str, np.ndarray]) -> bool:
    """Whether a BatchNormalization or a Dropout computes as in training.

    Args:
        node: one of the two.
        values: constants by name.
    """
    old = node.version < 7 and not node.attributes.get("is_test", 0)
    if is_batch_norm(node):
        several = 7 <= node.version < 14 and len(node.outputs) > 1
        return bool(node.attributes.get("training_mode", old or several))
    mode = node.inputs[2] if len(node.inputs) > 2 else ""
    return old or (mode in values and bool(values[mode]))


def batch_norm_form(nodes: Iterable[ModeNode]) -> BatchNorm:
    """The form of a model's batch normalizations; `FROZEN` where it has none."""
    kinds = {trains(node, {}) for node in nodes if is_batch_norm(node)}
    if len(kinds) == 2:
        return BatchNorm.MIXED
    return BatchNorm.TRAINING if True in kinds else BatchNorm.FROZEN


def evaluation_notes(
    nodes: Sequence[ModeNode],
    values: Mapping[str, np.ndarray],
    wanted: BatchNorm | None,
    exported_for_training: bool | None,
) -> tuple[str, ...]:
    """What a model leaves out when it is trained, because its operators are in evaluation mode.

    Args:
        nodes: as the file has them.
        values: constants by name.
        wanted: the form of batch normalizations that was asked for; None leaves it to the file.
        exported_for_training: mode of the module that was exported; None where that is not known.
    """
    norms = [trains(node, values) for node in nodes if is_batch_norm(node)]
    drops = [trains(node, values) for node in nodes if is_dropout(node)]
    if wanted is BatchNorm.TRAINING:
        norms = []
    frozen = len(norms) if wanted is BatchNorm.FROZEN else norms.count(False)
    parts = []
    if frozen:
        parts.append(
            _clause(frozen, norms, "BatchNormalization", ("uses", "use"), "running statistics")
        )
    if idle := drops.count(False):
        parts.append(_clause(idle, drops, "Dropout", ("drops", "drop"), "nothing"))
    if exported_for_training is False and not drops:
        parts.append("Dropout is left out, if the module has any")
    if not parts:
        return ()
    why = "the file was exported in evaluation mode; export with module.train()"
    if frozen and all(norms):  # nothing else is left out: the file is in training mode
        why = "--batch-norm is frozen, the file says training"
    return (f"{' and '.join(parts)}: {why}",)


def _clause(some: int, kind: Sequence[bool], name: str, verbs: tuple[str, str], rest: str) -> str:
    """Such as "2 of 3 Dropouts drop nothing"."""
    number = str(some) if some == len(kind) else f"{some} of {len(kind)}"
    plural = "" if len(kind) == 1 else "s"
    return f"{number} {name}{plural} {verbs[some > 1]} {rest}"
