"""The command line: its commands are in `planner/commands`."""

from planner.commands.signals import ended_at_once, ended_by_signals

with ended_at_once():  # until `start` takes over, a moment later
    import click

    from planner import __version__
    from planner.commands.calibrate import calibrate
    from planner.commands.compare import compare
    from planner.commands.compare_trace import compare_trace
    from planner.commands.convert import convert
    from planner.commands.errors import Commands, ranks_leave_at_once
    from planner.commands.export import export
    from planner.commands.hashes import start_with_one_hash_seed
    from planner.commands.inspect import inspect
    from planner.commands.launch import launch
    from planner.commands.profile import profile
    from planner.commands.simulate import simulate
    from planner.commands.solve import solve
    from planner.commands.topology import topology
    from planner.commands.weights import weights

    @click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
    @click.version_option(__version__)
    def main() -> None:
        """Plans how to train an ONNX model on several devices, says how good that is, and runs it.

        \b
        planner export nets:model -o model.onnx
        planner profile model.onnx
        planner solve --gpus 8 --topology p3.yaml
        torchrun --nproc-per-node 8 --no-python planner launch strategy.json
        """

    for command in (
        export, inspect, profile, solve, compare, simulate, launch, compare_trace, calibrate,
        topology, convert, weights,
    ):  # fmt: skip
        main.add_command(command)


def start() -> None:
    """The program."""
    start_with_one_hash_seed()
    with ended_by_signals(), ranks_leave_at_once():
        main()


if __name__ == "__main__":
    start()
