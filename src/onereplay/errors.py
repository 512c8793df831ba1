"""Every exception that onereplay raises on purpose.

::

    OnereplayError
    ├── ConfigError             an option or its value is refused (also a ValueError)
    ├── InputError              what the caller gave to encode is refused (also a ValueError)
    │   └── MediaError          one image or video cannot be read
    ├── UnsupportedModelError   no adapter for this model, or the model lacks what was asked
    ├── CheckpointError         a checkpoint misses, mis-shapes or mis-names a weight
    ├── CapacityError           a batch was sent to a graph that cannot hold it: a bug, never an input
    ├── CaptureError            a forward cannot be recorded; names the operation and the line
    ├── ClosedError             the encoder was closed (also a RuntimeError)
    ├── RankError               another rank of a data-parallel call failed; names it and its message
    └── MissingDependencyError  an optional package is absent; names the install line (also an ImportError)

A message says what was asked, the value, what is allowed, and what to do about it.
"""


class OnereplayError(Exception):
    """Base of every exception that onereplay raises on purpose."""


class ConfigError(OnereplayError, ValueError):
    """An option is unknown or its value is refused; raised before any weight is loaded."""


class InputError(OnereplayError, ValueError):
    """The caller's input is refused; nothing else of the call's work is lost with it."""


class MediaError(InputError):
    """One image or video cannot be read. `source` is what the caller gave, shortened for print."""

    def __init__(self, source: str, reason: str) -> None:
        super().__init__(f"{source}: {reason}")
        self.source = source
        self.reason = reason

    def __reduce__(self) -> tuple[type["MediaError"], tuple[str, str]]:
        return type(self), (self.source, self.reason)


class UnsupportedModelError(OnereplayError):
    """No adapter knows the model, or the model lacks what was asked of it."""


class CheckpointError(OnereplayError):
    """A checkpoint misses, mis-shapes or mis-names a weight of the vision encoder."""


class CapacityError(OnereplayError):
    """A batch was sent to a graph that cannot hold it. The plan prevents this: seeing it is a bug."""


class CaptureError(OnereplayError):
    """A forward cannot be recorded; the message names the operation and the line that called it."""


class ClosedError(OnereplayError, RuntimeError):
    """The encoder was closed and its memory given back; make a new one."""


class RankError(OnereplayError):
    """Another rank of a data-parallel call failed, or was given another batch; the message has its rank and reason."""


class MissingDependencyError(OnereplayError, ImportError):
    """An optional package is needed for this; the message has the install line."""
