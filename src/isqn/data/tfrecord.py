"""TFRecords of tf.Example without TensorFlow: lengths and payloads with checksums, and the parts of protocol buffers
that an Example is made of."""

from __future__ import annotations

import gzip
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isqn.types import UserError

Value = list[bytes] | NDArray[Any]
Example = dict[str, Value]

MOST_BYTES = 2**31  # of a record: a limit of protocol buffers
CHUNK = 2**20


def read_examples(path: Path) -> Iterator[Example]:
    """Of a file that is packed by gzip, one after the other."""
    offset = 0
    try:
        with gzip.open(path, "rb") as file:
            while head := file.read(12):
                length, checksum = struct.unpack("<QI", head) if len(head) == 12 else (0, None)
                if checksum != masked_crc(head[:8]):
                    raise ValueError("the length of a record does not match its checksum")
                if length > MOST_BYTES:
                    raise ValueError(f"a record of {length:,} bytes is longer than any can be")
                payload = _read(file, length)
                if struct.unpack("<I", _read(file, 4))[0] != masked_crc(payload):
                    raise ValueError("a record does not match its checksum")
                yield parse_example(payload)
                offset += length + 16
    except (OSError, EOFError, ValueError, zlib.error) as error:
        where = f"in the record at byte {offset:,} of what it unpacks to"
        raise UserError(f"{path} is damaged {where}: {error}.") from error


def _read(file: Any, size: int) -> bytes:
    """Bit by bit: what a length claims is not taken before it is there."""
    parts, left = [], size
    while left:
        part = file.read(min(left, CHUNK))
        if not part:
            raise EOFError(f"it ends {left:,} bytes before a record does")
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def masked_crc(content: bytes) -> int:
    """CRC-32C, turned and shifted, as TFRecords have it."""
    try:
        import google_crc32c
    except ImportError:
        raise UserError('TFRecords need `pip install "isqn[offline]"`.') from None
    crc = google_crc32c.value(content)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def parse_example(payload: bytes) -> Example:
    """Names and their values: `Example.features.feature`, a map from text to lists of bytes, floats or integers."""
    found: Example = {}
    for features in _messages(payload, 1):
        for entry in _messages(features, 1):
            names, values = [*_messages(entry, 1)], [*_messages(entry, 2)]
            if len(names) == 1 and values:
                found[names[0].decode()] = _feature(values[-1])
    return found


def _feature(message: bytes) -> Value:
    for field, kind, content in _fields(message):
        if kind != 2 or field not in (1, 2, 3):
            raise ValueError(f"a feature has a field {field} of kind {kind}")
        assert isinstance(content, bytes)
        if field == 1:
            return [*_messages(content, 1)]
        return _floats(content) if field == 2 else _integers(content)
    return []


def _floats(message: bytes) -> NDArray[Any]:
    """Packed, or each on its own."""
    parts = [content if isinstance(content, bytes) else b"" for _, _, content in _fields(message)]
    return np.frombuffer(b"".join(parts), "<f4")


def _integers(message: bytes) -> NDArray[Any]:
    found = []
    for _, kind, content in _fields(message):
        if kind == 0:
            found.append(content)
            continue
        assert isinstance(content, bytes)
        place = 0
        while place < len(content):
            number, place = _varint(content, place)
            found.append(number)
    return np.array(found, np.uint64).astype(np.int64)


def _messages(message: bytes, field: int) -> Iterator[bytes]:
    """What stands under one number, where it is text, bytes or another message."""
    for number, kind, content in _fields(message):
        if number == field:
            if kind != 2:
                raise ValueError(f"field {field} is of kind {kind}, and should be of kind 2")
            assert isinstance(content, bytes)
            yield content


def _fields(message: bytes) -> Iterator[tuple[int, int, bytes | int]]:
    """Number, kind and content, one after the other."""
    place = 0
    while place < len(message):
        tag, place = _varint(message, place)
        kind = tag & 7
        if kind == 0:
            content: bytes | int
            content, place = _varint(message, place)
        else:
            if kind == 2:
                size, place = _varint(message, place)
            elif kind in (1, 5):
                size = 8 if kind == 1 else 4
            else:
                raise ValueError(f"a field is of kind {kind}, which there is not")
            if place + size > len(message):
                raise ValueError("a field is longer than its message")
            content, place = message[place : place + size], place + size
        yield tag >> 3, kind, content


def _varint(message: bytes, place: int) -> tuple[int, int]:
    """A number in groups of 7 bits, the lowest first, and where it ends."""
    number = 0
    for shift in range(0, 70, 7):
        if place >= len(message):
            raise ValueError("a number is cut short")
        byte = message[place]
        place += 1
        number |= (byte & 127) << shift
        if byte < 128:
            return number & 0xFFFFFFFFFFFFFFFF, place
    raise ValueError("a number has more than 64 bits")
