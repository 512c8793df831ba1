"""Options of the encoder: one frozen object, built and checked once, the same from every entry point.

`EncoderCudaGraphConfig(...)` takes keywords; `load_config` merges, weakest first, the defaults, a TOML or JSON file,
the environment (`ONEREPLAY_*`) and flags. Both refuse unknown names and bad values with the value, the rule and the
fix, before a weight is loaded.
"""

import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from onereplay.core import budgets
from onereplay.errors import ConfigError

ENVIRONMENT_PREFIX = "ONEREPLAY_"
DEFAULT_MAX_ITEMS = 64

ATTENTION_BACKENDS = ("auto", "short", "fa2", "fa4", "reference")
GRAPH_BACKENDS = ("auto", "cuda", "traced")
FEATURES = ("auto", "embedding", "rows")
REWRITES = ("patch_embedding", "aligned_mlp", "fused_blocks", "compiled_blocks")
"""Names of the exact rewrites in `onereplay.optimize`."""


@dataclass(frozen=True)
class EncoderCudaGraphConfig:
    """What to capture and how.

    Args:
        max_token_budget: the largest captured budget, in tokens after the merge. A batch above it is one eager forward.
            `None` goes up to the model's largest batch.
        token_budgets: a list of budgets instead of the default grid; sorted, without repeats. With a list,
            `max_token_budget` must be left at its default.
        max_items_per_batch: a bound on the whole batch, 64 by default: nine images with a bound of eight are one eager
            forward of nine, not eight and one. It also sizes the sequence slots of a captured graph.
        max_frames_per_batch: sequence slots (frames of videos and images together) of a captured graph; by default as
            many as items. More slots let videos of many small frames replay, and cost a little attention time.
        attention: `auto`, `fa2`, `fa4` or `reference`; see `onereplay.attention`.
        backend: `auto` (CUDA graphs on a CUDA device, traced graphs elsewhere), `cuda` or `traced`.
        optimize: names of the exact rewrites of `onereplay.optimize` to apply; `None` is all of them under CUDA graphs
            and none elsewhere, an empty list is none.
        features: what a tower that embeds whole images gives: `embedding`, one row an image as the stock module pools
            it, or `rows`, its last hidden state. `auto` is the embedding where there is one. Other models give rows.
        tile_size: the size in pixels, a side or (height, width), that graphs are captured for, for towers that take
            images of any size (DINOv2, DINOv3); by default what the published image processor makes.

    Raises:
        ConfigError: a value is refused; the message names the option, the value, the rule and the fix.
    """

    max_token_budget: int | None = budgets.DEFAULT_MAX_TOKEN_BUDGET
    token_budgets: tuple[int, ...] | None = None
    max_items_per_batch: int | None = None
    max_frames_per_batch: int | None = None
    attention: str = "auto"
    backend: str = "auto"
    optimize: tuple[str, ...] | None = None
    features: str = "auto"
    tile_size: int | tuple[int, int] | None = None

    def __post_init__(self) -> None:
        for name in ("max_token_budget", "max_items_per_batch", "max_frames_per_batch"):
            if getattr(self, name) is not None:
                self._set(name, budgets.positive(name, getattr(self, name)))
        if self.token_budgets is not None:
            self._set("token_budgets", budgets.normalize_budgets(self.token_budgets))
            if self.max_token_budget != budgets.DEFAULT_MAX_TOKEN_BUDGET:
                raise ConfigError(
                    f"token_budgets={list(self.token_budgets)} and max_token_budget={self.max_token_budget} contradict "
                    f"each other; give one of them (the largest of a list is its cap)"
                )
        _one_of("attention", self.attention, ATTENTION_BACKENDS)
        _one_of("backend", self.backend, GRAPH_BACKENDS)
        if self.optimize is not None:
            self._set("optimize", _rewrites(self.optimize))
        _one_of("features", self.features, FEATURES)
        if self.tile_size is not None:
            self._set("tile_size", _sides(self.tile_size))

    @property
    def tile_sides(self) -> tuple[int, int] | None:
        """Height and width of `tile_size`."""
        return None if self.tile_size is None else _sides(self.tile_size)

    @property
    def items_bound(self) -> int:
        """The bound on items of one batch."""
        return DEFAULT_MAX_ITEMS if self.max_items_per_batch is None else self.max_items_per_batch

    @property
    def sequence_slots(self) -> int:
        """The most sequence slots that a captured graph gets."""
        return max(self.items_bound, self.max_frames_per_batch or 0)

    def ladder(self, max_batch_tokens: int, item_tokens: int = 1) -> tuple[int, ...]:
        """The budgets of one path, ascending.

        Args:
            max_batch_tokens: the most tokens that the model puts into one batch; clamps the cap.
            item_tokens: tokens of a fixed-size item (a tile), 1 for a packed path.

        Raises:
            ConfigError: no item fits the cap.
        """
        if self.token_budgets is not None:
            return budgets.normalize_budgets(self.token_budgets, item_tokens=item_tokens)
        cap = max_batch_tokens if self.max_token_budget is None else min(self.max_token_budget, max_batch_tokens)
        return budgets.token_budgets(None, cap, item_tokens=item_tokens)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @classmethod
    def option_names(cls) -> tuple[str, ...]:
        """Every option, in order."""
        return tuple(field.name for field in fields(cls))

    @classmethod
    def from_mapping(cls, options: Mapping[str, Any], *, origin: str = "options") -> Self:
        """A config from a mapping whose keys must all be options; `origin` names it in errors."""
        _refuse_unknown(options, cls.option_names(), origin)
        return cls(**options)


