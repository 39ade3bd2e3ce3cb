"""Embeddings, whose modules say more of their gradient than the graph's Gather."""

import torch
from torch import nn
from torch.nn import functional

from tests.support.gradient_kinds.kind import EQUAL, REFUSED, Kind


class Lookup(nn.Module):
    """An embedding and a linear layer."""

    def __init__(self, embedding):
        super().__init__()
        self.embedding, self.head = embedding, nn.Linear(6, 4)

    def forward(self, tokens):
        return self.head(torch.tanh(self.embedding(tokens)))


class FunctionalLookup(Lookup):
    """The same by a function, where the module has no attribute to look at."""

    def forward(self, tokens):
        h = functional.embedding(tokens, self.embedding.weight, padding_idx=0)
        return self.head(torch.tanh(h))


def looked_up(example=None, module=Lookup, **options):
    """A module with an embedding of ten tokens.

    Args:
        example: the example input; None has every token, and some twice.
        module: of the embedding.
        options: of the embedding.
    """
    tokens = torch.arange(20).reshape(4, 5) % 10 if example is None else torch.tensor(example)
    return lambda: (module(nn.Embedding(10, 6, **options)), (tokens,))


def all_tokens(generator):
    """Every token twice, in any order."""
    return (torch.randperm(20, generator=generator).reshape(4, 5) % 10,)


WITHOUT_ZERO = [[1, 2, 3, 4, 5], [6, 7, 8, 9, 1], [2, 3, 4, 5, 6], [7, 8, 9, 1, 2]]
ONCE = [[3, 1], [4, 5], [9, 2], [6, 8]]


def pairs(generator):
    """Tokens of which some come often."""
    return (torch.randint(3, (4, 2), generator=generator),)


def bagged(**options):
    """A bag of embeddings."""

    class Bag(nn.Module):
        def __init__(self):
            super().__init__()
            self.bag, self.head = nn.EmbeddingBag(10, 6, **options), nn.Linear(6, 4)

        def forward(self, tokens):
            return self.head(torch.tanh(self.bag(tokens)))

    return lambda: (Bag(), (torch.arange(20).reshape(4, 5) % 10,))


def pretrained():
    embedding = nn.Embedding.from_pretrained(torch.randn(10, 6), freeze=True)
    return Lookup(embedding), (torch.arange(20).reshape(4, 5) % 10,)


def frozen_with_padding():
    embedding = nn.Embedding(10, 6, padding_idx=0).requires_grad_(False)
    return Lookup(embedding), (torch.arange(20).reshape(4, 5) % 10,)


KINDS = {
    "embedding": Kind(looked_up(), "autograd's own", EQUAL, data=all_tokens),
    "embedding-padding": Kind(looked_up(padding_idx=0), "the padding's row has no gradient",
        EQUAL, data=all_tokens),
    "embedding-padding-unseen": Kind(looked_up(WITHOUT_ZERO, padding_idx=0),
        "the padding's row has no gradient, and no example input reads it", EQUAL,
        data=all_tokens),
    "embedding-padding-last": Kind(looked_up(padding_idx=-1), "the last row has no gradient",
        EQUAL, data=all_tokens),
    "embedding-padding-functional": Kind(looked_up(module=FunctionalLookup),
        "the padding's row has no gradient", EQUAL, data=all_tokens),
    "embedding-padding-functional-unseen": Kind(looked_up(WITHOUT_ZERO, module=FunctionalLookup),
        "the padding's row has no gradient, and no example input reads it", EQUAL,
        data=all_tokens),
    "embedding-padding-frozen": Kind(frozen_with_padding, "no row has a gradient anyway", EQUAL,
        data=all_tokens),
    "embedding-by-frequency": Kind(looked_up(scale_grad_by_freq=True),
        "rows that are read twice have half of the gradient", EQUAL,
        data=all_tokens),
    "embedding-by-frequency-unseen": Kind(looked_up(ONCE, scale_grad_by_freq=True),
        "no token is twice in the example inputs, some are in the data", EQUAL, data=pairs),
    "embedding-max-norm": Kind(looked_up(max_norm=0.5),
        "the forward pass writes shorter rows into the weight", REFUSED, ("max_norm",),
        data=all_tokens),
    "embedding-max-norm-unseen": Kind(looked_up(max_norm=4.0),
        "rows of the example inputs are short, and grow in the training", REFUSED, ("max_norm",),
        data=all_tokens, rate={"sgd": 20.0, "adamw": 2.0}),
    "embedding-sparse": Kind(looked_up(sparse=True), "autograd's own, as a sparse tensor", EQUAL,
        data=all_tokens, optimizers=("sgd",)),
    "embedding-bag": Kind(bagged(mode="mean"), "autograd's own", EQUAL, data=all_tokens),
    "embedding-bag-padding": Kind(bagged(mode="mean", padding_idx=0),
        "the padding is no part of the mean either", EQUAL, data=all_tokens),
    "embedding-bag-by-frequency": Kind(bagged(mode="sum", scale_grad_by_freq=True),
        "rows that are read twice have half of the gradient", EQUAL,
        data=all_tokens),
    "embedding-pretrained": Kind(pretrained, "frozen", EQUAL, data=all_tokens),
}  # fmt: skip
