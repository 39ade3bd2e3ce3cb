"""Networks for tables, recommendations and series, and torch's own Transformer."""

import torch
from torch import nn

from tests.support.zoo.networks import WORDS, Network, classifier, tokens, words


class DLRM(nn.Module):
    """Sums of embeddings of several categories, beside numbers, and all their products."""

    def __init__(self, width=8, sizes=(20, 30, 12)):
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(size, width, mode="sum") for size in sizes)
        self.bottom = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, width), nn.ReLU())
        pairs = (len(sizes) + 1) * len(sizes) // 2
        self.top = nn.Sequential(nn.Linear(width + pairs, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, numbers, *categories):
        dense = self.bottom(numbers)
        sums = [bag(ids) for bag, ids in zip(self.bags, categories, strict=True)]
        features = torch.stack([dense, *sums], 1)
        products = features @ features.transpose(1, 2)
        rows, columns = torch.tril_indices(4, 4, -1)
        return self.top(torch.cat([dense, products[:, rows, columns]], 1)).sigmoid()


def dlrm():
    ids = tuple(torch.randint(size, (4, 3)) for size in (20, 30, 12))
    return DLRM(), (torch.randn(4, 5), *ids)


class MatrixFactors(nn.Module):
    """Users times things, with a mean over the tables of both and a neural net beside."""

    def __init__(self, width=8):
        super().__init__()
        self.users, self.things = nn.Embedding(20, width), nn.Embedding(30, width)
        self.user_bias, self.thing_bias = nn.Embedding(20, 1), nn.Embedding(30, 1)
        self.deep = nn.Sequential(nn.Linear(2 * width, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, users, things):
        user, thing = self.users(users), self.things(things)
        product = (user * thing).sum(-1, keepdim=True)
        deep = self.deep(torch.cat([user, thing], -1))
        return product + deep + self.user_bias(users) + self.thing_bias(things)


def matrix_factors():
    return MatrixFactors(), (torch.randint(20, (6,)), torch.randint(30, (6,)))


class TabTransformer(nn.Module):
    """A token per column, torch's own encoder over them, and a score from the first."""

    def __init__(self, width=16):
        super().__init__()
        self.columns = nn.Parameter(torch.randn(6, width) * 0.1)
        self.offsets = nn.Parameter(torch.zeros(6, width))
        layer = nn.TransformerEncoderLayer(width, 2, 32, 0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 3)

    def forward(self, numbers):
        return self.head(self.encoder(numbers[..., None] * self.columns + self.offsets)[:, 0])


def tab_transformer():
    return TabTransformer(), (torch.randn(4, 6),)


class Translator(nn.Module):
    """torch.nn.Transformer between embeddings and scores, with a mask of the future."""

    def __init__(self, width=16):
        super().__init__()
        self.source, self.target = nn.Embedding(WORDS, width), nn.Embedding(WORDS, width)
        self.transformer = nn.Transformer(width, 2, 1, 1, 32, 0.0, batch_first=True)
        self.head = nn.Linear(width, WORDS)

    def forward(self, source, target):
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        # Without tgt_is_causal torch looks into the mask, which cannot be exported.
        return self.head(
            self.transformer(
                self.source(source), self.target(target), tgt_mask=mask, tgt_is_causal=True
            )
        )


def torch_transformer():
    return Translator(), (words(), words(2, 6))


def mlp():
    """Weights freshly at their defaults, and one layer that is frozen."""
    module = nn.Sequential(
        nn.Linear(6, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 16), nn.Softplus(),
        nn.LayerNorm(16), nn.Linear(16, 4),
    )  # fmt: skip
    module[0].weight.requires_grad_(False)
    return module, (torch.randn(4, 6),)


class Hyper(nn.Module):
    """Weights that another network makes."""

    def __init__(self):
        super().__init__()
        self.maker = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 5 * 4))
        self.unused = nn.Linear(4, 4)

    def forward(self, x, about):
        weights = self.maker(about).view(-1, 5, 4)
        return torch.einsum("bi,bij->bj", x, weights)


def hypernetwork():
    return Hyper(), (torch.randn(3, 5), torch.randn(3, 3))


NETWORKS = {
    "dlrm": Network(dlrm),
    "matrix-factors": Network(matrix_factors),
    "tab-transformer": classifier(tab_transformer),
    "torch-transformer": tokens(torch_transformer),
    "mlp-frozen": classifier(mlp),
    "hypernetwork": Network(hypernetwork),
}
