"""The vision encoder of a loaded transformers model under graphs, and `generate` on top, with one added line.

    python examples/accelerate_generate.py

So that this needs no network and no GPU, the model is a tiny Qwen2.5-VL with RANDOM weights: what it says is noise, and
all that is shown is that it says the same with graphs and without. With a checkpoint, `model` comes from
`AutoModelForImageTextToText.from_pretrained(...)`, `inputs` from its processor, and the rest stays.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from onereplay import accelerate
from onereplay.media import load_image
from onereplay.preprocess import load_image_processor, preprocess_images
from onereplay.presets import get_preset, hf_config

PHOTO = Path(__file__).parent / "photos" / "rocket.jpg"
PRESET = get_preset("qwen2_5_vl-3b@tiny")


def random_model() -> Any:
    """A whole model, its weights drawn from a seed."""
    torch.manual_seed(0)
    return AutoModelForImageTextToText.from_config(hf_config(PRESET)).eval()


def prompt(model: Any, photo: Path) -> dict[str, Tensor]:
    """What a processor would return for a photo and a few words."""
    pixels = preprocess_images(load_image_processor(PRESET.processor), PRESET.model_type, [load_image(photo)])
    num_tokens = int(pixels["image_grid_thw"].prod()) // model.config.vision_config.spatial_merge_size**2
    vision = [model.config.vision_start_token_id, *[model.config.image_token_id] * num_tokens]
    ids = torch.tensor([[1, *vision, model.config.vision_end_token_id, 10, 11, 12]])
    kinds = (ids == model.config.image_token_id).to(torch.int32)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": kinds, **pixels}


def main() -> None:
    """Generate without graphs, with them, and compare."""
    model = random_model()
    inputs = prompt(model, PHOTO)
    settings = {"max_new_tokens": 8, "do_sample": False}
    plain = model.generate(**inputs, **settings)

    with accelerate(model) as handle:  # the added line
        fast = model.generate(**inputs, **settings)
        print(handle.report())

    print(f"random weights say {fast[0, inputs['input_ids'].shape[1] :].tolist()}")
    print(f"the same without graphs: {torch.equal(plain, fast)}")


if __name__ == "__main__":
    main()
