"""Qwen3.5 and its mixture of experts: the tower of Qwen3-VL without deepstack.

Checkpoints: `Qwen/Qwen3.5-{0.8B,2B,4B,9B,27B}`, `Qwen/Qwen3.5-{35B-A3B,122B-A10B,397B-A17B}`. Reference:
`modeling_qwen3_5.py` and `modeling_qwen3_5_moe.py` of transformers 5.24 (also run with 5.17). Three sizes of tower; all
that `qwen3_vl.py` says of positions, images and videos holds.

Capacity rule: see `PackedAdapter`.
"""

from onereplay.adapters.qwen3_vl import Qwen3Tower


class Qwen35(Qwen3Tower):
    """Qwen3.5."""

    model_type = "qwen3_5"


class Qwen35Moe(Qwen35):
    """Qwen3.5 with a mixture of experts behind the same tower."""

    model_type = "qwen3_5_moe"
