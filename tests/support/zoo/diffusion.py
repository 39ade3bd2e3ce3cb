"""Networks that take noise away."""

import math

import torch
from torch import nn
from torch.nn import functional

from tests.support.zoo.networks import Network, images


def waves(times, width):
    """Sines and cosines of the noise levels."""
    rates = torch.exp(-math.log(10_000) * torch.arange(width // 2) / (width // 2))
    angles = times[:, None].float() * rates[None]
    return torch.cat([angles.sin(), angles.cos()], -1)


class Residual(nn.Module):
    """Two convolutions with group norms, told the noise level."""

    def __init__(self, channels_in, channels_out, told):
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(4, channels_in), nn.GroupNorm(4, channels_out)
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, padding=1)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1)
        self.told = nn.Linear(told, channels_out)
        same = channels_in == channels_out
        self.shortcut = nn.Identity() if same else nn.Conv2d(channels_in, channels_out, 1)

    def forward(self, x, time):
        inner = self.conv1(functional.silu(self.norm1(x))) + self.told(time)[:, :, None, None]
        return self.shortcut(x) + self.conv2(functional.silu(self.norm2(inner)))


class Looking(nn.Module):
    """Attention among all places of a picture."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.GroupNorm(4, width)
        self.joint = nn.Conv2d(width, 3 * width, 1)
        self.end = nn.Conv2d(width, width, 1)

    def forward(self, x):
        batch, width, height, breadth = x.shape
        joint = self.joint(self.norm(x)).view(batch, 3, 2, width // 2, -1).transpose(3, 4)
        seen = functional.scaled_dot_product_attention(*joint.unbind(1))
        return x + self.end(seen.transpose(2, 3).reshape(batch, width, height, breadth))


class DenoisingUNet(nn.Module):
    """The U-Net of diffusion models."""

    def __init__(self, width=8, told=16):
        super().__init__()
        self.width = width
        self.time = nn.Sequential(nn.Linear(width, told), nn.SiLU(), nn.Linear(told, told))
        self.start = nn.Conv2d(3, width, 3, padding=1)
        self.down1 = Residual(width, width, told)
        self.shrink = nn.Conv2d(width, width, 3, 2, 1)
        self.down2 = Residual(width, 2 * width, told)
        self.look = Looking(2 * width)
        self.middle = Residual(2 * width, 2 * width, told)
        self.up2 = Residual(4 * width, width, told)
        self.grow = nn.Conv2d(width, width, 3, padding=1)
        self.up1 = Residual(2 * width, width, told)
        self.end = nn.Sequential(nn.GroupNorm(4, width), nn.SiLU(), nn.Conv2d(width, 3, 3, 1, 1))

    def forward(self, x, times):
        time = self.time(waves(times, self.width))
        first = self.down1(self.start(x), time)
        second = self.look(self.down2(self.shrink(first), time))
        x = self.up2(torch.cat([self.middle(second, time), second], 1), time)
        x = self.grow(functional.interpolate(x, scale_factor=2.0, mode="nearest"))
        return self.end(self.up1(torch.cat([x, first], 1), time))


def diffusion_unet():
    return DenoisingUNet(), (images(), torch.randint(1000, (2,)))


class Modulated(nn.Module):
    """A block of the diffusion transformer: norms are scaled and shifted by the noise level."""

    def __init__(self, width, heads):
        super().__init__()
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.layers = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU("tanh"),
                                    nn.Linear(2 * width, width))  # fmt: skip
        self.told = nn.Linear(width, 6 * width)

    def forward(self, x, time):
        shift1, scale1, gate1, shift2, scale2, gate2 = self.told(time)[:, None].chunk(6, -1)
        inner = self.norm1(x) * (1 + scale1) + shift1
        x = x + gate1 * self.attention(inner, inner, inner, need_weights=False)[0]
        return x + gate2 * self.layers(self.norm2(x) * (1 + scale2) + shift2)


class DiT(nn.Module):
    """The diffusion transformer."""

    def __init__(self, width=24, heads=4):
        super().__init__()
        self.width = width
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.places = nn.Parameter(torch.randn(1, 16, width) * 0.02)
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU())
        self.label = nn.Embedding(6, width)
        self.blocks = nn.ModuleList(Modulated(width, heads) for _ in range(2))
        self.end = nn.Linear(width, 3 * 16)

    def forward(self, x, times, labels):
        time = self.time(waves(times, self.width)) + self.label(labels)
        x = self.patches(x).flatten(2).transpose(1, 2) + self.places
        for block in self.blocks:
            x = block(x, time)
        x = self.end(x).view(-1, 4, 4, 4, 4, 3)
        return x.permute(0, 5, 1, 3, 2, 4).reshape(-1, 3, 16, 16)


def dit():
    return DiT(), (images(), torch.randint(1000, (2,)), torch.randint(6, (2,)))


NETWORKS = {"diffusion-unet": Network(diffusion_unet), "dit": Network(dit)}
