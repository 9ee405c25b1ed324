"""Reader of TFRecord files of tf.Example, without TensorFlow.

A record is a length and a payload, each with a checksum. The payload is a protocol buffer, of which only the parts used
by tf.Example are decoded.
"""

from __future__ import annotations

import gzip
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isqn.data.files import check_claim
from isqn.types import UserError

Value = list[bytes] | NDArray[Any]
Example = dict[str, Value]

MAX_RECORD_BYTES = 2**31  # limit of protocol buffers
READ_BYTES = 2**20


def read_examples(path: Path, *, is_gzipped: bool = True) -> Iterator[Example]:
    """Yield the examples of a TFRecord file."""
    offset = 0
    try:
        with gzip.open(path, "rb") if is_gzipped else path.open("rb") as file:
            while head := file.read(12):
                length, checksum = struct.unpack("<QI", head) if len(head) == 12 else (0, None)
                if checksum != masked_crc(head[:8]):
                    raise ValueError("the length of a record does not match its checksum")
                if length > MAX_RECORD_BYTES:
                    raise ValueError(f"a record claims {length:,} bytes, more than the maximum of {MAX_RECORD_BYTES:,}")
                check_claim(path, f"the record at byte {offset:,}", length, path.stat().st_size)
                payload = _read(file, length)
                if struct.unpack("<I", _read(file, 4))[0] != masked_crc(payload):
                    raise ValueError("a record does not match its checksum")
                yield parse_example(payload)
                offset += length + 16
    except (OSError, EOFError, ValueError, zlib.error) as error:
        where = f"in the record at byte {offset:,}" + " of its decompressed data" * is_gzipped
        raise UserError(f"{path} is damaged {where}: {error}.") from error


def _read(file: Any, size: int) -> bytes:
    """Read in small parts, so that a damaged length cannot make it allocate more than the file holds."""
    parts, left = [], size
    while left:
        part = file.read(min(left, READ_BYTES))
        if not part:
            raise EOFError(f"the file ends {left:,} bytes before the end of a record")
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def masked_crc(content: bytes) -> int:
    """Return the masked CRC-32C that TFRecord files use: rotated, plus a constant."""
    try:
        import google_crc32c
    except ImportError:
        raise UserError('TFRecords need `pip install "isqn[offline]"`.') from None
    crc = google_crc32c.value(content)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def parse_example(payload: bytes) -> Example:
    """Parse `Example.features.feature`: a map from names to lists of bytes, floats or integers."""
    example: Example = {}
    for features in _messages(payload, 1):
        for entry in _messages(features, 1):
            names, values = [*_messages(entry, 1)], [*_messages(entry, 2)]
            if len(names) == 1 and values:
                example[names[0].decode()] = _parse_feature(values[-1])
    return example


def _parse_feature(message: bytes) -> Value:
    """Parse a Feature: field 1 is a BytesList, 2 a FloatList, 3 an Int64List."""
    for field, kind, content in _fields(message):
        if kind != 2 or field not in (1, 2, 3):
            raise ValueError(f"a feature has a field {field} of wire type {kind}")
        assert isinstance(content, bytes)
        if field == 1:
            return [*_messages(content, 1)]
        return _parse_floats(content) if field == 2 else _parse_integers(content)
    return []


def _parse_floats(message: bytes) -> NDArray[Any]:
    """Parse a FloatList, packed or not."""
    parts = [content if isinstance(content, bytes) else b"" for _, _, content in _fields(message)]
    return np.frombuffer(b"".join(parts), "<f4")


def _parse_integers(message: bytes) -> NDArray[Any]:
    """Parse an Int64List, packed or not."""
    numbers = []
    for _, kind, content in _fields(message):
        if kind == 0:
            numbers.append(content)
            continue
        assert isinstance(content, bytes)
        position = 0
        while position < len(content):
            number, position = _read_varint(content, position)
            numbers.append(number)
    return np.array(numbers, np.uint64).astype(np.int64)


def _messages(message: bytes, field: int) -> Iterator[bytes]:
    """Yield the contents of a length-delimited field (text, bytes or a message), given its number."""
    for number, kind, content in _fields(message):
        if number == field:
            if kind != 2:
                raise ValueError(f"field {field} has wire type {kind}; it must be 2")
            assert isinstance(content, bytes)
            yield content


def _fields(message: bytes) -> Iterator[tuple[int, int, bytes | int]]:
    """Yield the number, wire type and content of each field of a message."""
    position = 0
    while position < len(message):
        tag, position = _read_varint(message, position)
        kind = tag & 7
        if kind == 0:
            content: bytes | int
            content, position = _read_varint(message, position)
        else:
            if kind == 2:
                size, position = _read_varint(message, position)
            elif kind in (1, 5):
                size = 8 if kind == 1 else 4
            else:
                raise ValueError(f"a field has the unknown wire type {kind}")
            if position + size > len(message):
                raise ValueError("a field is longer than its message")
            content, position = message[position : position + size], position + size
        yield tag >> 3, kind, content


def _read_varint(message: bytes, position: int) -> tuple[int, int]:
    """Return a variable-length integer (groups of 7 bits, lowest first) and the position after it."""
    number = 0
    for shift in range(0, 70, 7):
        if position >= len(message):
            raise ValueError("a number is cut short")
        byte = message[position]
        position += 1
        number |= (byte & 127) << shift
        if byte < 128:
            return number & 0xFFFFFFFFFFFFFFFF, position
    raise ValueError("a number has more than 64 bits")
