"""Networks that see: transformers, convolutions, and both."""

import torch
import transformers as hf
from torch import nn
from torch.nn import functional

from tests.support.zoo.language import QUIET
from tests.support.zoo.networks import WORDS, Network, classifier, images, words

VIT = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "image_size": 16, "patch_size": 4, "num_labels": 5, **QUIET,
}  # fmt: skip


def vit():
    return hf.ViTForImageClassification(hf.ViTConfig(**VIT)), (images(),)


def deit():
    return hf.DeiTForImageClassification(hf.DeiTConfig(**VIT)), (images(),)


def swin():
    config = hf.SwinConfig(
        image_size=16, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4,
        num_labels=5, drop_path_rate=0.0, **QUIET,
    )  # fmt: skip
    return hf.SwinForImageClassification(config), (images(),)


def convnext():
    config = hf.ConvNextConfig(
        hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 2, 1], num_labels=5, patch_size=2,
        drop_path_rate=0.0,
    )  # fmt: skip
    return hf.ConvNextForImageClassification(config), (images(32),)


def detr():
    backbone = hf.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic",
        out_features=["stage2"],
    )  # fmt: skip
    config = hf.DetrConfig(
        use_timm_backbone=False, use_pretrained_backbone=False, backbone=None,
        backbone_config=backbone, d_model=16, encoder_layers=1, decoder_layers=1,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=24,
        decoder_ffn_dim=24, num_queries=4, num_labels=5, dropout=0.0,
    )  # fmt: skip
    return hf.DetrForObjectDetection(config), (images(32),)


def clip():
    config = hf.CLIPConfig(
        text_config={
            "vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 48, "projection_dim": 16,
            "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 16,
            "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
        },
        vision_config={
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "image_size": 16,
            "num_attention_heads": 4, "patch_size": 4, "projection_dim": 16,
        },
        projection_dim=16,
    )  # fmt: skip
    ids = words(3, 8).clamp_min(3)
    ids[:, -1] = 2
    return hf.CLIPModel(config), (ids, images(batch=3))


def segformer():
    config = hf.SegformerConfig(
        num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[8, 16],
        patch_sizes=[7, 3], strides=[4, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2],
        decoder_hidden_size=16, num_labels=4, classifier_dropout_prob=0.0, drop_path_rate=0.0,
        **QUIET,
    )  # fmt: skip
    return hf.SegformerForSemanticSegmentation(config), (images(32),)


def resnet():
    config = hf.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], layer_type="bottleneck",
        num_labels=5,
    )  # fmt: skip
    return hf.ResNetForImageClassification(config), (images(32, batch=4),)


def regnet():
    config = hf.RegNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], groups_width=4, num_labels=5
    )
    return hf.RegNetForImageClassification(config), (images(32, batch=4),)


def perceiver():
    config = hf.PerceiverConfig(
        num_latents=4, d_latents=16, d_model=24, num_blocks=1, num_self_attends_per_block=2,
        num_self_attention_heads=2, num_cross_attention_heads=2, num_labels=5, vocab_size=WORDS,
        max_position_embeddings=16, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return hf.PerceiverForSequenceClassification(config), (words(2, 16),)


# ------------------------------------------------------------------------------ plain modules


def normed(channels_in, channels_out, size=3, stride=1, groups=1):
    """A convolution, a BatchNorm and a ReLU."""
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, size, stride, size // 2, groups=groups, bias=False),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(),
    )


class PreActivation(nn.Module):
    """A block whose BatchNorm and ReLU stand before its convolutions."""

    def __init__(self, channels_in, channels_out, stride):
        super().__init__()
        self.norm1 = nn.BatchNorm2d(channels_in)
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, 1, 1, bias=False)
        self.shortcut = nn.Conv2d(channels_in, channels_out, 1, stride, bias=False)

    def forward(self, x):
        active = functional.relu(self.norm1(x))
        inner = self.conv2(functional.relu(self.norm2(self.conv1(active))))
        return inner + self.shortcut(active)


def preact_resnet():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), PreActivation(8, 8, 1),
        PreActivation(8, 16, 2), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(16, 5),
    ), (images(batch=4),)  # fmt: skip


class Inverted(nn.Module):
    """MobileNet's block: wide inside, a convolution per channel, squeeze and excitation."""

    def __init__(self, width, inner):
        super().__init__()
        self.expand = normed(width, inner, 1)
        self.deep = normed(inner, inner, 3, groups=inner)
        self.squeeze = nn.Conv2d(inner, 4, 1)
        self.excite = nn.Conv2d(4, inner, 1)
        self.project = nn.Sequential(nn.Conv2d(inner, width, 1, bias=False), nn.BatchNorm2d(width))

    def forward(self, x):
        inner = self.deep(self.expand(x))
        weight = self.excite(functional.silu(self.squeeze(inner.mean((2, 3), keepdim=True))))
        return x + self.project(inner * functional.hardsigmoid(weight))


