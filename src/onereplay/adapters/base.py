"""What every adapter shares. The protocol itself is `onereplay.core.protocol.SupportsEncoderCudaGraph`.

An adapter is made from a model's configuration alone or with its modules. The configuration is enough for sizes, items,
plans and capacities, so those answer before any weight is loaded; `forward` needs the modules.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from types import SimpleNamespace
from typing import Any, ClassVar, Generic

import torch
from torch import Tensor, nn

from onereplay.config import EncoderCudaGraphConfig
from onereplay.core.budgets import MAX_BATCH_TOKENS
from onereplay.core.buffers import Buffers, Packed
from onereplay.core.items import Item, Modality
from onereplay.core.plan import Capacity
from onereplay.core.protocol import BatchT, PathSpec
from onereplay.errors import InputError, UnsupportedModelError
from onereplay.geometry import Grid
from onereplay.optimize import Rewritten


class Adapter(ABC, Generic[BatchT]):
    """One model.

    Args:
        config: the whole model's transformers configuration (with `vision_config`).
        model: the stock base model (the one with `get_image_features`), or None for sizes alone.
        attention: a back end of `onereplay.attention`, or `auto`.
        optimize: names of rewrites of `onereplay.optimize` that `forward` runs with.
    """

    entry_points: ClassVar[Mapping[str, tuple[str, ...]]]
    """Methods of the stock base model that give features, with those of their parameters that `batch` takes."""
    model_type: ClassVar[str]
    parts: ClassVar[tuple[str, ...]]
    """Names of the vision modules in the stock base model."""
    modalities: ClassVar[tuple[Modality, ...]]
    engine: ClassVar[str]
    max_batch_tokens: ClassVar[int] = MAX_BATCH_TOKENS

    def __init__(self, config: Any, model: Any = None, attention: str = "auto", optimize: Sequence[str] = ()) -> None:
        self.config = config
        self.attention = attention
        self._model = model
        self.own: Any = SimpleNamespace()
        """The vision modules that `forward` runs, by the names in `parts`: copies of the model's that share its
        weights. What is changed in them (attention, rewrites) does not reach the user's modules, whatever thread runs
        those."""
        self._weights: list[tuple[dict[str, Any], str]] = []
        if model is not None:
            self._weights = [
                (module._parameters, name)
                for part in self.parts
                for module in getattr(model, part).modules()
                for name, weight in module._parameters.items()
                if weight is not None
            ]
            self.own = SimpleNamespace(**{part: share_weights(getattr(model, part)) for part in self.parts})
        self.rewritten = Rewritten(vars(self.own).values(), optimize, self.blocks() if model is not None else ())

    def blocks(self) -> Iterable[nn.Module]:
        """The blocks that `compiled_blocks` compiles; none where compiling them gains nothing."""
        return ()

    @property
    def model(self) -> Any:
        """The stock base model."""
        if self._model is None:
            raise UnsupportedModelError(
                f"this {type(self).__name__} was made from a configuration alone; give it a model"
            )
        return self._model

    @property
    def weights(self) -> Sequence[Tensor]:
        """All weights of the user's vision modules, as they are now."""
        return [parameters[name] for parameters, name in self._weights]

    @cached_property
    def weight(self) -> Tensor:
        """The first floating-point weight: it says where the modules are and in which dtype."""
        return next(weight for weight in self.weights if weight.is_floating_point())

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The type of pixels and outputs."""
        return self.weight.dtype

    @abstractmethod
    def batch(self, **inputs: Any) -> BatchT:
        """The adapter's batch from what the model's processor returns.

        Raises:
            InputError: a name is unknown, or shapes do not fit together; names the value and the rule.
        """

    @abstractmethod
    def items_of(self, **sizes: Any) -> tuple[Item, ...]:
        """The items of a batch from the processor's size entries alone (grids, tile counts), for planning.

        Raises:
            InputError: a size is refused.
        """

    @abstractmethod
    def example_inputs(self, grids: Sequence[Grid], generator: torch.Generator) -> dict[str, Tensor]:
        """Random pixels for these grids under the names of the stock entry points, for checks and benchmarks.

        A grid with more than one frame is a video where the model takes videos; for a model of tiles every grid is one
        tile. Pixels are float32 on the generator's device, sizes int64 on the CPU.
        """

    def unit(self, path: str) -> int:
        """Tokens that come and go together on a path: 1, or those of a tile."""
        return 1

    @abstractmethod
    def layouts(self, path: str, tokens: int, max_items: int) -> list[tuple[str, list[Grid]]]:
        """Named batches of exactly this many tokens on a path with other boundaries (one item, several, a video), as
        grids for `example_inputs`; the first has the fewest items.

        Args:
            path: the path to fill; what the batches ask of others follows from it.
            tokens: of the whole batch, a multiple of `unit(path)`.
            max_items: the most items of a batch.
        """

    @abstractmethod
    def join(self, batches: Sequence[BatchT]) -> BatchT:
        """Several batches as one, items in order."""

    @abstractmethod
    def paths(self) -> Mapping[str, PathSpec]:
        """The encoder's paths and their buffers."""

    @abstractmethod
    def capacities(self, path: str, config: EncoderCudaGraphConfig) -> Sequence[Capacity]:
        """What to capture, ascending."""

    @abstractmethod
    def pack(self, path: str, batch: BatchT) -> Packed:
        """The host side of one path of a batch."""

    @abstractmethod
    def forward(self, path: str, buffers: Buffers, bounds: Mapping[str, int]) -> Sequence[Tensor]:
        """The path's results."""

    @abstractmethod
    def stock_output(self, features: Sequence[Tensor]) -> Any:
        """The features in the type that the stock entry points return, one entry an item of `features`."""

    @abstractmethod
    def assemble(self, rows: Mapping[str, Sequence[Tensor]], batch: BatchT) -> list[Tensor]:
        """One tensor an item."""


