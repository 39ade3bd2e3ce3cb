"""The floors of the package: a module imports only from lower floors and from its own folder."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import networkx as nx
import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "planner"

# The folders of the package, a floor a line, from the lowest to the highest.
FLOORS = (
    ("support",),
    ("artefacts",),
    ("model", "clusters", "resharding"),
    ("operators", "schedules"),
    ("profilers", "costs"),
    ("simulator",),
    ("solvers", "launcher"),
    ("planning", "training"),
    ("reports",),
    ("api",),
    ("commands",),
)
FLOOR = {room: height for height, rooms in enumerate(FLOORS) for room in rooms}
MAX_ARROWS = 95
MAX_FILES_AT_THE_ROOT, MAX_FILES_IN_A_FOLDER = 2, 24
MAX_LINES_OF_A_COMMAND = 60

# Rooms that find and open no file, and what they do not call.
WITHOUT_FILES = {"planning", "solvers", "costs", "schedules", "resharding", "simulator"}
OPENING = {
    "Path", "open", "exists", "is_file", "is_dir", "glob", "rglob", "iterdir", "read_text",
    "read_bytes", "write_text", "write_bytes", "read_topology", "find_topology", "find_profile",
    "device_table", "shipped",
}  # fmt: skip

# Packages that take long to load, and the only places that may do so when they are imported.
HEAVY = {
    "torch": (
        "planner/operators",
        "planner/launcher",
        "planner/profilers",
        "planner/model/export",
        "planner/training",
    ),
    "onnx": (
        "planner/model",
        "planner/operators",
        "planner/profilers",
        "planner/training/checkpoints",
    ),
    "onnx_ir": ("planner/model/export",),
    "onnxscript": ("planner/model/export",),
    "sympy": (),
    "onnxruntime": (),
    "ortools": (),
    "gurobipy": (),
    "numba": ("planner/support/jit.py", "planner/solvers/piper/kernels.py"),
    "scipy": (),
    "rich": (),
    "click": ("cli.py", "planner/commands"),
}


ROOT_FILES = {"planner", "planner.__main__"}


def dotted(path):
    """The name of a module, from its file."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {dotted(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def room(module):
    """The folder right under the package that a module is in."""
    return module.split(".")[1]


def imported(nodes):
    """Dotted names of modules or of what is in them."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@cache
def arrows():
    """(module, module that it imports): anywhere in a file, also in functions and for types."""
    found = set()
    for module, path in MODULES.items():
        for name in imported(ast.walk(ast.parse(path.read_text()))):
            target = name if name in MODULES else name.rpartition(".")[0]
            if target in MODULES and target != module:
                found.add((module, target))
    return sorted(found)


def test_no_module_imports_upwards():
    upwards = [
        f"{module} imports {target}"
        for module, target in arrows()
        if "planner" not in (module, target)
        and room(module) != room(target)
        and FLOOR[room(module)] <= FLOOR[room(target)]
    ]
    assert not upwards


def test_few_rooms_know_each_other():
    known = {(room(module), room(target)) for module, target in arrows() if module != "planner"}
    assert len({(a, b) for a, b in known if a != b}) <= MAX_ARROWS


def test_no_two_files_import_each_other_at_any_distance():
    circles = nx.strongly_connected_components(nx.DiGraph(arrows()))
    assert [sorted(circle) for circle in circles if len(circle) > 1] == []


def test_no_module_imports_from_the_package_itself():
    assert [module for module, target in arrows() if target == "planner"] == []


@pytest.mark.parametrize("path", MODULES.values(), ids=dotted)
def test_rooms_of_plans_open_no_file(path):
    """What they need is read at the edge; the files of a simulation are traces."""
    where = path.relative_to(PACKAGE).as_posix()
    if where.split("/")[0] in WITHOUT_FILES and not where.startswith("simulator/traces/"):
        called = {
            node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute)
        }
        assert not called & OPENING


def test_commands_use_the_api_and_reports_and_nothing_else():
    used = {"api", "reports", "support", "commands"}
    assert [
        f"{module} imports {target}"
        for module, target in arrows()
        if module.startswith("planner.commands.") and room(target) not in used
    ] == []


@pytest.mark.parametrize("path", sorted((PACKAGE / "commands").glob("*.py")), ids=dotted)
def test_commands_only_parse_call_and_print(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            assert lines <= MAX_LINES_OF_A_COMMAND, f"{node.name} has {lines} lines"


def test_every_module_has_a_room():
    assert {room(module) for module in MODULES if module not in ROOT_FILES} == set(FLOOR)


def test_no_folder_is_crowded():
    for folder in {path.parent for path in MODULES.values()}:
        limit = MAX_FILES_AT_THE_ROOT if folder == PACKAGE else MAX_FILES_IN_A_FOLDER
        assert len(list(folder.glob("*.py"))) <= limit, folder


@pytest.mark.parametrize("path", [*MODULES.values(), ROOT / "cli.py"], ids=dotted)
def test_heavy_packages_load_only_where_they_are_needed(path):
    where = path.relative_to(ROOT).as_posix()
    for name in imported(ast.parse(path.read_text()).body):
        places = HEAVY.get(name.split(".")[0])
        assert places is None or any(where.startswith(p) for p in places), f"{where}: {name}"


def test_planning_loads_no_torch():
    code = (
        "import sys, planner.planning.portfolio, planner.reports.plans, planner.model.annotated\n"
        "import planner.solvers.antichain.solve, planner.launcher.failures.monitor, planner.model\n"
        "import planner.artefacts.files\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"