def mobilenet():
    """MobileNet V3 with the dropout before its classifier."""
    return nn.Sequential(
        normed(3, 8, 3, 2), Inverted(8, 16), nn.Hardswish(), Inverted(8, 24),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(8, 5),
    ), (images(batch=4),)  # fmt: skip


class Dense(nn.Module):
    """DenseNet's block: every layer reads all layers before it."""

    def __init__(self, width, growth, layers):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm2d(width + i * growth), nn.ReLU(),
                nn.Conv2d(width + i * growth, growth, 3, padding=1, bias=False),
            )
            for i in range(layers)
        )  # fmt: skip

    def forward(self, x):
        for layer in self.layers:
            x = torch.cat([x, layer(x)], 1)
        return x


def densenet():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), Dense(8, 4, 3), normed(20, 10, 1),
        nn.AvgPool2d(2), Dense(10, 4, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(18, 5),
    ), (images(batch=4),)  # fmt: skip


class SegmentingUNet(nn.Module):
    """A U-Net: down by pooling, up by transposed convolutions, and skips between."""

    def __init__(self, width=8, classes=3):
        super().__init__()
        self.down1, self.down2 = normed(3, width), normed(width, 2 * width)
        self.middle = normed(2 * width, 4 * width)
        self.rise2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2)
        self.up2 = normed(4 * width, 2 * width)
        self.rise1 = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.up1 = normed(2 * width, width)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x):
        first = self.down1(x)
        second = self.down2(functional.max_pool2d(first, 2))
        deep = self.middle(functional.max_pool2d(second, 2))
        up = self.up2(torch.cat([self.rise2(deep), second], 1))
        return self.head(self.up1(torch.cat([self.rise1(up), first], 1)))


def unet():
    return SegmentingUNet(), (images(),)


class Mixer(nn.Module):
    """MLP-Mixer: layers over the places of an image, then over its channels."""

    def __init__(self, places=16, width=24, blocks=2):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * blocks))
        self.over_places = nn.ModuleList(self.layers(places) for _ in range(blocks))
        self.over_channels = nn.ModuleList(self.layers(width) for _ in range(blocks))
        self.head = nn.Linear(width, 5)

    def layers(self, width):
        return nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        for i, (places, channels) in enumerate(
            zip(self.over_places, self.over_channels, strict=True)
        ):
            x = x + places(self.norms[2 * i](x).transpose(1, 2)).transpose(1, 2)
            x = x + channels(self.norms[2 * i + 1](x))
        return self.head(x.mean(1))


def mlp_mixer():
    return Mixer(), (images(),)


class SpatialTransformer(nn.Module):
    """Finds how to turn and shift an image, does it, and classifies the result."""

    def __init__(self):
        super().__init__()
        self.find = nn.Sequential(
            nn.Conv2d(1, 4, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(144, 16),
            nn.ReLU(), nn.Linear(16, 6),
        )  # fmt: skip
        # Near the identity: exactly there, the derivative of the bilinear samples jumps.
        self.find[-1].weight.data.mul_(0.1)
        self.find[-1].bias.data.copy_(torch.tensor([0.93, 0.11, 0.03, -0.07, 0.97, 0.05]))
        self.see = nn.Sequential(nn.Conv2d(1, 4, 5), nn.ReLU(), nn.Flatten(), nn.Linear(576, 5))

    def forward(self, x):
        grid = functional.affine_grid(self.find(x).view(-1, 2, 3), x.shape, align_corners=False)
        return self.see(functional.grid_sample(x, grid, align_corners=False))


def spatial_transformer():
    return SpatialTransformer(), (images(channels=1),)


def vgg_dropout():
    """Convolutions, pooling, and large layers with dropout."""
    return nn.Sequential(
        normed(3, 8), nn.MaxPool2d(2), normed(8, 16), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(256, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 5),
    ), (images(batch=4),)  # fmt: skip


NETWORKS = {
    "vit": classifier(vit),
    "deit": classifier(deit),
    "swin": classifier(swin),
    "convnext": classifier(convnext),
    # In training mode transformers looks for infinite numbers, which cannot be exported. Nothing
    # else differs: the statistics of the backbone are frozen, and dropout is off.
    "detr": Network(detr, training=False),
    "clip": Network(clip),
    "segformer": classifier(segformer),
    "resnet": classifier(resnet),
    "regnet": classifier(regnet),
    "perceiver": classifier(perceiver),
    "preact-resnet": classifier(preact_resnet),
    "mobilenet-dropout": classifier(mobilenet, draws=True),
    "densenet": classifier(densenet),
    "unet": classifier(unet),
    "mlp-mixer": classifier(mlp_mixer),
    "spatial-transformer": classifier(spatial_transformer),
    "vgg-dropout": classifier(vgg_dropout, draws=True),
}
