"""What people train with, around the actions of a step.

    run.py         a launch: the steps, and the report
    joining.py     how a rank comes to its job, whoever writes the loop
    trainer.py     one step of this device after the other
    report.py      predicted beside measured
    trials.py      the plans of several solvers, launched one after the other
    checkpoints/   what was learned, kept, gone on from, and put back into an ONNX file
    dealing.py     samples -> microbatches of steps; the numbers that datasets draw
    datasets.py    a dataset of the user -> the microbatches of one device
    samples.py     a sample or batch of the user -> tensors by their names in the model
    evaluation.py  forward passes over other data
    metrics.py     the figures of an evaluation
    log.py         a line of JSON for each step
    following.py   what happens between two steps
    config.py      options of a training in a YAML file
    own_loop.py    a training whose loop the user writes, by batches of whole steps
    fingerprints.py  whether all ranks have the same batch
    rows.py        batches to evaluate on -> the samples in them

A step itself is `planner.launcher.executor`.
"""
