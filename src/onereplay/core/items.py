"""Integers that describe a batch: what each item asks of each path. No tensor, no torch."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass


class Modality(enum.Enum):
    """What an item is."""

    IMAGE = "image"
    VIDEO = "video"
    AUDIO = "audio"


@dataclass(frozen=True, slots=True)
class PathSize:
    """What one item asks of one path. Every field adds up over a batch, except `longest`."""

    tokens: int
    """Rows after the merge or projector."""
    patches: int
    """Rows before it. A path of tiles counts the patches of its tiles."""
    sequences: int
    """Attention segments: an image, a frame or a tile each."""
    windows: int = 0
    """Segments of window attention, for towers that have a second kind; 0 elsewhere."""
    longest: int = 0
    """Patches of the longest sequence: what `max_seqlen` must cover."""


@dataclass(frozen=True, slots=True)
class Item:
    """One image, video or recording as the caller gave it."""

    modality: Modality
    sizes: Mapping[str, PathSize]
    """By path; a path that the item does not use is absent."""
    unsupported: str = ""
    """Why no captured graph can take this item (then it runs eagerly, with this as the reason); empty if one can."""
    rows: int | None = None
    """Rows of the item's result, where assembly adds some to the tokens (delimiters) or leaves some out."""

    @property
    def num_tokens(self) -> int:
        """Tokens over all paths."""
        return sum(size.tokens for size in self.sizes.values())

    @property
    def num_rows(self) -> int:
        """Rows of the item's result."""
        return self.num_tokens if self.rows is None else self.rows
