"""The planner's one cost model: every solver, the evaluator and the simulator take their
arithmetic from here.

    operators.py    time of operators and of the optimizer's step on a device
    transfers.py    time of transfers and collectives
    local_stage.py  a split stage as a profile of one of its devices
    stage_pass.py   forward and backward of a stage on a device
    actions.py      times and sizes of each action of a schedule
    closed_form.py  the iteration time in closed form, for search
    shared.py       the same where a device runs several stages
    memory.py       bytes on a device, reason by reason
    passes.py       bytes that live only inside a forward or a backward
    waiting.py      bytes that wait until other devices have come as far
    mesh_memory.py  bytes that conversions take inside a split stage
    bounds.py       times that no strategy can beat
    evaluate.py     all of it for one strategy
"""
