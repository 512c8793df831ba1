"""The models that onereplay runs, by the `model_type` of their transformers configuration. One line a model."""

import importlib
from typing import Any

from onereplay.adapters.base import Adapter
from onereplay.config import EncoderCudaGraphConfig
from onereplay.errors import UnsupportedModelError
from onereplay.optimize import choose

ADAPTERS: dict[str, str] = {
    "clip": "onereplay.adapters.clip:Clip",
    "clip_vision_model": "onereplay.adapters.clip:ClipVision",
    "deepseek_ocr": "onereplay.adapters.deepseek_ocr:DeepseekOcr",
    "deepseek_ocr2": "onereplay.adapters.deepseek_ocr2:DeepseekOcr2",
    "deepseek_v41": "onereplay.adapters.deepseek_v41:DeepseekV41",
    "deepseek_vl": "onereplay.adapters.deepseek_vl:DeepseekVL",
    "deepseek_vl_hybrid": "onereplay.adapters.deepseek_vl_hybrid:DeepseekVLHybrid",
    "deepseek_vl_v2": "onereplay.adapters.deepseek_vl2:DeepseekVL2",
    "dinov2": "onereplay.adapters.dino:Dinov2",
    "dinov3_vit": "onereplay.adapters.dino:Dinov3",
    "ernie4_5_vl_moe": "onereplay.adapters.ernie4_5_vl:Ernie45VL",
    "gemma3": "onereplay.adapters.gemma3:Gemma3",
    "gemma4": "onereplay.adapters.gemma4:Gemma4",
    "glm46v": "onereplay.adapters.glm4v:Glm46V",
    "glm4v": "onereplay.adapters.glm4v:Glm4v",
    "glm4v_moe": "onereplay.adapters.glm4v:Glm4vMoe",
    "glm_ocr": "onereplay.adapters.glm4v:GlmOcr",
    "idefics3": "onereplay.adapters.idefics3:Idefics3",
    "internvl": "onereplay.adapters.internvl:InternVL",
    "kimi_k25": "onereplay.adapters.kimi_k25:KimiK25",
    "lfm2_vl": "onereplay.adapters.lfm2_vl:Lfm2VL",
    "lfm3_vl": "onereplay.adapters.lfm3_vl:Lfm3VL",
    "llama4": "onereplay.adapters.llama4:Llama4",
    "llava": "onereplay.adapters.pixtral:Pixtral",
    "minicpmv4_6": "onereplay.adapters.minicpmv4_6:MiniCPMV46",
    "minimax_m3_vl": "onereplay.adapters.minimax_m3_vl:MiniMaxM3VL",
    "mistral3": "onereplay.adapters.mistral3:Mistral3",
    "paddleocr_vl": "onereplay.adapters.paddleocr_vl:PaddleOCRVL",
    "qwen2_5_omni_thinker": "onereplay.adapters.qwen2_5_omni:Qwen25Omni",
    "qwen2_5_vl": "onereplay.adapters.qwen2_5_vl:Qwen25VL",
    "qwen2_audio": "onereplay.adapters.qwen2_audio:Qwen2Audio",
    "qwen2_vl": "onereplay.adapters.qwen2_vl:Qwen2VL",
    "qwen3_5": "onereplay.adapters.qwen3_5:Qwen35",
    "qwen3_5_moe": "onereplay.adapters.qwen3_5:Qwen35Moe",
    "qwen3_vl": "onereplay.adapters.qwen3_vl:Qwen3VL",
    "qwen3_vl_moe": "onereplay.adapters.qwen3_vl:Qwen3VLMoe",
    "siglip": "onereplay.adapters.siglip:Siglip",
    "siglip2": "onereplay.adapters.siglip2:Siglip2",
    "siglip2_vision_model": "onereplay.adapters.siglip2:Siglip2Vision",
    "siglip_vision_model": "onereplay.adapters.siglip:SiglipVision",
    "smolvlm": "onereplay.adapters.idefics3:SmolVLM",
    "step3_vl": "onereplay.adapters.step3:Step3",
    "step3p7": "onereplay.adapters.step3p7:Step3p7",
    "step_robotics": "onereplay.adapters.step3p7:StepRobotics",
    "whisper": "onereplay.adapters.whisper:Whisper",
}


def adapter_class(model_type: str) -> type[Adapter[Any]]:
    """The adapter of a model type.

    Raises:
        UnsupportedModelError: there is none; the message lists those that exist.
    """
    if model_type not in ADAPTERS:
        raise UnsupportedModelError(
            f"no adapter for model type {model_type!r}; there are adapters for {', '.join(sorted(ADAPTERS))} "
            f"(docs/adding_a_model.md tells how to write one)"
        )
    module, _, name = ADAPTERS[model_type].partition(":")
    found: type[Adapter[Any]] = getattr(importlib.import_module(module), name)
    return found


def adapter_for(model: Any, config: EncoderCudaGraphConfig | None = None) -> Adapter[Any]:
    """An adapter on a loaded transformers model, the base model or one with a head.

    Args:
        model: the model.
        config: its `attention` and `optimize` are the adapter's; without one, `auto` attention and no rewrites.

    Raises:
        UnsupportedModelError: the model type has no adapter, or the model has no vision modules.
        ConfigError: a rewrite that the back end cannot hold.
    """
    model = getattr(model, "thinker", model)  # the rest of Qwen2.5-Omni speaks
    found = adapter_class(getattr(getattr(model, "config", None), "model_type", type(model).__name__))
    for candidate in (model, getattr(model, "model", None), getattr(model, "base_model", None)):
        if candidate is not None and found.fits(candidate):
            adapter = found(candidate.config, candidate)
            if config is None:
                return adapter
            names = choose(config.optimize, adapter.device, config.backend)
            adapter = found(candidate.config, candidate, config.attention, names)
            adapter.configure(config)
            return adapter
    raise UnsupportedModelError(
        f"{type(model).__name__} has no {' and '.join(filter(None, found.parts)) or 'such encoder'}; give the whole "
        f"model or its base model"
    )
