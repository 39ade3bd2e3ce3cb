"""Fourier transforms, and the windows and weights that go with them.

A complex number is two numbers in the last dimension, a real one is one.
"""

from collections.abc import Callable
from math import cos, floor, log10, pi

import torch
from torch import Tensor

from planner.support.errors import OperatorError

_HALVES = (torch.float16, torch.bfloat16)


def dft(
    input: Tensor,
    dft_length: int | None = None,
    axis: int = -2,
    inverse: int = 0,
    onesided: int = 0,
) -> Tensor:
    """The transform along an axis; `onesided` leaves out the half that follows from the other."""
    axis = axis + input.dim() if axis < 0 else axis
    signal = _complex(input)
    if inverse and onesided:
        real: Tensor = torch.fft.irfft(signal, dft_length, axis)
        return real.unsqueeze(-1).to(input.dtype)
    if inverse:
        made = torch.fft.ifft(signal, dft_length, axis)
    elif onesided and not signal.is_complex():
        made = torch.fft.rfft(signal, dft_length, axis)
    else:
        made = torch.fft.fft(signal, dft_length, axis)
        made = made.narrow(axis, 0, made.shape[axis] // 2 + 1) if onesided else made
    return torch.view_as_real(made).to(input.dtype)


def _complex(input: Tensor) -> Tensor:
    """A complex tensor, or a real one, without the last dimension; halves become float32."""
    wide = input.float() if input.dtype in _HALVES else input
    if input.shape[-1] not in (1, 2):
        raise OperatorError(f"expected real or complex numbers, got a tensor {tuple(input.shape)}")
    return wide[..., 0] if input.shape[-1] == 1 else torch.view_as_complex(wide.contiguous())


def stft(
    signal: Tensor,
    frame_step: int,
    window: Tensor | None = None,
    frame_length: int | None = None,
    onesided: int = 1,
) -> Tensor:
    """Transforms of the frames of a signal (samples, positions, 1 or 2), times the window."""
    length = frame_length or (signal.shape[1] if window is None else len(window))
    frames = signal.unfold(1, length, frame_step)  # samples, frames, 1 or 2, length
    frames = frames if window is None else frames * window
    return dft(frames.transpose(2, 3), axis=2, onesided=onesided)


def _window(name: str, *shares: float) -> Callable[..., Tensor]:
    """The function of a window: the sum of shares[k] cos(2 pi k n / N), N the size or, of a
    symmetric window, one less.

    Args:
        name: of the function, which torch.fx writes into its code.
    """

    def window(
        size: int, periodic: int, output_datatype: int, *, dtype: torch.dtype, device: str
    ) -> Tensor:
        turn = 2 * pi / max(size if periodic else size - 1, 1)
        values = [sum(a * cos(turn * k * n) for k, a in enumerate(shares)) for n in range(size)]
        return torch.tensor(values, dtype=dtype, device=device)

    window.__name__ = window.__qualname__ = name
    return window


hann_window = _window("hann_window", 0.5, -0.5)
hamming_window = _window("hamming_window", 25 / 46, -21 / 46)
blackman_window = _window("blackman_window", 0.42, -0.5, 0.08)


def mel_weight_matrix(
    num_mel_bins: int,
    dft_length: int,
    sample_rate: int,
    lower_edge_hertz: float,
    upper_edge_hertz: float,
    output_datatype: int,
    *,
    dtype: torch.dtype,
    device: str,
) -> Tensor:
    """(frequencies, mel bins): triangles, equally wide in mel = 2595 log10(1 + hertz / 700)."""
    low, high = (2595 * log10(1 + f / 700) for f in (lower_edge_hertz, upper_edge_hertz))
    step = (high - low) / (num_mel_bins + 2)
    hertz = [700 * (10 ** ((low + i * step) / 2595) - 1) for i in range(num_mel_bins + 2)]
    edges = [floor((dft_length + 1) * f / sample_rate) for f in hertz]
    matrix = torch.zeros((dft_length // 2 + 1, num_mel_bins), dtype=dtype)
    for i, (start, centre, end) in enumerate(zip(edges, edges[1:], edges[2:], strict=False)):
        for j in range(start, centre + 1):
            matrix[j, i] = 1.0 if start == centre else (j - start) / (centre - start)
        for j in range(centre, end):
            matrix[j, i] = (end - j) / (end - centre)
    return matrix.to(device)
