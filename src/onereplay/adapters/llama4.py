"""Llama 4: tiles of an image and one of the whole, each with a class token behind its patches.

Checkpoints: `meta-llama/Llama-4-{Scout-17B-16E,Maverick-17B-128E}[-Instruct]`. Reference: `modeling_llama4.py` of
transformers 5.24 (also run with 5.17), `image_processing_llama4.py` for the inputs. An image of `aspect_ratios` (rows,
columns) is that many tiles and, if there is more than one, a tile of the whole behind them.

The stock `get_image_features` ends before `multi_modal_projector`, which the model applies afterwards: here features
are projected, and only `accelerate` leaves the projector to the model. The rotary embedding multiplies complex numbers;
the adapter's own copies do the same with pairs of real ones, which `torch.compile` can fuse.

Capacity rule: see `TileAdapter`. A tile of 336 pixels is 577 rows in the tower and 144 tokens behind it.
"""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from types import MethodType
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import linear
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama4.modeling_llama4 import vision_eager_attention_forward

from onereplay.adapters.base import host_rows
from onereplay.adapters.tiles import TileAdapter
from onereplay.core.buffers import Buffers
from onereplay.core.items import Modality


class Llama4(TileAdapter):
    """Llama 4."""

    model_type = "llama4"
    parts = ("vision_model", "multi_modal_projector")
    modalities = (Modality.IMAGE,)
    entry_points: ClassVar = {"get_image_features": ("pixel_values",)}
    size_names = ("num_patches", "aspect_ratios")

    def __init__(self, config: Any, model: Any = None, attention: str = "auto", optimize: Sequence[str] = ()) -> None:
        super().__init__(config, model, attention, optimize)
        if model is not None:
            for layer in self.blocks():
                layer.self_attn.__dict__["forward"] = MethodType(_attend, layer.self_attn)

    # sizes

    @cached_property
    def tile_shape(self) -> tuple[int, int, int]:
        """3 x 336 x 336 in the published checkpoints."""
        vision = self.config.vision_config
        return int(vision.num_channels), int(vision.image_size), int(vision.image_size)

    @property
    def hidden_size(self) -> int:
        """The language model's width; that of the tower's adapter for `as_stock`."""
        if self.as_stock:
            return int(self.config.vision_config.vision_output_dim)
        return int(self.config.text_config.hidden_size)

    def tokens_of(self, height: int, width: int) -> int:
        """The pixel shuffle merges `1 / pixel_shuffle_ratio` patches a side."""
        return int((self.patches_of(height, width) - 1) * self.config.vision_config.pixel_shuffle_ratio**2)

    def patches_of(self, height: int, width: int) -> int:
        """The patches and the class token, for the one size that the tower has positions for."""
        self.refuse_other_sizes(height, width)
        return int((self.tile_shape[1] // self.config.vision_config.patch_size) ** 2 + 1)

    def image_counts(self, given: Mapping[str, Any]) -> Any:
        """From the processor's `aspect_ratios` `(N, 2)`; `num_patches` comes first."""
        if "num_patches" in given or "aspect_ratios" not in given:
            return super().image_counts(given)
        tiles = [rows * columns for rows, columns in host_rows("aspect_ratios", given["aspect_ratios"], 2)]
        return [count + (count > 1) for count in tiles]

    # forward

    def blocks(self) -> Iterable[Any]:
        """Every layer of the tower."""
        return self.own.vision_model.model.layers  # type: ignore[no-any-return]

    def forward(self, path: str, buffers: Buffers, bounds: Mapping[str, int]) -> Sequence[Tensor]:
        """Patches and class token, layers, pixel shuffle with its MLP, projector: `(tiles * tile_tokens, hidden)`."""
        tower = self.own.vision_model
        patches = tower.patch_embedding(buffers.pixels)
        class_token = tower.class_embedding.expand(len(patches), 1, -1)
        hidden = tower.layernorm_pre(torch.cat([patches, class_token], dim=1) + tower.positional_embedding_vlm)
        turns = torch.view_as_real(tower.rotary_embedding.freqs_ci)
        with self.own_attention(tower.config):
            for layer in tower.model.layers:
                hidden = layer(hidden, turns)[0]
        rows: Tensor = tower.vision_adapter(tower.layernorm_post(hidden)[:, :-1]).flatten(0, 1)
        return (rows if self.as_stock else self.own.multi_modal_projector(rows),)

    def stock_output(self, features: Sequence[Tensor]) -> Any:
        """`last_hidden_state` is one tensor, `(tiles, tile_tokens, vision_output_dim)`, and not projected."""
        return BaseModelOutputWithPooling(last_hidden_state=torch.stack(list(features)))

    def stock_features(self, model: Any, inputs: Mapping[str, Any]) -> list[Tensor]:
        """As for other models; transformers 5.17 also asks for a strategy, which its tower does not read."""
        weight = model.multi_modal_projector.linear_1.weight
        name = "vision_feature_select_strategy"
        asked = {name: "default"} if name in inspect.signature(model.get_image_features).parameters else {}
        pixels = inputs["pixel_values"].to(self.device, weight.dtype)
        return self.stock_rows(model.get_image_features(pixel_values=pixels, **asked))

    def stock_rows(self, output: Any) -> list[Tensor]:
        """What the model makes of the output: projected, in the output's own precision."""
        rows: Tensor = output.last_hidden_state
        if not self.as_stock:
            rows = linear(rows, self.model.multi_modal_projector.linear_1.weight.to(rows.dtype))
        return list(rows)


def _attend(self: Any, hidden_states: Tensor, freqs_ci: Tensor, **unused: Any) -> tuple[Tensor, None]:
    """`Llama4VisionAttention.forward` with the rotary embedding in real numbers.

    Args:
        hidden_states: `(tiles, rows, width)`.
        freqs_ci: float32 `(rows, 1, head_dim / 2, 2)`, cosine and sine of each pair's turn.
    """
    shape = (*hidden_states.shape[:-1], -1, self.head_dim)
    query, key = (_turn(part(hidden_states).view(shape), freqs_ci) for part in (self.q_proj, self.k_proj))
    value = self.v_proj(hidden_states).view(shape)
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, vision_eager_attention_forward)
    heads = (part.transpose(1, 2) for part in (query, key, value))
    output, _ = attend(self, *heads, None, dropout=0.0, scaling=None, is_causal=False)
    return self.o_proj(output.reshape(hidden_states.shape).contiguous()), None


def _turn(heads: Tensor, turns: Tensor) -> Tensor:
    """`(tiles, rows, heads, head_dim)` with each pair of neighbouring values turned, in float32."""
    even, odd = heads.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = turns.unbind(-1)
    turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1)
    return turned.flatten(-2).to(heads.dtype)
