"""Stages whose operators are split over the devices of a mesh.

lines.py           this device's place in a mesh, and the lines of devices that it is in
queue.py           the queue in which their collectives run beside computations
convert.py         the steps of `resharding.conversion` on local tensors, with their gradients
module.py          to_torch's module of a stage -> the same on local tensors
gather_again.py    operators that gather parameters again for their backward
late_gradients.py  products that make the gradients of parameters after those of their input
losses.py          losses of outputs that are cut
shards.py          gradients and optimizer states that are cut further than their parameters
sockets.py         threads of gloo that leave the core to computations
"""
