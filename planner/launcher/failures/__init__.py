"""Ranks that die, hang or raise: who notices, and what is said.

    page.py    the action that a rank is in, readable from other processes, also after its death
    limits.py  how long a rank may stand in an action: a hang, or a long step
    system.py  what Linux knows of a process: stopped, idle, its memory
    guard.py   watches the ranks of a host: in the launcher, or beside torchrun's ranks
    words.py   a rank, its action and its memory in words
    hosts.py   watches the other hosts through the store
    causes.py  an error with its rank, stage and action; what was out of memory

Nothing here but `hosts` and `causes` imports torch: the launcher and the guard have none.
"""
