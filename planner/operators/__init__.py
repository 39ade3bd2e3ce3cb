"""ONNX operators as torch functions, and ONNX subgraphs as `torch.fx.GraphModule`s."""

from planner.operators.convert import check, input_names, output_names, parameters, to_torch
from planner.operators.registering import register

__all__ = [
    "check",
    "input_names",
    "output_names",
    "parameters",
    "register",
    "to_torch",
]
