"""Operators on one part of their tensors: attributes that are divided, and functions that ask the
devices with the other parts.
"""

from planner.artefacts.sharding import HALO, MOMENTS, ROWS
from planner.operators.parts import moments
from planner.operators.parts.attributes import divided
from planner.operators.parts.halo import average_pool, conv, lp_pool, max_pool
from planner.operators.parts.line import Cut, MeshAxisGroup
from planner.operators.parts.vocabulary import cross_entropy, gather

MARKED = {
    (HALO, "AveragePool"): average_pool,
    (HALO, "Conv"): conv,
    (HALO, "LpPool"): lp_pool,
    (HALO, "MaxPool"): max_pool,
    (MOMENTS, "BatchNormalization"): moments.batch_normalization,
    (MOMENTS, "GroupNormalization"): moments.group_normalization,
    (MOMENTS, "InstanceNormalization"): moments.instance_normalization,
    (MOMENTS, "LayerNormalization"): moments.layer_normalization,
    (MOMENTS, "LogSoftmax"): moments.log_softmax,
    (MOMENTS, "RMSNormalization"): moments.rms_normalization,
    (MOMENTS, "Softmax"): moments.softmax,
    (ROWS, "Gather"): gather,
}
"""By a rule's mark and the operator's ONNX type, the function that runs in the place of the
operator's own: it takes the same arguments, and `cuts`, one for each axis with the mark."""

__all__ = ["HALO", "MARKED", "MOMENTS", "ROWS", "Cut", "MeshAxisGroup", "cross_entropy", "divided"]
