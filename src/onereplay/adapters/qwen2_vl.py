"""Qwen2-VL: the tower's own forward with precomputed metadata.

Checkpoints: `Qwen/Qwen2-VL-{2B,7B,72B}-Instruct`. Reference: `modeling_qwen2_vl.py` of transformers 5.24 (also run with
5.17). One tower for all sizes; only the width behind its merger differs, and that is what the vision configuration
calls `hidden_size` (the tower's own is `embed_dim`). Images and videos go through it alike, one sequence a frame.

Capacity rule: see `PackedAdapter`.
"""

from functools import cached_property

from onereplay.adapters.grids import GridAdapter


class Qwen2VL(GridAdapter):
    """Qwen2-VL."""

    model_type = "qwen2_vl"

    # sizes

    @cached_property
    def hidden_size(self) -> int:
        """The language model's width, under the name that Qwen2-VL gives it."""
        return int(self.config.vision_config.hidden_size)
