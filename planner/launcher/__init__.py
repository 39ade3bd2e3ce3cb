"""Running a strategy with PyTorch: one process per device, each with its own action list.

    failures/        starting ranks, and ending them; ranks that die, hang or raise
    options.py       the options of the loop of a training
    source.py        which file the model is read from, and whether it is the plan's
    job.py           strategy.json -> what is trained, known before the ranks meet
    seating.py       which rank runs which device: hosts of the plan on hosts
    rendezvous.py    this process among the ranks; whether all are of one launch; how they join
    batch.py         the data of a microbatch
    transfers.py     tensors between two devices: channels, order in memory, parts
    groups.py        process groups, and what all ranks do together
    mesh/            stages whose operators are split over the devices of a mesh
    stage.py         the forward and backward of a stage
    gradients.py     flat gradient buffers, and their sums within the backward that makes them
    device_part.py   `TrainingJob` -> the stages and parameters of this device
    stash/           what a forward leaves for its backward
    rates.py         the learning rate of each step
    updates.py       the optimizer's step: scaling, clipping and skipping
    executor.py      the loop over the actions, and a step of a training
    asynchronous.py  flows of an asynchronous schedule
    clocks.py        times of all ranks on rank 0's clock
    probe.py         measured transfers and all-reduces of the cluster itself

`planner.training.launch.launch` runs inside every process;
`planner.launcher.failures.monitor.start_ranks` starts them. This file imports neither, because
torch takes a second to import.
"""
