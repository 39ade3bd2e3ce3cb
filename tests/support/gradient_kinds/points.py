"""Networks that meet special points in every step: ties, zeros, bounds, rows that a mask hides.

The kinds of edges.py meet them in the first step alone, before their weights have moved. Here it is
the data that has equal or empty rows, or the activations are integers.
"""

import torch
from torch import nn
from torch.nn import functional

from tests.support.gradient_kinds.kind import DOUBLE, EQUAL, Kind

ROWS, WIDTH, POINTS = 4, 6, 5


def rounded(h):
    """Integers, many of which are equal, with the gradients of the numbers before."""
    return h + (h.round() - h).detach()


class Set(nn.Module):
    """The largest of each feature over points, as a PointNet has it."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 8), nn.Linear(16, 4)

    def forward(self, x):
        h = rounded(2 * self.first(x))
        return self.second(torch.cat([h.max(1).values, h.amin(1)], -1))


class Distances(nn.Module):
    """A loss of all distances between embeddings; those to themselves and to copies are zero."""

    def __init__(self, p=2.0):
        super().__init__()
        self.first, self.p = nn.Linear(WIDTH, 8), p

    def forward(self, x):
        h = torch.tanh(self.first(x))
        near = torch.exp(-torch.cdist(h, h, p=self.p)).mean()
        return {"loss": near + functional.pairwise_distance(h, h.roll(1, 0)).mean()}


class Masked(nn.Module):
    """Attention of samples of different lengths, one of which has no tokens."""

    def __init__(self, additive):
        super().__init__()
        self.inputs, self.output = nn.Linear(WIDTH, 3 * 8), nn.Linear(8, 4)
        self.additive = additive

    def forward(self, x, seen):
        q, k, v = (one.unflatten(-1, (2, 4)).transpose(1, 2) for one in self.inputs(x).chunk(3, -1))
        mask = seen[:, None, None, :]
        if self.additive:
            mask = torch.zeros_like(x[:, None, None, :, 0]).masked_fill(~mask, float("-inf"))
        h = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.output(h.transpose(1, 2).flatten(2))


class Standardized(nn.Module):
    """Rows by their mean and deviation; some rows are zero."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 8, bias=False), nn.Linear(8, 4)

    def forward(self, x):
        h = self.first(x)
        return self.second((h - h.mean(-1, keepdim=True)) / (h.std(-1, keepdim=True) + 0.5))


class Levels(nn.Module):
    """Activations that are rounded to integers, of which 0 and 6 are bounds."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 8), nn.Linear(24, 4)

    def forward(self, x):
        h = rounded(4 * self.first(x))
        bounded = (functional.relu6(h), functional.hardtanh(h, -1.0, 2.0), h.clamp(-2.0, 1.0))
        return self.second(torch.cat(bounded, -1))


class Certain(nn.Module):
    """A classifier whose probabilities are 0 or 1 for most samples."""

    def __init__(self, certainty):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 8), nn.Linear(8, 1)
        self.certainty = certainty

    def forward(self, x, target):
        logits = self.certainty * self.second(torch.tanh(self.first(x)))
        loss = functional.binary_cross_entropy(torch.sigmoid(logits), target)
        more = functional.binary_cross_entropy_with_logits(logits, target)
        return {"loss": loss + more - functional.logsigmoid(logits).mean()}


class Directions(nn.Module):
    """Directions of rows, some of which are zero."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, 8, bias=False)
        self.second = nn.Linear(8, 4)

    def forward(self, x):
        h = self.first(x)
        size = h.norm(dim=-1, keepdim=True) + h.norm(p=3, dim=-1, keepdim=True)
        near = functional.cosine_similarity(h, h.roll(1, 0), dim=-1)
        return self.second(h * torch.exp(-size)) + near[:, None]


class Rays(nn.Module):
    """Light along rays that opaque points end, as in a radiance field."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 8), nn.Linear(8, 2)

    def forward(self, x):
        h = self.second(torch.tanh(self.first(x)))
        opaque = (4 * h[..., 0]).clamp(0.0, 1.0)
        left = torch.cumprod(1 - opaque, -1)
        return (left * opaque * h[..., 1]).sum(-1) + (1 - opaque).prod(-1)


class Messages(nn.Module):
    """The largest message and the mean message of neighbours; one node has none."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 8), nn.Linear(16, 4)

    def forward(self, x, source, target):
        h = torch.tanh(self.first(x))
        sent = h.gather(1, source[..., None].expand(-1, -1, h.shape[2]))
        at, nothing = target[..., None].expand(sent.shape), torch.zeros_like(h)
        most = nothing.scatter_reduce(1, at, sent, "amax")
        mean = nothing.scatter_reduce(1, at, sent, "mean", include_self=False)
        return self.second(torch.cat([most, mean], -1))


