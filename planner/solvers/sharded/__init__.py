"""Planners that split operators over meshes by known recipes, without a search over rules."""
