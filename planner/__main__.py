"""`python -m planner`: the same as the command `planner`.

The program is `cli.py` beside this package. It is found by its path, because the current folder, in
which Python looks first here, may have a `cli.py` of the user.
"""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

if __name__ == "__main__":
    spec = spec_from_file_location("planner.cli", Path(__file__).resolve().parents[1] / "cli.py")
    assert spec is not None, "the ending is that of a module"
    assert spec.loader is not None, "a .py file has a loader"
    program = module_from_spec(spec)
    spec.loader.exec_module(program)
    program.start()
