"""Packs records of Celery's tasks: leaves out the text that all of them have in common.

store/lua/include/pack.lua describes the form and does the same in scripts.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

#: The end of a body after the arguments, in base64, by its last letters.
_BODY_ENDS = {
    "XQ==": (
        "a",
        "LCB7ImNhbGxiYWNrcyI6IG51bGwsICJlcnJiYWNrcyI6IG51bGwsICJjaGFpbiI6IG51bGws"
        "ICJjaG9yZCI6IG51bGx9XQ==",
    ),
    "fV0=": (
        "b",
        "eyJjYWxsYmFja3MiOiBudWxsLCAiZXJyYmFja3MiOiBudWxsLCAiY2hhaW4iOiBudWxsLCAi"
        "Y2hvcmQiOiBudWxsfV0=",
    ),
    "bH1d": (
        "c",
        "IHsiY2FsbGJhY2tzIjogbnVsbCwgImVycmJhY2tzIjogbnVsbCwgImNoYWluIjogbnVsbCwg"
        "ImNob3JkIjogbnVsbH1d",
    ),
}
_BEHIND_BODY = (
    '", "content-encoding": "utf-8", "content-type": "application/json", '
    '"headers": {"lang": "py", "task": "'
)
_BEHIND_ETA = (
    '+00:00", "expires": null, "group": null, "group_index": null, "retries": 0, '
    '"timelimit": [null, null], "root_id": "'
)
_NO_STAMPS = ', "replaced_task_nesting": 0, "stamped_headers": null, "stamps": {}'
#: The maximum length of a part of a packed record.
LONGEST_PART = 65_535

#: The first of the three letters in a compressed record.
COMPRESSED = b"z"

#: The texts of a compressed message before its task, and before version, digest and frame.
HEADERS, BEFORE_FRAME = b'"headers": {"lang": "py", "task": "', b'}, "x-zstd": "'

#: The texts before and after the ETA of such a record if it is in UTC. They are not stored.
BEFORE_ETA, BEHIND_UTC = b', "eta": "', b"+00:00"

#: The maximum length of step, due time, and the mark of a packed record.
_LONGEST_FRONT = 20

_FLAGS = {flag[0]: flag + _NO_STAMPS for flag in ("false", "null", "true")}

_ENDS = {form.encode(): text.encode() for form, text in _BODY_ENDS.values()}
_BEGINNINGS = {form.encode(): text.encode() for form, text in _FLAGS.items()}
_BEHIND_BODY_BYTES, _BEHIND_ETA_BYTES = _BEHIND_BODY.encode(), _BEHIND_ETA.encode()
_NO_PARENT = b'", "parent_id": null'


def whole(id: str, front: str, text: str) -> str:
    """A record that is not packed."""
    return front + text


def pack(id: str, front: str, text: str) -> str | bytes:
    """A record of its `front` and the JSON `text`, packed if that is of a task with this id."""
    body, _, rest = text.partition(_BEHIND_BODY)
    task, _, rest = rest.partition(f'", "id": "{id}", "shadow": null, "eta": ')
    eta, _, rest = rest.partition(', "argsrepr": "')
    args, _, rest = rest.partition('", "kwargsrepr": "')
    kwargs, _, rest = rest.partition('", "origin": "')
    origin, _, rest = rest.partition('", "ignore_result": ')
    flags, _, rest = rest.partition(f'}}, "properties": {{"correlation_id": "{id}", "reply_to": "')
    reply, _, rest = rest.partition('", "delivery_mode": 2, "delivery_info": {"exchange": "')
    route, is_task, tag = rest.partition(', "body_encoding": "base64", "delivery_tag": "')
    if not is_task or text[0] != "{" or "\\" in task or not text.isascii():
        return front + text
    flags_form = eta_form = "-"
    if (usual := _FLAGS.get(flags[:1])) and flags.startswith(usual):
        flags_form, flags = flags[0], flags[len(usual) :]
    if eta.endswith(usual := f'{_BEHIND_ETA}{id}", "parent_id": null'):
        eta_form, eta = "u", eta[: -len(usual)]
    body_form, body = without_end(body[1:])
    try:
        return (
            f"{front}\1{flags_form}{eta_form}{body_form}"
            f"{length(task)}{task}{length(flags)}{flags}{length(eta)}{eta}"
            f"{length(kwargs)}{kwargs}{length(origin)}{origin}{length(reply)}{reply}"
            f"{length(route)}{route}{length(args)}{args}{length(body)}{body}{tag}"
        ).encode("latin-1")
    except OverflowError:  # one part is too long
        return front + text


def without_end(body: str) -> tuple[str, str]:
    """The letter for the end of a body after the arguments, and the body without that end."""
    form, end = _BODY_ENDS.get(body[-4:], ("-", ""))
    return (form, body[: len(body) - len(end)]) if body.endswith(end) else ("-", body)


def length(text: str) -> str:
    """The length of a part in two letters. Raises OverflowError if it is too long."""
    return _two_letters(len(text))


@cache
def _two_letters(number: int) -> str:
    return number.to_bytes(2, "big").decode("latin-1")


class Glance(NamedTuple):
    """The facts that a packed record shows without unpacking.

    `version` is that of the dictionary; empty if the record is not compressed.
    """

    step: int
    due_ms: int
    task: bytes
    version: bytes


def glance(record: bytes) -> Glance | None:
    """Look at a record of the backlog; None if it is not packed, or has a wait."""
    at = record.find(b"\1", 2, _LONGEST_FRONT)
    if at < 0 or not (due_ms := record[1:at]).isdigit() or b'"wait"' in record:
        return None
    begin, version = at + 4, b""
    if record[at + 1 : at + 2] == COMPRESSED:
        begin += 2 + int.from_bytes(record[begin : begin + 2], "big")
    end = begin + 2 + int.from_bytes(record[begin : begin + 2], "big")
    if record[at + 1 : at + 2] == COMPRESSED:
        head = end + 2 + int.from_bytes(record[end : end + 2], "big")
        version = record[head + 2 : head + 10]
    return Glance(record[0] - 48, int(due_ms), record[begin + 2 : end], version)


def unpack(field: str | bytes, record: bytes) -> bytes:
    """Unpack a record if it is packed; `field` is its name in the hash."""
    at = record.find(b"\1", 1, _LONGEST_FRONT)
    if at < 0 or (at > 1 and not record[1:at].lstrip(b"-").isdigit()) or len(record) < at + 4:
        return record
    name = field if isinstance(field, bytes) else field.encode(errors="surrogateescape")
    id, is_one_of_many, number = name.rpartition(b"\x1f")
    if not (is_one_of_many and number.isdigit()):
        id = name
    start, is_utc = record[:at], record[at + 2 : at + 3] == b"u"
    is_compressed = record[at + 1 : at + 2] == COMPRESSED
    try:
        parts, end = parts_in(record, at + 4, 4 if is_compressed else 9)
    except IndexError:
        return record
    if is_compressed:
        before, task, head, frame = parts
        if is_utc:
            head = BEFORE_ETA + head.replace(b'"', BEHIND_UTC + b'"', 1)
        return _WHOLE_COMPRESSED % (start, before, task, id, head, frame, record[end:])
    task, flags, eta, kwargs, origin, reply, route, args, body = parts
    # `join` takes two thirds of the time of `%`.
    return b"".join(
        (
            start,
            b"{",
            body,
            _ENDS.get(record[at + 3 : at + 4], b""),
            _BEHIND_BODY_BYTES,
            task,
            b'", "id": "',
            id,
            b'", "shadow": null, "eta": ',
            eta,
            _BEHIND_ETA_BYTES + id + _NO_PARENT if is_utc else b"",
            b', "argsrepr": "',
            args,
            b'", "kwargsrepr": "',
            kwargs,
            b'", "origin": "',
            origin,
            b'", "ignore_result": ',
            _BEGINNINGS.get(record[at + 1 : at + 2], b""),
            flags,
            b'}, "properties": {"correlation_id": "',
            id,
            b'", "reply_to": "',
            reply,
            b'", "delivery_mode": 2, "delivery_info": {"exchange": "',
            route,
            b', "body_encoding": "base64", "delivery_tag": "',
            record[end:],
        )
    )


def parts_in(record: bytes, at: int, count: int) -> tuple[list[bytes], int]:
    """Read `count` parts after their lengths, and where they end. Raises IndexError if cut off."""
    parts = []
    for _ in range(count):
        end = at + 2 + (record[at] << 8 | record[at + 1])
        parts.append(record[at + 2 : end])
        at = end
    return parts, at


_WHOLE_COMPRESSED = b"%b{%b" + HEADERS + b'%b", "id": "%b"%b' + BEFORE_FRAME + b'%b"%b'
