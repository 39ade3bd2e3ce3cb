"""Networks and parts of them whose gradients are autograd's own, and some that only look so."""

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from tests.support.gradient_kinds.kind import (
    EITHER,
    EQUAL,
    FLOAT32_ATTRIBUTES,
    Around,
    Kind,
    around,
    rows,
)


class Recurrent(nn.Module):
    """A recurrent layer and a head on its outputs."""

    def __init__(self, layer, width=5):
        super().__init__()
        self.layer, self.head = layer, nn.Linear(width, 3)

    def forward(self, x):
        return self.head(self.layer(x)[0])


def sequences():
    return (torch.randn(3, 4, 6),)


class Attention(nn.Module):
    """Attention with a causal and a boolean mask."""

    def __init__(self):
        super().__init__()
        self.to_qkv = nn.Linear(6, 24, bias=False)

    def forward(self, x, mask):
        q, k, v = (one.unflatten(-1, (2, 4)).transpose(1, 2) for one in self.to_qkv(x).split(8, -1))
        a = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None])
        b = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return (a + b).transpose(1, 2).flatten(2)


def masked_sequences(generator=None):
    mask = torch.ones(3, 4, 4, dtype=torch.bool).tril()
    return torch.randn(3, 4, 6, generator=generator), mask


class Unused(Around):
    """A parameter that nothing reads."""

    def __init__(self):
        super().__init__(nn.Identity())
        self.unused = nn.Linear(3, 3)


class IntegersBeside(Around):
    """A parameter that only an output of integers depends on."""

    def __init__(self):
        super().__init__(nn.Identity())
        self.ranks = nn.Linear(8, 5)

    def forward(self, x):
        h = torch.tanh(self.first(x))
        return {"y": self.second(h), "index": self.ranks(h).argmax(-1)}


class ManyOutputs(Around):
    """Several outputs of floats, all with gradients, and no loss."""

    def forward(self, x):
        h = torch.tanh(self.first(x))
        return {"y": self.second(h), "h": h, "norm": h.square().sum(-1)}


class ByKeyword(Around):
    """Inputs by keyword, in another order than the parameters of forward."""

    def forward(self, x, *, scale=None, shift=None):
        return super().forward(x * scale + shift)


def by_keyword():
    inputs = {"shift": torch.randn(4, 6), "x": torch.randn(4, 6), "scale": torch.rand(4, 6)}
    return ByKeyword(nn.Identity()), inputs


class Fourier(nn.Module):
    """Mixes tokens by a Fourier transform, as FNet does."""

    def __init__(self):
        super().__init__()
        self.inward, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(torch.fft.fft2(self.inward(x), dim=(-2, -1)).real)


class Tied(nn.Module):
    """The embedding as the head."""

    def __init__(self):
        super().__init__()
        self.embedding, self.mix = nn.Embedding(10, 6), nn.Linear(6, 6)
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(torch.tanh(self.mix(self.embedding(tokens))))


class Forces(nn.Module):
    """Forces as the negative gradient of an energy, made in the forward pass."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 1)

    def forward(self, x):
        with torch.enable_grad():
            positions = x.detach().requires_grad_()
            energy = self.second(torch.tanh(self.first(positions))).sum()
            return -torch.autograd.grad(energy, positions, create_graph=True)[0]


class InPlace(nn.Module):
    """Writes to parts of a tensor."""

    def forward(self, h):
        made = h.clone()
        made[:, :4] *= 2
        made.relu_()
        return made


def normed(parametrization):
    """Two layers, the first one's weight under a parametrization."""
    module = Around(nn.Identity())
    parametrization(module.first)
    return module


