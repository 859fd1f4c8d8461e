"""Compresses records of Celery's tasks with a dictionary of their queue.

Scripts move a compressed message like any other text: its task, id, ETA, retries and tenant stay in
front, where scripts read and change them. The compressed rest has neither quotes nor zeros. Records
of the backlog are shorter still: see store/lua/include/pack.lua.

    {"headers": {"lang": "py", "task": "…", "id": "…", "eta": …}, "x-zstd": "…"}

The last member has the version of the dictionary, a digest, and a frame.
"""

from __future__ import annotations

import hashlib
import re
from binascii import a2b_base64, b2a_base64
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..errors import MessageError
from . import zstd
from .packing import (
    BEFORE_ETA,
    BEFORE_FRAME,
    BEHIND_UTC,
    COMPRESSED,
    HEADERS,
    LONGEST_PART,
    pack,
    unpack,
)

#: In every compressed message, and in no other message of Kombu: quotes in its texts are escaped.
MARK = b'"x-zstd": "'

_FRONT = r'(?:"due_ms": ?-?\d+, ?)?(?:"wait": ?\{[^}]*\}, ?)?(?:"ticket": ?"[^"]*", ?)?'
_TASK = re.compile(
    r"\{(" + _FRONT + r')("body": "([A-Za-z0-9+/=]*)"([^{"]*(?:"[^"\\]*"[^{"]*)*)'
    r'\{"lang": "py", "task": "([^"\\]*)", "id": "([^"\\]*)"'
    r'([^{}]*?"eta": )(null|"[^"\\{}]*")(.*))\}',
    re.DOTALL,
)
_TENANT = re.compile(r'"tenant": ?("[^"\\{}]*")')
_RETRIES = re.compile(r'"group_index": ?[^,"{}]*, ?"retries": ?(\d+)')
#: Scripts read these headers, so a message with one of them is not compressed.
_UNUSUAL = '"delayed_answer":', '"delayed_until":', '"delayed_unique":'
#: The member that scripts add to the end of a message that was delivered before.
_DELIVERIES, _LONGEST_DELIVERIES = re.compile(r', ?"deliveries": ?\d+\}$'), 40
#: The parts that depend on the sender, in the order in which Celery and Kombu write them.
_SENDER = '"eta": "', '"origin": "', '"reply_to": "', '"delivery_tag": "'

_IN_FRONT = re.compile(rb"[^{]?\d*\{" + _FRONT.encode())
_RECORD = re.compile(rb".-?\d*\x01" + COMPRESSED, re.DOTALL)
_UTC = re.compile(BEFORE_ETA + b'([^"]*)' + re.escape(BEHIND_UTC) + b'"')
_ETA = re.compile(rb', "eta": ?(null|"[^"]*")')
_RETRIED = re.compile(rb'("group_index": ?[^,"{}]*, ?"retries": ?)\d+')

#: Bytes with a meaning outside of a frame, and their escapes within a frame.
_ESCAPES = (b"\1", b"\0011"), (b"\0", b"\0010"), (b'"', b"\0012"), (b"\\", b"\0013")
_ESCAPED = {escape[1:]: byte for byte, escape in _ESCAPES}


class Unknown(MessageError):
    """A message is compressed with a dictionary that this process does not know."""

    def __init__(self, version: bytes) -> None:
        """`version` is that of the dictionary."""
        self.version = version
        super().__init__(f"the dictionary {version!r} of a compressed message is lost")


class Parts(NamedTuple):
    """A message in parts: `head` stays readable, `content` is compressed."""

    front: str
    task: str
    head: str
    digest: str
    content: bytes
    behind: str


_codecs: dict[bytes, zstd.Codec] = {}

#: How many dictionaries a process keeps loaded.
MOST_CODECS = 256


def version_of(dictionary: bytes) -> bytes:
    """The version of a dictionary, a digest of it."""
    return hashlib.sha1(dictionary, usedforsecurity=False).hexdigest()[:8].encode()


def learn(dictionary: bytes) -> bytes:
    """Load a dictionary into this process; returns its version. Raises CompressionError."""
    version = version_of(dictionary)
    if version not in _codecs:
        for oldest in [*_codecs][: max(len(_codecs) + 1 - MOST_CODECS, 0)]:
            _codecs.pop(oldest, None)
        _codecs[version] = zstd.Codec(dictionary)
    return version


def known(version: bytes) -> zstd.Codec | None:
    """The codec of a loaded dictionary, or None."""
    return _codecs.get(version)


def codec(version: bytes) -> zstd.Codec:
    """The codec of a dictionary. Raises Unknown if it is not loaded."""
    try:
        return _codecs[version]
    except KeyError:
        raise Unknown(version) from None


def split(id: str, text: str) -> Parts | None:
    """Split a message into its parts; None if it is not one that can be compressed."""
    behind_frame = "}"
    if '"deliveries"' in text[-_LONGEST_DELIVERIES:] and (counted := _DELIVERIES.search(text)):
        text, behind_frame = text[: counted.start()] + "}", counted[0]
    found = _TASK.fullmatch(text)
    if found is None or found[6] != id or not id or not text.isascii():
        return None
    if '"delayed_' in text and any(name in text for name in _UNUSUAL):
        return None
    front, _, body, between, task, _, before, eta, behind = found.groups()
    raw = _decoded(body)
    head = _head(before, eta, behind)
    if raw is None or head is None or "\0" in text or "\1" in text:
        return None
    whole, short = f'"{id}"', '"\1"'
    texts = "\0".join((between, before.replace(whole, short), behind.replace(whole, short), ""))
    digest = digest_of(same_of(found[2], head))
    return Parts(front, task, head, digest, texts.encode() + raw, behind_frame)


