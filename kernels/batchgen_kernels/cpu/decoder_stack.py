"""A model of the llama kind in one call, or some of its layers: in short steps, calling costs as much as computing.

In each layer, h += out(attention(rotary(q), rotary(k), v)) with q, k, v = qkv(rms_norm(h)); then
h += down(silu(gate(x)) * up(x)) with x = rms_norm(h). All in bf16, with the bits of the kernels called one by one.

Legend: T tokens, S sequences, E features, H query heads, G KV heads, D head size, N blocks, B block size,
V vocabulary, P positions, R features of a head that are rotated, W tokens whose logits are wanted.
"""

from __future__ import annotations

import ctypes
import itertools
from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from batchgen_kernels.cpu.library import DTYPE_CODES, dtype_code, empty_in_huge_pages, library
from batchgen_kernels.cpu.linear import LinearArgs, PackedGatedLinear, PackedLinear
from batchgen_kernels.segments import check_block_size

_P, _I64, _I32, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float
_FLOATS = (torch.float32, torch.bfloat16)
_NO_SUCH_TOKEN, _NO_SUCH_POSITION, _NO_SUCH_CHUNK = 1, 2, 3
"""Of DecoderStatus in api.h."""
_FIRST_POSITIONS = 1024
"""In the first table of angles."""


class _LayerArgs(ctypes.Structure):
    """DecoderLayerArgs of api.h."""

    _fields_ = [
        *((name, LinearArgs) for name in ("qkv", "attention_out", "gate_up", "down")),
        *((name, _P) for name in ("attention_norm", "mlp_norm", "k_cache", "v_cache", "k_scales", "v_scales")),
        *((name, _F) for name in ("attention_eps", "mlp_eps", "scale")),
        *((name, _I32) for name in ("norm_dtype", "kv_dtype", "num_heads", "num_kv_heads", "head_dim", "block_size")),
        ("window", _I32),
    ]


class _StepArgs(ctypes.Structure):
    """DecoderStepArgs of api.h."""

    _fields_ = [
        *((name, _P) for name in ("cos", "sin", "positions", "slots", "block_tables", "query_starts", "context_lens")),
        *((name, _I64) for name in ("table_stride", "step")),
        *((name, _I32) for name in ("num_tokens", "num_sequences", "rotated", "angle_dtype", "num_threads")),
    ]


class _ModelArgs(ctypes.Structure):
    """DecoderModelArgs of api.h."""

    _fields_ = [
        ("layers", ctypes.POINTER(ctypes.POINTER(_LayerArgs))),
        *((name, _P) for name in ("embedding", "norm")),
        ("head", LinearArgs),
        ("num_embeddings", _I64),
        ("eps", _F),
        *((name, _I32) for name in ("norm_dtype", "num_layers")),
    ]


class _ModelStepArgs(ctypes.Structure):
    """DecoderModelStepArgs of api.h."""

    _fields_ = [
        *((name, _P) for name in ("token_ids", "starts", "counts", "wanted", "block_tables", "cos", "sin", "logits")),
        *((name, _I64) for name in ("table_stride", "num_positions", "step")),
        *((name, _I32) for name in ("num_tokens", "num_sequences", "num_wanted", "rotated", "angle_dtype")),
        ("num_threads", _I32),
    ]


class Norm(NamedTuple):
    """The weight [E] (fp32 or bf16) and epsilon of an RMS norm."""

    weight_E: Tensor
    eps: float


class TokenChunks(NamedTuple):
    """A step of a model: of each of S sequences some neighbouring tokens, one sequence after the other; all int32."""

    token_ids_T: array[int]
    starts_S: array[int]
    """Position of a sequence's first token in this step."""
    counts_S: array[int]
    """How many tokens of it there are."""
    wanted_W: array[int]
    """The tokens, as they lie in `token_ids_T`, whose logits are computed."""


_step_numbers = itertools.count()


class DecoderStep:
    """Where the tokens of a step stand, for all layers: the arguments of `store_kv` and `paged_attention`."""

    def __init__(
        self, slots_T: Tensor, block_tables_SB: Tensor, query_starts_S1: Tensor, context_lens_S: Tensor
    ) -> None:
        for tensor, dtype in (
            (slots_T, torch.int64), (block_tables_SB, torch.int32), (query_starts_S1, torch.int32),
            (context_lens_S, torch.int32),
        ):  # fmt: skip
            if tensor.dtype != dtype or not tensor.is_contiguous():
                raise TypeError(f"step tensors must be contiguous {dtype}, got {tensor.dtype}")
        self._kept = (slots_T, block_tables_SB, query_starts_S1, context_lens_S)
        self.num_tokens = len(slots_T)
        self.args = _StepArgs(
            slots=slots_T.data_ptr(),
            block_tables=block_tables_SB.data_ptr(),
            query_starts=query_starts_S1.data_ptr(),
            context_lens=context_lens_S.data_ptr(),
            table_stride=block_tables_SB.stride(0),
            step=next(_step_numbers),
            num_tokens=self.num_tokens,
            num_sequences=len(context_lens_S),
            num_threads=torch.get_num_threads(),
        )