def gpt2(*, checkpointing=False):
    """A fresh GPT-2 with labels, which computes its own loss."""
    import transformers

    config = transformers.GPT2Config(
        n_layer=1, n_embd=16, n_head=2, vocab_size=30, n_positions=8, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, use_cache=False,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    if checkpointing:
        new = getattr(model, "activation_checkpointing_enable", None)  # its new name
        (new or model.gradient_checkpointing_enable)()
    return model, {"input_ids": torch.arange(16).reshape(2, 8), "labels": torch.ones(2, 8).long()}


def bert():
    """A fresh BERT for classification, with labels; its embedding has a padding index."""
    import transformers

    config = transformers.BertConfig(
        num_hidden_layers=1, hidden_size=16, num_attention_heads=2, intermediate_size=32,
        vocab_size=30, max_position_embeddings=8, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, num_labels=3,
    )  # fmt: skip
    model = transformers.BertForSequenceClassification(config)
    tokens = torch.arange(16).reshape(2, 8) + 1
    mask = torch.ones(2, 8).long()
    return model, {"input_ids": tokens, "attention_mask": mask, "labels": torch.tensor([0, 2])}


def tokens_and_mask(generator):
    """Inputs of `bert` without its padding."""
    tokens = torch.randint(1, 30, (2, 8), generator=generator)
    labels = torch.randint(3, (2,), generator=generator)
    return {"input_ids": tokens, "attention_mask": torch.ones(2, 8).long(), "labels": labels}


def tokens_with_padding(generator):
    """The same with it."""
    inputs = tokens_and_mask(generator)
    inputs["input_ids"][:, -2:] = 0
    return inputs


def language(generator):
    """Inputs of `gpt2`."""
    tokens = torch.randint(30, (2, 8), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


SLOW = {"sgd": 0.1, "adamw": 1e-3}
"""Rates by which AdamW does not make rounding visible where gradients are small."""
OWN = "autograd's own"

KINDS = {
    "plain": Kind(around(nn.Identity), OWN, EQUAL),
    "in-place": Kind(around(InPlace), OWN, EQUAL),
    "weight-norm": Kind(lambda: (normed(parametrizations.weight_norm), rows()),
        "that of a direction and a length", EQUAL),
    "orthogonal": Kind(lambda: (normed(parametrizations.orthogonal), rows()), OWN,
        EQUAL),
    "spectral-norm": Kind(lambda: (normed(parametrizations.spectral_norm), rows()),
        "the power iteration has no gradient, and it is remembered", EQUAL),
    "spectral-norm-evaluated": Kind(lambda: (normed(parametrizations.spectral_norm), rows()),
        OWN, EQUAL, training=False),
    "lstm": Kind(lambda: (Recurrent(nn.LSTM(6, 5, batch_first=True)), sequences()), OWN, EQUAL),
    "gru": Kind(lambda: (Recurrent(nn.GRU(6, 5, batch_first=True)), sequences()), OWN, EQUAL),
    "attention": Kind(lambda: (Attention(), masked_sequences()), OWN, EQUAL,
        data=masked_sequences, within=FLOAT32_ATTRIBUTES),
    "encoder-layer": Kind(
        lambda: (
            nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True), sequences()),
        OWN, EQUAL, within=FLOAT32_ATTRIBUTES),
    "unused-parameter": Kind(lambda: (Unused(), rows()), "the unused layer has none", EQUAL),
    "parameter-of-integers": Kind(lambda: (IntegersBeside(), rows()),
        "the layer before the index has none", EQUAL),
    "many-outputs": Kind(lambda: (ManyOutputs(nn.Identity()), rows()), OWN, EQUAL,
        outputs=("y", "norm")),
    "many-outputs-by-default": Kind(lambda: (ManyOutputs(nn.Identity()), rows()), OWN, EQUAL),
    "inputs-by-keyword": Kind(by_keyword, OWN, EQUAL),
    "fourier": Kind(lambda: (Fourier(), sequences()), "autograd's own, through complex numbers",
        EQUAL),
    "tied-head": Kind(lambda: (Tied(), (torch.randint(10, (4, 5)),)), "the sum of both uses",
        EQUAL),
    "gradient-in-forward": Kind(lambda: (Forces(), rows()), "a second derivative", EITHER),
    "gpt2": Kind(gpt2, OWN, EQUAL, data=language, loss="own", within=FLOAT32_ATTRIBUTES,
        rate=SLOW),
    "gpt2-checkpointing": Kind(lambda: gpt2(checkpointing=True), OWN, EQUAL, data=language,
        loss="own", within=FLOAT32_ATTRIBUTES,
        rate=SLOW),
    "bert-with-padding": Kind(bert,
        "the padding's row has no gradient, and no example input reads it", EQUAL,
        data=tokens_with_padding, loss="own", within=FLOAT32_ATTRIBUTES,
        rate=SLOW),
    "bert-without-padding": Kind(bert, "the padding's row is never read", EQUAL,
        data=tokens_and_mask, loss="own", within=FLOAT32_ATTRIBUTES,
        rate=SLOW),
}  # fmt: skip
