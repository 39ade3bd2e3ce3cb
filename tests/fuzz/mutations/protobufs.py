"""Mutations of any protobuf message: a field of it, or of a message in it, is changed."""

from math import inf, nan
from random import Random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor as Field

from tests.fuzz.mutations.values import FLOATS, INTEGERS, text

_BITS = {Field.TYPE_INT32: 32, Field.TYPE_INT64: 64, Field.TYPE_ENUM: 8, Field.TYPE_UINT64: 64}


def mutate(random: Random, message: Any) -> str:
    """Changes one field; says which."""
    target, path = _within(random, message)
    field = _field(random, target)
    if field is None:
        return "nothing"
    path = f"{path}.{field.name}"
    try:
        if field.is_repeated:
            return f"{_repeated(random, getattr(target, field.name), field, message)} {path}"
        return f"{_single(random, target, field, message)} {path}"
    except (ValueError, TypeError) as error:  # what protobuf itself does not let in
        return f"nothing, {path}: {type(error).__name__}"


def _within(random: Random, message: Any, path: str = "") -> tuple[Any, str]:
    """The message or one inside of it, and the way there."""
    inside = [
        (field, value)
        for field, value in message.ListFields()
        if field.message_type is not None and (not field.is_repeated or len(value))
    ]
    if not inside or random.random() < 0.15:
        return message, path
    field, value = random.choice(inside)
    if not field.is_repeated:
        return _within(random, value, f"{path}.{field.name}")
    at = random.randrange(len(value))
    return _within(random, value[at], f"{path}.{field.name}[{at}]")


def _field(random: Random, message: Any) -> Any:
    """A field, more often one that is set."""
    given = [field for field, _ in message.ListFields()]
    every = list(message.DESCRIPTOR.fields)
    chosen = given if given and random.random() < 0.8 else every
    return random.choice(chosen) if chosen else None


def _single(random: Random, message: Any, field: Any, whole: Any) -> str:
    if message.HasField(field.name) and random.random() < 0.2:
        message.ClearField(field.name)
        return "clear"
    if field.message_type is not None:
        getattr(message, field.name).CopyFrom(_another(random, whole, field.message_type))
        return "copy into"
    setattr(message, field.name, _scalar(random, field, getattr(message, field.name)))
    return "set"


def _repeated(random: Random, values: Any, field: Any, whole: Any) -> str:
    kind = random.choice(("drop", "add", "change", "swap", "double", "many", "clear"))
    at = random.randrange(len(values)) if len(values) else 0
    is_message = field.message_type is not None
    if kind == "clear":
        del values[:]
    elif kind == "drop" and len(values):
        del values[at]
    elif kind == "swap" and len(values) > 1:
        parts = [values[i] for i in range(len(values))]
        other = random.randrange(len(parts))
        parts[at], parts[other] = parts[other], parts[at]
        copies = [_copy(part) if is_message else part for part in parts]
        del values[:]
        values.extend(copies)
    elif kind in ("double", "many") and len(values):
        one = _copy(values[at]) if is_message else values[at]
        values.extend([one] * (1 if kind == "double" else 300))
    elif is_message:
        values.add().CopyFrom(_another(random, whole, field.message_type))
    elif kind == "change" and len(values):
        values[at] = _scalar(random, field, values[at])
    else:
        values.append(_scalar(random, field, 1 if field.type in _BITS else None))
    return kind


def _copy(message: Any) -> Any:
    copy = type(message)()
    copy.CopyFrom(message)
    return copy


def _another(random: Random, whole: Any, kind: Any) -> Any:
    """A message of a type from anywhere in the whole, or an empty one."""
    found = [one for one in _all(whole) if one.DESCRIPTOR is kind]
    return _copy(random.choice(found)) if found else kind._concrete_class()


def _all(message: Any) -> list[Any]:
    found = [message]
    for field, value in message.ListFields():
        if field.message_type is not None:
            for one in value if field.is_repeated else [value]:
                found += _all(one)
    return found


def _scalar(random: Random, field: Any, old: Any) -> Any:
    if field.type in _BITS:
        bits = _BITS[field.type]
        least, most = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
        near = [old + 1, old - 1, -old, 2 * old] if isinstance(old, int) else []
        fitting = [one for one in (*INTEGERS, *near * 3) if least <= one <= most]
        return random.choice(fitting)
    if field.type in (Field.TYPE_FLOAT, Field.TYPE_DOUBLE):
        return random.choice((*FLOATS, nan, inf, -inf))
    if field.type == Field.TYPE_STRING:
        return text(random, (old,) if old else ()).encode("utf-8", "replace").decode()
    made = text(random).encode("utf-8", "surrogatepass")
    return random.choice((made, (old or b"")[:-1], (old or b"") + made, bytes(64), b"\xff\xfe"))
