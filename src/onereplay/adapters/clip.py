"""CLIP: the vision tower and its projection.

Checkpoints: `openai/clip-vit-{base-patch32,large-patch14-336,...}`. Reference: `modeling_clip.py` of transformers 5.24
(also run with 5.17). An image gives what `get_image_features` pools: the class token behind the last norm and the
projection, not normalised. `CLIPVisionModel` has no projection, `CLIPVisionModelWithProjection` has it.

Capacity rule: see `TileAdapter`. An image of 336 pixels in patches of 14 is 577 rows.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from torch import Tensor, nn
from transformers.models.clip.modeling_clip import CLIPVisionModelOutput

from onereplay.adapters.towers import TowerAdapter, WholeTower
from onereplay.core.buffers import Buffers


class Clip(TowerAdapter):
    """CLIP with both towers; the text side is not touched."""

    model_type = "clip"
    parts = ("vision_model", "visual_projection")

    @property
    def prefix_rows(self) -> int:
        """The class token."""
        return 1

    @cached_property
    def embedding_size(self) -> int:
        """The width that both towers share."""
        return int(self.config.projection_dim)

    def embed(self, pooled: Tensor) -> Tensor:
        """Through the projection."""
        projected: Tensor = self.own.visual_projection(pooled)
        return projected


class ClipVision(WholeTower):
    """`CLIPVisionModel` and `CLIPVisionModelWithProjection`."""

    model_type = "clip_vision_model"
    classes = ("CLIPVisionModel", "CLIPVisionModelWithProjection")

    @property
    def prefix_rows(self) -> int:
        """The class token."""
        return 1

    @property
    def projects(self) -> bool:
        """Whether the embedding goes through a projection."""
        return hasattr(self._model, "visual_projection")

    @property
    def embedding_size(self) -> int:
        """The tower's width, or the projection's."""
        return int(self.vision.projection_dim) if self.projects else self.hidden_size

    def blocks(self) -> Iterable[nn.Module]:
        """Every layer of the tower."""
        return getattr(self.tower, "vision_model", self.tower).encoder.layers  # type: ignore[no-any-return]

    def forward(self, path: str, buffers: Buffers, bounds: Mapping[str, int]) -> Sequence[Tensor]:
        """The model's own forward."""
        if not self.projects:
            return super().forward(path, buffers, bounds)
        with self.own_attention(self.tower.config):
            output = self.tower(
                pixel_values=buffers.pixels, output_hidden_states=False, output_attentions=False, return_dict=True
            )
        return output.last_hidden_state.flatten(0, 1), output.image_embeds

    def stock_output(self, features: Sequence[Tensor]) -> Any:
        """With a projection the embedding is `image_embeds`."""
        if not self.projects:
            return super().stock_output(features)
        return CLIPVisionModelOutput(image_embeds=features[1], last_hidden_state=features[0])

    def stock_rows(self, output: Any) -> list[Tensor]:
        """What an item gets, of a stock output."""
        return [output.image_embeds] if self.projects and self.form != "rows" else super().stock_rows(output)
