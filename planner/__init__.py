"""The planner: how to split the training of an ONNX model over several devices.

The way from a model to a trained model, one module a step:

    model.py -> graph.py -> profilers/ -> profile.py          what the operators cost
    topology.py                                               what the devices can do
    problem.py -> coarsen.py, order.py, solvers/ -> strategy.py   who runs what
    schedules.py -> dry_run.py, simulate/, costs/             when it runs, how long it takes
    judge.py, plan.py -> reports/, partition.py, launch/    choose, show, write, run
"""

__version__ = "0.1.0"