class DecoderLayer:
    """The weights of one layer and where its cache lies; called as part of a stack."""

    def __init__(
        self,
        qkv: PackedLinear,
        attention_out: PackedLinear,
        gate_up: PackedGatedLinear,
        down: PackedLinear,
        norms: tuple[Norm, Norm],
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
    ) -> None:
        features = qkv.in_features
        sizes = {
            "qkv": (qkv.out_features, (num_heads + 2 * num_kv_heads) * head_dim),
            "attention_out": (attention_out.in_features, num_heads * head_dim),
            "the output of attention": (attention_out.out_features, features),
            "gate_up": (gate_up.in_features, features),
            "down": (down.in_features, gate_up.out_features),
            "the output of down": (down.out_features, features),
            **{f"norm {index}": (len(norm.weight_E), features) for index, norm in enumerate(norms)},
        }
        for name, (size, expected) in sizes.items():
            if size != expected:
                raise ValueError(f"{name} must have {expected} features, got {size}")
        weights = [norm.weight_E.detach().contiguous() for norm in norms]
        codes = {dtype_code(weight, "norm", _FLOATS) for weight in weights}
        if len(codes) > 1:
            raise TypeError("both norms must be of one dtype")
        self._kept = (qkv, attention_out, gate_up, down, weights)
        self.head_dim, self.features = head_dim, features
        self.args = _LayerArgs(
            *(product.prepared() for product in (qkv, attention_out, gate_up, down)),
            attention_norm=weights[0].data_ptr(),
            mlp_norm=weights[1].data_ptr(),
            attention_eps=norms[0].eps,
            mlp_eps=norms[1].eps,
            scale=scale,
            norm_dtype=codes.pop(),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
        )

    def attach_cache(
        self,
        k_cache: Tensor,
        v_cache: Tensor,
        window: int | None = None,
        k_scales: Tensor | None = None,
        v_scales: Tensor | None = None,
    ) -> None:
        """Say where keys and values lie: [N, G, B, D] in bf16, or int8 with fp32 scales [N, G, B]."""
        check_block_size(k_cache.shape[2])
        args = self.args
        for cache in (k_cache, v_cache):
            if (cache.shape[1], cache.shape[3]) != (args.num_kv_heads, args.head_dim) or not cache.is_contiguous():
                raise ValueError(f"a cache must be contiguous [N, {args.num_kv_heads}, B, {args.head_dim}]")
        args.kv_dtype = dtype_code(k_cache, "k_cache", (torch.bfloat16, torch.int8))
        if (args.kv_dtype == DTYPE_CODES[torch.int8]) != (k_scales is not None and v_scales is not None):
            raise ValueError("k_scales and v_scales belong to int8 caches, and only to these")
        args.k_cache, args.v_cache = k_cache.data_ptr(), v_cache.data_ptr()
        args.k_scales = None if k_scales is None else k_scales.data_ptr()
        args.v_scales = None if v_scales is None else v_scales.data_ptr()
        args.block_size, args.window = k_cache.shape[2], window or 0
        self._caches = (k_cache, v_cache, k_scales, v_scales)


class _Angles:
    """Cosines and sines [P, R] (fp32 or bf16) of tokens, or of positions."""

    def __init__(self, cos_PR: Tensor, sin_PR: Tensor, head_dim: int) -> None:
        if cos_PR.shape != sin_PR.shape or cos_PR.dtype != sin_PR.dtype:
            raise ValueError("cos and sin must agree in shape and dtype")
        self.num_positions, self._rotated = cos_PR.shape
        if self._rotated % 2 or self._rotated > head_dim:
            raise ValueError(f"cos must have an even number of features, no more than {head_dim}")
        self._cos, self._sin = cos_PR.contiguous(), sin_PR.contiguous()
        self._code = dtype_code(cos_PR, "cos and sin", _FLOATS)

    def enter(self, args: _StepArgs | _ModelStepArgs) -> None:
        """Let a step use these."""
        args.cos, args.sin = self._cos.data_ptr(), self._sin.data_ptr()
        args.rotated, args.angle_dtype = self._rotated, self._code


class DecoderStack:
    """Layers that follow each other, of the same sizes; called once per step."""

    def __init__(self, layers: Sequence[DecoderLayer]) -> None:
        first = layers[0]
        if any((layer.features, layer.head_dim) != (first.features, first.head_dim) for layer in layers):
            raise ValueError("the layers of a stack must have the same number of features and the same head size")
        self.features, self.head_dim = first.features, first.head_dim
        self.layers = list(layers)
        self.pointers = (ctypes.POINTER(_LayerArgs) * len(layers))(*(ctypes.pointer(layer.args) for layer in layers))

    def __call__(self, hidden_TE: Tensor, cos_TR: Tensor, sin_TR: Tensor, step: DecoderStep) -> None:
        """Run the layers over contiguous bf16 `hidden_TE`, which is changed in place; angles as for `rotary`."""
        dtype_code(hidden_TE, "hidden", (torch.bfloat16,))
        if hidden_TE.shape != (step.num_tokens, self.features) or not hidden_TE.is_contiguous():
            raise ValueError(f"hidden must be contiguous [{step.num_tokens}, {self.features}]")
        angles = _Angles(cos_TR, sin_TR, self.head_dim)
        if angles.num_positions != step.num_tokens:
            raise ValueError(f"cos and sin must be for {step.num_tokens} tokens")
        angles.enter(step.args)
        hidden = ctypes.c_void_p(hidden_TE.data_ptr())
        library().bg_decoder_layers(self.pointers, len(self.layers), hidden, ctypes.byref(step.args))


