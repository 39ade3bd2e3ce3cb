"""What was measured of operators before, in the user's cache folder.

An entry is found by its content: the class of the operator (classes.py), the machine, PyTorch and
the sources of the conversion. So an entry is never wrong, only no longer asked for; the folder may
be deleted at any time.
"""

import hashlib
import json
import platform
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path

from platformdirs import user_cache_path

from planner.errors import FileError
from planner.files import write_atomically
from planner.profilers.classes import Flow

METHOD = 3
"""Of measuring; a new one makes all entries stale."""

_CONVERSION = Path(__file__).resolve().parent.parent / "operators"


@dataclass(frozen=True, slots=True)
class Measured:
    """What was found out about a class of operators. Names are places in the list of an operator's
    inputs, outputs and parameters, one after the other, as its `Operator` lists them.

    Attributes:
        forward_s: median time of a forward pass, in s.
        backward_s: the same for a backward pass.
        interval: as `OperatorCost.interval`.
        spread: (slowest - fastest) / median of forward and backward together.
        repetitions: number of times that it was timed.
        flops: of a forward pass.
        workspace_bytes: as `OperatorCost.workspace_bytes`.
        kept: places of the tensors that autograd keeps.
        private_bytes: what it keeps besides.
        views: pairs of places: a tensor, and what it is a view of.
        outputs: its outputs in order, as they arrive at others.
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
    outputs: tuple[Flow, ...]


@dataclass
class Cache:
    """Entries for one machine and one way to measure, on disk.

    Attributes:
        folder: of the entries; None keeps nothing.
        problem: why nothing could be written; None while all is well.
    """

    folder: Path | None
    problem: str | None = field(default=None, init=False)

    def get(self, name: str) -> Measured | None:
        """What is known of a class.

        Raises:
            FileError: if an entry is damaged.
        """
        if self.folder is None:
            return None
        path = self._path(self.folder, name)
        try:
            plain = json.loads(path.read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            return None
        except ValueError as error:
            raise FileError(f"{path}: expected JSON: {error}; delete the file") from None
        outputs = tuple(
            Flow(**{**one, "shape": tuple(one["shape"]), "stride": tuple(one["stride"])})
            for one in plain["outputs"]
        )
        views = tuple((tensor, base) for tensor, base in plain["views"])
        return Measured(
            **{**plain, "kept": tuple(plain["kept"]), "views": views, "outputs": outputs}
        )

    def put(self, name: str, measured: Measured) -> None:
        """Keep what was found; where the folder cannot be written, `problem` says why."""
        if self.folder is None or self.problem:
            return
        content = json.dumps(asdict(measured), sort_keys=True).encode()
        try:
            write_atomically(self._path(self.folder, name), content)
        except FileError as error:
            self.problem = str(error)

    @staticmethod
    def _path(folder: Path, name: str) -> Path:
        return folder / name[:2] / f"{name}.json"


def cache_for(device_name: str, threads: int | None, dtype: str, torch_version: str) -> Cache:
    """The entries that were measured under the same conditions.

    Args:
        device_name: the processor's or the GPU's own name, see `processor`.
        threads: of the CPU, None elsewhere.
        dtype: that operators compute in.
        torch_version: such as "2.13.0+cpu".
    """
    conditions = [METHOD, device_name, threads, dtype, torch_version, _conversion()]
    digest = hashlib.sha256(json.dumps(conditions).encode()).hexdigest()[:16]
    return Cache(user_cache_path("planner", appauthor=False) / "operators" / digest)


@cache
def _conversion() -> str:
    """A hash of the code that turns ONNX operators into torch functions."""
    sources = sorted(_CONVERSION.glob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()


def processor() -> str:
    """The processor's own name, such as "AMD EPYC 7B13"."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not on Linux
        return platform.processor() or platform.machine()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())
