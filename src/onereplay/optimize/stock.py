"""Whether modules run the forward that their class has in the library that a rewrite was written for."""

from torch import nn

_LIBRARIES = ("torch", "transformers", "onereplay")


def is_stock(module: nn.Module, *linear: nn.Module) -> bool:
    """Whether a rewrite may stand in for a module and all in it.

    It may not where somebody has put something of their own inside: a layer of an adapter (PEFT), a subclass, a
    parametrization, a `forward` on the instance. What they add would be passed over without a word.

    Args:
        module: what is to be replaced.
        linear: the layers whose weights are read: each must be an `nn.Linear` and nothing else.
    """
    return all(type(layer) is nn.Linear for layer in linear) and all(
        type(part).__module__.partition(".")[0] in _LIBRARIES
        and "forward" not in part.__dict__
        and not hasattr(part, "parametrizations")
        for part in module.modules()
    )
