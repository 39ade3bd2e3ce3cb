"""The gradients of an exported file beside those of the module that it was made of.

precision.py   both runs in float64, and the random numbers that the module draws
module_run.py  the module's own forward and backward pass
graph_run.py   those of the file's graph, by the functions that the launcher runs
events.py      what a module does to its backward pass, and where in the source
places.py      between which calls of the module a difference arises
check.py       the comparison, and its outcome in words
"""
