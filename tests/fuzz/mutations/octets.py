"""Mutations of bytes, and of what a file is at all."""

from random import Random

from tests.fuzz.cases import Content, Folder, Link, Pipe

MARKS = (
    b"\0",
    b"\xff",
    b"\xff\xfe",
    b"\xef\xbb\xbf",
    b"\x1b[2J",
    b"\r\n",
    b"\xed\xa0\x80",
    b"\x80",
)


def octets(random: Random, content: bytes, other: bytes = b"") -> tuple[bytes, str]:
    """Bytes with one change.

    Args:
        other: content to take parts from.
    """
    kind = random.choice(
        ("cut", "flip", "insert", "drop", "repeat", "splice", "overwrite", "end", "empty")
    )
    at = random.randrange(len(content) + 1)
    length = min(random.choice((1, 2, 4, 8, 64, 1024)), len(content))
    match kind:
        case "cut":
            return content[:at], f"cut at {at}"
        case "flip" if content:
            at = min(at, len(content) - 1)
            flipped = content[at] ^ 1 << random.randrange(8)
            return content[:at] + bytes([flipped]) + content[at + 1 :], f"flip a bit at {at}"
        case "insert":
            mark = random.choice(MARKS)
            return content[:at] + mark + content[at:], f"insert {mark!r} at {at}"
        case "drop":
            return content[:at] + content[at + length :], f"drop {length} bytes at {at}"
        case "repeat":
            part = content[at : at + length] * random.choice((2, 10, 1000))
            return content[:at] + part + content[at:], f"repeat {length} bytes at {at}"
        case "splice":
            start = random.randrange(len(other) + 1)
            part = other[start : start + 64]
            return content[:at] + part + content[at:], f"insert another file's bytes at {at}"
        case "overwrite":
            part = bytes(random.randrange(256) for _ in range(length))
            return content[:at] + part + content[at + length :], f"overwrite {length} at {at}"
        case "end":
            return content + random.randbytes(length), f"append {length} bytes"
    return b"", "an empty file"


def no_file(random: Random, name: str) -> tuple[Content, str]:
    """What may lie where a file is expected."""
    found = random.choice(
        (
            Folder(), Pipe(), Link("/dev/zero"), Link("/dev/null"), Link("/dev/full"),
            Link("nowhere"), Link(name.rpartition("/")[2]), Link("/proc/self/mem"), Link("."),
        )
    )  # fmt: skip
    return found, f"{name} is {found}"
