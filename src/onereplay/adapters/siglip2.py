"""SigLIP 2 (NaFlex): images of any shape as rows of patches, and one embedding an image.

Checkpoints: `google/siglip2-{base,so400m}-patch16-naflex` (the fixed sizes are published as `siglip`). Reference:
`modeling_siglip2.py` of transformers 5.24 (also run with 5.17). The tower is that of `naflex.py`. Its pooling head asks
each image with one learned query; here every row asks with it, so that the attention is the one of the layers, and the
first row of each image is kept. That costs about one layer more.

Capacity rule: see `PackedAdapter`; nothing is merged, so a token is a patch. The published processor makes at most 256
patches an image; graphs take up to 1,024 and a longer sequence is an eager forward.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from torch import Tensor
from torch.nn.functional import linear
from torch.nn.utils.rnn import pad_sequence
from transformers.modeling_outputs import BaseModelOutputWithPooling

from onereplay.adapters.base import TOWER, WHOLE
from onereplay.adapters.naflex import NaflexAdapter
from onereplay.adapters.packed import PATH, PackedBatch
from onereplay.attention import varlen_attention
from onereplay.config import EncoderCudaGraphConfig
from onereplay.core.assembly import split_rows
from onereplay.core.buffers import Array, Buffers, Declaration, Output, Rows
from onereplay.core.items import Item, Modality
from onereplay.core.protocol import PathSpec
from onereplay.errors import ConfigError
from onereplay.geometry import Grid

_INPUTS = ("pixel_values", "pixel_attention_mask", "spatial_shapes")


class Siglip2(NaflexAdapter):
    """SigLIP 2 with both towers; the text side is not touched."""

    model_type = "siglip2"
    parts = ("vision_model",)
    entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = {"get_image_features": _INPUTS}
    merge = 1

    def __init__(self, config: Any, model: Any = None, attention: str = "auto", optimize: Sequence[str] = ()) -> None:
        super().__init__(config, model, attention, optimize)
        self.form = "embedding" if self.has_embedding else "rows"
        """What an item gets: `embedding` or `rows`."""

    def configure(self, config: EncoderCudaGraphConfig) -> None:
        """Take `features`."""
        if config.features == "embedding" and not self.has_embedding:
            raise ConfigError(f"features='embedding': this {self.model_type} has no pooling head; use 'rows'")
        if config.features != "auto":
            self.form = config.features
        if config.tile_size is not None:
            raise ConfigError(f"tile_size={config.tile_size}: {self.model_type} takes images of any size; leave it out")

    # sizes

    @property
    def naflex(self) -> Any:
        """The vision side."""
        return vars(self.own)[self.parts[0] or TOWER]

    @cached_property
    def hidden_size(self) -> int:
        """The width of a row, and of an embedding."""
        return int(self.vision.hidden_size)

    @property
    def has_embedding(self) -> bool:
        """False for a tower without a pooling head."""
        return bool(self.vision.vision_use_head)

    # buffers

    def buffers(self) -> tuple[Declaration, ...]:
        """The tower's, and the first row of each image."""
        return (*super().buffers(), Rows("first", "sequences", shift="patches"))

    def paths(self) -> Mapping[str, PathSpec]:
        """One path; the table of rows, and the embedding."""
        outputs = [Output("rows", "tokens", (self.hidden_size,))]
        if self.has_embedding:
            outputs.append(Output("embedding", "sequences", (self.hidden_size,)))
        return {PATH: PathSpec(self.buffers(), tuple(outputs))}

    # pack

    def item(self, modality: Modality, grids: Sequence[Grid]) -> Item:
        """An embedding is one row an image, whatever its tokens are."""
        item = super().item(modality, grids)
        return item if self.form == "rows" else replace(item, rows=item.sizes[PATH].sequences)

    def piece(self, grid: Grid) -> Mapping[str, Array]:
        """The tower's metadata, and where the image begins."""
        return {**super().piece(grid), "first": np.zeros(grid.t, dtype=np.int64)}

    # forward

    def forward(self, path: str, buffers: Buffers, bounds: Mapping[str, int]) -> Sequence[Tensor]:
        """Rows `(patches, hidden)` and, with a head, embeddings `(images, hidden)`."""
        rows = self.rows(buffers, bounds)
        if not self.has_embedding:
            return (rows,)
        return rows, self._pooled(rows, buffers, bounds["cu_seqlens"])

    def _pooled(self, rows: Tensor, buffers: Buffers, max_seqlen: int) -> Tensor:
        """The head, with its query at every row of the attention and the first row of each image behind it."""
        head = self.naflex.head
        attention = head.attention
        heads = attention.num_heads
        weights, biases = attention.in_proj_weight.chunk(3), attention.in_proj_bias.chunk(3)
        query = linear(head.probe.view(1, -1), weights[0], biases[0]).expand(len(rows), -1)
        key, value = (linear(rows, weight, bias) for weight, bias in zip(weights[1:], biases[1:], strict=True))
        q, k, v = (each.unflatten(-1, (heads, -1)) for each in (query, key, value))
        scale = q.shape[-1] ** -0.5
        asked = varlen_attention(q, k, v, buffers.cu_seqlens, max_seqlen, scale, self.attention)
        pooled: Tensor = attention.out_proj(asked.flatten(1)[buffers.first])
        behind: Tensor = head.mlp(head.layernorm(pooled))
        return pooled + behind

    # results

    def assemble(self, rows: Mapping[str, Sequence[Tensor]], batch: PackedBatch) -> list[Tensor]:
        """Each item's embedding `(images, hidden)` or rows `(patches, hidden)`, one image behind the other.

        With `as_stock` the rows of every image, then the embeddings of all.
        """
        results = rows[PATH]
        sizes = [item.sizes[PATH] for item in batch.items]
        tables = split_rows(results[0], [size.tokens for size in sizes])
        if self.as_stock:
            return [*tables, *results[1:]]
        return tables if self.form == "rows" else split_rows(results[1], [size.sequences for size in sizes])

    def stock_output(self, features: Sequence[Tensor]) -> Any:
        """`pooler_output` `(images, hidden)`, and `last_hidden_state` padded with zeros to the longest image.

        The stock table is as long as the pixels were padded, with the tower's opinion of padding in its last rows.
        """
        pooled = features[-1] if self.has_embedding else None
        tables = features[: -1 if self.has_embedding else None]
        return BaseModelOutputWithPooling(
            last_hidden_state=pad_sequence(list(tables), batch_first=True), pooler_output=pooled
        )

    def stock_features(self, model: Any, inputs: Mapping[str, Any]) -> list[Tensor]:
        """What an item gets, of the stock method."""
        given = {name: inputs[name].to(self.device) for name in _INPUTS}
        (name,) = self.entry_points
        output = getattr(model, name)(**given)
        if self.form != "rows":
            return [output.pooler_output]
        counts = inputs["spatial_shapes"].prod(-1).tolist()
        return [table[:count] for table, count in zip(output.last_hidden_state, counts, strict=True)]


class Siglip2Vision(Siglip2):
    """`Siglip2VisionModel`."""

    model_type = "siglip2_vision_model"
    parts = (WHOLE,)
    entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = {"forward": _INPUTS}

    @classmethod
    def fits(cls, model: Any) -> bool:
        """By its class."""
        return type(model).__name__ == "Siglip2VisionModel"
