"""Planners that split operators over meshes by known recipes: policies that mask the space of all
splits (`solvers/intra/`).
"""
