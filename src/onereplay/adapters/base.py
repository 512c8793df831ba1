"""What every adapter shares. The protocol itself is `onereplay.core.protocol.SupportsEncoderCudaGraph`.

An adapter is made from a model's configuration alone or with its modules. The configuration is enough for sizes, items,
plans and capacities, so those answer before any weight is loaded; `forward` needs the modules.
"""

import copy
import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from operator import attrgetter
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
from onereplay.errors import ConfigError, InputError, UnsupportedModelError
from onereplay.geometry import Grid
from onereplay.optimize import Rewritten

WHOLE = ""
"""In `Adapter.parts`: the base model itself, as `nn.Module.get_submodule` spells it."""
TOWER = "tower"
"""The name of a whole base model in `Adapter.own`."""


class Adapter(ABC, Generic[BatchT]):
    """One model.

    Args:
        config: the whole model's transformers configuration (with `vision_config`).
        model: the stock base model (the one with `get_image_features`), or None for sizes alone.
        attention: a back end of `onereplay.attention`, or `auto`.
        optimize: names of rewrites of `onereplay.optimize` that `forward` runs with.
    """

    entry_points: ClassVar[Mapping[str, tuple[str, ...]]]
    """Methods of the stock base model that give features (of a sub-module where the name has dots), with those of their
    parameters that `batch` takes."""
    stock_arguments: ClassVar[Mapping[str, Any]] = {}
    """Other parameters of the entry points that change features, with the values that leave them as they are here; a
    call with another value goes to the stock method."""
    model_type: ClassVar[str]
    parts: ClassVar[tuple[str, ...]]
    """Names of the vision modules in the stock base model, and of parameters that it holds itself; `(WHOLE,)` where all
    of the base model is the encoder, which then is `own.tower`."""
    modalities: ClassVar[tuple[Modality, ...]]
    engine: ClassVar[str]
    max_batch_tokens: ClassVar[int] = MAX_BATCH_TOKENS
    as_stock = False
    """Give what the stock entry points give, also where the model goes on with it before a token is made (Llama 4
    projects afterwards); `accelerate` sets it before anything is captured."""

    def __init__(self, config: Any, model: Any = None, attention: str = "auto", optimize: Sequence[str] = ()) -> None:
        self.config = config
        self.attention = attention
        self._model = model
        self.own: Any = SimpleNamespace()
        """The vision modules that `forward` runs, by the names in `parts`: copies of the model's that share its
        weights. What is changed in them (attention, rewrites) does not reach the user's modules, whatever thread runs
        those."""
        self._weights: list[tuple[dict[str, Any], str]] = []
        """Where each weight is found, also after another was put in its place."""
        if model is not None:
            found = {part or TOWER: getattr(model, part) if part else model for part in self.parts}
            modules = {part: value for part, value in found.items() if isinstance(value, nn.Module)}
            self._weights = [
                (module._parameters, name)
                for part in modules.values()
                for module in part.modules()
                for name, weight in module._parameters.items()
                if weight is not None
            ]
            self._weights += [(model._parameters, part) for part in found if part not in modules]
            self.own = SimpleNamespace(**found | {part: share_weights(value) for part, value in modules.items()})
        roots = [value for value in vars(self.own).values() if isinstance(value, nn.Module)]
        blocks = self.blocks() if model is not None else ()
        self.rewritten = Rewritten(roots, optimize, blocks, tiles=self.engine != "packed")

    @classmethod
    def fits(cls, model: Any) -> bool:
        """Whether this is the base model that the adapter runs: it has all `parts`."""
        return all(getattr(model, part, None) is not None for part in cls.parts)

    def configure(self, config: EncoderCudaGraphConfig) -> None:
        """Take the options that change what the model takes or gives.

        Raises:
            ConfigError: an option is set that this model does not have.
        """
        if config.features == "embedding":
            raise ConfigError(
                f"features='embedding': {self.model_type} gives no single embedding of its input; leave it out"
            )
        if config.tile_size is not None:
            raise ConfigError(f"tile_size={config.tile_size}: {self.model_type} takes no other size; leave it out")

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
    def select(self, batch: BatchT, chosen: Sequence[int]) -> BatchT:
        """Some items of a batch as a batch of their own, in the order of `chosen`; pixels are views."""

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

    @property
    def result_shape(self) -> tuple[int, ...]:
        """The shape of one row of an item's result: that of the first output, unless a model says otherwise."""
        return next(iter(self.paths().values())).outputs[0].shape

    def of_entry(self, name: str) -> "Adapter[Any]":
        """Whose `stock_output` and `stock_rows` an entry point has: this adapter's own, unless a model has one for each
        of its towers (see `omni`)."""
        return self

    def stock_rows(self, output: Any) -> list[Tensor]:
        """The way back from `stock_output`: what a stock entry point returned, as rows `(..., hidden_size)`."""
        return list(output.pooler_output)

    def stock_features(self, model: Any, inputs: Mapping[str, Any]) -> list[Tensor]:
        """All rows that the stock entry points of a model give for these inputs, in the order of `batch`: the reference
        of checks and benchmarks."""
        found: list[Tensor] = []
        for name, parameters in self.entry_points.items():
            if parameters[0] in inputs:
                given = {each: inputs[each].to(self.device) for each in parameters if each in inputs}
                found += self.of_entry(name).stock_rows(attrgetter(name)(model)(**given))
        return found

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


