"""Networks on graphs and on sets of points."""

import torch
from torch import nn

from tests.support.zoo.networks import classifier


class GCN(nn.Module):
    """Graph convolutions: the mean over neighbours, by scatter."""

    def __init__(self, width=12, classes=4):
        super().__init__()
        self.first, self.second = nn.Linear(5, width), nn.Linear(width, classes)

    def spread(self, x, edges):
        source, target = edges[0], edges[1]
        index = target[:, None].expand(-1, x.shape[1])
        sums = torch.zeros_like(x).scatter_add(0, index, x[source])
        ones = torch.ones_like(target, dtype=x.dtype)
        counts = torch.zeros_like(x[:, 0]).scatter_add(0, target, ones)
        return x + sums / counts.clamp_min(1)[:, None]

    def forward(self, x, edges):
        x = torch.relu(self.spread(self.first(x), edges))
        return self.spread(self.second(x), edges)


def edges(nodes=7, count=12):
    return torch.randint(nodes, (2, count))


def gnn_scatter():
    return GCN(), (torch.randn(7, 5), edges())


class GAT(nn.Module):
    """Attention over the neighbours in a dense matrix, and index_add."""

    def __init__(self, width=8, classes=4):
        super().__init__()
        self.layer = nn.Linear(5, width)
        self.sends, self.gets = nn.Linear(width, 1), nn.Linear(width, 1)
        self.head = nn.Linear(width, classes)

    def forward(self, x, edges):
        x = self.layer(x)
        source, target = edges[0], edges[1]
        scores = nn.functional.leaky_relu(self.sends(x)[source] + self.gets(x)[target], 0.2).exp()
        total = torch.zeros(7, 1).index_add(0, target, scores)
        seen = torch.zeros_like(x).index_add(0, target, scores * x[source])
        return self.head(x + seen / (total + 1e-6))


def gat():
    return GAT(), (torch.randn(7, 5), edges())


class PointNet(nn.Module):
    """The largest of what is seen at each point, over all points."""

    def __init__(self, classes=5):
        super().__init__()
        self.points = nn.Sequential(
            nn.Conv1d(3, 12, 1), nn.BatchNorm1d(12), nn.ReLU(), nn.Conv1d(12, 16, 1),
            nn.BatchNorm1d(16),
        )  # fmt: skip
        self.head = nn.Sequential(nn.Linear(16, 12), nn.BatchNorm1d(12), nn.ReLU(),
                                  nn.Linear(12, classes))  # fmt: skip

    def forward(self, x):
        return self.head(self.points(x).amax(-1))


def pointnet():
    return PointNet(), (torch.randn(4, 3, 10),)


NETWORKS = {
    "gnn-scatter": classifier(gnn_scatter),
    "gat": classifier(gat),
    "pointnet": classifier(pointnet),
}
