"""ONNX file -> `Model`: its `Graph`, and everything that converting and annotating it needs.

source.py     a file, read and checked once
load.py       the way from the file to the graph; the module of each operator
dataflow.py   the operators that are left, and the gradients through them
canonical.py  nodes named; the content hash
binding.py    symbolic dimensions -> sizes
expansion/    control flow, sequences and functions as plain nodes
folding.py    constants and shape arithmetic folded, shapes inferred, node by node
reference.py  ONNX's reference, which evaluates nodes
modes.py      training or evaluation: BatchNormalization, Dropout
record.py     the module that `planner export` wrote into the file
scopes.py     the notes of torch's exporter at each node: module, call and its arguments
origins.py    which tensor of the module a node reads, by these notes
repair.py     merged initializers parted, lost biases and ties put back
constants.py  masks, tables, slopes, states: floats that nobody trains
trainable.py  which initializers are trained and why, over which tensors gradients flow
inspection.py everything that a file says without its weights
values.py     initializers and folded constants, read when asked for
weights.py    where the bytes of initializers are: the message without them
wire.py       the fields of a protobuf message in a file, and its metadata
"""