class Images(nn.Module):
    """Images of few grey levels, pooled by their largest numbers."""

    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 4, 1), nn.Linear(8, 4)

    def forward(self, x):
        h = rounded(2 * self.conv(x))
        pooled = functional.max_pool2d(torch.relu(h), 3, 2, 1)
        whole = (functional.adaptive_max_pool2d(one, 1).flatten(1) for one in (h, pooled))
        return self.head(torch.cat([*whole], -1))


class Bags(nn.Module):
    """The largest numbers of bags of words with integer vectors; one bag is empty."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Parameter(torch.randn(8, 6)), nn.Linear(6, 4)

    def forward(self, tokens, begins):
        bags = functional.embedding_bag(tokens, rounded(self.words), begins, mode="max")
        return self.head(bags)


class Ignored(nn.Module):
    """A loss of tokens, most of which are ignored, with smoothed labels; logits of -inf."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, 5)

    def forward(self, x, target):
        logits = self.first(x)
        loss = functional.cross_entropy(
            logits.flatten(0, 1), target.flatten(), label_smoothing=0.125
        )
        hidden = logits.masked_fill(target[..., None] == torch.arange(5), float("-inf"))
        return {"loss": loss + hidden.logsumexp(-1).mean() + hidden.softmax(-1).square().mean()}


def floats(generator, *shape):
    return torch.randn(*shape, generator=generator)


def copies(generator):
    """Rows of which two are equal."""
    x = floats(generator, ROWS, WIDTH)
    return (torch.cat([x, x[:1]]),)


def partly_zero(generator):
    """Rows of which two are zero."""
    x = floats(generator, ROWS + 2, WIDTH)
    return (x * torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 1.0])[:, None],)


def lengths(generator):
    """Tokens of samples, and which of them there are."""
    seen = torch.arange(POINTS) < torch.tensor([POINTS, 0, 2, 1])[:, None]
    return floats(generator, ROWS, POINTS, WIDTH), seen


def sure(generator):
    """Rows, and which of two classes they are of."""
    return 4 * floats(generator, ROWS, WIDTH), torch.tensor([[0.0], [1.0], [1.0], [0.0]])


def graphs(generator):
    """Features of nodes, and edges of which two are the same; the last node has none."""
    edges = torch.tensor([[0, 1, 1, 2, 2, 0], [1, 0, 0, 0, 1, 2]])
    source, target = (one.expand(ROWS, -1).clone() for one in edges)
    return floats(generator, ROWS, 4, WIDTH), source, target


def bags(generator):
    """Words, and where each bag begins."""
    return torch.randint(8, (12,), generator=generator), torch.tensor([0, 6, 6, 8])


def targets(generator):
    """Tokens and their classes, most of which are ignored."""
    classes = torch.full((ROWS, POINTS), -100)
    classes[0, 0], classes[2] = 1, torch.arange(5)
    return floats(generator, ROWS, POINTS, WIDTH), classes


def kind(module, data, does, loss="mse", **how):
    """A kind that is trained in float64 on data that has special points."""

    def make():
        return module(), data(torch.Generator().manual_seed(1))

    return Kind(make, does, EQUAL, data=data, loss=loss, dtypes=DOUBLE, **how)


KINDS = {
    "points-set": kind(Set, lambda g: (floats(g, ROWS, 8, WIDTH),),
        "the first of equal points gets the gradient of the largest"),
    "points-distances": kind(Distances, copies, "a distance of zero has no gradient", "own"),
    "points-distances-of-ones": kind(lambda: Distances(1.0), copies, "the same by sums", "own"),
    "points-masked-attention": kind(lambda: Masked(False), lengths, "zeros where no key is seen"),
    "points-additive-mask": kind(lambda: Masked(True), lengths, "the same by -inf"),
    "points-standardized": kind(Standardized, partly_zero, "a deviation of zero has no gradient"),
    "points-levels": kind(Levels, lambda g: (floats(g, ROWS, WIDTH),),
        "the gradient is zero at the bounds of relu6 and hardtanh, and one at those of clamp"),
    "points-certain": kind(lambda: Certain(64.0), sure, "finite for probabilities of 0 and 1",
        "own"),
    "points-directions": kind(Directions, partly_zero, "a norm of zero has no gradient"),
    "points-rays": kind(Rays, lambda g: (floats(g, ROWS, POINTS, WIDTH),),
        "products with zeros, which are not divided by"),
    "points-messages": kind(Messages, graphs, "equal messages share the gradient"),
    "points-images": kind(Images, lambda g: (floats(g, ROWS, 1, 6, 6),),
        "the first of equal pixels gets the gradient"),
    "points-bags": kind(Bags, bags, "the first of equal numbers gets the gradient"),
    "points-ignored": kind(Ignored, targets, "classes that are ignored have no gradient", "own"),
}  # fmt: skip
