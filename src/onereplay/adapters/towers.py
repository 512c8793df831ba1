"""Towers that embed whole images: a table of rows an image, and one row pooled from it.

The engine is that of tiles: an image is a tile of one size. What a model adds is facts: the rows in front of the
patches, which sizes it takes, where its embedding comes from. Both results lie in one graph; `features` of the options
says which one an item gets. Tokens are the rows of the table either way, so that a budget means the same work.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPooling

from onereplay.adapters.base import TOWER, WHOLE
from onereplay.adapters.tiles import TileAdapter, TileBatch
from onereplay.config import EncoderCudaGraphConfig
from onereplay.core.assembly import split_rows
from onereplay.core.buffers import Buffers, Output
from onereplay.core.items import Item, Modality
from onereplay.errors import ConfigError, InputError


def sides(size: Any) -> tuple[int, int]:
    """Height and width of a configuration's entry: one integer or two."""
    height, width = (size, size) if isinstance(size, int) else size
    return int(height), int(width)


class TowerAdapter(TileAdapter):
    """What image towers share; the defaults are those of a model of two towers, of which only the vision side runs."""

    modalities = (Modality.IMAGE,)
    parts: ClassVar[tuple[str, ...]] = ("vision_model",)
    entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = {"get_image_features": ("pixel_values",)}
    stock_arguments: ClassVar[Mapping[str, Any]] = {"interpolate_pos_encoding": False}
    classes: ClassVar[tuple[str, ...]] = ()
    """Names of the stock classes, where a configuration alone does not tell the base model from those around it."""
    any_size: ClassVar[bool] = False
    """Whether the tower takes images of other sizes than its configuration's, without being asked to interpolate."""

    def __init__(self, config: Any, model: Any = None, attention: str = "auto", optimize: Sequence[str] = ()) -> None:
        super().__init__(config, model, attention, optimize)
        self.form = "embedding" if self.has_embedding else "rows"
        """What an item gets: `embedding` or `rows`."""
        self._tile_sides: tuple[int, int] | None = None

    @classmethod
    def fits(cls, model: Any) -> bool:
        """All parts are there; the class is one of `classes` where those are named."""
        return type(model).__name__ in cls.classes if cls.classes else super().fits(model)

    def configure(self, config: EncoderCudaGraphConfig) -> None:
        """Take `features`, and `tile_size` if the tower takes any size."""
        if config.features == "embedding" and not self.has_embedding:
            raise ConfigError(f"features='embedding': this {self.model_type} has no pooling head; use 'rows'")
        if config.features != "auto":
            self.form = config.features
        if config.tile_size is not None and not self.any_size:
            raise ConfigError(
                f"tile_size={config.tile_size}: {self.model_type} takes images of {self.tile_shape[1]}x"
                f"{self.tile_shape[2]} alone; leave it out"
            )
        self._tile_sides = config.tile_sides
        self.tokens_of(*self.tile_shape[-2:])

    # sizes

    @property
    def vision(self) -> Any:
        """The tower's configuration."""
        return getattr(self.config, "vision_config", self.config)

    @property
    def tile_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of the images that graphs are captured for."""
        return (int(self.vision.num_channels), *(self._tile_sides or self.default_sides))

    @property
    def default_sides(self) -> tuple[int, int]:
        """Where the options say nothing."""
        return sides(self.vision.image_size)

    @property
    def prefix_rows(self) -> int:
        """Rows in front of the patches: class token and registers."""
        return 0

    @cached_property
    def hidden_size(self) -> int:
        """The width of a row."""
        return int(self.vision.hidden_size)

    @property
    def embedding_size(self) -> int:
        """The width of an image's embedding."""
        return self.hidden_size

    @property
    def has_embedding(self) -> bool:
        """False for a tower without a pooling head."""
        return bool(getattr(self.vision, "vision_use_head", True))

    def tokens_of(self, height: int, width: int) -> int:
        """The patches, and the rows in front of them."""
        down, across = sides(self.vision.patch_size)
        if not self.any_size and (height, width) != self.default_sides:
            raise InputError(
                f"an image of {height}x{width} pixels; {self.model_type} takes {self.default_sides[0]}x"
                f"{self.default_sides[1]}, what its image processor makes"
            )
        if height < down or width < across:
            raise InputError(f"an image of {height}x{width} pixels is smaller than a patch of {down}x{across}")
        return (height // down) * (width // across) + self.prefix_rows

    def patches_of(self, height: int, width: int) -> int:
        """Nothing is merged."""
        return self.tokens_of(height, width)

    def item(self, modality: Modality, num_tiles: int, height: int, width: int) -> Item:
        """An embedding is one row an image, whatever its tokens are."""
        item = super().item(modality, num_tiles, height, width)
        return item if self.form == "rows" else replace(item, rows=num_tiles)

    @property
    def result_shape(self) -> tuple[int, ...]:
        """Of a row of the table, or of an embedding."""
        return (self.hidden_size if self.form == "rows" else self.embedding_size,)

    # forward

    def outputs(self) -> tuple[Output, ...]:
        """The table of rows, and the embedding."""
        rows = Output("rows", "tokens", (self.hidden_size,))
        return (rows, Output("embedding", "sequences", (self.embedding_size,))) if self.has_embedding else (rows,)

    @property
    def tower(self) -> Any:
        """The vision side."""
        return vars(self.own)[self.parts[0] or TOWER]

    def blocks(self) -> Iterable[nn.Module]:
        """Every layer of the tower."""
        return self.tower.encoder.layers  # type: ignore[no-any-return]

    def embed(self, pooled: Tensor) -> Tensor:
        """An image's embedding from what the tower pooled."""
        return pooled

    def forward(self, path: str, buffers: Buffers, bounds: Mapping[str, int]) -> Sequence[Tensor]:
        """The tower's own forward: rows `(tokens, hidden)` and, with a head, embeddings `(images, embedding)`."""
        with self.own_attention(self.tower.config):
            output = self.tower(
                pixel_values=buffers.pixels, output_hidden_states=False, output_attentions=False, return_dict=True
            )
        rows = output.last_hidden_state.flatten(0, 1)
        return (rows, self.embed(output.pooler_output)) if self.has_embedding else (rows,)

    # results

    def assemble(self, rows: Mapping[str, Sequence[Tensor]], batch: TileBatch) -> list[Tensor]:
        """Each item's embedding `(images, embedding)` or rows `(tokens, hidden)`, one image behind the other.

        With `as_stock` both results of the whole batch, which `stock_output` takes.
        """
        results = rows[self.path]
        sizes = [item.sizes[self.path] for item in batch.items]
        if self.as_stock:
            return [results[0].unflatten(0, (sum(size.sequences for size in sizes), -1)), *results[1:]]
        if self.form == "rows":
            return split_rows(results[0], [size.tokens for size in sizes])
        return split_rows(results[1], [size.sequences for size in sizes])

    def stock_output(self, features: Sequence[Tensor]) -> Any:
        """`last_hidden_state` `(images, rows, hidden)` and `pooler_output` `(images, embedding)`, as stock."""
        rows, *pooled = features
        return BaseModelOutputWithPooling(last_hidden_state=rows, pooler_output=pooled[0] if pooled else None)

    def stock_rows(self, output: Any) -> list[Tensor]:
        """What an item gets, of a stock output."""
        table = output.last_hidden_state if self.form == "rows" else output.pooler_output
        return [table]


class WholeTower(TowerAdapter):
    """A vision tower as a model of its own, called by its `forward`."""

    parts = (WHOLE,)
    entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = {"forward": ("pixel_values",)}
