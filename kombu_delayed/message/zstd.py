"""Zstandard with a dictionary: Python's own from 3.14, the package `zstandard` before."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from ..errors import CompressionError, MessageError

#: The beginning of all frames, which is not stored.
_MAGIC = b"\x28\xb5\x2f\xfd"

#: The compression level. Higher levels save a few bytes and take many times longer.
_LEVEL = 3

DICTIONARY_BYTES = 16_384

#: The length in bytes of the parts of messages that a dictionary consists of.
SHORTEST_PART, LONGEST_PART = 200, 2_000

#: Content longer than this is not accepted as a message.
LONGEST_BYTES = 64 * 2**20

#: If the first byte of a frame is at least this, its content may be longer than 65 kB.
_LONG = 0x80


#: Compresses or decompresses, and a function that makes such a function for one thread.
Use = Callable[[bytes], bytes]
Maker = Callable[[], Use]


@cache
def is_installed() -> bool:
    """Whether this process can compress and decompress."""
    try:
        _library()
    except CompressionError:
        return False
    return True


def _library() -> Any:
    try:
        if sys.version_info >= (3, 14):
            from compression import zstd

            return zstd
        import zstandard
    except ModuleNotFoundError as error:
        raise CompressionError from error
    return zstandard


def train(samples: Sequence[bytes]) -> bytes:
    """Train a dictionary on samples. Raises CompressionError without the extra."""
    library = _library()
    if sys.version_info >= (3, 14):
        return bytes(library.train_dict(samples, DICTIONARY_BYTES).dict_content)
    # Parts as long as a message do best. To fix the length takes one pass, to search for it five.
    length = sum(map(len, samples)) // len(samples)
    part = min(max(length, SHORTEST_PART), LONGEST_PART)
    return bytes(library.train_dictionary(DICTIONARY_BYTES, samples, k=part, d=8).as_bytes())


class Codec:
    """Compresses and decompresses with one dictionary. Threads may share it."""

    def __init__(self, dictionary: bytes) -> None:
        self.dictionary = dictionary
        # Each is used by one thread at a time. Taking one from a list needs no lock, so that no
        # lock is held when a process forks.
        self._compressors: list[Use] = []
        self._decompressors: list[Use] = []
        self._new_compressor, self._new_decompressor = _makers(dictionary)

    def compress(self, content: bytes) -> bytes:
        """Compress into one frame, without the beginning that all frames share."""
        try:
            use = self._compressors.pop()
        except IndexError:
            use = self._new_compressor()
        frame = use(content)
        self._compressors.append(use)
        return frame[len(_MAGIC) :]

    def decompress(self, frame: bytes) -> bytes:
        """Decompress a frame. Raises MessageError if it is not one of ours."""
        try:
            use = self._decompressors.pop()
        except IndexError:
            use = self._new_decompressor()
        try:
            content = use(_MAGIC + frame)
        except Exception as error:  # each library has its own errors
            raise MessageError(f"the compressed message is damaged: {error}") from error
        self._decompressors.append(use)
        return content


def _makers(dictionary: bytes) -> tuple[Maker, Maker]:
    library = _library()
    if sys.version_info >= (3, 14):
        return _standard_makers(library, dictionary)
    shared = library.ZstdCompressionDict(dictionary)
    shared.precompute_compress(level=_LEVEL)
    options = {"write_checksum": False, "write_dict_id": False, "write_content_size": True}

    def new_compressor() -> Use:
        return library.ZstdCompressor(level=_LEVEL, dict_data=shared, **options).compress

    def new_decompressor() -> Use:
        decompress: Use = library.ZstdDecompressor(dict_data=shared).decompress

        def checked(frame: bytes) -> bytes:
            if frame[len(_MAGIC)] >= _LONG and not (
                0 <= library.frame_content_size(frame) <= LONGEST_BYTES
            ):
                raise MessageError("it is too long, or its length is unknown")
            return decompress(frame)

        return checked

    return new_compressor, new_decompressor


def _standard_makers(library: Any, dictionary: bytes) -> tuple[Maker, Maker]:
    shared, parameter = library.ZstdDict(dictionary), library.CompressionParameter
    options = {
        parameter.compression_level: _LEVEL,
        parameter.checksum_flag: 0,
        parameter.dict_id_flag: 0,
        parameter.content_size_flag: 1,
    }

    def new_compressor() -> Use:
        # Reusing a compressor takes a twentieth of the time of the module's `compress`.
        used = library.ZstdCompressor(options=options, zstd_dict=shared)

        def compress(content: bytes) -> bytes:
            used.set_pledged_input_size(len(content))
            return bytes(used.compress(content, used.FLUSH_FRAME))

        return compress

    def decompress(frame: bytes) -> bytes:
        info = library.get_frame_info(frame)
        if info.decompressed_size is None or info.decompressed_size > LONGEST_BYTES:
            raise MessageError("it is too long, or its length is unknown")
        return bytes(library.decompress(frame, zstd_dict=shared))

    return new_compressor, lambda: decompress
