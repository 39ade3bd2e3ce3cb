"""Stages whose operators are split over the devices of a mesh.

mesh.py       this device's place in a mesh, and the lines of devices that it is in
convert.py    the steps of `splitting.conversion` on local tensors, with their gradients
module.py     to_torch's module of a stage -> the same on local tensors
losses.py     losses of outputs that are cut
part.py       local parameters, and the passes of a stage
boxes.py      parts of tensors that cross stages
states.py     gradients and optimizer states that are cut further than their parameters
"""
