"""Transformer blocks as few kernels as they need: five or six products and attention, and one pass between each.

A pre-norm block reads its residual stream, normalises it, multiplies, attends, adds, and so on; run module by module
that is some twenty kernels, and most of their time is memory that is read and written again. Here

* query, key and value are one product, and so are gate and up while rows are few;
* the product that ends the MLP adds to the residual stream itself (`addmm_`), in float32 and rounded once;
* the norm between adds the attention's branch and bias and, ahead, the bias of the MLP. The stream is rounded twice a
  block, as in the stock one: a third rounding made the error of a tower 1.1 times as large;
* rotary embedding happens inside attention where sequences are short, else in place;
* the activation takes the bias of its product along; GELU by tanh is part of the product.

Weights stay where the user's module has them, or become views of joined tensors (`storage`). A block changes its input
in place (or a copy, where that is not contiguous): towers hand each block a tensor that nobody else reads.

Recognised are blocks by the name of their class, whose forward was read in transformers 5.17 and 5.24; others are left
to `compiled_blocks`.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from onereplay.attention import resolve_backend, varlen_attention
from onereplay.attention.interface import attention_forward, backend_of, offsets_of
from onereplay.core.budgets import round_up
from onereplay.optimize import kernels
from onereplay.optimize.stock import is_stock
from onereplay.optimize.storage import Storage

ALIGNMENT = 64
"""Inner widths of gated MLPs are padded to multiples of this; see `aligned_mlp`."""
MAX_MERGED_ROWS = 8192
"""Gate and up are one product up to here. Measured on an H200, 1,280 to 2 x 3,456 columns without bias: one product
takes 0.72 of the time of two with 256 rows, 0.96 with 4,096 and 1.06 with 20,480."""


@dataclass(frozen=True)
class _Parts:
    """The modules of a block by their roles."""

    norms: tuple[nn.Module, nn.Module]
    attention: Any
    projections: tuple[nn.Linear, ...]
    """Query, key and value in one, or each."""
    out: nn.Linear
    rising: tuple[nn.Linear, ...]
    """Of the MLP: up; gate and up; or one layer of gate and up, if `gated`."""
    down: nn.Linear
    activation: nn.Module | str
    gated: bool = False
    scales: tuple[Tensor, Tensor] | None = None
    """Of the branches, where the block has layer scale."""
    second: str = "attention_mask"
    """The name of the second argument of `forward`."""


def fused_blocks(blocks: Iterable[nn.Module], storage: Storage) -> dict[nn.Module, Callable[..., Any]]:
    """A fused `forward` for each block that is recognised."""
    found: dict[nn.Module, Callable[..., Any]] = {}
    for block in blocks:
        kind = type(block)
        parts_of = _RECOGNISED.get(kind.__name__) or _RECOGNISED.get(f"{kind.__module__}.{kind.__name__}")
        parts = parts_of(block) if parts_of is not None else None
        if parts is None or not is_stock(block, *parts.projections, parts.out, *parts.rising, parts.down):
            continue
        known = _activation_name(parts.activation) and all(map(_norm_of, parts.norms))
        if known and _biases_alike(parts.projections) and _biases_alike(parts.rising):
            found[block] = _Fused(parts, storage).forward
    return found


def fused_norms(modules: Iterable[nn.Module]) -> dict[nn.Module, Callable[..., Any]]:
    """A `forward` in one kernel for each root-mean-square norm that stands alone: transformers' own are seven."""
    return {module: functools.partial(_normed, module) for module in modules if _is_rms(module) and is_stock(module)}


def _normed(module: Any, hidden_states: Tensor) -> Tensor:
    rows = hidden_states.reshape(-1, hidden_states.shape[-1]).contiguous()
    normed = kernels.norm(rows, module.weight, None, module.variance_epsilon, rms=True)
    return normed.view(hidden_states.shape)


