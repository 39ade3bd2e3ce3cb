"""Parts of operators measured for a search, whose model is found here."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from planner.support.errors import FileError
from planner.support.reading import File

if TYPE_CHECKING:
    from planner.artefacts.profile import Profile
    from planner.planning.portfolio import Attempts
    from planner.planning.refine import Refinement, Wanted
    from planner.profilers.parts import MeasuredParts


class Refining:
    """Measures parts of operators for `solve`.

    Args:
        profiles: of one model.
        model: its ONNX file; None takes the profiles'.
        progress: called with what is done.

    Raises:
        FileError: if parts can be measured and the model is not there, or is another one.
    """

    def __init__(
        self, profiles: "Sequence[Profile]", model: File | None, progress: Callable[[str], None]
    ) -> None:
        from planner.profilers.parts import obstacle

        self._progress = progress
        self._reason = next(filter(None, map(obstacle, profiles)), None)
        self.done: Refinement | None = None
        place = model or profiles[-1].model_path
        if self._reason is None:
            if place is None or not Path(place).is_file():
                raise FileError(
                    f"--refine: {place or 'the model'} is not there, and parts of its operators are"
                    " measured; give it with --model FILE"
                )
            self._path = Path(place)

    def refined(self, of_sizes: "Sequence[Attempts]") -> "Sequence[Attempts]":
        """The attempts, judged again with measured times; `done` has what came of it."""
        from planner.planning.refine import nothing, refine

        if self._reason is not None:
            self.done = nothing(self._reason)
            return of_sizes
        made, self.done = refine(of_sizes, self._measured)
        return made

    def _measured(self, profile: "Profile", wanted: "Wanted") -> "MeasuredParts":
        from planner.profilers.origin import profiled_model
        from planner.profilers.parts import measure_parts

        self._progress("measuring parts")
        return measure_parts(profiled_model(profile, self._path), profile, wanted)
