"""ONNX file -> `Model`: its `Graph`, and everything that converting and annotating it needs.

load.py       the way from the file to the graph
canonical.py  functions inlined, nodes named; the content hash
binding.py    symbolic dimensions -> sizes
folding.py    constants and shape arithmetic folded, shapes inferred, in one pass
sequences.py  sequences of tensors as plain operators
modes.py      training or evaluation: BatchNormalization, Dropout
trainable.py  which initializers are trained, over which tensors gradients flow
values.py     initializers and folded constants, read when asked for
"""

from planner.model.load import Model, Node, content_hash, first_consumers, hash_of, load

__all__ = ["Model", "Node", "content_hash", "first_consumers", "hash_of", "load"]
