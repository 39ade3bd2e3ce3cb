"""What people train with, around the actions of a step.

    trainer.py     one device's part of a training: meets the other ranks, makes the steps
    launch.py      the planner's loop: a launch, its log and its report
    loop.py        a training whose loop the user writes, by batches of whole steps
    data/          data of the user -> microbatches
    evaluation.py  forward passes over other data
    metrics.py     the figures of an evaluation
    checkpoints/   what was learned, kept, gone on from, and put back into an ONNX file
    log.py         a line of JSON for each step
    report.py      predicted beside measured
    steady.py      the steady state of a measured flow
    trials.py      the plans of several solvers, launched one after the other
    options.py     options of a training, and all that a user asks of one
    config.py      the same in a YAML file

A step itself is run by `planner.launcher.executor`.
"""
