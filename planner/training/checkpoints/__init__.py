"""What a training has learned, kept in a folder.

    folder.py   names of checkpoints, their records, which are whole; written whole or not at all
    keeping.py  the folder of a launch, and the checkpoint that it goes on from
    storage.py  tensors by torch.distributed.checkpoint: each one in the file of one rank
    state.py    the tensors of a device by their names, from and into its `Trainer`
    saver.py    saving behind the training

Tensors are named after the parameters of the model, never after stages or ranks. So a checkpoint of
one strategy is read by any other one of the same model.
"""
