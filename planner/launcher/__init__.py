"""Running a strategy with PyTorch: one process per device, each with its own action list.

    torchrun.py   starting the processes
    run.py        strategy.json -> this process's part, the steps, the report
    world.py      who is who; process groups, transfers and sums between devices
    runtime.py    the loop over the actions
    gradients.py  flat gradient buffers, optimizers
    feed.py       losses; synthetic data and the user's own
    report.py     predicted beside measured
    probe.py      transfers and all-reduces of the cluster itself, measured

`planner.launcher.run.launch` runs inside every process; `planner.launcher.torchrun.start_torchrun`
starts them. This file imports neither, because torch takes a second to import.
"""
