"""Puts the rules by which operators split into the shipped profiles, and the growth of computed
ones. Figures stay as they are.

    python -m tests.bench.shipped_rules                    # all profiles
    python -m tests.bench.shipped_rules gpt2 resnet50      # some

Rules and growth are facts of the graph, so the models are written anew (tests/support/models.py)
with random weights, and what was measured is not measured again. A computed profile is computed
again, and has to be the same but for what older planners left out: losses and modules.
"""

import argparse
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from planner.artefacts.files import write_profiles
from planner.artefacts.formats.any import read_any_profiles
from planner.artefacts.profile import Source
from planner.model.load import ReadOptions, load
from planner.profilers.engines import profile_with
from planner.profilers.options import Measuring, ProfileEngine
from planner.profilers.rules import with_rules
from tests.support.models import LARGE, MODELS, SYNTHETIC

ADDED = ("growth", "loss_costs", "modules")
"""Fields of a computed profile that it gets from the model."""
FOLDER = Path(__file__).parent.parent.parent / "profiles"


def model_name(stem):
    """The model of a profile: its name begins with it.

    >>> model_name("llama7b-a100"), model_name("gpt2-medium-a100"), model_name("gpt2")
    ('llama7b', 'gpt2-medium', 'gpt2')
    """
    known = [name for name in (*MODELS, *LARGE, *SYNTHETIC) if stem.startswith(name)]
    return max(known, key=len)


def written(name, folder):
    """The file of a model, which is written where it is not there."""
    path = folder / f"{name}.onnx"
    if not path.exists():
        path.write_bytes({**MODELS, **LARGE, **SYNTHETIC}[name]().SerializeToString())
    return path


def renewed(profile, path):
    """A profile with the rules of its model, and its growth if it is computed.

    Raises:
        ValueError: if the model has other operators than the profile, or a computed one is other.
    """
    options = ReadOptions(batch=profile.microbatch_size, dimensions=profile.dimensions)
    model = load(path, options, known_hash="")
    if facts(model.graph) != facts(profile.graph):
        raise ValueError(f"{path}: expected the operators of the profile, got others")
    if profile.source is not Source.ANALYTIC:
        return with_rules(profile, model)
    types = {"dtype": profile.dtype, "parameters": profile.parameter_dtype}
    how = Measuring(device=profile.device_type, **types)
    computed = profile_with(ProfileEngine.ANALYTIC, model, profile.model_path, how)
    kept = {name: getattr(profile, name) for name in ("model_hash", "versions")}
    added = {name: getattr(computed, name) for name in ADDED}
    if replace(computed, **kept) != replace(profile, **added):
        raise ValueError(f"{path}: expected the figures of the profile, got others")
    return replace(profile, **added)


def facts(graph):
    """All of a graph but element types, which autocast changes."""
    sizes = [(one.name, one.shape) for one in (*graph.tensors, *graph.parameters)]
    return sizes, graph.operators, graph.inputs, graph.outputs


def main():
    """Writes the profiles that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="such as gpt2; all without")
    parser.add_argument("--models", type=Path, help="folder in which models are kept")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        for path in sorted(FOLDER.glob("*.json")):
            if options.names and path.stem not in options.names:
                continue
            begin = time.perf_counter()
            onnx_file = written(model_name(path.stem), options.models or Path(scratch))
            profiles = [renewed(one, onnx_file) for one in read_any_profiles(path)]
            write_profiles(profiles, path)
            print(f"{path.name}: {time.perf_counter() - begin:.1f} s", flush=True)


if __name__ == "__main__":
    main()
