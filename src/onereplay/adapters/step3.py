"""Step3 (321B): a deep tower with norms behind its sublayers, on two sizes of tiles; two convolutions and a projector.

Checkpoint: `stepfun-ai/step3`; tower and names are in `models/step3.py`. Sizes, order and capacity rule are those of
`step3p7`: 169 tokens a global view of 728 pixels, 81 a local tile of 504; in the tower, four copies of a class row
stand in front of 2,704 or 1,296 patches.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from onereplay.adapters.multipath import MultiPathBatch
from onereplay.adapters.step3p7 import StepAdapter
from onereplay.core.buffers import Buffers
from onereplay.core.items import Item
from onereplay.models.step3 import CLASS_ROWS

PUBLISHED_NAMES: Mapping[str, str] = {"patch_pixel_values": "pixel_values_local", "num_patches": "num_local_patches"}
"""What the checkpoint's processor calls the inputs that have other names here."""


class Step3(StepAdapter):
    """Step3."""

    model_type = "step3_vl"
    parts = ("vision_model", "vit_downsampler", "vit_downsampler2", "vit_large_projector")

    # sizes

    def patches_of(self, side: int) -> int:
        """And the class rows."""
        return super().patches_of(side) + CLASS_ROWS

    def tokens_of(self, side: int) -> int:
        """The first convolution takes whole squares of 2x2 patches, the second every second row and column of those."""
        squares = (self.side_in_patches(side) - 2) // int(self.config.understand_projector_stride) + 1
        return int(-(-squares // 2)) ** 2

    def batch(self, **inputs: Any) -> MultiPathBatch:
        """As `MultiPathAdapter.batch`; the published processor's names are taken too."""
        return super().batch(**_renamed(inputs))

    def items_of(self, **sizes: Any) -> tuple[Item, ...]:
        """From `num_local_patches`, or `num_patches`."""
        return super().items_of(**_renamed(sizes))

    # forward

    def blocks(self) -> Iterable[nn.Module]:
        """Every layer of the tower."""
        return self.own.vision_model.transformer.layers  # type: ignore[no-any-return]

    def forward(self, path: str, buffers: Buffers, bounds: Mapping[str, int]) -> Sequence[Tensor]:
        """Tower, convolutions, projector: `(tiles * tokens, hidden)`."""
        own = self.own
        with self.attend(own.vision_model):
            rows = own.vision_model(buffers.pixels)
        side = buffers.pixels.shape[-1] // own.vision_model.config.patch_size
        square = rows.transpose(1, 2).unflatten(-1, (side, side))
        thinned = own.vit_downsampler2(own.vit_downsampler(square)).flatten(2).transpose(1, 2)
        return (own.vit_large_projector(thinned).flatten(0, 1),)


def _renamed(inputs: Mapping[str, Any]) -> dict[str, Any]:
    return {PUBLISHED_NAMES.get(name, name): value for name, value in inputs.items()}