def _as_first(retries: re.Match[str]) -> str:
    return retries[0][: -len(retries[1])] + "0"


def _decoded(body: str) -> bytes | None:
    try:
        raw = a2b_base64(body)
    except ValueError:
        return None
    # The body round-trips if its last bytes do and the decoder has skipped nothing.
    last = raw[(len(raw) - 1) // 3 * 3 :]
    is_same = body.endswith(b2a_base64(last, newline=False).decode())
    return raw if is_same and len(body) == (len(raw) + 2) // 3 * 4 else None


def _head(before: str, eta: str, behind: str) -> str | None:
    """The headers that scripts read and change; None if scripts would have to search for them."""
    head = f', "eta": {eta}'
    retries = _RETRIES.search(behind)
    if retries is None:
        return None
    if retries[1] != "0":
        head += f', "group_index": null, "retries": {retries[1]}'
    if 'tenant":' in behind or 'tenant":' in before:
        tenant = _TENANT.search(behind)
        if tenant is None or (before + behind).count('tenant":') > 1:
            return None
        if '{"' in behind[: tenant.start() + 1]:  # it may belong to another object
            return None
        head += f', "tenant": {tenant[1]}'
    return head


def same_of(text: str, head: str) -> str:
    """The text that identifies a message of any sender: see store/lua/include/marks.lua."""
    if '"retries"' in head:
        text = _RETRIES.sub(_as_first, text, count=1)
    parts, at = [], 0
    for name in _SENDER:
        begin = text.find(name, at)
        if begin >= 0:
            parts.append(text[at:begin])
            at = text.index('"', begin + len(name)) + 1
    parts += text[at:], "}"
    return "".join(parts)


def digest_of(same: str) -> str:
    """The digest that compares two messages if one of them is compressed."""
    return hashlib.sha1(same.encode(), usedforsecurity=False).hexdigest()[:8]


def escaped(frame: bytes) -> bytes:
    """Escape the bytes of a frame that have a meaning outside of it."""
    for byte, escape in _ESCAPES:
        frame = frame.replace(byte, escape)
    return frame


def compress(
    id: str, front: str, text: str, version: bytes, by: zstd.Codec | None = None
) -> str | bytes:
    """A record as `pack` makes it, compressed if it is that of a task; `by` as in `expand`."""
    parts = split(id, text)
    if parts is None or len(parts.content) > zstd.LONGEST_BYTES:
        return pack(id, front, text)
    frame = escaped((by or codec(version)).compress(parts.content))
    eta_form, head = b"-", parts.head.encode()
    if (usual := _UTC.match(head)) is not None:
        eta_form, head = b"u", usual[1] + head[usual.end() - 1 :]
    each = [parts.front.encode(), parts.task.encode(), head]
    each.append(version + parts.digest.encode() + frame)
    if max(map(len, each)) > LONGEST_PART:
        return pack(id, front, text)
    lengths = [len(part).to_bytes(2, "big") + part for part in each]
    behind = parts.behind.encode()
    return b"%b\1%b%b-%b%b" % (front.encode(), COMPRESSED, eta_form, b"".join(lengths), behind)


def expand(text: bytes, by: zstd.Codec | None = None) -> bytes:
    """Decompress a message, or a record with a message.

    `by` is the codec, if the caller has it. Raises Unknown if the dictionary must be loaded first,
    MessageError if the message is damaged.
    """
    at = text.find(HEADERS)
    behind = text.find(BEFORE_FRAME, at)
    fields = text[at + len(HEADERS) : behind].split(b'"', 5)
    if at < 0 or behind < 0 or len(fields) < 6 or not _is_front(text[:at]):
        return text
    task, _, _, _, id, head = fields
    frame, _, end = text[behind + len(BEFORE_FRAME) :].partition(b'"')
    eta = _ETA.match(head)
    content = (by or codec(frame[:8])).decompress(_unescaped(frame[16:]))
    parts = content.split(b"\0", 3)
    if len(parts) != 4 or eta is None:
        raise MessageError("the compressed message is damaged")
    between, before, tail, body = parts
    tail = tail.replace(b"\1", id)
    if b'"retries"' in head and (retried := _RETRIED.search(head)):
        number = retried[0][len(retried[1]) :]
        tail = _RETRIED.sub(lambda each: each[1] + number, tail, count=1)
    return b"".join(
        (
            text[:at],
            b'"body": "',
            b2a_base64(body, newline=False),
            b'"',
            between,
            b'{"lang": "py", "task": "',
            task,
            b'", "id": "',
            id,
            b'"',
            before.replace(b"\1", id),
            eta[1],
            tail,
            end,
        )
    )


def _unescaped(frame: bytes) -> bytes:
    first, *others = frame.split(b"\1")
    try:
        return first + b"".join([_ESCAPED[each[:1]] + each[1:] for each in others])
    except KeyError:
        raise MessageError("the compressed message is damaged") from None


def _is_front(text: bytes) -> bool:
    """Whether a compressed message may begin like this: most have nothing, or the due time."""
    if text.find(b"{") == len(text) - 1 or (
        text.startswith(b'{"due_ms":', 1) and text.find(b'"', 11) < 0
    ):
        return True
    return _IN_FRONT.fullmatch(text) is not None


def undone(command: Sequence[Any]) -> tuple[list[Any], str]:
    """A command with its compressed records decompressed, and the version that they needed.

    A record comes after its id and its due time, and the version somewhere before all records.
    """
    parts, version = [*command], ""
    for n, part in enumerate(parts):
        if isinstance(part, bytes) and _RECORD.match(part):
            text = unpack(parts[n - 2], part)
            parts[n] = expand(text)
            version = text[text.index(MARK) + len(MARK) :][:8].decode()
    if version in parts:
        parts[parts.index(version)] = ""
    return parts, version
