"""What happens around the actions of a step, for people who train.

    rates.py       the learning rate of each step
    updates.py     scaling, clipping and skipping, which all ranks decide together
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

A step itself is `planner.launcher.runtime`.
"""
