"""Values that a reader may not expect. None of the texts reads "nan" or "inf", so that an output
with such a number has computed it.
"""

from random import Random

HUGE = 10**400
INTEGERS = (0, 1, 2, 3, -1, -2, 7, 255, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64,
            -(2**31), -(2**63), 10**6, 10**9, 10**12, 10**18, 10**30, HUGE)  # fmt: skip
FLOATS = (0.0, -0.0, 0.5, -0.5, 1e-320, 1e-12, 1e6, 1e18, 1e38, 1e300, 1.7e308, -1e300, 1e-9)
TEXTS = (
    "", " ", "x", "0", "-1", "1e999", "x" * 300, "x" * 20_000, "\x00", "a\x00b", "a\nb", "a\rb",
    "\t", "\x1b[31mred\x1b[0m", "\x1b]0;title\x07", "\x9b31m", "\x7f", "\x08\x08", "\u202eab\u202c",
    "\u2066a", "\u2028", "\ufeff", "\ud800", "a\udfffb", "\U0001f600", "ä", "[red]x[/red]", "[/]",
    "<script>alert(1)</script>", '"><x y="', "]]>", "&amp;&x;", "{}", "%s%n", "${HOME}", "$(id)",
    "`id`", "a b", "a,b", "a=b", "a: b", "- a", "# a", "*a", "&a", "!!a", "../../../etc/passwd",
    "/etc/passwd", "/dev/zero", "/dev/full", "C:\\x", ".", "..", "/", "~", "a/b", "a//b", "a\\b",
    '"', "'", "\\", "--help", "-1", "None", "null", "true", "x -- y", "}\n[", "label=\"",
)  # fmt: skip
UNITS = ("B", "GB", "GiB", "TiB", "GB/s", "Gbps", "us", "s", "ms", "TFLOP/s", "XB", "", "%")
FIGURES = ("0", "-1", "1e999", "1e308", "1e-320", "0.0000001", "99999999999999999999", "1", "0x10",
           "1_000", "\u0661", "+1", "1.", ".5", "1e", "", "9" * 400)  # fmt: skip


def text(random: Random, known: tuple[str, ...] = ()) -> str:
    """A text: a strange one, one of those known, or a known one with a change."""
    kind = random.randrange(4 if known else 1)
    if kind == 0:
        return random.choice(TEXTS)
    one = random.choice(known)
    if kind == 1:
        return one
    at = random.randrange(len(one) + 1)
    return one[:at] + random.choice(TEXTS) + one[at + (kind == 2) :]


def quantity(random: Random) -> str:
    """A quantity, with or without a unit."""
    return f"{random.choice(FIGURES)} {random.choice(UNITS)}"


def number(random: Random, near: float = 1) -> int | float:
    """A number: a strange one, or one made from another one."""
    kind = random.randrange(3)
    if kind == 0:
        return random.choice(INTEGERS)
    if kind == 1:
        return random.choice(FLOATS)
    changed = random.choice((-1, 0.5, 2, 10, 1000, 10**6, 10**12)) * near
    is_whole = isinstance(near, int) and float(changed).is_integer()
    return int(changed) if is_whole else changed
