"""The layers of the package: a module imports only from lower layers and from its own folder."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

LAYERS = {
    "errors": 0, "derived": 0, "units": 0, "jit": 0, "__init__": 0,
    "graph": 1, "topology": 1, "routes": 1,
    "profile": 2, "strategy": 2, "order": 2, "windows": 2, "blocks": 2, "contraction": 2,
    "interpolate": 2,
    "prediction": 3,
    "formats": 3, "actions": 3, "dry_run": 3, "dry_run_kernels": 3, "schedules": 3,
    "schedules_blocks": 3, "schedules_shared": 3, "problem": 3, "pins": 3,
    "files": 3, "clusters": 3,
    "clusters_building": 3, "clusters_levels": 3, "clusters_schema": 3,
    "coarsen": 3, "model": 3,
    "costs": 4, "operators": 4, "placement": 4.5,
    "profilers": 5, "solvers": 5, "simulate": 5,
    "judge": 5.5, "plan": 6, "trace_comparison": 6, "reports": 8, "partition": 6, "foreign": 6,
    "launch": 7, "commands": 9,
    "places": 2, "pictures": 2, "pictures_layout": 2, "pictures_svg": 2, "what_if": 3,
    "calibration": 2, "calibrate": 6, "calibration_runs": 6.5, "sensitivity": 6,
    "link_fit": 3, "probing": 3, "write_topology": 3,
}  # fmt: skip

# Packages that take long to load, and the only places that may do so when they are imported.
HEAVY = {
    "torch": ("planner/operators", "planner/launch", "planner/profilers"),
    "onnxruntime": (),
    "ortools": (),
    "gurobipy": (),
    "numba": ("planner/jit.py",),
    "rich": (),
    "click": ("cli.py", "planner/commands"),
}
MODULES = sorted([*(ROOT / "planner").rglob("*.py"), ROOT / "cli.py"])


def imports(path, *, top_level_only=False):
    """Dotted names that a module imports; those for type checkers only are left out."""
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_level_only else list(ast.walk(tree))
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in nodes:
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def part(dotted):
    """The module or folder right under the package."""
    pieces = dotted.split(".")
    return pieces[1] if len(pieces) > 1 else "__init__"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_only_from_lower_layers(path):
    if path.name == "cli.py":
        return
    relative = path.relative_to(ROOT / "planner")
    own = relative.parts[0].removesuffix(".py")
    for dotted in imports(path):
        if dotted.split(".")[0] != "planner":
            continue
        other = part(dotted)
        if other in LAYERS and other != own:
            same_layer_is_fine = LAYERS[own] < 4 or own in ("plan", "partition")
            allowed = (
                LAYERS[other] <= LAYERS[own]
                if same_layer_is_fine
                else (LAYERS[other] < LAYERS[own])
            )
            assert allowed, f"{relative} imports {dotted}"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_heavy_packages_load_only_where_they_are_needed(path):
    where = path.relative_to(ROOT).as_posix()
    for dotted in imports(path, top_level_only=True):
        places = HEAVY.get(dotted.split(".")[0])
        assert places is None or any(where.startswith(p) for p in places), f"{where}: {dotted}"


def test_every_module_has_a_layer():
    parts = {p.relative_to(ROOT / "planner").parts[0].removesuffix(".py") for p in MODULES[:-1]
             if p.is_relative_to(ROOT / "planner")}  # fmt: skip
    assert {p for p in parts if p != "__pycache__"} <= set(LAYERS)


def test_planning_loads_no_torch():
    import subprocess

    code = (
        "import sys, planner.judging.portfolio, planner.reports.solve, planner.partition\n"
        "import planner.files\n"
        "import planner.solvers.antichain.solve, planner.launcher.torchrun, planner.model\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"
