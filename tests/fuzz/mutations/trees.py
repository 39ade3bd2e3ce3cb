"""Mutations of JSON, and of YAML, which JSON is a part of."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from ruamel.yaml import YAML

from tests.fuzz.mutations.values import number, quantity, text

# Texts that are no JSON of a Python value; what readers of JSON and of YAML make of them.
RAW_JSON = (
    "NaN", "Infinity", "-Infinity", "1e400", "-1e400", "9" * 400, "9" * 5000, "[" * 100_000,
    "[" * 5000 + "]" * 5000, '{"a":' * 3000 + "1" + "}" * 3000, "01", "'x'", "undefined", "",
    '"\\ud800"', '"\\u0000"', '1, "format": 1',
)  # fmt: skip
_LAUGHS = ", ".join(
    ["&a0 [x, x]", *(f"&a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12))]
)
RAW_YAML = (
    f"[{_LAUGHS}]",
    ".nan", ".inf", "-.inf", "9" * 400, "9" * 5000, "[" * 3000 + "]" * 3000, "!!set {a, b}",
    "!!python/object:os.x []", "!!binary x", "!!timestamp 2001-01-01", "2001-01-01", "0x1F", "0o17",
    "1_0", "yes",
    "~", "*a", "&a [*a]", "<<", "!a b", "{? [a]: b}", "? a", "|", "@", "%", "\t",
)  # fmt: skip
QUANTITY = re.compile(r"\d+(\.\d*)?")


@dataclass
class Tree:
    """A value of JSON while it is changed.

    Attributes:
        plain: lists, dicts, texts, numbers.
        raw: texts that stand for themselves in the file.
        words: on what was done.
        gentle: whether changed values keep their type and mostly their size, so that readers let
            them pass.
    """

    plain: Any
    raw: tuple[str, ...] = RAW_JSON
    words: list[str] = field(default_factory=list)
    gentle: bool = False

    def mutate(self, random: Random) -> None:
        """One change."""
        place = _place(random, self.plain)
        for _ in range(8 if self.gentle else 0):  # figures are what readers let pass most often
            if place is None or _is_figure(place[0][place[1]]):
                break
            place = _place(random, self.plain, chance=0.95)
        if place is None:
            self.plain = self._value(random, self.plain)
            self.words.append("replace all")
            return
        parent, key, path = place
        if self.gentle:
            self.words.append(f"nudge {path}")
            self.nudge(random, parent, key)
            return
        kind = random.choice(("value", "value", "value", "drop", "add", "copy", "near", "long"))
        if kind == "near" and not isinstance(parent[key], int | float | str):
            kind = "value"
        self.words.append(f"{kind} {path}")
        _CHANGES[kind](self, random, parent, key)

    def _value(self, random: Random, old: Any) -> Any:
        kind = random.randrange(8)
        if kind == 0:
            return _Raw(random.choice(self.raw))
        if kind == 1:
            return random.choice((None, True, False, [], {}, [[]], [None], {"a": 1}, [{}]))
        if kind == 2:
            return _draw(random, self.plain)
        if kind in (3, 4):
            return text(random, (old,) if isinstance(old, str) else ())
        return number(random, old if _is_number(old) else 1)

    def replace(self, random: Random, parent: Any, key: Any) -> None:
        parent[key] = self._value(random, parent[key])

    def near(self, random: Random, parent: Any, key: Any) -> None:
        """A value of the same type."""
        old = parent[key]
        if isinstance(old, bool):
            parent[key] = not old
        elif isinstance(old, str):
            others = tuple(_texts(self.plain))
            parent[key] = random.choice((text(random, others), quantity(random)))
        else:
            parent[key] = number(random, old)

    def nudge(self, random: Random, parent: Any, key: Any) -> None:
        """A value of the same type and mostly of the same size; of a list, one element twice or
        none.
        """
        old = parent[key]
        if isinstance(old, bool):
            parent[key] = not old
        elif isinstance(old, int):
            factor = random.choice((0, 2, 3, 10, 1000, 10**6))
            parent[key] = random.choice((old + 1, old - 1, old * factor))
        elif isinstance(old, float):
            parent[key] = old * random.choice((0, 0.5, 2, 3, 10, 1000, 1e6, 1e-6))
        elif isinstance(old, str):
            parent[key] = _nudged(random, old, _texts(self.plain))
        elif isinstance(old, list) and old:
            at = random.randrange(len(old))
            parent[key] = old[:at] + [old[at]] * random.choice((0, 2)) + old[at + 1 :]
        else:
            self.replace(random, parent, key)

    def drop(self, random: Random, parent: Any, key: Any) -> None:
        del parent[key]

    def add(self, random: Random, parent: Any, key: Any) -> None:
        value = self._value(random, parent[key])
        if isinstance(parent, dict):
            parent[text(random, tuple(map(str, parent)))] = value
        else:
            parent.insert(key, value)

    def copy(self, random: Random, parent: Any, key: Any) -> None:
        """What stands elsewhere."""
        value = _draw(random, self.plain)
        if isinstance(parent, list) and random.random() < 0.5:
            parent.insert(key, value)
        else:
            parent[key] = value

    def lengthen(self, random: Random, parent: Any, key: Any) -> None:
        """A list of many, or an empty one."""
        old = parent[key]
        count = random.choice((0, 2, 100, 30 if isinstance(old, list | dict) else 10_000))
        parent[key] = (old if isinstance(old, list) and old else [old]) * count

    def text(self) -> str:
        """As the file has it."""
        raws: dict[str, str] = {}
        plain = _without_raws(self.plain, raws)
        whole = json.dumps(plain)
        for name, raw in raws.items():
            whole = whole.replace(f'"{name}"', raw)
        return whole


@dataclass(frozen=True)
class _Raw:
    text: str


_CHANGES: dict[str, Callable[[Tree, Random, Any, Any], None]] = {
    "value": Tree.replace, "near": Tree.near, "drop": Tree.drop, "add": Tree.add,
    "copy": Tree.copy, "long": Tree.lengthen,
}  # fmt: skip


def mutated_json(random: Random, content: bytes) -> tuple[bytes, str]:
    """A JSON file with one to three changes."""
    return _mutated(random, Tree(json.loads(content)))


def mutated_yaml(random: Random, content: bytes) -> tuple[bytes, str]:
    """A YAML file with one to three changes, written as JSON."""
    return _mutated(random, Tree(YAML(typ="safe", pure=True).load(content.decode()), RAW_YAML))


def _mutated(random: Random, tree: Tree) -> tuple[bytes, str]:
    tree.gentle = random.random() < 0.5
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        tree.mutate(random)
    return tree.text().encode("utf-8", "surrogatepass"), ", ".join(tree.words)


def _is_figure(value: Any) -> bool:
    is_quantity = isinstance(value, str) and QUANTITY.match(value) is not None
    return is_quantity or isinstance(value, int | float)


def _nudged(random: Random, old: str, known: list[str]) -> str:
    """A quantity that is larger or smaller, another text of the file, or a longer one."""
    quantity = QUANTITY.match(old)
    if quantity is not None:
        factor = random.choice(("0", "0.5", "3", "1000", "1e6", "1e-6", "1e12"))
        return f"{float(factor) * float(quantity[0]):g}{old[quantity.end() :]}"
    return random.choice((random.choice(known or ["x"]), old + random.choice("0x*-.")))


def _place(
    random: Random, plain: Any, path: str = "", chance: float = 0.8
) -> tuple[Any, Any, str] | None:
    """A list or dict, an index or key in it, and the way there.

    Args:
        chance: to go deeper, at every depth.
    """
    if not isinstance(plain, list | dict) or not plain:
        return None
    key = random.choice(list(plain) if isinstance(plain, dict) else range(len(plain)))
    here = f"{path}.{key!s:.40}".encode("ascii", "backslashreplace").decode()
    deeper = _place(random, plain[key], here, chance) if random.random() < chance else None
    return deeper or (plain, key, here.lstrip("."))


def _draw(random: Random, plain: Any) -> Any:
    """A copy of something in a tree."""
    place = _place(random, plain)
    if place is None:
        return None
    found = place[0][place[1]]
    return json.loads(json.dumps(found)) if _is_plain(found) else None


def _is_plain(value: Any) -> bool:
    """Whether there is no raw text in it."""
    if isinstance(value, list | dict):
        return all(map(_is_plain, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, _Raw)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 10**300


def _texts(plain: Any) -> list[str]:
    """Texts in a tree, the first hundred."""
    found: list[str] = []
    rest = [plain]
    while rest and len(found) < 100:
        one = rest.pop()
        if isinstance(one, str) and one:
            found.append(one)
        elif isinstance(one, list | dict):
            rest += list(one.values()) if isinstance(one, dict) else one
    return found


def _without_raws(plain: Any, raws: dict[str, str]) -> Any:
    """The tree with names in place of raw texts, which are put down."""
    if isinstance(plain, _Raw):
        name = f"raw-{len(raws)}-text"
        raws[name] = plain.text
        return name
    if isinstance(plain, dict):
        return {key: _without_raws(value, raws) for key, value in plain.items()}
    return [_without_raws(one, raws) for one in plain] if isinstance(plain, list) else plain
