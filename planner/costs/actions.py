"""`ActionCosts`: what the actions of a program cost, which is all that the simulator asks for."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ActionCosts:
    """Durations and sizes of the actions of one program.

    Attributes:
        forward_s: by (stage, device), time of the forward of one microbatch, in s.
        backward_s: by (stage, device), time of its backward, recomputation included, in s.
        tensor_bytes: by name, size of each tensor that crosses stages, for one microbatch; its
            gradient has the same size.
        sum_s: time of each all-reduce of the program, in s.
        step_s: by device, time of the optimizer's step, in s.
        launch_s: by device, what starting a computation, sum or step adds to it, in s: none where
            times were measured operator by operator, because those contain it.
        post_s: by device, how long posting a send or a receive keeps it from its next action, in s.
        copy_s_per_byte: by device, what posting takes besides for each byte of the tensor: copies
            that its own processor makes.
        wire: share of a tensor's bytes that moves over its route after it was posted.
    """

    forward_s: Mapping[tuple[int, int], float]
    backward_s: Mapping[tuple[int, int], float]
    tensor_bytes: Mapping[str, int]
    sum_s: tuple[float, ...]
    step_s: Mapping[int, float]
    launch_s: Mapping[int, float] = field(default_factory=dict)
    post_s: Mapping[int, float] = field(default_factory=dict)
    copy_s_per_byte: Mapping[int, float] = field(default_factory=dict)
    wire: float = 1.0
