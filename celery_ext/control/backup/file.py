"""The file of a backup: blocks with checksums, the last of which covers the whole."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import struct
import zlib
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from celery_ext.errors import BackupError

VERSION = 1
MAGIC = b"kombu-delayed backup %d\n" % VERSION

#: The kinds of blocks.
HEADER, MESSAGES, DEAD, END = b"H", b"M", b"D", b"E"

#: Kind, number of items, length of the content; then the CRC-32 of these and of the content.
_HEAD = struct.Struct(">cII")
_NUMBER = struct.Struct(">I")

#: A higher level takes three times as long to save a tenth.
_LEVEL = 1

#: Maximum length of a block; a greater length means damage.
_LONGEST = 2**31

#: Maximum bytes in the name of a queue.
_LONGEST_NAME = 2**16

#: Maximum bytes in a part of a message: Redis keeps no longer text.
_LONGEST_PART = 2**29

#: How many bytes are unpacked at once: a small block may unpack to more than there is memory.
_PIECE = 2**18


@dataclass(frozen=True)
class Block:
    """A part of the file: `items` messages or dead letters of one queue, or a piece of JSON.

    If the content cannot be read although its checksum is right, BackupErrors are raised whose text
    begins with `place`.
    """

    kind: bytes
    items: int
    content: bytes
    place: str

    @property
    def queue(self) -> str:
        """The name of the queue, read without unpacking the rest."""
        unpacker = zlib.decompressobj()
        with self._reading():
            (length,) = _NUMBER.unpack(unpacker.decompress(self.content, _NUMBER.size))
        self._check(length <= _LONGEST_NAME, f"the name of a queue of {length:,} bytes")
        with self._reading():
            name = unpacker.decompress(unpacker.unconsumed_tail, length) if length else b""
        return name.decode(errors="surrogateescape")

    @property
    def size_bytes(self) -> int:
        return _HEAD.size + _NUMBER.size + len(self.content)

    def fields(self) -> Iterator[bytes]:
        """The name of the queue, and then two fields per message or three per dead letter."""
        unpacked, count = bytearray(), 0
        expected = 1 + self.items * (3 if self.kind == DEAD else 2)
        for piece in self._pieces():
            with self._reading():
                unpacked += piece
            while (end := self._end_of_part(unpacked)) <= len(unpacked):
                with self._reading():
                    part = bytes(unpacked[_NUMBER.size : end])
                del unpacked[:end]
                yield part
                count += 1
                self._check(count <= expected, f"it has more than {expected:,} parts")
        self._check(not unpacked, "it ends within a message")
        self._check(count == expected, f"it has {count:,} parts in place of {expected:,}")

    def _pieces(self) -> Iterator[bytes]:
        """The content, unpacked."""
        unpacker = zlib.decompressobj()
        for at in range(0, len(self.content), _PIECE):
            packed = self.content[at : at + _PIECE]
            while packed and not unpacker.eof:
                with self._reading():
                    piece = unpacker.decompress(packed, _PIECE)
                yield piece
                packed = unpacker.unconsumed_tail
        yield unpacker.flush()
        self._check(unpacker.eof, "it ends within what is packed")

    def _end_of_part(self, unpacked: bytearray) -> int:
        """Where the first part of this ends; it may not be unpacked yet."""
        if len(unpacked) < _NUMBER.size:
            return _NUMBER.size
        (length,) = _NUMBER.unpack_from(unpacked)
        self._check(length <= _LONGEST_PART, f"a part of {length:,} bytes")
        return _NUMBER.size + int(length)

    def facts(self) -> dict[str, Any]:
        with self._reading():
            found = json.loads(self.content)
        self._check(isinstance(found, dict), f"it says {found!r:.80}")
        return dict(found)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except (zlib.error, struct.error, ValueError, RecursionError) as error:
            raise BackupError(f"{self.place}: {type(error).__name__}: {error}") from error
        except MemoryError as error:
            raise BackupError(f"{self.place}: it needs more memory than there is") from error

    def _check(self, is_right: bool, why: str) -> None:
        if not is_right:
            raise BackupError(f"{self.place}: {why}")


class Writer:
    """Writes blocks in order. The file is complete only after `end`.

    A thread compresses one block while the next one is read.
    """

    def __init__(self, file: IO[bytes], name: str, thread: Executor) -> None:
        self._file = file
        self._name = name
        self._thread = thread
        self._packing: tuple[bytes, int, Future[bytes]] | None = None
        self._hash = hashlib.sha256()
        self._items = {MESSAGES: 0, DEAD: 0}
        self._blocks = 0
        self._write(MAGIC)

    def _write(self, data: bytes) -> None:
        self._hash.update(data)
        with _naming(self._name):
            self._file.write(data)

    def _block(self, kind: bytes, items: int, content: bytes) -> None:
        head = _HEAD.pack(kind, items, len(content))
        self._write(head + _NUMBER.pack(zlib.crc32(content, zlib.crc32(head))))
        self._write(content)
        self._blocks += 1

    def header(self, facts: dict[str, Any]) -> None:
        self._block(HEADER, 0, _json(facts))

    def items(self, kind: bytes, queue: str, items: int, fields: Iterable[bytes]) -> None:
        parts: list[bytes] = []
        for field in (queue.encode(errors="surrogateescape"), *fields):
            parts += (_NUMBER.pack(len(field)), field)
        packing = self._thread.submit(zlib.compress, b"".join(parts), _LEVEL)
        self._write_packed()
        self._packing = kind, items, packing

    def _write_packed(self) -> None:
        if self._packing is not None:
            kind, items, packing = self._packing
            self._packing = None
            self._block(kind, items, packing.result())
            self._items[kind] += items

    def end(self) -> None:
        """Write the counts and the checksum of the whole file, and sync the file to disk."""
        self._write_packed()
        facts = {
            "messages": self._items[MESSAGES],
            "dead": self._items[DEAD],
            "blocks": self._blocks,
            "sha256": self._hash.hexdigest(),
        }
        self._block(END, 0, _json(facts))
        with _naming(self._name):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()


def _json(facts: dict[str, Any]) -> bytes:
    return json.dumps(facts, ensure_ascii=False).encode(errors="surrogateescape")


@contextmanager
def _naming(path: str) -> Iterator[None]:
    """Let errors name the file that was asked for, not the temporary one that becomes it."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from None


@contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[Writer]:
    """A file that gets its name when it is complete and on disk, and has a temporary one before."""
    target, name = Path(os.path.realpath(path)), os.fspath(path)
    if target.exists() and not target.is_file():
        raise BackupError(f"{path} is not a file: name one to write the backup to")
    part = target.with_name(f"{target.name}.{secrets.token_hex(4)}.part")
    with ExitStack() as stack:
        stack.callback(part.unlink, missing_ok=True)
        with _naming(name):
            file = open(part, "xb", opener=_only_owner)  # noqa: SIM115
        stack.callback(_close, file)
        thread = stack.enter_context(ThreadPoolExecutor(1, "backup"))
        yield (writer := Writer(file, name, thread))
        writer.end()
        os.replace(part, target)
    _sync_directory(target.parent)


def _only_owner(path: str, flags: int) -> int:
    """Open a file that nobody else may read, because messages may hold secrets."""
    return os.open(path, flags, 0o600)


def _close(file: IO[bytes]) -> None:
    with suppress(OSError):  # a failed write was already reported
        file.close()


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def blocks(path: str | os.PathLike[str]) -> Generator[Block, None, None]:
    """The blocks of a file. Each is checked before it is yielded, the whole with the last one.

    Raises BackupError that names the place, and OSError if the file cannot be read.
    """
    with open(path, "rb") as file:
        yield from _Reader(file, os.fspath(path)).blocks()


class _Reader:
    def __init__(self, file: IO[bytes], name: str) -> None:
        self._file = file
        self._name = name
        self._hash = hashlib.sha256()
        self._at = 0
        self._items = {MESSAGES: 0, DEAD: 0}

    def blocks(self) -> Iterator[Block]:
        self._check_magic()
        number = 0
        while True:
            start, before = self._at, self._hash.hexdigest()
            block = self._next(number, start)
            if (number == 0) != (block.kind == HEADER):
                raise self._damaged(number, start, "a block is missing or out of order")
            if block.kind == END:
                self._check_end(block, number, start, before)
                yield block
                return
            yield block
            number += 1

    def _check_magic(self) -> None:
        found = self._file.read(len(MAGIC))
        if found != MAGIC:
            if MAGIC.startswith(found):
                raise BackupError(f"{self._name} is cut short: it ends within its first line")
            known, _, version = found.strip().rpartition(b" ")
            if known == MAGIC.strip().rpartition(b" ")[0] and version.isdigit():
                raise BackupError(
                    f"{self._name} has version {version.decode()} of the format and this program "
                    f"reads version {VERSION}: restore it with a later release"
                )
            raise BackupError(f"{self._name} is not a backup: it begins with {found[:20]!r}")
        self._took(found)

    def _took(self, data: bytes) -> None:
        self._hash.update(data)
        self._at += len(data)

    def _next(self, number: int, start: int) -> Block:
        head = self._read(_HEAD.size + _NUMBER.size, number, start)
        kind, items, length = _HEAD.unpack_from(head)
        if kind not in (HEADER, MESSAGES, DEAD, END) or length > _LONGEST:
            raise self._damaged(number, start, "this is no beginning of a block")
        content = self._read(length, number, start)
        (expected,) = _NUMBER.unpack_from(head, _HEAD.size)
        if zlib.crc32(content, zlib.crc32(head[: _HEAD.size])) != expected:
            raise self._damaged(number, start, "its checksum does not match")
        if kind in self._items:
            self._items[kind] += items
        return Block(kind, items, content, self._place(number, start))

    def _read(self, length: int, number: int, start: int) -> bytes:
        try:
            data = self._file.read(length)
        except MemoryError:
            why = f"a block of {length:,} bytes needs more memory than there is"
            raise self._damaged(number, start, why) from None
        if len(data) < length:
            raise BackupError(
                f"{self._name} is cut short: it ends at byte {self._at + len(data):,}, within or "
                f"before block {number}, which begins at byte {start:,}"
            )
        self._took(data)
        return data

    def _check_end(self, block: Block, number: int, start: int, before: str) -> None:
        expected = {
            "messages": self._items[MESSAGES],
            "dead": self._items[DEAD],
            "blocks": number,
            "sha256": before,
        }
        if block.facts() != expected:
            raise self._damaged(number, start, "blocks are missing or doubled in front of it")
        if self._file.read(1):
            raise self._damaged(number, self._at, "there is data behind the end")

    def _damaged(self, number: int, at: int, why: str) -> BackupError:
        return BackupError(f"{self._place(number, at)}: {why}")

    def _place(self, number: int, at: int) -> str:
        return f"{self._name} is damaged at byte {at:,}, block {number}"
