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
from dataclasses import replace

import numpy as np

from planner.artefacts.profile import BatchNorm
from planner.model.dataflow import Node


def is_batch_norm(node: Node) -> bool:
    """Whether a node is ONNX's BatchNormalization."""
    return node.type == "BatchNormalization" and not node.domain


def is_dropout(node: Node) -> bool:
    """Whether a node is ONNX's Dropout."""
    return node.type == "Dropout" and not node.domain


def trains(node: Node, values: Mapping[str, np.ndarray]) -> bool:
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


def with_mode(node: Node, form: BatchNorm | None) -> Node:
    """A node, a batch normalization with its mode in its attribute `training_mode`, whatever its
    version.

    Args:
        form: of all batch normalizations; None leaves it to the node.
    """
    if not is_batch_norm(node):
        return node
    mode = trains(node, {}) if form is None else form is BatchNorm.TRAINING
    if node.attributes.get("training_mode", 0) == mode:
        return node
    return replace(node, attributes={**node.attributes, "training_mode": int(mode)})


def batch_norm_form(nodes: Iterable[Node]) -> BatchNorm:
    """The form of a model's batch normalizations; `FROZEN` where it has none."""
    kinds = {trains(node, {}) for node in nodes if is_batch_norm(node)}
    if len(kinds) == 2:
        return BatchNorm.MIXED
    return BatchNorm.TRAINING if True in kinds else BatchNorm.FROZEN


def evaluation_notes(
    nodes: Sequence[Node],
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
