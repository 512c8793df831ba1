"""SigLIP, and SigLIP 2 at a fixed size: the vision tower with its attention pooling.

Checkpoints: `google/siglip-{base-patch16-224,so400m-patch14-384,...}` and `google/siglip2-so400m-patch14-384` and its
like (the fixed sizes of SigLIP 2 are published as `siglip`; its NaFlex form is `siglip2`). Reference:
`modeling_siglip.py` of transformers 5.24 (also run with 5.17). An image gives its pooled embedding, the `pooler_output`
of `get_image_features`; `features="rows"` gives the rows of its patches.

Capacity rule: see `TileAdapter`. An image of 384 pixels in patches of 14 is 729 rows.
"""

from onereplay.adapters.towers import TowerAdapter, WholeTower


class Siglip(TowerAdapter):
    """SigLIP with both towers; the text side is not touched."""

    model_type = "siglip"


class SiglipVision(WholeTower):
    """`SiglipVisionModel`."""

    model_type = "siglip_vision_model"
    classes = ("SiglipVisionModel",)
