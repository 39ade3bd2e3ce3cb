"""The bare problem of choosing one strategy per node, with a bound; `solve.py` has the model."""
