"""Paths of the modules of a network, such as "model.layers.0.mlp", for people."""

from collections.abc import Sequence


def block_of(path: str) -> str:
    """The path up to its first number, the whole path without any.

    >>> block_of("h.0.attn.c"), block_of("wte")
    ('h.0', 'wte')
    """
    parts = path.split(".")
    numbered = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
    return path if numbered is None else ".".join(parts[: numbered + 1])


def blocks(paths: Sequence[str]) -> tuple[str, ...]:
    """The numbered modules among some, each once, in order. Modules without a number are told as
    they are, and the whole network, "", only where there is nothing else.

    >>> blocks(["", "wte", "h.0.ln", "h.0.attn.c", "h.1.ln", "ln_f"])
    ('wte', 'h.0', 'h.1', 'ln_f')
    """
    lifted = dict.fromkeys(map(block_of, paths))
    named = tuple(path for path in lifted if path)
    return named or tuple(lifted)


def from_to(paths: Sequence[str]) -> str:
    """Modules in a few words: the first and the last.

    >>> from_to(["wte", "h.0", "h.1"]), from_to(["h.0"]), from_to([""])
    ('wte .. h.1', 'h.0', 'the whole network')
    """
    ends = [path or "the whole network" for path in paths]
    return " .. ".join(dict.fromkeys([*ends[:1], *ends[-1:]]))


def part_of_block(path: str) -> str:
    """The path up to the name behind its first number, the whole path without any.

    >>> part_of_block("h.0.attn.c"), part_of_block("h.0"), part_of_block("wte")
    ('h.0.attn', 'h.0', 'wte')
    """
    block = block_of(path)
    part = path.removeprefix(block).strip(".").partition(".")[0]
    return f"{block}.{part}" if part else block
