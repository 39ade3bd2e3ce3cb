"""Ranks that die, hang or raise: who notices, and what is said.

    status.py   the action that a rank is in, readable from other processes, also after its death
    watch.py    how long a rank may stand in an action: a hang, or a long step
    requests.py signals that ask a training to save and to end
    rank.py     this process as one of several: one rank of a host reports why a launch ends
    monitor.py  looks after the ranks of a host: `--nproc`'s own, or beside torchrun's
    errors.py   an error with its rank, stage and action; what was out of memory
    hosts.py    watches the other hosts through the store

Nothing here but `hosts` and `errors` imports torch: the launcher and the monitor have none.
"""
