"""Step-3.7 and Step3-VL-10B: a tower with rotary positions on two sizes of tiles, strided convolutions, a projector.

Checkpoints: `stepfun-ai/Step-3.7-Flash`, `stepfun-ai/Step3-VL-10B` (as `step_robotics`, see `models/step_robotics.py`).
Reference: `modeling_step3p7.py` of transformers 5.24 (also run with 5.17, whose rotary embedding orders rows and
columns the other way; each version's own is called here).

An image is a global view of 728 pixels, 169 tokens, and local tiles of 504 pixels, 81 tokens each, which come first in
its result: `81 k + 169` rows for k tiles. The processor makes up to 36 tiles, more of very long images.

Capacity rule: see `MultiPathAdapter`. A global view is 2,704 rows in the tower, a local tile 1,296.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from onereplay.adapters.multipath import GLOBAL, LOCAL, MultiPathAdapter, local_then_global
from onereplay.attention.interface import use_varlen_on_tiles
from onereplay.core.buffers import Buffers
from onereplay.errors import InputError
from onereplay.geometry import Grid
from onereplay.geometry.grids import Int64

PUBLISHED_SIDES = {GLOBAL: 728, LOCAL: 504}
"""Pixels of a tile as the published processors make them; configurations have the global one alone."""


class StepAdapter(MultiPathAdapter):
    """What the Step models share: tiles of two sizes, patches thinned twice, local tiles before the global one."""

    ignored: ClassVar[tuple[str, ...]] = ("patch_newline_masks", "patch_newline_mask")

    # sizes

    @cached_property
    def sides(self) -> Mapping[str, int]:
        """The global side is the tower's, the local one in the published proportion."""
        side = int(self.config.vision_config.image_size)
        return {path: side * pixels // PUBLISHED_SIDES[GLOBAL] for path, pixels in PUBLISHED_SIDES.items()}

    @cached_property
    def hidden_size(self) -> int:
        """The language model's width."""
        return int(self.config.text_config.hidden_size)

    def side_in_patches(self, side: int) -> int:
        """Patches along a side of a tile.

        Raises:
            InputError: the tile is no whole number of patches.
        """
        patch = int(self.config.vision_config.patch_size)
        if side < 2 * patch or side % patch:
            raise InputError(
                f"a tile of {side}x{side} pixels; {self.model_type} takes multiples of {patch}, at least {2 * patch}"
            )
        return side // patch

    def patches_of(self, side: int) -> int:
        """Rows inside the tower."""
        return self.side_in_patches(side) ** 2

    def tokens_of(self, side: int) -> int:
        """Each convolution takes every second row and column."""
        return int(-(-self.side_in_patches(side) // 4)) ** 2

    def order(self, grid: Grid, global_tokens: int, local_tokens: int) -> Int64:
        """Local tiles one behind the other, then the global view."""
        return local_then_global(grid, global_tokens, local_tokens)

    # forward

    def attend(self, tower: Any) -> AbstractContextManager[None]:
        """`auto` keeps the tower's own attention unless FlashAttention 4 is there, a named one replaces it."""
        return use_varlen_on_tiles(tower.config, self.attention, self.weight)


class Step3p7(StepAdapter):
    """Step-3.7."""

    model_type = "step3p7"
    parts = ("vision_model", "multi_modal_projector")

    def blocks(self) -> Iterable[nn.Module]:
        """Every layer of the tower."""
        return self.own.vision_model.layers  # type: ignore[no-any-return]

    def forward(self, path: str, buffers: Buffers, bounds: Mapping[str, int]) -> Sequence[Tensor]:
        """The tower with positions made on the device, then projector: `(tiles * tokens, hidden)`."""
        tower = self.own.vision_model
        hidden = tower.pre_layernorm(tower.embeddings(buffers.pixels, interpolate_pos_encoding=True))
        side = buffers.pixels.shape[-1] // tower.embeddings.patch_size
        places = torch.arange(side * side, device=hidden.device)
        rotary = tower.rotary_emb(hidden, torch.stack([places // side, places % side], dim=-1))
        with self.attend(tower):
            for layer in tower.layers:
                hidden = layer(hidden, position_embeddings=rotary)
        square = hidden.transpose(1, 2).unflatten(-1, (side, side))
        thinned = tower.downsampler2(tower.downsampler1(square)).flatten(2).transpose(1, 2)
        return (self.own.multi_modal_projector(thinned).flatten(0, 1),)


class StepRobotics(Step3p7):
    """Step3-VL-10B."""

    model_type = "step_robotics"
