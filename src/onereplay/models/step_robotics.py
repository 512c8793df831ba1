"""Step3-VL-10B: the vision tower of Step-3.7 in transformers, published as `step_robotics` with another language model.

Checkpoint: `stepfun-ai/Step3-VL-10B` (`StepVLForConditionalGeneration`). Its weights have the names that Step-3.7
publishes, so transformers' own conversion of those serves both.
"""

from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import AutoConfig, AutoModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.models.step3p7.configuration_step3p7 import Step3p7VisionConfig
from transformers.models.step3p7.modeling_step3p7 import Step3p7Model, Step3p7VisionModel

from onereplay.models.base import ComposedConfig, LanguageConfig, OwnModel


class StepRoboticsConfig(ComposedConfig):
    """The whole model."""

    model_type = "step_robotics"
    sub_configs: ClassVar = {"vision_config": Step3p7VisionConfig, "text_config": LanguageConfig}

    vision_config: Any = None
    text_config: Any = None
    understand_projector_stride: int = 2
    projector_bias: bool = False
    image_token_id: int = 151679

    def __post_init__(self, **kwargs: Any) -> None:
        if isinstance(self.vision_config, dict):
            self.vision_config = {name: value for name, value in self.vision_config.items() if name != "model_type"}
        super().__post_init__(**kwargs)


class StepRoboticsModel(OwnModel):
    """The vision encoder of Step3-VL-10B; the language model is not here."""

    config_class = StepRoboticsConfig
    base_model_prefix = "model"
    main_input_name = "pixel_values"
    _keys_to_ignore_on_load_unexpected: ClassVar = [
        r"^(model\.)?(language_model|embed_tokens|layers|norm)\.",
        r"^lm_head\.",
    ]

    def __init__(self, config: StepRoboticsConfig) -> None:
        super().__init__(config)
        self.vision_model = Step3p7VisionModel(config.vision_config)
        self.multi_modal_projector = nn.Linear(
            4 * config.vision_config.hidden_size, config.text_config.hidden_size, bias=config.projector_bias
        )
        self.post_init()

    def get_image_features(
        self, pixel_values: Tensor, pixel_values_local: Tensor | None = None, num_local_patches: Any = None
    ) -> Any:
        """As `Step3p7Model.get_image_features`."""
        plain = Step3p7Model.get_image_features
        return plain(self, pixel_values, pixel_values_local, num_local_patches)


AutoConfig.register(StepRoboticsConfig.model_type, StepRoboticsConfig)
AutoModel.register(StepRoboticsConfig, StepRoboticsModel)
register_checkpoint_conversion_mapping(
    StepRoboticsConfig.model_type,
    get_checkpoint_conversion_mapping("step3p7"),
)
