"""Earlier measurements of operators, in the user's cache folder.

The key of an entry is a hash of everything that it depends on: the class of the operator
(classes.py), the machine, PyTorch and the sources of the conversion. So an entry never becomes
wrong, only unused; the folder may be deleted at any time.
"""

import hashlib
import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from planner.artefacts.operator_types import registered
from planner.artefacts.strict import reader
from planner.profilers.classes import TensorLayout
from planner.support.caches import CacheFolder, cache_root

METHOD = 5
"""Number of the way to measure, and of the fields of an entry; a new one makes all entries unused.
"""

_CONVERSION = Path(__file__).resolve().parent.parent / "operators"
_TYPES = _CONVERSION.parent / "artefacts/operator_types.py"


@dataclass(frozen=True, slots=True)
class MeasuredClass:
    """The measurement of a class of operators. Tensors and parameters are given by place: their
    index in the list of an operator's inputs, outputs and parameters, one after the other.

    Attributes:
        forward_s: median time of a forward pass, in s.
        backward_s: median time of a backward pass, in s.
        interval: as `OperatorCost.interval`.
        spread: (slowest - fastest) / median of forward and backward together.
        repetitions: number of times that it was timed.
        flops: floating-point operations of a forward pass.
        workspace_bytes: as `OperatorCost.workspace_bytes`.
        kept: places of the tensors that autograd keeps.
        private_bytes: bytes that autograd keeps besides these tensors.
        views: pairs of places: a view, and the tensor that it is a view of.
        outputs: layouts of its outputs, in order.
        backward_weight_s: as `OperatorCost.backward_weight_s`; None where it was not measured.
        host_forward_s, host_backward_s: as of `OperatorCost`.
    """

    forward_s: float
    backward_s: float
    interval: float
    spread: float
    repetitions: int
    flops: int
    workspace_bytes: int
    kept: tuple[int, ...]
    private_bytes: int
    views: tuple[tuple[int, int], ...]
    outputs: tuple[TensorLayout, ...]
    backward_weight_s: float | None = None
    host_forward_s: float = 0.0
    host_backward_s: float = 0.0


class Cache:
    """Entries for one machine and one way to measure, on disk. An entry that cannot be read is
    measured anew, with a warning.
    """

    def __init__(self, folder: Path | None) -> None:
        """The entries in a folder; None keeps nothing."""
        self._shelf = CacheFolder(folder)

    @property
    def folder(self) -> Path | None:
        """The folder of the entries."""
        return self._shelf.folder

    @property
    def problem(self) -> str | None:
        """The reason if an entry could not be written, else None."""
        return self._shelf.problem

    def get(self, name: str) -> MeasuredClass | None:
        """The measurement of a class; None if there is none."""
        content = self._shelf.get(_file(name))
        if content is None:
            return None
        measured: MeasuredClass = reader(MeasuredClass).validate_json(content)
        return measured

    def put_all(self, measured: Mapping[str, MeasuredClass]) -> None:
        """Stores measurements by the names of their classes; if the folder cannot be written,
        `problem` has the reason.
        """
        for name, one in measured.items():
            self._shelf.put_json(_file(name), asdict(one))

    def ratio(self, name: str) -> float:
        """The operators' times over that of the whole step when a model was measured; 1 if that is
        not known.

        Args:
            name: name of the model.
        """
        known = self._shelf.get_json(_file(f"ratio-{name}"))
        return 1.0 if known is None else float(known)

    def put_ratio(self, name: str, ratio: float) -> None:
        """Stores it; if the folder cannot be written, `problem` has the reason."""
        self._shelf.put_json(_file(f"ratio-{name}"), ratio)


def _file(name: str) -> str:
    return f"{name[:2]}/{name}.entry"


def cache_for(device_name: str, threads: int | None, dtype: str, torch_version: str) -> Cache:
    """The entries that were measured under the same conditions.

    Args:
        device_name: the processor's or the GPU's own name, see `processor`.
        threads: number of CPU threads; None on other devices.
        dtype: the type that operators compute in.
        torch_version: version of PyTorch, such as "2.13.0+cpu".
    """
    # Operators that the user has registered: a change of their file is another conversion.
    own = [hashlib.sha256(source).hexdigest() for source in registered().values()]
    conditions = [METHOD, device_name, threads, dtype, torch_version, _conversion(), *own]
    digest = hashlib.sha256(json.dumps(conditions).encode()).hexdigest()[:16]
    return Cache(cache_root() / "operators" / digest)


@cache
def _conversion() -> str:
    """A hash of the code that turns ONNX operators into torch functions."""
    sources = [_TYPES, *sorted(_CONVERSION.glob("*.py"))]
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()


def processor() -> str:
    """The processor's own name, such as "AMD EPYC 7B13"."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not on Linux
        return platform.processor() or platform.machine()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())
