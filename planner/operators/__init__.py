"""ONNX operators as torch functions, and ONNX subgraphs as `torch.fx.GraphModule`s."""

from planner.operators.convert import check, input_names, output_names, parameters, to_torch
from planner.operators.registering import register
from planner.operators.table import OPERATORS, UNSUPPORTED

__all__ = [
    "OPERATORS",
    "UNSUPPORTED",
    "check",
    "input_names",
    "output_names",
    "parameters",
    "register",
    "to_torch",
]
