"""DeepSeek-OCR-2: SAM features and learned queries go through a Qwen2-like encoder; the queries' rows are the tokens.

Checkpoint: `deepseek-community/DeepSeek-OCR-2`. Reference: `modeling_deepseek_ocr2.py` of transformers 5.24 (also run
with 5.17).

An image is a global view of 1,024 pixels, 256 tokens, and no or 2 to 6 local tiles of 768 pixels, 144 tokens each. Its
result is the tiles' rows, the global rows and a separator: `144 k + 257` rows for k tiles. Features attend to each
other, queries to all features and to the queries before them.

Capacity rule and memory: see `deepseek_ocr`.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from onereplay.adapters.deepseek_ocr import DeepEncoder
from onereplay.adapters.multipath import GLOBAL, LOCAL, local_then_global
from onereplay.adapters.sam import sam_features
from onereplay.attention.interface import use_varlen
from onereplay.core.buffers import Buffers
from onereplay.geometry import Grid
from onereplay.geometry.grids import Int64

FEW_QUERIES, MANY_QUERIES = 144, 256
"""Rows of the two tables of queries in transformers; the first serves tiles of at most as many features."""


class DeepseekOcr2(DeepEncoder):
    """DeepSeek-OCR-2."""

    model_type = "deepseek_ocr2"
    parts = ("vision_tower", "multi_modal_projector", "view_separator")
    published_sides: ClassVar = {GLOBAL: 1024, LOCAL: 768}

    # sizes

    def tokens_of(self, side: int) -> int:
        """As many as queries."""
        return FEW_QUERIES if self.features_of(side) ** 2 <= FEW_QUERIES else MANY_QUERIES

    def order(self, grid: Grid, global_tokens: int, local_tokens: int) -> Int64:
        """Local tiles, the global view, the separator."""
        rows = local_then_global(grid, global_tokens, local_tokens)
        return np.append(rows, len(rows))

    # forward

    def blocks(self) -> Iterable[nn.Module]:
        """Every layer of SAM and of the encoder."""
        tower = self.own.vision_tower
        return [*tower.sam_encoder.layers, *tower.vision_encoder.layers]

    def forward(self, path: str, buffers: Buffers, bounds: Mapping[str, int]) -> Sequence[Tensor]:
        """SAM, the encoder over features and queries with its mask, the queries' rows projected: `(tokens, hidden)`.

        The mask makes attention sdpa, whatever back end is named.
        """
        tower = self.own.vision_tower
        features = sam_features(tower.sam_encoder, buffers.pixels).flatten(2).transpose(1, 2)
        tiles, count, _ = features.shape
        table = tower.query_768_resolution if count <= FEW_QUERIES else tower.query_1024_resolution
        hidden = torch.cat([features, table.weight.expand(tiles, -1, -1)], dim=1)
        places = torch.arange(hidden.shape[1], device=hidden.device)
        mask = (places < count) | (places <= places[:, None])
        encoder = tower.vision_encoder
        rotary = encoder.rotary_emb(hidden, places[None])
        with use_varlen(encoder.config, self.attention):
            for layer in encoder.layers:
                hidden = layer(hidden, attention_mask=mask[None, None], position_embeddings=rotary)
        queries = encoder.norm(hidden)[:, count:]
        return (self.own.multi_modal_projector(queries).flatten(0, 1),)

    def delimiters(self) -> Sequence[Tensor]:
        """The separator."""
        return (self.own.view_separator[None],)
