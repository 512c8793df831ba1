"""One file a model: what the core asks of it, in terms of its transformers modules."""

from onereplay.adapters.registry import ADAPTERS, adapter_class, adapter_for

__all__ = ["ADAPTERS", "adapter_class", "adapter_for"]
