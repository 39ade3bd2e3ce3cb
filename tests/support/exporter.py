"""PyTorch's exporter reads its table of operators from some 500 sources at each export, which takes
longer than the export of a small module. Here it reads them once per process.
"""

import sys
from functools import cache

REGISTRATION = "torch.onnx._internal.exporter._registration"


@cache
def read_operators_once():
    """Makes each export of this process begin with a copy of the same table."""
    registry = sys.modules[REGISTRATION].ONNXRegistry
    read = cache(registry.from_torchlib.__func__)

    def copied(cls, *given, **options):
        made, kept = cls(), read(cls, *given, **options)
        vars(made).update(vars(kept))
        made.functions = {target: list(metas) for target, metas in kept.functions.items()}
        return made

    registry.from_torchlib = classmethod(copied)
