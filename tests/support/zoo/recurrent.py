"""Recurrent networks."""

import torch
from torch import nn

from tests.support.zoo.networks import WORDS, classifier, tokens, words


class Words(nn.Module):
    """An embedding, a recurrent layer, and scores of the next word."""

    def __init__(self, kind, width=16, **options):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.recurrent = kind(width, 24, batch_first=True, **options)
        sides = 2 if options.get("bidirectional") else 1
        self.head = nn.Linear(24 * sides, WORDS)

    def forward(self, ids):
        return self.head(self.recurrent(self.embedding(ids))[0])


def lstm():
    return Words(nn.LSTM, num_layers=2), (words(),)


def lstm_dropout():
    return Words(nn.LSTM, num_layers=2, dropout=0.25), (words(),)


def bilstm():
    return Words(nn.LSTM, bidirectional=True), (words(),)


def gru():
    return Words(nn.GRU, num_layers=2), (words(),)


def elman():
    return Words(nn.RNN, nonlinearity="tanh"), (words(),)


class Attending(nn.Module):
    """An encoder and a decoder of GRUs, and attention of the second to the first."""

    def __init__(self, width=16):
        super().__init__()
        self.source = nn.Embedding(WORDS, width)
        self.target = nn.Embedding(WORDS, width)
        self.encoder = nn.GRU(width, width, bidirectional=True, batch_first=True)
        self.start = nn.Linear(2 * width, width)
        self.decoder = nn.GRU(width, width, batch_first=True)
        self.query = nn.Linear(width, 2 * width)
        self.head = nn.Linear(3 * width, WORDS)

    def forward(self, source, target):
        seen, _ = self.encoder(self.source(source))
        start = torch.tanh(self.start(seen.mean(1)))
        said, _ = self.decoder(self.target(target), start.unsqueeze(0))
        scores = self.query(said) @ seen.transpose(1, 2)
        return self.head(torch.cat([said, scores.softmax(-1) @ seen], -1))


def seq2seq():
    return Attending(), (words(), words(2, 5))


class Cells(nn.Module):
    """A loop over LSTM cells in Python, and classes from the last state."""

    def __init__(self, width=16):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.cell = nn.LSTMCell(width, width)
        self.head = nn.Linear(width, 5)

    def forward(self, ids):
        steps = self.embedding(ids).unbind(1)
        state = None
        for step in steps:
            state = self.cell(step, state)
        return self.head(state[0])


def lstm_cells():
    return Cells(), (words(2, 5),)


NETWORKS = {
    "lstm": tokens(lstm),
    "lstm-dropout": tokens(lstm_dropout, draws=True),
    "bilstm": tokens(bilstm),
    "gru": tokens(gru),
    "rnn": tokens(elman),
    "seq2seq-attention": tokens(seq2seq),
    "lstm-cells": classifier(lstm_cells),
}
