"""What a user typed as inputs: files, directories, patterns and URLs, and a name of its own for each."""

import hashlib
import os
import re
import unicodedata
import urllib.parse
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from onereplay.errors import ConfigError, MediaError

_MAX_NAME_BYTES = 200
"""File systems allow 255 bytes in a name; this leaves room for a number and an extension."""
_RESERVED = ("__metadata__",)
"""Names that safetensors keeps for itself."""


@dataclass(frozen=True)
class Input:
    """One file or URL, or why what was typed stands for none."""

    source: str | Path
    error: MediaError | None = None

    @property
    def shown(self) -> str:
        """The source, for print."""
        from onereplay import media

        return media.describe(self.source)

    @property
    def path(self) -> str:
        """The source, for scripts: a path as it is, a URL without its secrets."""
        return self.shown if is_url(self.source) else str(self.source)


def resolve_inputs(typed: Sequence[str], *, allow_urls: bool = False, limit: int | None = None) -> list[Input]:
    """Every file behind what was typed, in that order, each once. What gives no file is kept with its error.

    Raises:
        MediaError: nothing that was typed gives a file.
        ConfigError: there are URLs and they are not allowed.
    """
    urls = [text for text in typed if is_url(text)]
    if urls and not allow_urls:
        raise ConfigError(f"{Input(urls[0]).shown} is a URL; add --allow-urls to fetch it, or give a file")
    found: dict[str, Input] = {}
    for entry in (entry for text in typed for entry in _expand(text)):
        identity = entry.source if is_url(entry.source) else os.path.realpath(entry.source)
        found.setdefault(str(identity), entry)
    entries = list(found.values())
    if all(entry.error for entry in entries):
        raise next(entry.error for entry in entries if entry.error)
    return entries[:limit]


def is_url(source: object) -> bool:
    """Whether a source is fetched from the network."""
    return isinstance(source, str) and re.match("https?://", source, re.IGNORECASE) is not None


def _expand(text: str) -> list[Input]:
    from onereplay import media

    if is_url(text):
        return [Input(text)]
    try:
        return [Input(path) for path in media.expand_inputs([text])]
    except MediaError as error:
        return [Input(text, error)]


def unique_names(sources: Sequence[str | Path]) -> list[str]:
    """A name for each source that can be a file's name and a key.

    It is the file's own name with its extension. Where several share it, directories are put in front, as few as tell
    them apart (`a__photo.jpg`). What is still the same, also to a file system that ignores case, gets a number. The
    same sources in the same order have the same names in every run.
    """
    parts = [_parts(source) for source in sources]
    depths = [1] * len(parts)
    while True:
        names = ["__".join(part[-depth:]) for part, depth in zip(parts, depths, strict=True)]
        count = Counter(names)
        clashing = [i for i, name in enumerate(names) if count[name] > 1 and depths[i] < len(parts[i])]
        if not clashing:
            return _numbered(map(_shortened, names))
        for i in clashing:
            depths[i] += 1


def _parts(source: str | Path) -> list[str]:
    if is_url(source):
        url = urllib.parse.urlsplit(str(source))
        found: Iterable[str] = [url.hostname or "", *urllib.parse.unquote(url.path).split("/")]
    else:
        found = Path(os.path.abspath(source)).parts[1:]
    return [_cleaned(part) for part in found if part] or ["input"]


def _cleaned(part: str) -> str:
    """Without what some file system or UTF-8 refuses."""
    return "".join(char if char.isprintable() and char not in '\\/:*?"<>|' else "_" for char in part)


def _shortened(name: str) -> str:
    encoded = name.encode()
    if len(encoded) <= _MAX_NAME_BYTES:
        return name
    digest = hashlib.sha256(encoded).hexdigest()[:8]
    return f"{digest}-{encoded[len(digest) + 1 - _MAX_NAME_BYTES :].decode(errors='ignore')}"


def _numbered(names: Iterable[str]) -> list[str]:
    taken, given = set(_RESERVED), []
    for name in names:
        (stem, extension), number = os.path.splitext(name), 2
        candidate = name
        while _folded(candidate) in taken:
            candidate, number = f"{stem}-{number}{extension}", number + 1
        taken.add(_folded(candidate))
        given.append(candidate)
    return given


def _folded(name: str) -> str:
    return unicodedata.normalize("NFC", name).casefold()
