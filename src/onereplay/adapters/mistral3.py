"""Mistral 3: the Pixtral tower, and a projector that merges 2x2 patches.

Checkpoints: `mistralai/Mistral-Small-3.1-24B-Instruct-2503` and later ones of `mistral3`. Reference:
`modeling_mistral3.py` and `modeling_pixtral.py` of transformers 5.24 (also run with 5.17). The projector's
`patch_merger` unfolds every image by itself; here one gather brings the patches of each token together, channel by
channel as `unfold` does, and its linear layers run once. An odd last row or column of patches belongs to no token.

Capacity rule: see `onereplay.adapters.pixtral`; at most 110x110 patches in Mistral-Small-3.1.
"""

from collections.abc import Mapping
from functools import cached_property

from torch import Tensor

from onereplay import geometry
from onereplay.adapters.pixtral import Pixtral
from onereplay.core.buffers import Array, Buffers, Declaration, Rows
from onereplay.geometry import Grid


class Mistral3(Pixtral):
    """Mistral 3."""

    model_type = "mistral3"

    # sizes

    @cached_property
    def merge(self) -> int:
        """2 in every published checkpoint."""
        return int(self.config.spatial_merge_size)

    # buffers

    def buffers(self) -> tuple[Declaration, ...]:
        """Pixtral's, and the patches of each token."""
        return (*super().buffers(), Rows("merge_gather", "tokens", width=self.merge**2, shift="patches"))

    # pack

    def piece(self, grid: Grid) -> Mapping[str, Array]:
        """The metadata of one image."""
        return {**super().piece(grid), "merge_gather": geometry.merge_gather(grid, self.merge)}

    def layouts(self, path: str, tokens: int, max_items: int) -> list[tuple[str, list[Grid]]]:
        """None of a single token: transformers takes its only row for a column and fails. Here it is a batch as any."""
        return super().layouts(path, tokens, max_items) if tokens > 1 else []

    # forward

    def project(self, hidden: Tensor, buffers: Buffers) -> Tensor:
        """Norm, merge, two linear layers: `(P, width of the tower)` to `(tokens, hidden)`."""
        projector = self.own.multi_modal_projector
        units = projector.norm(hidden)[buffers.merge_gather].transpose(1, 2).flatten(1)
        merged = projector.patch_merger.merging_layer(units)
        projected: Tensor = projector.linear_2(projector.act(projector.linear_1(merged)))
        return projected