_INTEGERS = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8})


def plain_numbers(values: Any) -> Any:
    """A list of Python's numbers, of an array or a sequence; numbers of NumPy and of PyTorch become Python's.

    Raises:
        TypeError: it has no entries.
    """
    if hasattr(values, "tolist"):
        return values.tolist()
    return [value.tolist() if hasattr(value, "tolist") else value for value in values]


def host_rows(name: str, value: Any, columns: int) -> list[list[int]]:
    """A small integer table (`image_grid_thw`, `spatial_shapes`) as Python lists: `(N, columns)`.

    A table on the device is read back, which waits for the device: keep it on the CPU, where processors make it.

    Raises:
        InputError: not a table of `columns` integers.
    """
    try:
        if isinstance(value, Tensor) and value.dtype in _INTEGERS and value.ndim == 2 and value.shape[1] == columns:
            return value.tolist()
        rows = value.tolist() if hasattr(value, "tolist") else [plain_numbers(row) for row in value]
    except TypeError:
        rows = None
    if not isinstance(rows, list):
        raise InputError(f"{name} must be a table of {columns} columns, one row an item, got {value!r:.80}")
    if any(not isinstance(row, list) or len(row) != columns for row in rows):
        raise InputError(f"{name} must have {columns} columns, got {rows!r:.80}")
    if any(isinstance(entry, bool) or not isinstance(entry, int) for row in rows for entry in row):
        raise InputError(f"{name} must hold integers, got {rows!r:.80}")
    return rows


def take_rows(tensors: Sequence[Tensor], counts: Sequence[int], chosen: Sequence[int]) -> tuple[Tensor, ...]:
    """The rows of chosen items, as views.

    Args:
        tensors: whose rows follow one another over all items.
        counts: rows of each item.
        chosen: places of items in `counts`.
    """
    ends = list(itertools.accumulate(counts))
    starts = [0, *itertools.accumulate(len(tensor) for tensor in tensors)]
    found = []
    for place in chosen:
        begin, end = ends[place] - counts[place], ends[place]
        for tensor, start in zip(tensors, starts, strict=False):
            low, high = max(begin - start, 0), min(end - start, len(tensor))
            if low < high:
                found.append(tensor[low:high])
    return tuple(found)


def host_integers(name: str, values: Any, least: int) -> list[int]:
    """A list of integers, one an image, none below `least`.

    Raises:
        InputError: it is something else.
    """
    rule = "positive integers" if least == 1 else f"integers of at least {least}"
    try:
        listed = plain_numbers(values)
    except TypeError:
        listed = None
    if not isinstance(listed, list):
        raise InputError(f"{name}={values!r:.80} must be a list of {rule}, one an image")
    if any(isinstance(value, bool) or not isinstance(value, int) or value < least for value in listed):
        raise InputError(f"{name}={listed!r:.80} must be {rule}, one an image")
    return listed


def tile_counts(name: str, counts: Any, num_tiles: int | None) -> list[int]:
    """How many tiles each item has; one each where nothing is said.

    Raises:
        InputError: the counts are not positive integers or do not add up to the tiles.
    """
    if counts is None:
        return [1] * (num_tiles or 0)
    listed = host_integers(name, counts, 1)
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
        if name.startswith(("pixel_values", "input_features")) and not isinstance(value, Tensor):
            raise InputError(f"{name} is a {type(value).__name__}; give a tensor of PyTorch")
    unknown = sorted(set(given) - set(allowed))
    if unknown:
        raise InputError(
            f"{model_type} does not take {', '.join(unknown)}; it takes {', '.join(allowed)}"
            f"{' (precomputed embeddings need no encoder)' if any('embeds' in name for name in unknown) else ''}"
        )
    return given
