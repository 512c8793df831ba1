"""Relative positions of SAM layers as operations that a graph can hold; for every model with a SAM tower.

transformers picks rows of the table of relative positions with an index that it makes on the host, twice a layer
(`get_rel_pos` of `sam`, `deepseek_ocr2` and `unlimited_ocr`, the same in 5.17 and 5.24): on a CUDA device that is a
copy that waits. Query q and key k use row `q - k + size - 1`, so what is picked is a window that slides over the table,
read backwards. No index is needed for that, and nothing is kept between forwards that could outlive a change of
weights.
"""

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import interpolate

from onereplay.errors import InputError


def use_sliding_positions(tower: nn.Module) -> None:
    """Give every SAM attention below `tower` the `relative_positions` of this file, for good: meant for own copies.

    Args:
        tower: modules of `Adapter.own`; those without `get_rel_pos` stay as they are.
    """
    for module in tower.modules():
        if hasattr(module, "get_rel_pos"):
            module.__dict__["get_rel_pos"] = relative_positions


def relative_positions(q_size: int, k_size: int, rel_pos: Tensor) -> Tensor:
    """The embedding of the distance of every query to every key along one axis: `(q_size, k_size, C)`, bit for bit what
    `get_rel_pos` gives.

    Args:
        q_size: rows (or columns) of queries.
        k_size: the same of keys; vision towers attend within one grid, so the two are equal.
        rel_pos: `(L, C)`, the learned table; resized along L, as in transformers, if it was learned for another size.

    Raises:
        InputError: the sizes differ.
    """
    if q_size != k_size:
        raise InputError(f"SAM attention from {q_size} to {k_size} rows; both must be of one grid")
    distances = 2 * q_size - 1
    if rel_pos.shape[0] != distances:
        rel_pos = interpolate(rel_pos.T.unsqueeze(0), size=distances, mode="linear").squeeze(0).T
    return rel_pos.unfold(0, k_size, 1).flip(-1).transpose(1, 2)


def sam_features(encoder: Any, pixels: Tensor) -> Tensor:
    """What the SAM encoder of the OCR models gives, without the hooks of its own `forward`.

    Args:
        encoder: a SAM encoder with `proj` behind its neck (`deepseek_ocr2`, `unlimited_ocr`), prepared by
            `use_sliding_positions`.
        pixels: `(tiles, channels, side, side)` in the model's dtype; nothing is cast here.

    Returns:
        `(tiles, width, side', side')`, where `side'` is a quarter of the patches along a side.
    """
    hidden = encoder.patch_embed(pixels)
    if encoder.pos_embed is not None:
        hidden = hidden + encoder.interpolate_pos_encoding(*hidden.shape[1:3])
    for layer in encoder.layers:
        hidden = layer(hidden)
    features: Tensor = encoder.proj(encoder.neck(hidden))
    return features
