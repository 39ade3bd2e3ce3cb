"""The keys of a table in a Python file, read without running the file."""

import ast
from pathlib import Path


def keys_of(path: Path, name: str) -> frozenset[str]:
    """The keys that are strings of a literal dict.

    Args:
        path: of the Python file.
        name: of the variable that the dict is assigned to.

    Raises:
        ValueError: if the file assigns no dict to that name.
    """
    for statement in ast.parse(path.read_text()).body:
        target = statement.target if isinstance(statement, ast.AnnAssign) else None
        if isinstance(target, ast.Name) and target.id == name:
            value = statement.value if isinstance(statement, ast.AnnAssign) else None
            if isinstance(value, ast.Dict):
                keys = [key.value for key in value.keys if isinstance(key, ast.Constant)]
                return frozenset(key for key in keys if isinstance(key, str))
    raise ValueError(f"{path}: expected a dict called {name}")
