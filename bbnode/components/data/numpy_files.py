"""Arrays of .npy and .npz files, mapped where they can be.

Rule: nothing is unpickled, and what a header claims is compared with the file before it is used.
"""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, Final, cast

import numpy as np
from numpy.lib import format as npy

from bbnode.components.data.base import Array
from bbnode.components.data.data_file import UNREADABLE, DataFile, Room, memory_limit, told
from bbnode.components.errors import DataUnavailable

SUFFIX: Final = ".npy"
_LOCAL_HEADER_BYTES = 30  # of a member of a zip file, before its name (APPNOTE.TXT, 4.3.7)
_LENGTHS_AT = 26  # in that header: of the name and of the extra field, 2 bytes each
_MOST_HEADER_BYTES = 10_000  # of an .npy file; numpy reads no longer ones


def whole(file: DataFile, opened: BinaryIO) -> Array:
    """Return the array of an .npy file, mapped; `opened` is its stream. Raises as numpy does."""
    header = read_header(opened)
    return mapped(opened, file.size, opened.tell(), header)


def read_array(path: Path, component: str) -> Array:
    """Return the numbers in an .npy file, in memory. Raises DataUnavailable."""
    try:
        with DataFile(path, component) as file, file.stream() as opened:
            if file.size > memory_limit():
                raise ValueError(f"its {file.size} bytes are too much for this machine's memory")
            array = np.array(whole(file, opened))
    except UNREADABLE as error:
        raise DataUnavailable(f"{component}: {path} is no .npy file: {told(error)}") from error
    if array.dtype.kind not in "fiub":
        raise DataUnavailable(f"{component}: {path} is of {array.dtype}, and not of numbers")
    return array


def member(
    file: DataFile,
    opened: BinaryIO,
    archive: zipfile.ZipFile,
    info: zipfile.ZipInfo,
    room: Room,
) -> Array:
    """Return an array of an .npz file, mapped where it is not compressed.

    Raises DataUnavailable for one that is too large to be unpacked, else as numpy and zipfile do.
    """
    with archive.open(info) as stream:
        header = read_header(stream)
        start = stream.tell()
        if start + header.size != info.file_size:
            raise ValueError(
                f"array {info.filename!r} declares {header.size} bytes of values and has "
                f"{info.file_size - start}"
            )
        if info.compress_type != zipfile.ZIP_STORED:
            room.take(
                file.path,
                header.size,
                "raise it, or write the arrays with numpy.savez (uncompressed), which is mapped",
            )
            values = np.frombuffer(stream.read(), header.dtype)
            return values.reshape(header.shape, order=header.order)
    lengths = file.read(info.header_offset + _LENGTHS_AT, 4)
    before = sum(int.from_bytes(lengths[at : at + 2], "little") for at in (0, 2))
    offset = info.header_offset + _LOCAL_HEADER_BYTES + before + start
    return mapped(opened, file.size, offset, header)


@dataclass(frozen=True)
class NpyHeader:
    """The header of an .npy file."""

    shape: tuple[int, ...]
    order: Any  # "C" or "F"
    dtype: np.dtype[Any]
    size: int  # bytes of the values


def read_header(file: IO[bytes]) -> NpyHeader:
    """Read the header of an .npy file; the values begin where the file then stands.

    Raises ValueError and what numpy raises for a header that is none of arrays of numbers or texts.
    """
    version = npy.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"version {version} of the .npy format is of structured arrays")
    begin = file.tell()
    length = int.from_bytes(file.read(2 * version[0]), "little")
    if length > _MOST_HEADER_BYTES:
        raise ValueError(
            f"the header of an array has {length} bytes, more than the {_MOST_HEADER_BYTES} that "
            "numpy reads"
        )
    file.seek(begin)
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, fortran, dtype = read(file)
    if dtype.hasobject:
        raise ValueError("it holds pickled Python objects, which could run code")
    if any(size < 0 for size in shape):
        raise ValueError(f"the shape {list(shape)} is negative")
    size = dtype.itemsize
    for each in shape:  # in integers of Python, which do not overflow
        size *= each
    return NpyHeader(shape, "F" if fortran else "C", dtype, size)


def mapped(opened: BinaryIO, size: int, offset: int, header: NpyHeader) -> Array:
    """Return the values behind a header, mapped; ValueError where the file ends before them."""
    if offset + header.size > size:
        raise ValueError(f"it ends before the {header.size} bytes of an array do")
    if header.size == 0:
        return np.empty(header.shape, header.dtype)
    mapped = np.memmap(opened, header.dtype, "r", offset, header.shape, order=header.order)
    return cast(Array, mapped)
