"""Networks that make pictures and numbers."""

import torch
from torch import nn

from tests.support.zoo.networks import Network, images


class VAE(nn.Module):
    """A variational autoencoder, which samples its code."""

    def __init__(self, width=24, code=6):
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU())
        self.mean, self.log_variance = nn.Linear(width, code), nn.Linear(width, code)
        self.decoder = nn.Sequential(
            nn.Linear(code, width), nn.ReLU(), nn.Linear(width, 64), nn.Sigmoid()
        )

    def forward(self, x):
        inner = self.encoder(x)
        mean, log_variance = self.mean(inner), self.log_variance(inner)
        code = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
        return self.decoder(code).view_as(x), mean, log_variance


def vae():
    return VAE(), (images(8, 1),)


def gan_generator():
    """DCGAN's generator."""
    return nn.Sequential(
        nn.ConvTranspose2d(12, 16, 4, 1, 0, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.ConvTranspose2d(16, 8, 4, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.ConvTranspose2d(8, 3, 4, 2, 1, bias=False), nn.Tanh(),
    ), (torch.randn(4, 12, 1, 1),)  # fmt: skip


def gan_discriminator():
    """DCGAN's discriminator, with dropout on whole channels left out."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(8, 16, 4, 2, 1, bias=False),
        nn.BatchNorm2d(16), nn.LeakyReLU(0.2), nn.Conv2d(16, 1, 4, 1, 0),
    ), (images(batch=4),)  # fmt: skip


class Coupling(nn.Module):
    """RealNVP's layers, which change one half of the numbers by the other."""

    def __init__(self, width=8, layers=4):
        super().__init__()
        self.nets = nn.ModuleList(
            nn.Sequential(nn.Linear(width // 2, 16), nn.Tanh(), nn.Linear(16, width))
            for _ in range(layers)
        )

    def forward(self, x):
        total = 0
        for net in self.nets:
            kept, changed = x.chunk(2, -1)
            scale, shift = net(kept).chunk(2, -1)
            scale = torch.tanh(scale)
            x = torch.cat([changed * scale.exp() + shift, kept], -1)
            total = total + scale.sum(-1)
        return x, total


def normalizing_flow():
    return Coupling(), (torch.randn(4, 8),)


class Autoencoder(nn.Module):
    """A convolutional autoencoder whose decoder uses the encoder's own weights, turned around."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 24), nn.Linear(24, 8)
        self.bias1, self.bias2 = nn.Parameter(torch.zeros(24)), nn.Parameter(torch.zeros(64))

    def forward(self, x):
        code = torch.relu(self.second(torch.relu(self.first(x))))
        inner = torch.relu(code @ self.second.weight + self.bias1)
        return inner @ self.first.weight + self.bias2


def tied_autoencoder():
    return Autoencoder(), (torch.randn(4, 64),)


NETWORKS = {
    "vae": Network(vae, draws=True),
    "gan-generator": Network(gan_generator),
    "gan-discriminator": Network(gan_discriminator),
    "normalizing-flow": Network(normalizing_flow),
    "tied-autoencoder": Network(tied_autoencoder),
}
