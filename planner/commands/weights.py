"""`planner weights`."""

import json
from pathlib import Path

import click

from planner import api
from planner.commands.terminal import say


@click.command()
@click.argument("checkpoint", metavar="DIR", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), help="ONNX file to write.")
@click.option("--state-dict", type=click.Path(path_type=Path),
              help="File to write a dict of tensors to, by names of initializers, for torch.load.",
              )  # fmt: skip
@click.option("--form", type=click.Choice(["evaluation", "training"]), default="evaluation",
              show_default=True,
              help="BatchNormalization by running statistics and no Dropout, or as the file has"
              " them.")  # fmt: skip
@click.option("--model", type=click.Path(path_type=Path),
              help="The ONNX file that was trained, if it is not where the checkpoint says.",
              )  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def weights(
    checkpoint: Path,
    output: Path | None,
    state_dict: Path | None,
    form: str,
    model: Path | None,
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
    api.check_outputs(written, {"model": model, "checkpoint's model": chosen.model_path})
    done = api.write_weights(chosen, output, state_dict, model=model, form=form)
    if as_json:
        click.echo(json.dumps(weights_json(done)))
    else:
        for line in weights_lines(done):
            say(line)
