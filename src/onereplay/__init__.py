"""Vision encoders of vision-language models under CUDA graphs: a batch is one replay or one eager forward.

The public names. They are imported on first use, so that `import onereplay` stays light.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onereplay.acceleration import Accelerated, accelerate
    from onereplay.config import EncoderCudaGraphConfig, load_config
    from onereplay.core.manager import EncoderCudaGraphManager
    from onereplay.core.protocol import SupportsEncoderCudaGraph
    from onereplay.encoder import Encoded, Encoder, VideoOptions
    from onereplay.parallel import DataParallelEncoder
    from onereplay.wrapping import Wrapped, wrap

__version__ = "0.1.0"

_HOMES = {
    "Accelerated": "onereplay.acceleration",
    "DataParallelEncoder": "onereplay.parallel",
    "Encoded": "onereplay.encoder",
    "Encoder": "onereplay.encoder",
    "EncoderCudaGraphConfig": "onereplay.config",
    "EncoderCudaGraphManager": "onereplay.core.manager",
    "SupportsEncoderCudaGraph": "onereplay.core.protocol",
    "VideoOptions": "onereplay.encoder",
    "Wrapped": "onereplay.wrapping",
    "accelerate": "onereplay.acceleration",
    "load_config": "onereplay.config",
    "wrap": "onereplay.wrapping",
}

__all__ = [
    "Accelerated",
    "DataParallelEncoder",
    "Encoded",
    "Encoder",
    "EncoderCudaGraphConfig",
    "EncoderCudaGraphManager",
    "SupportsEncoderCudaGraph",
    "VideoOptions",
    "Wrapped",
    "__version__",
    "accelerate",
    "load_config",
    "wrap",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'onereplay' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
