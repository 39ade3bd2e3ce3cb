"""Parts of operators, measured at their local shapes as whole operators are measured."""

from planner.profilers.parts.measure import MeasuredParts, device_for, measure_parts, obstacle

__all__ = ["MeasuredParts", "device_for", "measure_parts", "obstacle"]
