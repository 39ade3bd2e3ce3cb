"""The bare problem of choosing one strategy per node, with its bounds (`solve.py` has the model)."""
