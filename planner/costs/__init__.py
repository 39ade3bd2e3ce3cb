"""The planner's one cost model: every solver, the evaluator and the simulator take their
arithmetic from here.

    compute.py      time of operators and stages on a device
    collectives.py  time of transfers and all-reduces
    memory.py       bytes on a device
    closed_form.py  the iteration time in closed form, for search
    bounds.py       what no strategy can beat
    actions.py      what each action of a schedule takes, for the simulator
    evaluate.py     all of it for one strategy
"""
