"""The planner's one cost model: every solver, the evaluator and the simulator take their
arithmetic from here.

    compute.py      time of operators on a device
    collectives.py  time of transfers and all-reduces
    pricing.py      times and sizes of a stage, and of each action of a schedule
    memory.py       bytes on a device, reason by reason
    passes.py       bytes that live only inside a forward or a backward
    waiting.py      bytes that wait until other devices have come as far
    closed_form.py  the iteration time in closed form, for search
    shared.py       the same where a device runs several stages
    bounds.py       times that no strategy can beat
    pins.py         operators that have to be on certain devices
    evaluate.py     all of it for one strategy
"""