class _Fused:
    """One block."""

    def __init__(self, parts: _Parts, storage: Storage) -> None:
        self._parts = parts
        attention = parts.attention
        self._heads = int(getattr(attention, "num_heads", None) or attention.num_attention_heads)
        self._scale = float(getattr(attention, "scaling", None) or attention.scale)
        self._kind = _activation_name(parts.activation)
        self._qkv, self._qkv_bias = _stacked(parts.projections, storage, None)
        self._gate_up, self._gate_up_bias, self._width, self._down = self._mlp_weights(storage)

    def _mlp_weights(self, storage: Storage) -> tuple[Tensor, Tensor | None, int, Tensor]:
        first, down = self._parts.rising[0], self._parts.down.weight
        if len(self._parts.rising) == 1:
            return first.weight, first.bias, down.shape[1], down
        width = round_up(first.out_features, ALIGNMENT)
        weight, bias = _stacked(self._parts.rising, storage, width)
        return weight, bias, width, down if width == down.shape[1] else storage.pad(down, (len(down), width))

    def forward(self, hidden_states: Tensor, second: Tensor | None = None, **others: Any) -> Tensor:
        """As the stock block's: `(..., rows, width)`. Changes its input in place."""
        parts, arguments = self._parts, _arguments({self._parts.second: second} | others)
        first_norm, second_norm = map(_norm_of, parts.norms)
        scales = parts.scales or (None, None)
        biases: tuple[Tensor | None, Tensor | None] = parts.out.bias, parts.down.bias
        x = hidden_states.reshape(-1, hidden_states.shape[-1]).contiguous()
        normed = kernels.norm(x, *first_norm[:3], rms=first_norm[3])
        qkv = linear(normed, self._qkv, self._qkv_bias)
        del normed  # what nobody reads any more is memory for what comes next
        attended = self._attended(qkv, hidden_states.shape, arguments)
        del qkv
        if parts.scales is None and all(bias is None for bias in biases):
            x.addmm_(attended, parts.out.weight.t())
            normed = kernels.norm(x, *second_norm[:3], rms=second_norm[3])
        else:
            normed = kernels.norm(
                x,
                *second_norm[:3],
                rms=second_norm[3],
                branch=linear(attended, parts.out.weight),
                scale=scales[0],
                before=biases[0],
                after=biases[1] if parts.scales is None else None,
            )
        del attended
        risen = self._risen(normed)
        del normed
        inner = self._activated(risen)
        del risen
        if parts.scales is None:
            x.addmm_(inner, self._down.t())
        else:
            kernels.add(x, linear(inner, self._down), biases[1], scales[1])
        return x.view(hidden_states.shape)

    def _attended(self, qkv: Tensor, shape: torch.Size, arguments: Mapping[str, Any]) -> Tensor:
        """`(rows, width)` from `(rows, 3 * width)`."""
        parts = qkv.view(len(qkv), 3, self._heads, -1)
        query, key, value = parts.unbind(1)
        angles: tuple[Tensor, Tensor] | None = arguments.get("position_embeddings")
        mask = arguments.get("attention_mask")
        offsets, bound = offsets_of(arguments.get("cu_seqlens"), arguments.get("max_seqlen"), mask)
        backend = backend_of(self._parts.attention)
        if angles is not None:
            if offsets is not None and resolve_backend(backend, qkv.device, bound, query.shape[-1]) == "short":
                from onereplay.attention.short import short_attention

                return short_attention(query, key, value, offsets, self._scale, angles).flatten(1)
            kernels.rotate(parts[:, :2].flatten(1, 2), *angles)
        if offsets is not None:
            return varlen_attention(query, key, value, offsets, bound, self._scale, backend).flatten(1)
        query, key, value = (part.view(*shape[:2], self._heads, -1).transpose(1, 2) for part in (query, key, value))
        output, _ = attention_forward(backend, self._parts.attention, query, key, value, mask, scaling=self._scale)
        return output.reshape(len(qkv), -1)

    def _risen(self, normed: Tensor) -> tuple[Tensor, ...]:
        """Up, or gate and up, before the activation: `(rows, inner width)` each."""
        weight, width = self._gate_up, self._width
        if not self._parts.gated:
            bias = self._bias_in_product(normed)
            if bias is not None:
                return (torch._addmm_activation(bias, normed, weight.t(), use_gelu=True),)
            return (linear(normed, weight),)
        if len(normed) <= MAX_MERGED_ROWS:
            gate, up = linear(normed, weight).split(width, 1)
            return gate, up
        return linear(normed, weight[:width]), linear(normed, weight[width:])

    def _activated(self, risen: tuple[Tensor, ...]) -> Tensor:
        """What the last product of the MLP takes: `(rows, inner width)`."""
        bias, width = self._gate_up_bias, self._width
        if len(risen) == 2:
            return kernels.gated(*risen, None if bias is None else (bias[:width], bias[width:]), self._kind)
        (inner,) = risen
        if self._bias_in_product(inner) is None:
            kernels.activate(inner, bias, self._kind)
        return inner

    def _bias_in_product(self, rows: Tensor) -> Tensor | None:
        """The bias of up, where cuBLAS adds it and applies GELU by tanh on the way out of the product."""
        return self._gate_up_bias if self._kind == "gelu_tanh" and rows.is_cuda else None


