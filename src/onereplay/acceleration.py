"""Put the vision encoder of a loaded transformers model under graphs, in place.

    handle = accelerate(model)
    model.generate(**inputs)       # get_image_features and get_video_features are replays now
    handle.restore()               # the model is as it was

The stock methods keep their names, parameters and return types. A call that asks for more than features (hidden states,
attentions, tuples, another feature layer, metadata of the caller's own) or that trains goes to the stock method: it is
counted with that reason, and the first is logged.
"""

import inspect
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any, Self

import torch

from onereplay.adapters import adapter_for
from onereplay.config import EncoderCudaGraphConfig
from onereplay.core.manager import EncoderCudaGraphManager
from onereplay.core.plan import Reason
from onereplay.core.stats import Report
from onereplay.encoder import check_options
from onereplay.errors import OnereplayError, UnsupportedModelError


class Accelerated:
    """A model whose vision encoder runs under graphs; made by `accelerate`, undone by `restore`."""

    def __init__(self, model: Any, config: EncoderCudaGraphConfig) -> None:
        plain = adapter_for(model)
        check_options(plain, config, plain.device, plain.dtype)
        if not plain.entry_points:
            raise UnsupportedModelError(
                f"{plain.model_type} has no stock method that gives features, so there is none to replace; use Encoder"
            )
        self._base = plain.model
        if vars(self._base).get(_MARK) == id(self._base):  # a copy of an accelerated model has the mark of the first
            raise OnereplayError("this model is accelerated already; call restore() on the first handle")
        self.adapter = adapter_for(model, config)
        self.adapter.as_stock = True
        self.manager: EncoderCudaGraphManager[Any] = EncoderCudaGraphManager(self.adapter, config)
        try:
            self.manager.capture()
        except BaseException:
            self.manager.close()
            self.adapter.rewritten.restore()
            raise
        self._plain = {"return_dict": True, "output_hidden_states": False, "output_attentions": False}
        """What a call must ask for, by name, so that features alone answer it; the model's settings as captured."""
        for name in ("vision_feature_layer", "vision_feature_select_strategy"):
            if hasattr(self.adapter.config, name):
                self._plain[name] = getattr(self.adapter.config, name)
        self._plain |= self.adapter.stock_arguments
        self._before = {name: vars(owner).get(leaf) for name, (owner, leaf) in self._owners().items()}
        """The model's own instance attributes of those names, if it had any."""
        for name, (owner, leaf) in self._owners().items():
            setattr(owner, leaf, self._replacement(owner, leaf, name))
        setattr(self._base, _MARK, id(self._base))
        self._restored = False

    def _owners(self) -> dict[str, tuple[Any, str]]:
        """For each entry point the module that has it, the base model or one in it, and its name there."""
        parts = {name: name.rpartition(".") for name in self.adapter.entry_points}
        return {name: (self._base.get_submodule(path), leaf) for name, (path, _, leaf) in parts.items()}

    def _replacement(self, owner: Any, name: str, entry: str) -> Callable[..., Any]:
        """A method of the model in place of the stock one. A copy of the model has it too, and then goes to its own."""
        parameters = self.adapter.entry_points[entry]
        stock = getattr(owner, name)
        signature = inspect.signature(stock)

        def features(base: Any, *args: Any, **kwargs: Any) -> Any:
            if base is not owner:
                return getattr(type(base), name)(base, *args, **kwargs)
            given = dict(signature.bind(*args, **kwargs).arguments)
            given |= given.pop("kwargs", {})
            others = {k: v for k, v in given.items() if k not in parameters}
            why = self._needs_stock(given.get(parameters[0]), others)
            if why:
                self.manager.count_outside(Reason.UNSUPPORTED_INPUT, why, self.adapter.of_entry(entry).paths())
                return stock(*args, **kwargs)
            batch = self.adapter.batch(**{name: given[name] for name in parameters if name in given})
            return self.adapter.of_entry(entry).stock_output(self.manager.encode(batch))

        features.__name__, features.__doc__ = name, stock.__doc__
        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        # `generate` reads it to tell which inputs the method takes.
        features.__signature__ = signature.replace(parameters=[own, *signature.parameters.values()])  # type: ignore[attr-defined]
        return MethodType(features, owner)

    def _needs_stock(self, pixels: Any, others: Mapping[str, Any]) -> str:
        """Why a call cannot be served by features alone; empty if it can."""
        if torch.is_grad_enabled():
            if self._base.training:
                return "the model is in training mode"
            if getattr(pixels, "requires_grad", False) or any(weight.requires_grad for weight in self.adapter.weights):
                return "gradients are enabled; call it under torch.no_grad() or torch.inference_mode()"
        for name, plain in self._plain.items():
            value = others.get(name)
            value = getattr(self.adapter.config, name, plain) if value is None else value
            if value != plain:
                return f"{name}={value!r}"
        vision = getattr(self.adapter.config, "vision_config", None)
        if getattr(vision, "output_hidden_states", False) or getattr(vision, "output_attentions", False):
            return "the vision configuration asks for hidden states or attentions"
        own = [
            name
            for name, value in others.items()
            if name.startswith(("image_", "video_", "audio_")) and value is not None
        ]
        return f"the caller's own {own[0]}" if own else ""

    def report(self) -> Report:
        """What was done so far."""
        return self.manager.report()

    def restore(self) -> None:
        """Give the model its stock methods back, and the graphs' memory to the device. Again: nothing."""
        if self._restored:
            return
        self._restored = True
        vars(self._base).pop(_MARK, None)
        for name, (owner, leaf) in self._owners().items():
            vars(owner).pop(leaf, None)
            if self._before[name] is not None:
                vars(owner)[leaf] = self._before[name]
        self.manager.close()
        self.adapter.rewritten.restore()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.restore()


_MARK = "_onereplay_accelerated"


def accelerate(model: Any, config: EncoderCudaGraphConfig | None = None) -> Accelerated:
    """Put `get_image_features` and `get_video_features` of a loaded transformers model under graphs, in place.

    Args:
        model: a `...ForConditionalGeneration` or its base model, on its device, in eval mode for inference.
        config: what to capture.

    Returns:
        A handle with `restore()` and `report()`; also a context manager. `pooler_output` of the results has the stock
        type and values up to rounding; `last_hidden_state`, which generation does not read, is None.

    Raises:
        UnsupportedModelError: no adapter knows the model.
        ConfigError: the options do not fit the model or the device.
        OnereplayError: the model is accelerated already.
    """
    return Accelerated(model, config or EncoderCudaGraphConfig())
