"""What a training has learned, kept in a folder.

    folder.py   names of checkpoints, their records, which are whole; written whole or not at all
    start.py    the checkpoint that a training goes on from
    held.py     `Held`: what one device has of a tensor
    files.py    `Held`s by torch.distributed.checkpoint: each box in the file of one rank
    content.py  what a device has by its names, out of a training and into one
    saver.py    saving behind the training

Tensors are named after the parameters of the model, never after stages or ranks. So a checkpoint of
one strategy is read by any other one of the same model.
"""
