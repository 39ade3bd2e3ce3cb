"""State that a forward changes, parametrizations, and modes of modules."""

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from tests.support.gradient_kinds.kind import DOUBLE, EQUAL, FLOAT32_ATTRIBUTES, Kind, around


class Average(nn.Module):
    """Centred by a moving average, in training and in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return x - self.mean


class AverageBefore(Average):
    """Centred by the average before it moves; the buffer is another tensor then."""

    def forward(self, x: Tensor) -> Tensor:
        made = x * (1 + self.mean)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return made


class Normalized(nn.Module):
    """By the statistics of the batch in training, by moving averages in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("square", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return (x - self.mean) / self.square.sqrt()
        mean, square = x.mean(0), x.var(0) + 0.1
        self.mean.lerp_(mean.detach(), 0.2)
        self.square.lerp_(square.detach(), 0.2)
        return (x - mean) / square.sqrt()


class Counter(nn.Module):
    """A factor that grows with the number of batches."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("largest", torch.tensor(0.0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count += 1
            self.largest.copy_(torch.maximum(self.largest, x.detach().abs().max()))
        return x * (self.count / (self.count + 3))


class Unread(nn.Module):
    """A count and the last mean, which nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(2, dtype=torch.long))
        self.register_buffer("last", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.count += torch.tensor([1, 2])
        self.last.copy_(x.detach().mean(0))
        return x


class Codebook(nn.Module):
    """Vectors are quantized to a codebook, whose entries follow what is assigned to them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(5, 8))
        self.register_buffer("sums", torch.randn(5, 8))
        self.register_buffer("counts", torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        distances = (x.detach().unsqueeze(1) - self.codes).square().sum(-1)
        chosen = functional.one_hot(distances.argmin(-1), 5).to(x.dtype)
        quantized = chosen @ self.codes
        if self.training:
            self.counts.mul_(0.8).add_(chosen.sum(0), alpha=0.2)
            self.sums.mul_(0.8).add_(chosen.T @ x.detach(), alpha=0.2)
            self.codes.copy_(self.sums / self.counts.unsqueeze(1))
        return x + (quantized - x).detach()


class Quantile(nn.Module):
    """Clipped at a quantile that is followed step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bound", torch.full((8,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        bound = self.bound.clone()
        if self.training:
            above = (x.detach() > bound).to(x.dtype).mean(0)
            self.bound.add_(0.1 * (above - 0.1))
        return torch.minimum(x, bound)


class Memory(nn.Module):
    """A queue of earlier rows, as in contrastive learning; the oldest go."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.randn(12, 8))

    def forward(self, x: Tensor) -> Tensor:
        similar = torch.softmax(x @ self.rows.T, -1)
        made = x + similar @ self.rows
        if self.training:
            self.rows = torch.cat([self.rows[x.shape[0] :], x.detach()])
        return made


class Apart(nn.Module):
    """State is read at the beginning, and changed at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        made = self.inner(torch.tanh(x - self.mean))
        if self.training:
            self.mean.lerp_(made.detach().mean(0), 0.3)
        return torch.tanh(made)


class Shaped(nn.Module):
    """A layer on (N, 2, 4)."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.unflatten(1, (2, 4))).flatten(1)


class HardDropout(nn.Module):
    """Drops in evaluation, too."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(x, 0.3, training=True)


class HardNorm(nn.Module):
    """Normalizes by the batch, or by running statistics, whatever the mode is."""

    def __init__(self, training: bool) -> None:
        super().__init__()
        self.norm, self.hard = nn.BatchNorm1d(8), training

    def forward(self, x: Tensor) -> Tensor:
        return functional.batch_norm(
            x, self.norm.running_mean, self.norm.running_var, training=self.hard
        )


class FrozenNorm(nn.Module):
    """A normalization in evaluation mode, in a module in training."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        nn.init.uniform_(self.norm.running_mean)
        nn.init.uniform_(self.norm.running_var, 0.5, 1.5)

    def train(self, mode: bool = True) -> "FrozenNorm":
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


def _state(between, does, **options):
    return Kind(around(between), does, EQUAL, dtypes=DOUBLE, **options)


def _norm(between, does, **options):
    """Of epsilons, which ONNX holds in float32."""
    return _state(between, does, within=FLOAT32_ATTRIBUTES, **options)


KINDS = {
    "moving-average": _state(Average, "updated before it is read"),
    "moving-average-before": _state(AverageBefore, "updated after it is read, by assignment"),
    "moving-statistics": _state(Normalized, "other operators in evaluation"),
    "counter": _state(Counter, "integers and a single number"),
    "unread-state": _state(Unread, "new values that nothing reads"),
    "codebook": _state(Codebook, "a codebook by moving averages, straight through"),
    "quantile": _state(Quantile, "a running quantile"),
    "memory": _state(Memory, "a queue of rows"),
    "state-apart": _state(Apart, "read in front of what its new value is made of"),
    "spectral-state": _state(
        lambda: parametrizations.spectral_norm(nn.Linear(8, 8)), "a power iteration"
    ),
    "spectral-state-of-old": _state(
        lambda: nn.utils.spectral_norm(nn.Linear(8, 8)), "a power iteration in a hook"
    ),
    "orthogonal-exponential": _state(
        lambda: nn.Sequential(
            parametrizations.orthogonal(nn.Linear(8, 8)),
            parametrizations.orthogonal(
                nn.Linear(8, 4), orthogonal_map="matrix_exp", use_trivialization=False
            ),
            parametrizations.orthogonal(nn.Linear(4, 8), orthogonal_map="householder"),
        ),
        "matrix exponentials, also of a part, and reflections",
    ),
    "instance-norm-tracked": _norm(
        lambda: Shaped(nn.InstanceNorm1d(2, affine=True, track_running_stats=True)),
        "running statistics of instances",
    ),
    "batch-norm-untracked": _norm(
        lambda: nn.BatchNorm1d(8, track_running_stats=False), "the batch's statistics in both modes"
    ),
    "batch-norm-averaging": _norm(
        lambda: nn.BatchNorm1d(8, momentum=None), "means over all batches"
    ),
    "batch-norm-frozen-inside": _norm(FrozenNorm, "frozen in training"),
    "batch-norm-hard": _norm(lambda: HardNorm(True), "the batch's statistics in evaluation, too"),
    "batch-norm-hard-frozen": _norm(lambda: HardNorm(False), "running statistics in training"),
    "dropout-hard": _norm(HardDropout, "drops in evaluation", draws=True),
    "dropout-channels": _state(
        lambda: Shaped(nn.Dropout1d(0.3)), "drops whole channels", draws=True
    ),
    "dropout-alpha": _state(lambda: nn.AlphaDropout(0.3), "drops to another value", draws=True),
}
