"""What happens around the actions of a step, for people who train.

rates.py       the learning rate of each step
updates.py     scaling, clipping and skipping, which all ranks decide together
datasets.py    a dataset of the user -> the microbatches of one device
samples.py     a sample or batch of the user -> tensors by their names in the model
evaluation.py  a forward pass over other data, and its metrics
log.py         a line of JSON for each step
"""
