"""The devices of this machine: their names in PyTorch and in topologies, and checks."""

import platform
from collections.abc import Mapping
from importlib import import_module

from planner.artefacts.graph import Graph, main_dtype, with_parameters_in
from planner.artefacts.profile import SHORT_PARAMETERS
from planner.support.errors import OptionError

TYPES: Mapping[str, str] = {
    "NVIDIA A100-SXM4-40GB": "A100-SXM4-40GB",
    "NVIDIA A100-SXM4-80GB": "A100-SXM4-80GB",
    "NVIDIA H100 80GB HBM3": "H100-SXM",
    "NVIDIA H200": "H200-SXM",
    "NVIDIA L4": "L4",
    "Tesla T4": "T4",
    "Tesla V100-SXM2-16GB": "V100-SXM2-16GB",
}
"""Names of device types in topologies, by CUDA's names."""


def device_type(device: str) -> str:
    """The name in topologies of the type of a device of this machine.

    Args:
        device: "cpu", "cuda" or "cuda:N".
    """
    if device == "cpu":
        return "cpu"
    import torch

    name = torch.cuda.get_device_name(device)
    return TYPES.get(name, name.replace(" ", "-"))


def is_of_type(name: str, type_: str) -> bool:
    """Whether a device is of a topology's device type.

    Args:
        name: its own name: "cpu" or CUDA's.

    >>> is_of_type("Tesla V100-SXM2-16GB", "V100-SXM2-16GB"), is_of_type("NVIDIA H200", "cpu")
    (True, False)
    >>> is_of_type("NVIDIA H200", "H200-SXM"), is_of_type("NVIDIA H200", "H100-SXM")
    (True, False)
    """
    if TYPES.get(name) == type_:
        return True
    own, short = ["".join(c for c in text.lower() if c.isalnum()) for text in (name, type_)]
    return short == own if "cpu" in (short, own) else short in own


def gpu_names() -> tuple[str, ...]:
    """CUDA's names of the GPUs of this machine, by index; loads torch."""
    import torch

    if not torch.cuda.is_available():
        return ()
    return tuple(map(torch.cuda.get_device_name, range(torch.cuda.device_count())))


def check_measuring(
    device: str,
    threads: int,
    repetitions: int,
    install: str = "install PyTorch for your CUDA driver",
) -> None:
    """Checks that the device is there and that the numbers are positive.

    Args:
        device: "cpu", "cuda" or "cuda:N".
        threads: number of CPU threads.
        repetitions: number of timed runs.
        install: advice where CUDA is missing.

    Raises:
        OptionError: if the device is not there or a number is below 1.
    """
    for option, value in (("--threads", threads), ("--repetitions", repetitions)):
        if value < 1:
            raise OptionError(f"{option}: expected 1 or more, got {value}")
    if device == "cpu":
        return
    kind, _, index = device.partition(":")
    if kind != "cuda" or not (index or "0").isdecimal():
        raise OptionError(f"--device: expected cpu, cuda or cuda:N, got {device!r}")
    import torch

    num_devices = torch.cuda.device_count()
    if int(index or 0) >= num_devices:
        raise OptionError(
            f"--device {device}: expected a CUDA device, PyTorch {torch.__version__} finds"
            f" {num_devices} of them here; use --device cpu, or {install}"
        )


SHORTER = ("bfloat16", "float16")


def autocast_dtype(graph: Graph, dtype: str | None) -> str | None:
    """The type that autocast has to compute in, so that a model is trained in `dtype`; None if that
    is the model's own type.

    Raises:
        OptionError: if autocast does not compute in that type.
    """
    own = main_dtype(graph)
    if dtype in (None, own):
        return None
    if dtype not in SHORTER or own != "float32":
        raise OptionError(
            f"--dtype: expected {own}, the model's own, or, for models in float32,"
            f" {' or '.join(SHORTER)}, got {dtype!r}"
        )
    return dtype


def trained_in(
    graph: Graph, shorter: str | None, parameters: str | None, gradients: str | None
) -> tuple[Graph, str | None]:
    """A graph with its trained parameters in a type, and that type; None where it is the model's.

    Args:
        shorter: the type that autocast computes in; None without autocast.
        parameters: the type that is asked for.
        gradients: the type in which gradients are added up; None for that of the parameters.

    Raises:
        OptionError: if autocast computes in another type, or gradients have one for which
            parameters are too long.
    """
    if parameters in (None, "float32"):
        if gradients == SHORT_PARAMETERS:
            raise OptionError(f"--gradients {gradients}: expected --parameters {gradients}, too")
        return graph, None
    if parameters != shorter:
        raise OptionError(
            f"--parameters {parameters}: expected --dtype {parameters}, too, of a model in float32"
        )
    return with_parameters_in(graph, parameters, gradients), parameters


def versions(*more: str) -> dict[str, str]:
    """Versions of the software that makes profiles.

    Args:
        more: packages besides those that every profile is made with.
    """
    packages = ("onnx", "planner", "torch", *more)
    known = {name: str(import_module(name).__version__) for name in packages}
    return {**known, "python": platform.python_version()}
