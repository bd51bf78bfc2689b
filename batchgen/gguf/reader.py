"""The header of a GGUF file: its metadata and where its tensors lie.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
The `gguf` package's own reader makes a numpy view of every string, which takes seconds for a vocabulary; this one
makes a str.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from batchgen.errors import ModelError

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor as it is stored; `shape` has the slowest dimension first, as in torch."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int
    """Of the first byte in the file."""
    num_bytes: int


@dataclass(frozen=True)
class GGUFFile:
    """The parsed header of one file."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]

    def rows(self, tensor: GGUFTensor) -> npt.NDArray[np.uint8]:
        """The stored bytes of a tensor, uint8 [rows, bytes per row], mapped and not read; 1-d tensors are one row."""
        num_rows = prod(tensor.shape[:-1])
        return np.memmap(self.path, np.uint8, "r", tensor.offset, (num_rows, tensor.num_bytes // num_rows))


def read_gguf(path: Path) -> GGUFFile:
    """Parse the header; ModelError if this is no GGUF file, or a damaged, cut, split or byte-swapped one."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Parser(path, data).parse()
    except (struct.error, UnicodeDecodeError, ValueError, OverflowError, MemoryError) as error:
        raise ModelError(f"{path}: this GGUF file is damaged or incomplete ({error}); fetch it again") from error


class _Parser:
    """Reads little-endian values one after another."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.position = 0

    def parse(self) -> GGUFFile:
        if self.data[:4] != MAGIC:
            raise ModelError(f"{self.path}: not a GGUF file (its first bytes are {self.data[:4]!r})")
        self.position = 4
        version, num_tensors, num_keys = self.scalar("I"), self.scalar("Q"), self.scalar("Q")
        if version not in _VERSIONS:
            raise ModelError(
                f"{self.path}: GGUF version {version} is not supported, only 2 and 3 in little-endian order"
            )
        metadata = {self.string(): self.value(self.scalar("I")) for _ in range(num_keys)}
        if metadata.get("split.count", 1) > 1:
            raise ModelError(f"{self.path}: one part of a split GGUF; merge the parts first (llama-gguf-split --merge)")
        headers = [self.tensor_header() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        start = -(-self.position // alignment) * alignment
        return GGUFFile(self.path, metadata, {header[0]: self.tensor(start, *header) for header in headers})

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.data, self.position)
        self.position += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        return self.take(self.scalar("Q")).decode()

    def take(self, num_bytes: int) -> bytes:
        end = self.position + num_bytes
        if end > len(self.data):
            raise ValueError(f"it ends at byte {len(self.data)}, but a value reaches to byte {end}")
        value, self.position = self.data[self.position : end], end
        return value

    def value(self, type_number: int) -> Any:
        if type_number == _STRING:
            return self.string()
        if type_number == _ARRAY:
            return self.array(self.scalar("I"), self.scalar("Q"))
        if type_number not in _SCALARS:
            raise ValueError(f"unknown value type {type_number}")
        return self.scalar(_SCALARS[type_number])

    def array(self, type_number: int, length: int) -> list[Any]:
        if type_number in _SCALARS:
            dtype = np.dtype(_SCALARS[type_number]).newbyteorder("<")
            values: list[Any] = np.frombuffer(self.take(length * dtype.itemsize), dtype).tolist()
            return values
        return [self.value(type_number) for _ in range(length)]

    def tensor_header(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.string()
        dimensions = tuple(self.scalar("Q") for _ in range(self.scalar("I")))
        return name, dimensions[::-1], self.scalar("I"), self.scalar("Q")

    def tensor(self, start: int, name: str, shape: tuple[int, ...], type_number: int, offset: int) -> GGUFTensor:
        try:
            quantization = GGMLQuantizationType(type_number)
        except ValueError as error:
            raise ModelError(f"{self.path}: {name} has the unknown tensor type {type_number}") from error
        block_elements, block_bytes = GGML_QUANT_SIZES[quantization]
        if not shape or shape[-1] % block_elements:
            raise ValueError(f"{name} has shape {shape}, which {quantization.name} cannot hold")
        num_bytes = prod(shape) // block_elements * block_bytes
        if start + offset + num_bytes > len(self.data):
            raise ValueError(f"it ends at byte {len(self.data)}, inside {name}")
        return GGUFTensor(name, shape, quantization, start + offset, num_bytes)