class DecoderModel:
    """Embedding, layers, norm and head; called once per step."""

    def __init__(
        self,
        embedding_VE: Tensor,
        layers: Sequence[DecoderLayer],
        norm: Norm,
        head: PackedLinear,
        angles_of: Callable[[int], tuple[Tensor, Tensor]],
    ) -> None:
        """`angles_of` gives cosines and sines [P, R] of the first P positions; it is called again where P grows."""
        self._stack = DecoderStack(layers)
        features = self._stack.features
        weight = norm.weight_E.detach().contiguous()
        sizes = {"the embedding": embedding_VE.shape[1], "the norm": len(weight), "the head": head.in_features}
        for name, size in sizes.items():
            if size != features:
                raise ValueError(f"{name} must have {features} features, got {size}")
        dtype_code(embedding_VE, "the embedding", (torch.bfloat16,))
        embedding = embedding_VE.detach().contiguous()
        self._num_logits = head.out_features
        self._logits_WV = self._room_WV = torch.empty(0, self._num_logits)
        self._kept = (embedding, weight, head)
        self._angles_of = angles_of
        self._step = _ModelStepArgs()
        self._make_angles_for(_FIRST_POSITIONS)
        self._args = _ModelArgs(
            layers=self._stack.pointers,
            embedding=embedding.data_ptr(),
            norm=weight.data_ptr(),
            head=head.prepared(),
            num_embeddings=len(embedding),
            eps=norm.eps,
            norm_dtype=dtype_code(weight, "the norm", _FLOATS),
            num_layers=len(self._stack.layers),
        )

    def __call__(self, chunks: TokenChunks, block_tables_SB: Tensor) -> Tensor:
        """The logits [W, V] (fp32) of the wanted tokens, until the next call; tables as for `paged_attention`.

        Raises IndexError for an id that has no embedding, or for a negative position.
        """
        token_ids, starts, counts, wanted = chunks
        if not all(column.typecode == "i" for column in chunks):
            raise TypeError("token ids, starts, counts and wanted tokens must be arrays of int32")
        if block_tables_SB.dtype != torch.int32 or block_tables_SB.stride(1) != 1:
            raise TypeError(f"block tables must be int32, row by row, got {block_tables_SB.dtype}")
        if not len(starts) == len(counts) <= len(block_tables_SB):
            raise ValueError("starts, counts and block tables must be for the same sequences")
        step = self._step
        step.token_ids, step.num_tokens = token_ids.buffer_info()
        step.starts, step.num_sequences = starts.buffer_info()
        step.counts = counts.buffer_info()[0]
        step.wanted, step.num_wanted = wanted.buffer_info()
        step.block_tables, step.table_stride = block_tables_SB.data_ptr(), block_tables_SB.stride(0)
        step.step, step.num_threads = next(_step_numbers), torch.get_num_threads()
        logits_WV = self._logits_for(len(wanted))
        step.logits = logits_WV.data_ptr()
        status = self._run()
        if status == _NO_SUCH_POSITION:
            if min(starts) < 0:
                raise IndexError("a position is negative")
            self._make_angles_for(2 * max(map(sum, zip(starts, counts, strict=True))))
            status = self._run()
        if status == _NO_SUCH_TOKEN:
            raise IndexError(f"token ids must be from 0 to {self._args.num_embeddings - 1}")
        if status == _NO_SUCH_CHUNK:
            raise ValueError(f"counts must add up to {len(token_ids)} token ids, and wanted tokens be among them")
        return logits_WV

    def _run(self) -> int:
        status: int = library().bg_decoder_model(ctypes.byref(self._args), ctypes.byref(self._step))
        return status

    def _logits_for(self, count: int) -> Tensor:
        # Kept: the system would find and clear the pages of a new one in most steps, a twentieth of their time.
        if count > len(self._room_WV):
            self._room_WV = empty_in_huge_pages([count, self._num_logits], torch.float32)
        if count != len(self._logits_WV):
            self._logits_WV = self._room_WV[:count]
        return self._logits_WV

    def _make_angles_for(self, num_positions: int) -> None:
        self._angles = _Angles(*self._angles_of(num_positions), self._stack.head_dim)
        self._angles.enter(self._step)
        self._step.num_positions = self._angles.num_positions
