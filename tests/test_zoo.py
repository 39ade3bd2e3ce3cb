"""The zoo: what is trained is the module's own, and as PyTorch trains it.

Each network is exported by `planner.export`, cut into two stages, and trained by the launcher; the
losses are compared with a plain PyTorch loop over the module itself.
"""

from functools import partial

import pytest
import torch

import planner
from planner.model.record import read_record
from tests.support.zoo import ZOO, build, draws, journey, pipeline, reference

# One after the other: dropout is fed, a tie, frozen parameters, batch statistics, random numbers.
FAST = ("vae", "preact-resnet", "tied-autoencoder", "mlp-frozen")
ON_TWO_PROCESSES = ("gpt2", "gpt2-dropout", "preact-resnet", "lstm", "mixtral", "vae")
TOLERANCE = 1e-5

NETWORKS = [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in ZOO]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def expected(name, model, seed=0):
    """The losses of the reference, and the parameters that it trained."""
    feeding = partial(draws.fed, model, seed) if ZOO[name].draws else None
    return reference.train(name, feeding)


def names_of(model):
    """The trained parameters, by the module's names, in its order."""
    trained = {p.name for p in model.graph.parameters if p.trainable}
    record = read_record(model.proto)
    known = [one.name for one in record.parameters if one.initializer in trained]
    assert len(known) == len(trained), f"trained and no parameters: {sorted(trained)}"
    return known


def ties_of(module):
    """Every parameter with several names: the first one, and the others."""
    names = {}
    for name, one in module.named_parameters(remove_duplicate=False):
        names.setdefault(one, []).append(name)
    return {first: tuple(others) for first, *others in names.values() if others}


@pytest.mark.parametrize("name", NETWORKS)
def test_trains_as_pytorch_does(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module, inputs = build(name)
    planner.export(module, inputs, tmp_path / "model.onnx")
    model = pipeline.read(name, tmp_path / "model.onnx")
    record = read_record(model.proto)
    assert {p.name: p.aliases for p in record.parameters if p.aliases} == ties_of(module)

    losses = pipeline.train(name, model, tmp_path)
    wanted, trained = expected(name, model)
    assert names_of(model) == trained
    assert losses == pytest.approx(wanted, rel=TOLERANCE)
    assert abs(wanted[-1] - wanted[0]) > 1e-4 * wanted[0], "nothing was learned"


def test_the_zoo_has_the_networks_that_matter():
    """The list of the families that have to be there, at least."""
    assert len(ZOO) >= 45
    assert ZOO.keys() >= {
        "gpt2", "llama", "qwen2", "qwen3", "mistral", "gemma", "phi", "opt", "bloom", "t5", "bart",
        "bert", "deberta", "vit", "swin", "convnext", "detr", "clip", "whisper", "wav2vec2",
        "mamba", "mamba2", "mixtral", "qwen2-moe", "diffusion-unet", "lstm", "bilstm", "gru",
        "wavenet", "dlrm", "vae", "spatial-transformer", "gan-generator", "preact-resnet",
        "gnn-scatter",
    }  # fmt: skip


@pytest.fixture(scope="module")
def on_two_processes(tmp_path_factory):
    """Plans, models and losses of networks on the user's way, by one start of torchrun."""
    folders = [tmp_path_factory.mktemp(name) for name in ON_TWO_PROCESSES]
    plans = []
    for name, folder in zip(ON_TWO_PROCESSES, folders, strict=True):
        path = folder / "model.onnx"
        journey.export_by_planner(name, path)
        profile = journey.profiled(name, path)
        assert journey.solved(profile).plan is not None
        plans.append(journey.two_stages(profile))
        journey.prepared(name, path, plans[-1])
    losses = journey.launched(folders)
    return dict(zip(ON_TWO_PROCESSES, zip(folders, plans, losses, strict=True), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_TWO_PROCESSES)
def test_trains_on_two_processes_as_pytorch_does(name, on_two_processes):
    folder, plan, losses = on_two_processes[name]
    model = pipeline.read(name, folder / "model.onnx")
    assert len({device for stage in plan.strategy.stages for device in stage.devices}) == 2
    wanted, _ = expected(name, model, plan.seed)
    assert losses == pytest.approx(wanted, rel=TOLERANCE)


@pytest.mark.slow
def test_gpt2_by_torchs_default_trains_all_of_its_parameters(tmp_path, monkeypatch):
    """The exporter merges initializers of equal values; they are parted again, with a warning."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "model.onnx"
    journey.export_by_torch("gpt2", path)
    model = pipeline.read("gpt2", path)
    assert sum(p.trainable for p in model.graph.parameters) == 28
    assert any("planner.export" in warning for warning in model.warnings)
    wanted, _ = expected("gpt2", model)
    assert pipeline.train("gpt2", model, tmp_path) == pytest.approx(wanted, rel=TOLERANCE)
