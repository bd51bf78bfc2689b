"""Mixtures of experts whose rows do not know their neighbours: packed products for routers and experts.

Shapes: T tokens, K experts per token, E hidden size, N products' outputs, M tokens of one expert.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from batchgen.engine.aligned import aligned_rows
from batchgen.engine.linear import Product, checked_product

_ROUTER = re.compile("(router|gate|gating)$", re.IGNORECASE)


def pack_experts(model: nn.Module) -> int:
    """Pack what `nn.Linear` does not hold: the weights of routers and of experts; returns of how many modules."""
    count = 0
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if hasattr(type(module), "_apply_gate") and isinstance(getattr(module, "down_proj", None), nn.Parameter):
            module.forward = PackedExperts(name, module)
        elif _ROUTER.search(type(module).__name__) and isinstance(weight, nn.Parameter) and weight.dim() == 2:
            module.forward = _with_packed_weight(name, module.forward, weight)
        elif any(parameter.dim() == 3 for parameter in module.parameters(recurse=False)):
            module.forward = _with_packed_batches(name, module)
        else:
            continue
        count += 1
    return count


class PackedExperts:
    """The forward pass of a module that transformers' `use_experts_implementation` decorates.

    The module's own weights are released; its gate and its activation stay in use.
    """

    def __init__(self, name: str, module: Any) -> None:
        self._module = module
        up_name = "gate_up_proj" if module.has_gate else "up_proj"
        self._up = _products(f"{name}.{up_name}", module, up_name)
        self._down = _products(f"{name}.down_proj", module, "down_proj")
        self._width = getattr(module, up_name).shape[1 if not module.is_transposed else 2]
        for released in (up_name, "down_proj"):
            setattr(module, released, None)

    def __call__(self, hidden_TE: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Each token's experts, weighted and summed in the order of their numbers."""
        out_TE = torch.zeros_like(hidden_TE)
        for expert in torch.unique(index_TK).tolist():
            if expert >= len(self._up):
                continue
            token_M, place_M = (index_TK == expert).nonzero(as_tuple=True)
            result_ME = self._expert(expert, hidden_TE[token_M])
            weighted_ME = result_ME * weights_TK[token_M, place_M, None]
            out_TE.index_add_(0, token_M, weighted_ME.to(out_TE.dtype))
        return out_TE

    def _expert(self, expert: int, x_ME: Tensor) -> Tensor:
        module = self._module
        num_rows = len(x_ME)
        # The gate computes curved functions over all rows at once; see batchgen.engine.aligned.
        rows = aligned_rows(num_rows, self._width // 2 if module.has_gate else self._width)
        up_MN = self._up[expert](functional.pad(x_ME, (0, 0, 0, rows - num_rows)))
        gated_MN = module._apply_gate(up_MN) if module.has_gate else module.act_fn(up_MN)
        down_ME = self._down[expert](gated_MN)[:num_rows]
        return module.post_expert_norm(down_ME) if module.has_post_expert_norm else down_ME


def _products(name: str, module: Any, parameter: str) -> list[Product]:
    weights = getattr(module, parameter).detach()
    biases = getattr(module, f"{parameter}_bias", None) if module.has_bias else None
    if module.is_transposed:
        weights = weights.transpose(1, 2)
    return [
        checked_product(f"{name}[{index}]", weight.contiguous(), None if biases is None else biases[index].detach())
        for index, weight in enumerate(weights)
    ]


class _Products(TorchFunctionMode):
    """While it is entered, functional.linear and torch.bmm over known weights are packed products."""

    def __init__(self, linear: Callable[..., Tensor] | None, batches: Mapping[int, Sequence[Product]]) -> None:
        super().__init__()
        self._linear = linear
        self._batches = batches

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Called by torch in place of every function."""
        if func is functional.linear and self._linear is not None:
            return self._linear(*args, **(kwargs or {}))
        if func is torch.bmm and id(args[1]) in self._batches:
            products = self._batches[id(args[1])]
            return torch.stack([product(x) for product, x in zip(products, args[0], strict=True)])
        return func(*args, **(kwargs or {}))


def _with_packed_weight(name: str, forward: Callable[..., Any], weight: nn.Parameter) -> Callable[..., Any]:
    """A router's forward pass; some compute in float32 whatever the model does, so a product is kept per dtype."""
    products: dict[torch.dtype, Product] = {}

    def linear(x: Tensor, used: Tensor, bias: Tensor | None = None) -> Tensor:
        if used.shape != weight.shape:
            return functional.linear(x, used, bias)
        if used.dtype not in products:
            products[used.dtype] = checked_product(name, weight.detach().to(used.dtype), None)
        result = products[used.dtype](x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], len(used))
        return result if bias is None else result + bias

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _Products(linear, {}):
            return forward(*args, **kwargs)

    return run


def _with_packed_batches(name: str, module: nn.Module) -> Callable[..., Any]:
    """The forward pass of experts that all see every token, in one batched product per weight [experts, K, N]."""
    forward = module.forward
    batches = {
        id(parameter): [
            checked_product(f"{name}.{key}[{index}]", weight.T.contiguous(), None)
            for index, weight in enumerate(parameter.detach())
        ]
        for key, parameter in module.named_parameters(recurse=False)
        if parameter.dim() == 3
    }

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _Products(None, batches):
            return forward(*args, **kwargs)

    return run
