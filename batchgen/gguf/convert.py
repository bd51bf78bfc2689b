"""Write a GGUF file as a checkpoint directory: config.json, model.safetensors and the tokenizer.

Weights that GGUF stores as floats keep their bits; quantized ones become float32, since a narrower type would lose
part of scale x quant. So `model.dtype: float32` computes with exactly what the file says, and `auto` (bfloat16, from
config.json) rounds once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from batchgen.errors import ModelError
from batchgen.gguf.architectures import ROPE_FACTORS, Architecture, read_config
from batchgen.gguf.reader import GGUFFile, GGUFTensor, read_gguf
from batchgen.gguf.vocabulary import write_tokenizer

CONVERTER_VERSION = 1
"""Part of the cache key: raise it with every change of what is written."""

_CHUNK_ELEMENTS = 1 << 20
_KEPT = {
    GGMLQuantizationType.F32: "F32",
    GGMLQuantizationType.F16: "F16",
    GGMLQuantizationType.BF16: "BF16",
}
_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True)
class _Conversion:
    """One tensor on its way: where from, under which name, in which order of rows, minus what."""

    name: str
    source: GGUFTensor
    dtype: str
    row_order: npt.NDArray[np.intp] | None = None
    offset: float = 0.0

    @property
    def num_bytes(self) -> int:
        return prod(self.source.shape) * _ITEM_BYTES[self.dtype]


def convert_gguf(path: Path, directory: Path) -> None:
    """Convert into the existing, empty `directory`; ModelError, by name, for what cannot be converted exactly."""
    gguf = read_gguf(path)
    try:
        architecture, config = read_config(gguf)
        plan = [_plan(gguf, architecture, config, tensor) for tensor in _weights(gguf)]
        ends = write_tokenizer(gguf, directory)
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        what = f"{type(error).__name__}: {error}"
        raise ModelError(
            f"{path}: the metadata of this GGUF file is incomplete or contradicts itself ({what})"
        ) from error
    ids = {
        f"{name}_token_id": gguf.metadata[key]
        for name, key in (("bos", "tokenizer.ggml.bos_token_id"), ("pad", "tokenizer.ggml.padding_token_id"))
        if key in gguf.metadata
    } | {"eos_token_id": ends[0] if len(ends) == 1 else ends}
    _write_json(directory / "generation_config.json", ids)
    _write_safetensors(directory / "model.safetensors", gguf, plan)
    _write_json(directory / "config.json", {**config, **ids})


def _weights(gguf: GGUFFile) -> Iterator[GGUFTensor]:
    # The rope factors became part of config.json.
    return (tensor for tensor in gguf.tensors.values() if tensor.name != ROPE_FACTORS)


def _plan(gguf: GGUFFile, architecture: Architecture, config: dict[str, int], tensor: GGUFTensor) -> _Conversion:
    name = architecture.tensor_name(tensor.name)
    if name is None:
        kind = gguf.metadata["general.architecture"]
        raise ModelError(f"{gguf.path}: the tensor {tensor.name} has no place in the architecture {kind}")
    try:
        dequantize(np.zeros((1, gguf.rows(tensor).shape[1]), np.uint8), tensor.type)
    except NotImplementedError as error:
        raise ModelError(
            f"{gguf.path}: {tensor.name} is of tensor type {tensor.type.name}, which cannot be dequantized"
        ) from error
    part = tensor.name.split(".")[-2]
    order = None
    if part in architecture.permuted:
        heads = config["num_attention_heads" if part == "attn_q" else "num_key_value_heads"]
        order = _half_order(tensor.shape[0], heads)
    offset = architecture.norm_offset if part.endswith("_norm") else 0.0
    dtype = "F32" if offset else _KEPT.get(tensor.type, "F32")
    return _Conversion(name, tensor, dtype, order, offset)


def _half_order(num_rows: int, num_heads: int) -> npt.NDArray[np.intp]:
    """Which stored row each row of the result is: rotary pairs (0, 1), (2, 3), ... become two halves of a head."""
    pairs = np.arange(num_rows).reshape(num_heads, num_rows // num_heads // 2, 2)
    return pairs.swapaxes(1, 2).ravel()


def _write_safetensors(path: Path, gguf: GGUFFile, plan: list[_Conversion]) -> None:
    """Format: https://github.com/huggingface/safetensors#format. Written piece by piece, so memory stays small."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for item in plan:
        header[item.name] = {
            "dtype": item.dtype,
            "shape": item.source.shape,
            "data_offsets": [end, end + item.num_bytes],
        }
        end += item.num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for item in plan:
            _write_tensor(file, gguf, item)


def _write_tensor(file: BinaryIO, gguf: GGUFFile, item: _Conversion) -> None:
    rows = gguf.rows(item.source)
    if len(item.source.shape) == 1:
        # One row of n: rows of one element, where the type allows, so that an order of rows can be applied.
        rows = rows.reshape(-1, _ITEM_BYTES[_KEPT[item.source.type]]) if item.source.type in _KEPT else rows
    step = max(1, _CHUNK_ELEMENTS * len(rows) // prod(item.source.shape))
    for start in range(0, len(rows), step):
        stop = min(start + step, len(rows))
        chunk = rows[start:stop] if item.row_order is None else rows[item.row_order[start:stop]]
        file.write(_converted(np.ascontiguousarray(chunk), item).data)


def _converted(chunk: npt.NDArray[np.uint8], item: _Conversion) -> npt.NDArray[np.generic]:
    if _KEPT.get(item.source.type) == item.dtype and not item.offset:
        return chunk
    values = dequantize(chunk, item.source.type)
    return np.ascontiguousarray(values.astype("<f4", copy=False) - np.float32(item.offset))


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
