"""Both libraries for Zstandard read the output of the other."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest

from kombu_delayed.errors import CompressionError, MessageError
from kombu_delayed.message import compressing, zstd
from kombu_delayed.message.packing import unpack
from tests.kit.compressed import dictionary, entries

PARTS = [
    each.content for some in entries(150) if (each := compressing.split(some.id, some.message))
]
LIBRARIES = "zstandard", "compression.zstd"


@contextmanager
def using(library: str) -> Iterator[None]:
    """Imitate Python 3.14 or an older one: `backports.zstd` equals the module of 3.14."""
    with pytest.MonkeyPatch.context() as patch:
        if library == "zstandard":
            pytest.importorskip("zstandard")
            patch.setattr(zstd, "sys", Python((3, 13)))
        elif sys.version_info < (3, 14):
            module = pytest.importorskip("backports.zstd")
            patch.setattr(zstd, "sys", Python((3, 14)))
            package = ModuleType("compression")
            package.zstd = module  # type: ignore[attr-defined]
            patch.setitem(sys.modules, "compression", package)
            patch.setitem(sys.modules, "compression.zstd", module)
        zstd.is_installed.cache_clear()
        yield
    zstd.is_installed.cache_clear()


class Python:
    """Stands in for the part of `sys` that a module reads."""

    def __init__(self, version_info: tuple[int, int]) -> None:
        self.version_info = version_info


@pytest.fixture(params=LIBRARIES)
def library(request: pytest.FixtureRequest) -> Iterator[str]:
    with using(request.param):
        yield request.param


@pytest.fixture(params=LIBRARIES)
def other(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_it_is_the_library_that_was_asked_for(library: str) -> None:
    assert zstd.is_installed()
    assert zstd._library().__name__.rpartition(".")[2] == library.rpartition(".")[2]


def test_one_reads_what_another_writes(library: str, other: str) -> None:
    frames = [*map(zstd.Codec(dictionary()).compress, PARTS)]
    assert sum(map(len, frames)) < sum(map(len, PARTS)) / 3
    with using(other):
        codec = zstd.Codec(dictionary())
        assert [*map(codec.decompress, frames)] == PARTS


def test_one_knows_the_dictionary_that_another_has_trained(library: str, other: str) -> None:
    trained = zstd.train(PARTS)
    assert 1_000 < len(trained) <= zstd.DICTIONARY_BYTES
    frames = [*map(zstd.Codec(trained).compress, PARTS)]
    assert sum(map(len, frames)) < sum(map(len, PARTS)) / 3
    with using(other):
        assert [*map(zstd.Codec(trained).decompress, frames)] == PARTS


def test_long_messages(library: str, other: str) -> None:
    long = random.Random(1).randbytes(100_000)
    frame = zstd.Codec(dictionary()).compress(long)
    with using(other):
        assert zstd.Codec(dictionary()).decompress(frame) == long


def test_messages_as_a_whole(library: str, other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compressing, "_codecs", {})
    version = compressing.learn(dictionary())
    (task,) = entries(1, seed=5)
    record = compressing.compress(task.id, "02000", task.message, version)
    assert isinstance(record, bytes)
    monkeypatch.setattr(compressing, "_codecs", {})
    with using(other):
        compressing.learn(dictionary())
        text = compressing.expand(unpack(task.id, record))
    assert text == f"02000{task.message}".encode()


@pytest.mark.parametrize("damage", ["cut", "no length", "too long", "empty", "another dictionary"])
def test_what_is_damaged_is_a_message_error(
    library: str, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    frame = zstd.Codec(dictionary()).compress(PARTS[0])
    codec = zstd.Codec(dictionary())
    if damage == "another dictionary":
        codec = zstd.Codec(zstd.train([part.replace(b"customer", b"client") for part in PARTS]))
    elif damage == "too long":
        monkeypatch.setattr(zstd, "LONGEST_BYTES", 99_999)
        frame = codec.compress(bytes(100_000))
    else:
        frame = {"cut": frame[:-3], "no length": b"\x00" + frame[2:], "empty": b""}[damage]
    try:
        found: Any = codec.decompress(frame)
    except MessageError:
        found = None
    assert found != PARTS[0]
    if damage != "another dictionary":
        assert found is None
    frame = zstd.Codec(dictionary()).compress(PARTS[1])
    assert zstd.Codec(dictionary()).decompress(frame) == PARTS[1], "the next one can be read"


def test_without_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python before 3.14 without the extra."""
    monkeypatch.setattr(zstd, "sys", Python((3, 13)))
    monkeypatch.setitem(sys.modules, "zstandard", None)
    zstd.is_installed.cache_clear()
    assert not zstd.is_installed()
    with pytest.raises(CompressionError, match=r"pip install 'kombu-delayed\[zstd\]'"):
        zstd.Codec(dictionary())
    zstd.is_installed.cache_clear()
