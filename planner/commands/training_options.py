"""Options of `planner launch` about the training itself: the fields of the launcher's settings."""

from pathlib import Path

import click

from planner.commands.options import stacked

LOOP = stacked(
    click.option("--steps", type=click.IntRange(1), metavar="N",
                 help="Optimizer steps, counted from the very first.  [default: 10]"),
    click.option("--epochs", type=click.IntRange(1), metavar="N",
                 help="Passes over the dataset of --data, instead of --steps."),
    click.option("--optimizer", type=click.Choice(["sgd", "momentum", "adam", "adamw"]),
                 help="Optimizer, with at most the state that was planned."
                 "  [default: the strategy's]"),
    click.option("--lr", "learning_rate", type=float,
                 help="Learning rate.  [default: the optimizer's usual one]"),
    click.option("--lr-schedule", default="constant", show_default=True, metavar="SCHEDULE",
                 help="Factor of the learning rate: constant, linear:W:N or cosine:W:N (W steps of"
                 " warm-up, 0 at step N; by default 0 and the last step), or your"
                 " module:function (step) -> factor."),
    click.option("--weight-decay", type=float,
                 help="Weight decay.  [default: the optimizer's usual one]"),
    click.option("--clip", type=float, metavar="NORM",
                 help="Largest norm of all gradients together; longer ones are scaled down."),
    click.option("--nan", type=click.Choice(["stop", "skip"]),
                 help="End the training, or leave the step out, where a loss or gradient is not"
                 " finite.  [default: go on]"),
    click.option("--dtype", type=click.Choice(["float64", "float32", "bfloat16", "float16"]),
                 help="Type that products and convolutions are computed in (autocast); float16 has"
                 " a loss scale.  [default: the strategy's]"),
    click.option("--data", metavar="MODULE:CALLABLE",
                 help="Function without required parameters that returns a dataset or a DataLoader"
                 " with the batch of a step, or function (step, microbatch, inputs) -> (tensors by"
                 " input, target).  [default: synthetic data]"),
    click.option("--shuffle/--no-shuffle", default=True, show_default=True,
                 help="Draw the samples of a dataset in another order in each epoch; a DataLoader"
                 " says that itself."),
    click.option("--eval-data", metavar="MODULE:CALLABLE",
                 help="The same for a dataset to evaluate on: loss, accuracy and --metric."),
    click.option("--eval-every", type=click.IntRange(1), metavar="N",
                 help="Evaluate after every N steps.  [default: after the last one]"),
    click.option("--metric", "metrics", multiple=True, metavar="MODULE:FUNCTION",
                 help="Function (output, target) -> number, a mean over samples; may be repeated."),
    click.option("--log", type=click.Path(path_type=Path),
                 help="Write a line of JSON for each step and evaluation."),
    click.option("--threads", type=click.IntRange(1),
                 help="CPU threads per rank.  [default: as in the profile]"),
    click.option("--seed", type=int,
                 help="Seed of synthetic data and of random operators, such as Dropout."
                 "  [default: the strategy's]"),
)  # fmt: skip
"""How the model is trained."""
