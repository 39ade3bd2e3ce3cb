"""The zoo: small networks of today's kinds, for the way from a PyTorch module to its training.

A network is a function without arguments that gives the module, freshly initialised, and a tuple of
example inputs: one microbatch. Transformers networks are made from their configurations with few
layers of small width; the others are plain modules. Nothing is downloaded. Modules are in training
mode, as far as torch exports them so. Dropout is off in most of them, because a comparison has to
feed its draws; those that keep it, or draw numbers otherwise, say so.

    networks.py    `Network`
    language.py, experts.py, state_space.py, vision.py, audio.py, ...    the families
    reference.py   the plain PyTorch loop
    pipeline.py    the same training by the launcher, in two stages
"""

from zlib import crc32

import torch

from tests.support.zoo import (
    audio,
    diffusion,
    experts,
    generative,
    graphs,
    language,
    recurrent,
    state_space,
    tables,
    vision,
)

ZOO = {
    **language.NETWORKS,
    **experts.NETWORKS,
    **state_space.NETWORKS,
    **recurrent.NETWORKS,
    **vision.NETWORKS,
    **audio.NETWORKS,
    **diffusion.NETWORKS,
    **generative.NETWORKS,
    **tables.NETWORKS,
    **graphs.NETWORKS,
}


def build(name):
    """The module of a network, in the mode that it is trained in, and its example inputs; the same
    in each call.
    """
    torch.manual_seed(crc32(name.encode()))
    network = ZOO[name]
    module, inputs = network.make()
    return module.train(network.training), inputs
