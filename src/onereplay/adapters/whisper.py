"""Whisper: the encoder, over windows of 30 seconds.

Checkpoints: `openai/whisper-{tiny,base,small,medium,large-v2,large-v3}`. Reference: `modeling_whisper.py` of
transformers 5.24 (also run with 5.17). A window is `max_source_positions * 2` frames (3,000) of `num_mel_bins` bands,
padded by the feature extractor; the encoder hears the padding too, so every window gives all its rows. There is no
projector, and no stock method for features: `accelerate` replaces the encoder's `forward`, which `generate` calls.

Capacity rule: see `TileAdapter`. A window is 1,500 rows, so the default cap of 5,120 tokens holds three windows, and a
larger one pays where launches cost more than the work (Whisper small): `max_token_budget=24000` holds sixteen.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from onereplay.adapters.audio import AudioAdapter
from onereplay.adapters.tiles import TileBatch
from onereplay.core.buffers import Buffers

STRIDE = 2
"""Frames a row: the second convolution's stride."""


class Whisper(AudioAdapter):
    """Whisper's encoder."""

    model_type = "whisper"
    parts = ("encoder",)
    entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = {"encoder.forward": ("input_features",)}
    max_batch_tokens = 96_000
    """64 windows: what `max_token_budget=None` means."""

    # sizes

    @cached_property
    def tile_shape(self) -> tuple[int, int]:
        """Bands and frames of a window."""
        return int(self.config.num_mel_bins), STRIDE * self.window_tokens

    @property
    def window_tokens(self) -> int:
        """A row for every second frame."""
        return int(self.config.max_source_positions)

    @cached_property
    def hidden_size(self) -> int:
        """The encoder's width."""
        return int(self.config.d_model)

    def patches_of(self, height: int, width: int) -> int:
        """Nothing is merged."""
        return self.window_tokens

    # forward

    def blocks(self) -> Iterable[nn.Module]:
        """Every layer of the encoder."""
        return self.own.encoder.layers  # type: ignore[no-any-return]

    def forward(self, path: str, buffers: Buffers, bounds: Mapping[str, int]) -> Sequence[Tensor]:
        """The encoder's own forward: `(windows * 1,500, hidden)`."""
        encoder = self.own.encoder
        with self.own_attention(encoder.config):
            output = encoder(buffers.pixels, output_hidden_states=False, output_attentions=False, return_dict=True)
        return (output.last_hidden_state.flatten(0, 1),)

    # results

    def assemble(self, rows: Mapping[str, Sequence[Tensor]], batch: TileBatch) -> list[Tensor]:
        """Each recording's rows; for the stock entry point the table of all windows."""
        if self.as_stock:
            return [rows[self.path][0].unflatten(0, (-1, self.window_tokens))]
        return super().assemble(rows, batch)

    def stock_output(self, features: Sequence[Tensor]) -> Any:
        """`last_hidden_state` `(windows, 1,500, hidden)`."""
        return BaseModelOutput(last_hidden_state=features[0])

    def stock_rows(self, output: Any) -> list[Tensor]:
        """The last hidden state."""
        return [output.last_hidden_state]

    def stock_features(self, model: Any, inputs: Mapping[str, Any]) -> list[Tensor]:
        """The stock encoder takes features in its own dtype alone."""
        weight = model.encoder.conv1.weight
        return super().stock_features(model, {"input_features": inputs["input_features"].to(weight.dtype)})
