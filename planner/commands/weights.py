"""`planner weights`."""

import json
from pathlib import Path

import click

from planner import api
from planner.api import WeightsOptions
from planner.commands.options import JSON, file_option, takes
from planner.commands.terminal import say
from planner.support.options import given


@click.command()
@click.argument("checkpoint", metavar="DIR", type=click.Path(path_type=Path))
@file_option("-o", "--output", help="ONNX file to write.")
@file_option("--state-dict", help="File to write a dict of tensors to, by names of initializers,"
             " for torch.load.")  # fmt: skip
@takes(WeightsOptions, "options")
@JSON
def weights(
    checkpoint: Path,
    output: Path | None,
    state_dict: Path | None,
    options: WeightsOptions,
    as_json: bool,
) -> None:
    """Writes the ONNX file that was trained, with the weights of a checkpoint.

    DIR is a folder that `planner launch --checkpoint DIR` has written, of which the newest whole
    checkpoint is taken, or one checkpoint in it.

    \b
    planner weights runs/resnet -o trained.onnx
    planner weights runs/resnet/step-00000100 --state-dict resnet.pt
    """
    from planner.reports.model import weights_json, weights_lines

    chosen = api.find_checkpoint(checkpoint)
    written = {"trained model": output, "state dict": state_dict}
    api.check_outputs(written, {"model": options.model, "checkpoint's model": chosen.model_path})
    done = api.write_weights(chosen, output, state_dict, **given(options))
    if as_json:
        click.echo(json.dumps(weights_json(done)))
    else:
        for line in weights_lines(done):
            say(line)
