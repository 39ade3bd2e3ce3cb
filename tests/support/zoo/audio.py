"""Networks that hear."""

from itertools import pairwise

import torch
import transformers as hf
from torch import nn
from torch.nn import functional

from tests.support.zoo.networks import WORDS, Called, Network, classifier, tokens, words


def whisper():
    config = hf.WhisperConfig(
        vocab_size=WORDS, num_mel_bins=8, d_model=32, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48,
        decoder_ffn_dim=48, max_source_positions=10, max_target_positions=16, dropout=0.0,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    module = hf.WhisperForConditionalGeneration(config)
    return Called(module, "input_features", "decoder_input_ids"), (torch.randn(2, 8, 20), words())


def wav2vec2():
    config = hf.Wav2Vec2Config(
        vocab_size=WORDS, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=48, conv_dim=(8, 8), conv_stride=(5, 2), conv_kernel=(10, 3),
        num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2, hidden_dropout=0.0,
        attention_dropout=0.0, activation_dropout=0.0, feat_proj_dropout=0.0, final_dropout=0.0,
        layerdrop=0.0, apply_spec_augment=False, do_stable_layer_norm=False, mask_time_prob=0.0,
    )  # fmt: skip
    return hf.Wav2Vec2ForCTC(config), (torch.randn(2, 400),)


class WaveNet(nn.Module):
    """Gated, dilated convolutions of the past, with skips to the end."""

    def __init__(self, width=16, layers=4, levels=24):
        super().__init__()
        self.start = nn.Embedding(levels, width)
        self.dilations = [2**i for i in range(layers)]
        self.gated = nn.ModuleList(nn.Conv1d(width, 2 * width, 2, dilation=d)
                                   for d in self.dilations)  # fmt: skip
        self.onward = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in self.dilations[:-1])
        self.skip = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in self.dilations)
        self.end = nn.Sequential(nn.ReLU(), nn.Conv1d(width, width, 1), nn.ReLU(),
                                 nn.Conv1d(width, levels, 1))  # fmt: skip

    def forward(self, samples):
        x = self.start(samples).transpose(1, 2)
        said = 0
        for i, dilation in enumerate(self.dilations):
            value, gate = self.gated[i](functional.pad(x, (dilation, 0))).chunk(2, 1)
            inner = torch.tanh(value) * torch.sigmoid(gate)
            said = said + self.skip[i](inner)
            if i < len(self.onward):
                x = x + self.onward[i](inner)
        return self.end(said).transpose(1, 2)


def wavenet():
    return WaveNet(), (torch.randint(24, (2, 20)),)


class Conformer(nn.Module):
    """A block of Conformer: half a feed-forward layer, attention, convolution, and half again."""

    def __init__(self, width=24, heads=4):
        super().__init__()
        self.before, self.after = self.forward_layer(width), self.forward_layer(width)
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.norm_convolution = nn.LayerNorm(width)
        self.wide = nn.Conv1d(width, 2 * width, 1)
        self.deep = nn.Conv1d(width, width, 5, padding=2, groups=width)
        self.norm_deep = nn.BatchNorm1d(width)
        self.narrow = nn.Conv1d(width, width, 1)
        self.end = nn.LayerNorm(width)

    def forward_layer(self, width):
        return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.SiLU(),
                             nn.Linear(2 * width, width))  # fmt: skip

    def forward(self, x):
        x = x + 0.5 * self.before(x)
        normed = self.norm(x)
        x = x + self.attention(normed, normed, normed, need_weights=False)[0]
        inner = functional.glu(self.wide(self.norm_convolution(x).transpose(1, 2)), 1)
        inner = self.narrow(functional.silu(self.norm_deep(self.deep(inner))))
        x = x + inner.transpose(1, 2)
        return self.end(x + 0.5 * self.after(x))


def conformer():
    return nn.Sequential(nn.Linear(8, 24), Conformer(), Conformer(), nn.Linear(24, 12)), (
        torch.randn(2, 10, 8),
    )


class TCN(nn.Module):
    """A temporal convolutional network with weight norm and dropout."""

    def __init__(self, width=16, layers=3):
        super().__init__()
        sizes = [4] + [width] * layers
        self.layers = nn.ModuleList(
            nn.utils.parametrizations.weight_norm(nn.Conv1d(a, b, 3, dilation=2**i))
            for i, (a, b) in enumerate(pairwise(sizes))
        )
        self.match = nn.Conv1d(4, width, 1)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(width, 5)

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            kept = self.match(x) if i == 0 else x
            inner = layer(functional.pad(x, (2 * 2**i, 0)))
            x = kept + self.dropout(functional.relu(inner))
        return self.head(x[:, :, -1])


def tcn():
    return TCN(), (torch.randn(3, 4, 16),)


class Spectrogram(nn.Module):
    """Instance norms over a picture of sound, PReLU, and one score per moment."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 6, 3, padding=1), nn.InstanceNorm2d(6, affine=True), nn.PReLU(6),
            nn.Conv2d(6, 6, 3, (2, 1), 1, padding_mode="reflect"), nn.GroupNorm(2, 6), nn.ELU(),
        )  # fmt: skip
        self.head = nn.Conv1d(24, 3, 1)

    def forward(self, x):
        return self.head(self.layers(x).flatten(1, 2))


def spectrogram():
    return Spectrogram(), (torch.randn(2, 1, 8, 12),)


NETWORKS = {
    "whisper": tokens(whisper),
    "wav2vec2": tokens(wav2vec2),
    "wavenet": tokens(wavenet),
    "conformer": tokens(conformer),
    "tcn-dropout": classifier(tcn, draws=True),
    "spectrogram": Network(spectrogram),
}
