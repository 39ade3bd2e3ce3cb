"""Strategy -> annotated ONNX: the model as it was, with ONNX's own multi-device annotations (IR
version 11 and later) and what a launcher needs beside them.

    annotations.py  stages, devices and transfers in the messages of the model
    weights.py      whether they are in the file, in the original's, or in a copy of it
    write.py        plan and model -> file
    agreement.py    whether a file still belongs to a plan

Replicas, schedule and warm-up exist only in strategy.json, which is the authority.
"""

from planner.model.annotated.agreement import check_agreement, refers_to
from planner.model.annotated.annotations import STAGE_MODULES
from planner.model.annotated.write import write_partition

__all__ = ["STAGE_MODULES", "check_agreement", "refers_to", "write_partition"]
