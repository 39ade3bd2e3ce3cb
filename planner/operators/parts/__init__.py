"""Operators on one part of their tensors."""