def load_config(
    *,
    file: str | Path | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> EncoderCudaGraphConfig:
    """One config from all sources; a later source overrides an earlier one.

    Args:
        file: a `.toml` or `.json` file of options, at the top level or under `[onereplay]`; defaults to the file
            that `ONEREPLAY_CONFIG` names, if set.
        environment: `ONEREPLAY_<OPTION>` values as text; defaults to the process environment. Lists are comma
            separated.
        flags: options given on a command line; `None` values count as not given.

    Raises:
        ConfigError: a file cannot be read, an option is unknown, or a value is refused.
    """
    environment = os.environ if environment is None else environment
    file = file or environment.get(f"{ENVIRONMENT_PREFIX}CONFIG") or None
    merged: dict[str, Any] = dict(_from_file(Path(file))) if file else {}
    merged.update(_from_environment(environment))
    given = {name: value for name, value in (flags or {}).items() if value is not None}
    _refuse_unknown(given, EncoderCudaGraphConfig.option_names(), "flags")
    merged.update({name: _parse(name, value) if isinstance(value, str) else value for name, value in given.items()})
    return EncoderCudaGraphConfig(**merged)


def _from_file(path: Path) -> Mapping[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"config file {path} cannot be read: {error.strerror}; check the path") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"config file {path} is not UTF-8 text: {error.reason}; save it as UTF-8") from error
    try:
        if path.suffix == ".toml":
            options = tomllib.loads(text)
        elif path.suffix == ".json":
            options = json.loads(text)
        else:
            raise ConfigError(f"config file {path} has the suffix {path.suffix!r}; use .toml or .json")
    except (tomllib.TOMLDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"config file {path} is not valid {path.suffix[1:].upper()}: {error}") from error
    if not isinstance(options, dict):
        raise ConfigError(f"config file {path} holds a {type(options).__name__}; use a table of options")
    if "onereplay" in options:
        _refuse_unknown(options, ("onereplay",), f"config file {path} beside [onereplay]")
        options = options["onereplay"]
        if not isinstance(options, dict):
            raise ConfigError(f"config file {path}: onereplay is a {type(options).__name__}; use a table of options")
    _refuse_unknown(options, EncoderCudaGraphConfig.option_names(), f"config file {path}")
    return {name: _parse(name, value) if isinstance(value, str) else value for name, value in options.items()}


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    given = {
        name.removeprefix(ENVIRONMENT_PREFIX).lower(): value
        for name, value in environment.items()
        if name.startswith(ENVIRONMENT_PREFIX) and name != f"{ENVIRONMENT_PREFIX}CONFIG"
    }
    _refuse_unknown(given, EncoderCudaGraphConfig.option_names(), f"environment ({ENVIRONMENT_PREFIX}*)")
    return {name: _parse(name, value) for name, value in given.items()}


def _parse(name: str, text: str) -> Any:
    """The value that text of a flag, variable or file stands for."""
    if name in ("attention", "backend", "features"):
        return text.strip()
    if text.strip().lower() == "none":
        return () if name == "optimize" else None
    if name == "optimize" and text.strip().lower() == "auto":
        return None
    if name == "tile_size":
        return tuple(_integer(name, part) for part in text.lower().split("x"))
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if name == "optimize":
        return tuple(parts)
    if name == "token_budgets":
        return tuple(_integer(name, part) for part in parts)
    return _integer(name, text)


def _integer(name: str, text: str) -> int:
    try:
        return int(text.strip())
    except ValueError:
        raise ConfigError(f"{name}={text!r} is not an integer; give a positive integer") from None


def _sides(size: object) -> tuple[int, int]:
    """A size of one or two sides as height and width."""
    sides = tuple(size) if isinstance(size, tuple | list) else (size,)
    if len(sides) not in (1, 2):
        raise ConfigError(f"tile_size={size!r} is no size; give a side such as 518, or height and width")
    height, width = (budgets.positive("tile_size", side) for side in (sides[0], sides[-1]))
    return height, width


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name}={value!r} is unknown; use one of {', '.join(allowed)}")


def _rewrites(names: object) -> tuple[str, ...]:
    if isinstance(names, str) or not isinstance(names, tuple | list):
        raise ConfigError(f"optimize={names!r} is not a list of names; give one such as ['name'] or []")
    for name in names:
        if name not in REWRITES:
            raise ConfigError(f"optimize={name!r} is unknown; use one of {', '.join(REWRITES)}")
    return tuple(dict.fromkeys(names))


def _refuse_unknown(options: Mapping[str, Any], allowed: tuple[str, ...], origin: str) -> None:
    unknown = sorted(set(options) - set(allowed))
    if unknown:
        raise ConfigError(f"unknown option {', '.join(unknown)} in {origin}; options are {', '.join(allowed)}")
