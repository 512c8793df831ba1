"""The directory that a run of `encode` writes: features as safetensors, and `index.json`.

A file is written under a temporary name and renamed, so a file under its own name is always whole.
"""

import contextlib
import enum
import json
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from safetensors import SafetensorError

from onereplay.errors import ConfigError, OnereplayError

if TYPE_CHECKING:
    from torch import Tensor

INDEX = "index.json"
KEY = "features"
_SUFFIX = ".safetensors"


class Layout(enum.StrEnum):
    """How features are spread over files."""

    PER_FILE = "per-file"
    SINGLE = "single"


@dataclass(frozen=True)
class Entry:
    """What the index says about one input."""

    name: str
    """Unique in the run."""
    path: str
    """The input as it was given."""
    file: str | None = None
    """Where its features are, in the output directory."""
    key: str | None = None
    """And under which name in that file."""
    modality: str | None = None
    size: str | None = None
    """Pixels, and frames of a video after sampling; unknown of what came from the network."""
    tokens: int | None = None
    patches: int | None = None
    hidden: int | None = None
    dtype: str | None = None
    steps: Mapping[str, Mapping[str, Any]] | None = None
    """What its batch did, by path: a replayed budget with its padding, or why it ran eagerly."""
    error: str | None = None


class Writer(Protocol):
    """Puts features into files."""

    def add(self, name: str, features: "Tensor", metadata: Mapping[str, str]) -> tuple[str, str]:
        """Take the features of one input; gives the file and the key that they will have."""
        ...

    def finish(self) -> None:
        """Write what is still held."""
        ...


class PerFile:
    """A file an input, with its metadata in the header."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def add(self, name: str, features: "Tensor", metadata: Mapping[str, str]) -> tuple[str, str]:
        """Written at once."""
        file = f"{name}{_SUFFIX}"
        _save(self._directory / file, {KEY: features}, metadata)
        return file, KEY

    def finish(self) -> None:
        """Nothing is held."""


class Single:
    """One file for all. Features stay in memory until the end, since the file begins with all their sizes."""

    def __init__(self, directory: Path, metadata: Mapping[str, str]) -> None:
        self._path = directory / f"{KEY}{_SUFFIX}"
        self._metadata = metadata
        self._held: dict[str, Tensor] = {}

    def add(self, name: str, features: "Tensor", metadata: Mapping[str, str]) -> tuple[str, str]:
        """Held until `finish`; what describes one input is in the index alone."""
        self._held[name] = features.to("cpu", copy=True)
        return self._path.name, name

    def finish(self) -> None:
        """Written at once."""
        if self._held:
            _save(self._path, self._held, self._metadata)


class OutputDirectory:
    """Where one run writes.

    Args:
        path: made by `make` if it is not there.
        names: of all inputs.
        layout: see `Layout`.
        overwrite: replace an earlier run: its index and the files that it lists.

    Raises:
        ConfigError: it holds an earlier run and `overwrite` is off.
    """

    def __init__(self, path: Path, names: Sequence[str], layout: Layout, *, overwrite: bool) -> None:
        self.path, self.layout = path, layout
        files = [f"{name}{_SUFFIX}" for name in names] if layout is Layout.PER_FILE else [f"{KEY}{_SUFFIX}"]
        existing = next((file for file in (INDEX, *files) if (path / file).exists()), None)
        if existing and not overwrite:
            raise ConfigError(
                f"--out {path} has {existing} of an earlier run; give an empty directory, or --overwrite to replace it"
            )

    def make(self) -> None:
        """Make the directory.

        Raises:
            ConfigError: it cannot be made.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--out {self.path} cannot be made: {error.strerror}; give another directory") from error

    @contextlib.contextmanager
    def run(self, about: Mapping[str, Any], metadata: Mapping[str, str]) -> Iterator[tuple[Writer, list[Entry]]]:
        """A writer, and the list that the caller adds an entry an input to. The index is written at the end, also of a
        run that was interrupted after some entries; then it says that it is not complete.
        """
        self._remove_earlier()
        writer: Writer = PerFile(self.path) if self.layout is Layout.PER_FILE else Single(self.path, metadata)
        entries: list[Entry] = []
        complete = False
        try:
            yield writer, entries
            complete = True
        finally:
            writer.finish()
            if complete or entries:
                self._write_index({**about, "complete": complete, "items": [asdict(entry) for entry in entries]})

    def _write_index(self, content: Mapping[str, Any]) -> None:
        with _whole(self.path / INDEX) as temporary:
            temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    def _remove_earlier(self) -> None:
        """Remove what the index of an earlier run lists, and the index; nothing else in the directory is touched."""
        index = self.path / INDEX
        try:
            listed = [str(item["file"]) for item in json.loads(index.read_text(encoding="utf-8"))["items"]]
        except (OSError, ValueError, KeyError, TypeError):
            listed = []
        for file in {file for file in listed if file.endswith(_SUFFIX) and Path(file).name == file}:
            (self.path / file).unlink(missing_ok=True)
        index.unlink(missing_ok=True)


def _save(path: Path, tensors: Mapping[str, "Tensor"], metadata: Mapping[str, str]) -> None:
    from safetensors.torch import save_file

    with _whole(path) as temporary:
        temporary.touch()
        mode = temporary.stat().st_mode  # safetensors makes a file that nobody else may read.
        whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_file(whole, temporary, {"format": "pt", **{name: _utf8(text) for name, text in metadata.items()}})
        temporary.chmod(mode)


def _utf8(text: str) -> str:
    """A header is UTF-8; a file's name need not be."""
    return text.encode(errors="backslashreplace").decode()


@contextlib.contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """A temporary path that takes the place of `path` when the block ends well, and is removed when it does not.

    Raises:
        OnereplayError: it cannot be written.
    """
    temporary = path.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        raise OnereplayError(f"{path} cannot be written: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)