def share_weights(module: nn.Module) -> nn.Module:
    """A copy of a module and all below it, in eval mode, with the same parameters and buffers, without forward hooks.

    Hooks are left out because a replay would not run them, and because those that transformers installs to collect
    hidden states keep `torch.compile` from whole blocks.
    """
    shared = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    copied = copy.deepcopy(module, shared)
    for part in copied.modules():
        part._forward_hooks.clear()
        part._forward_pre_hooks.clear()
    return copied.eval()


def host_rows(name: str, value: Any, columns: int) -> list[list[int]]:
    """A small integer table (`image_grid_thw`, `spatial_shapes`) as Python lists: `(N, columns)`.

    A table on the device is read back, which waits for the device: keep it on the CPU, where processors make it.

    Raises:
        InputError: not a table of `columns` integers.
    """
    try:
        rows = value.tolist() if hasattr(value, "tolist") else [[*row] for row in value]
    except TypeError:
        rows = None
    if not isinstance(rows, list):
        raise InputError(f"{name} must be a table of {columns} columns, one row an item, got {value!r:.80}")
    if any(not isinstance(row, list) or len(row) != columns for row in rows):
        raise InputError(f"{name} must have {columns} columns, got {rows!r:.80}")
    if any(isinstance(entry, bool) or not isinstance(entry, int) for row in rows for entry in row):
        raise InputError(f"{name} must hold integers, got {rows!r:.80}")
    return rows


def tile_counts(name: str, counts: Any, num_tiles: int | None) -> list[int]:
    """How many tiles each item has; one each where nothing is said.

    Raises:
        InputError: the counts are not positive integers or do not add up to the tiles.
    """
    if counts is None:
        return [1] * (num_tiles or 0)
    try:
        listed = counts.tolist() if hasattr(counts, "tolist") else [*counts]
    except TypeError:
        raise InputError(f"{name}={counts!r:.80} must be a list of positive integers, one an image") from None
    if not isinstance(listed, list):
        raise InputError(f"{name}={counts!r:.80} must be a list of positive integers, one an image")
    if any(isinstance(count, bool) or not isinstance(count, int) or count < 1 for count in listed):
        raise InputError(f"{name}={listed!r:.80} must be positive integers, one an image")
    if num_tiles is not None and sum(listed) != num_tiles:
        raise InputError(f"{name} adds up to {sum(listed)} tiles, pixel_values has {num_tiles}")
    return listed


def refuse_unknown(inputs: Mapping[str, Any], allowed: Sequence[str], model_type: str) -> dict[str, Any]:
    """The inputs that are given (not None), all of known names.

    Raises:
        InputError: an unknown name, with the known ones.
    """
    given = {name: value for name, value in inputs.items() if value is not None}
    for name, value in given.items():
        if name.startswith("pixel_values") and not isinstance(value, Tensor):
            raise InputError(f"{name} is a {type(value).__name__}; give a tensor of PyTorch")
    unknown = sorted(set(given) - set(allowed))
    if unknown:
        raise InputError(
            f"{model_type} does not take {', '.join(unknown)}; it takes {', '.join(allowed)}"
            f"{' (precomputed embeddings need no encoder)' if any('embeds' in name for name in unknown) else ''}"
        )
    return given
