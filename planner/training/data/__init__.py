"""Data of the user -> the microbatches of one device.

feeds.py         what feeds a training: functions, datasets, random numbers
datasets.py      a map-style or iterable dataset, or a DataLoader, for training and evaluation
samples.py       a sample or batch of the user -> tensors by their names in the model
batching.py      samples -> microbatches of steps; the numbers that datasets draw
states.py        state that datasets and samplers of a user hold
orders.py        the orders of epochs
fingerprints.py  numbers that tell batches apart
agreement.py     whether all ranks read the same data
"""
