"""Small PyTorch modules and their files by torch's own exporter, as users write them."""

import logging
import warnings
from pathlib import Path

import torch
from torch import nn


class Logits(nn.Module):
    """A language model that takes tokens and gives logits."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids):
        return self.model(input_ids=input_ids, use_cache=False).logits


def gpt2():
    """A fresh GPT-2 of two layers: 28 parameters, of which the head shares one."""
    import transformers

    config = transformers.GPT2Config(
        n_layer=2, n_embd=32, n_head=2, vocab_size=100, n_positions=32, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return Logits(transformers.GPT2LMHeadModel(config)), (torch.arange(32).reshape(2, 16),)


def llama():
    """A fresh Llama of two layers, with rotary tables and a head of its own."""
    import transformers

    config = transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=32, intermediate_size=64, num_attention_heads=2,
        num_key_value_heads=1, vocab_size=100,
    )  # fmt: skip
    return Logits(transformers.LlamaForCausalLM(config)), (torch.arange(32).reshape(2, 16),)


def bloom():
    """A fresh BLOOM of two layers, with ALiBi."""
    import transformers

    config = transformers.BloomConfig(n_layer=2, hidden_size=32, n_head=2, vocab_size=100)
    return Logits(transformers.BloomForCausalLM(config)), (torch.arange(32).reshape(2, 16),)


def mamba():
    """A fresh Mamba of two layers, with an initial state of zeros."""
    import transformers

    config = transformers.MambaConfig(
        num_hidden_layers=2, hidden_size=32, state_size=4, vocab_size=100
    )
    return Logits(transformers.MambaForCausalLM(config)), (torch.arange(32).reshape(2, 16),)


class Images(nn.Module):
    """A classifier that takes images and gives logits."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, pixel_values):
        return self.model(pixel_values=pixel_values).logits


def vit():
    """A fresh vision transformer, with a mask of zeros and a class token for every sample."""
    import transformers

    config = transformers.ViTConfig(
        num_hidden_layers=2, hidden_size=32, intermediate_size=64, num_attention_heads=2,
        image_size=32, patch_size=8,
    )  # fmt: skip
    return Images(transformers.ViTForImageClassification(config)), (torch.randn(2, 3, 32, 32),)


def detr():
    """A fresh DETR, with frozen statistics, sinusoidal positions and masks of zeros."""
    import transformers

    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], out_features=["stage2"],
        layer_type="basic",
    )  # fmt: skip
    config = transformers.DetrConfig(
        use_timm_backbone=False, backbone_config=backbone, use_pretrained_backbone=False,
        backbone=None, d_model=32, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=64,
        decoder_ffn_dim=64, encoder_attention_heads=2, decoder_attention_heads=2, num_queries=5,
        num_labels=4,
    )  # fmt: skip
    return Images(transformers.DetrForObjectDetection(config)), (torch.randn(1, 3, 64, 64),)


class Normalized(nn.Module):
    """Two batch normalizations before a layer normalization, fresh: biases equal means."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, x):
        x = self.second(torch.relu(self.first(x)))
        return self.head(self.norm(x.mean((2, 3))))


def normalized():
    """A fresh network of normalizations: eight parameters and six statistics."""
    return Normalized(), (torch.randn(2, 4, 5, 5),)


def exported(build, path: Path, *, optimize: bool = True):
    """Writes the file of a fresh module in evaluation mode, as `torch.onnx.export` does it.

    Args:
        build: gives the module and its example inputs.
        optimize: the exporter's default, which merges initializers of equal values.

    Returns:
        The module and its example inputs.
    """
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        logging.disable(logging.WARNING)
        module, example = build()
        module.eval()
        torch.onnx.export(
            module, example, path, dynamo=True, optimize=optimize, verbose=False,
            external_data=False,
        )  # fmt: skip
        logging.disable(logging.NOTSET)
    return module, example
