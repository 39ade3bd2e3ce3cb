"""Control flow, sequences and functions as plain nodes, while a model is folded.

expand.py        the way from an ONNX graph to plain nodes
nested.py        graphs inside nodes: their names, values and nodes in the flat graph
control_flow.py  If, Loop, Scan and functions as the nodes that they run
sequences.py     sequences and optionals as lists that are known
inlining.py      functions, of the model and of operators, in place of their calls
"""