_NAMES = {"cu_seq_lens_q": "cu_seqlens", "max_length_q": "max_seqlen"}
_KNOWN = {"attention_mask", "cu_seqlens", "max_seqlen", "position_embeddings"}


def _arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """What a block was handed, under one set of names.

    Raises:
        TypeError: something that a fused block would not obey.
    """
    arguments = {_NAMES.get(name, name): value for name, value in given.items() if value is not None}
    unknown = sorted(name for name in arguments.keys() - _KNOWN if arguments[name] is not False)
    if unknown:
        raise TypeError(f"a fused block takes no {', '.join(unknown)}; leave fused_blocks out of optimize")
    return arguments


def _biases_alike(layers: tuple[nn.Linear, ...]) -> bool:
    """All have a bias or none has: only then are they one layer."""
    return len({layer.bias is None for layer in layers}) == 1


def _stacked(parts: tuple[nn.Linear, ...], storage: Storage, rows: int | None) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of several layers on one input as those of one layer, each filled up to `rows`."""
    if len(parts) == 1:
        return parts[0].weight, parts[0].bias
    biases = [part.bias for part in parts]
    bias = None if biases[0] is None else storage.stack(biases, rows)
    return storage.stack([part.weight for part in parts], rows), bias


# ---------------------------------------------------------------------------------------------------------------------
# What is recognised
# ---------------------------------------------------------------------------------------------------------------------


def _norm_of(module: Any) -> tuple[Tensor, Tensor | None, float, bool]:
    """Weight, bias, epsilon, and whether it is a root mean square; empty if it is another kind of norm."""
    if isinstance(module, nn.LayerNorm):
        return module.weight, module.bias, module.eps, False
    if _is_rms(module):
        return module.weight, None, module.variance_epsilon, True
    return ()  # type: ignore[return-value]


def _is_rms(module: Any) -> bool:
    """A norm `weight * x / rms(x)`; those that add one to the weight name their epsilon otherwise."""
    return type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon")


_ACTIVATIONS = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "QuickGELUActivation": "quick_gelu",
}


def _activation_name(module: Any) -> str:
    """The kind of `kernels.ACTIVATIONS` that a module is; empty if none."""
    if isinstance(module, str):
        return module
    if isinstance(module, nn.GELU):
        return "gelu_tanh" if module.approximate == "tanh" else "gelu"
    return _ACTIVATIONS.get(type(module).__name__, "")


def _qwen(block: Any) -> _Parts:
    """Blocks of the Qwen line: `attn.qkv`, `attn.proj`, an MLP of three or two layers under one of several names."""
    mlp = block.mlp
    names = next(names for names in _QWEN_MLPS if hasattr(mlp, names[-1]))
    return _Parts(
        norms=(block.norm1, block.norm2),
        attention=block.attn,
        projections=(block.attn.qkv,),
        out=block.attn.proj,
        rising=tuple(getattr(mlp, name) for name in names[:-1]),
        down=getattr(mlp, names[-1]),
        activation=mlp.act_fn if hasattr(mlp, "act_fn") else mlp.act,
        gated=len(names) == 3,
        second="cu_seqlens",
    )


_QWEN_MLPS = (("gate_proj", "up_proj", "down_proj"), ("linear_fc1", "linear_fc2"), ("fc1", "fc2"))


def _siglip(block: Any) -> _Parts:
    """Encoder layers in the form of CLIP."""
    attention = block.self_attn
    separate = () if hasattr(attention, "qkv_proj") else (attention.q_proj, attention.k_proj, attention.v_proj)
    return _Parts(
        norms=(block.layer_norm1, block.layer_norm2),
        attention=attention,
        projections=separate or (attention.qkv_proj,),
        out=attention.out_proj,
        rising=(block.mlp.fc1,),
        down=block.mlp.fc2,
        activation=block.mlp.activation_fn,
    )


def _paddleocr(block: Any) -> _Parts:
    """The same, handed cumulative lengths."""
    return replace(_siglip(block), second="cu_seqlens")


def _pixtral(block: Any) -> _Parts:
    """Pixtral: a gated MLP, no biases."""
    attention, mlp = block.attention, block.feed_forward
    return _Parts(
        norms=(block.attention_norm, block.ffn_norm),
        attention=attention,
        projections=(attention.q_proj, attention.k_proj, attention.v_proj),
        out=attention.o_proj,
        rising=(mlp.gate_proj, mlp.up_proj),
        down=mlp.down_proj,
        activation=mlp.act_fn,
        gated=True,
    )


def _deepseek_v41(block: Any) -> _Parts:
    """DeepSeek-V4.1: gate and up are one layer."""
    return _Parts(
        norms=(block.norm1, block.norm2),
        attention=block.attn,
        projections=(block.attn.wqkv,),
        out=block.attn.wo,
        rising=(block.mlp.w1,),
        down=block.mlp.w2,
        activation="silu",
        gated=True,
        second="cu_seqlens",
    )


def _dinov2(block: Any) -> _Parts | None:
    """DINOv2 with layer scale, under the names of 5.17 or 5.24; the giant one has another MLP and is left out."""
    nested = hasattr(block.attention, "attention")
    attention = block.attention.attention if nested else block.attention
    names = ("query", "key", "value") if nested else ("q_proj", "k_proj", "v_proj")
    if not hasattr(block.mlp, "fc1"):
        return None
    return _Parts(
        norms=(block.norm1, block.norm2),
        attention=attention,
        projections=tuple(getattr(attention, name) for name in names),
        out=block.attention.output.dense if nested else attention.o_proj,
        rising=(block.mlp.fc1,),
        down=block.mlp.fc2,
        activation=block.mlp.activation if hasattr(block.mlp, "activation") else block.mlp.activation_fn,
        scales=(block.layer_scale1.lambda1, block.layer_scale2.lambda1),
    )


def _internvl(block: Any) -> _Parts | None:
    """InternViT with layer scale; the one that normalises queries and keys is left out."""
    attention = block.attention
    if not isinstance(attention.q_norm, nn.Identity):
        return None
    return _Parts(
        norms=(block.layernorm_before, block.layernorm_after),
        attention=attention,
        projections=(attention.q_proj, attention.k_proj, attention.v_proj),
        out=attention.projection_layer,
        rising=(block.mlp.fc1,),
        down=block.mlp.fc2,
        activation=block.mlp.activation_fn,
        scales=(block.lambda_1, block.lambda_2),
    )


_RECOGNISED: Mapping[str, Callable[[Any], _Parts | None]] = {
    **dict.fromkeys(
        (
            "Qwen2VLVisionBlock",
            "Qwen2_5_VLVisionBlock",
            "Qwen3VLVisionBlock",
            "Qwen3VLMoeVisionBlock",
            "Qwen3_5VisionBlock",
            "Qwen3_5MoeVisionBlock",
            "Glm4vVisionBlock",
            "Glm4vMoeVisionBlock",
            "Ernie4_5_VLMoeVisionBlock",
        ),
        _qwen,
    ),
    **dict.fromkeys(
        (
            "SiglipEncoderLayer",
            "Siglip2EncoderLayer",
            "CLIPEncoderLayer",
            "Idefics3EncoderLayer",
            "SmolVLMEncoderLayer",
            "MiniMaxM3VLVisionEncoderLayer",
            "MiniCPMV4_6VisionEncoderLayer",
            "onereplay.models.deepseek_ocr.Layer",
        ),
        _siglip,
    ),
    "onereplay.models.deepseek_vl_v2.Block": _qwen,
    "onereplay.models.deepseek_v41.Block": _deepseek_v41,
    "PaddleOCRVisionEncoderLayer": _paddleocr,
    "PixtralAttentionLayer": _pixtral,
    "Dinov2Layer": _dinov2,
    "InternVLVisionLayer": _internvl,
}
