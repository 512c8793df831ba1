"""Qwen2-Audio: Whisper's encoder with a mask, an average over pairs of rows, and the projector.

Checkpoints: `Qwen/Qwen2-Audio-7B{,-Instruct}`. Reference: `modeling_qwen2_audio.py` of transformers 5.24 (also run with
5.17). A recording is one window of 3,000 frames, padded; the encoder's keys behind the sound are masked, and the rows
behind it dropped. transformers has no stock method that gives these features (the model's own forward makes them), so
`accelerate` cannot serve this model; `Encoder` can.

Capacity rule: see `TileAdapter`. A window is 1,500 rows in the encoder and 750 tokens behind it, whatever is heard.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from onereplay.adapters.audio import HeardAdapter, HeardBatch, frames_of
from onereplay.adapters.base import host_integers, refuse_unknown
from onereplay.adapters.tiles import TileBatch
from onereplay.attention.interface import use_varlen
from onereplay.core.buffers import Buffers
from onereplay.core.items import Item
from onereplay.errors import InputError, UnsupportedModelError

STRIDE = 2
"""Frames a row of the encoder, and rows a token."""


class Qwen2Audio(HeardAdapter):
    """Qwen2-Audio."""

    model_type = "qwen2_audio"
    parts = ("audio_tower", "multi_modal_projector")
    entry_points: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    size_names = ()

    # sizes

    @cached_property
    def tile_shape(self) -> tuple[int, int]:
        """Bands and frames of a window."""
        return int(self.audio.num_mel_bins), STRIDE * int(self.audio.max_source_positions)

    @property
    def window_tokens(self) -> int:
        """A token for two rows of the encoder."""
        return int(self.audio.max_source_positions) // STRIDE

    def patches_of(self, height: int, width: int) -> int:
        """A row for every second frame."""
        return int(self.audio.max_source_positions)

    @cached_property
    def hidden_size(self) -> int:
        """The language model's width."""
        return int(self.config.text_config.hidden_size)

    def rows_heard(self, frames: int) -> int:
        """Whole pairs of the encoder's rows."""
        return -(-frames // STRIDE) // STRIDE

    # pack

    def items_of(self, **sizes: Any) -> tuple[Item, ...]:
        """From `audio_lengths`, frames of sound in each recording."""
        given = refuse_unknown(sizes, ("audio_lengths",), self.model_type)
        lengths = host_integers("audio_lengths", given.get("audio_lengths", ()), 1)
        return tuple(self.recording([length]) for length in lengths)

    def batch(self, **inputs: Any) -> TileBatch:
        """From `input_features` `(N, bands, 3,000)` and `feature_attention_mask` `(N, 3,000)`; without a mask all is
        sound."""
        given = refuse_unknown(inputs, ("input_features", "feature_attention_mask"), self.model_type)
        if not given:
            return HeardBatch((), ())
        if "input_features" not in given:
            raise InputError("feature_attention_mask says what of input_features is sound; give them too")
        windows = given["input_features"]
        self.check_tiles("input_features", windows)
        self.tokens_of(*windows.shape[1:])
        lengths = [self.tile_shape[1]] * len(windows)
        if "feature_attention_mask" in given:
            shape = (len(windows), self.tile_shape[1])
            lengths = frames_of(given["feature_attention_mask"], "feature_attention_mask", shape)
        items = tuple(self.recording([length]) for length in lengths)
        return HeardBatch(items, (windows,), tuple((length,) for length in lengths))

    # forward

    def blocks(self) -> Iterable[nn.Module]:
        """Every layer of the encoder."""
        return self.own.audio_tower.layers  # type: ignore[no-any-return]

    def forward(self, path: str, buffers: Buffers, bounds: Mapping[str, int]) -> Sequence[Tensor]:
        """The encoder's own forward with a mask of keys, and the projector: `(windows * 750, hidden)`.

        The mask is made for sdpa, which masked attention always runs through. A window of nothing keeps its first key.
        """
        tower = self.own.audio_tower
        rows = torch.arange(self.patches_of(*self.tile_shape), device=buffers.heard.device)
        heard = (buffers.heard + 1).div(STRIDE, rounding_mode="floor").clamp(min=1)
        mask = (rows < heard.unsqueeze(-1))[:, None, None, :]
        with use_varlen(tower.config, self.attention, tiles=True):
            output = tower(
                buffers.pixels,
                attention_mask=mask,
                output_hidden_states=False,
                output_attentions=False,
                return_dict=True,
            )
        return (self.own.multi_modal_projector(output.last_hidden_state).flatten(0, 1),)

    # results

    def stock_output(self, features: Sequence[Tensor]) -> Any:
        """There is no stock entry point."""
        raise UnsupportedModelError(
            "transformers makes the features of qwen2_audio inside its forward and has no method for them; use Encoder"
        )

    def stock_features(self, model: Any, inputs: Mapping[str, Any]) -> list[Tensor]:
        """As the stock model's forward makes them, one recording at a time without padded neighbours."""
        weight = model.audio_tower.conv1.weight
        found = []
        for window, mask in zip(inputs["input_features"], inputs["feature_attention_mask"], strict=True):
            frames = mask[None].sum(-1).to(weight.device)
            heard, tokens = model.audio_tower._get_feat_extract_output_lengths(frames)
            keys = torch.arange(self.patches_of(*self.tile_shape), device=weight.device)[None, None, None] < heard
            lowest = torch.finfo(weight.dtype).min
            additive = torch.where(keys, 0.0, lowest).to(weight.dtype).expand(1, 1, keys.shape[-1], -1)
            rows = model.audio_tower(window[None].to(weight), attention_mask=additive).last_hidden_state
            found.append(model.multi_modal_projector(rows)[0, : int(tokens)])
        return found
