"""Names of inputs, and the list behind what was typed."""

import os
from pathlib import Path

import pytest

from onereplay.cli.inputs import resolve_inputs, unique_names
from onereplay.errors import ConfigError, MediaError
from tests.cli.conftest import picture


@pytest.mark.parametrize(
    ("sources", "names"),
    [
        (["/p/x.png"], ["x.png"]),
        (["/p/x.png", "/p/x.jpg"], ["x.png", "x.jpg"]),
        (["/a/x.png", "/b/x.png", "/b/y.png"], ["a__x.png", "b__x.png", "y.png"]),
        (["/a/1/x.png", "/b/1/x.png", "/b/2/x.png"], ["a__1__x.png", "b__1__x.png", "2__x.png"]),
        (["/x.png", "/a/x.png"], ["x.png", "a__x.png"]),
        (["/a/x.png", "/b/x.png", "/c/a__x.png"], ["a__x.png", "b__x.png", "c__a__x.png"]),
        (["/p/X.png", "/p/x.png"], ["X.png", "x-2.png"]),
        (["/p/é.png", "/p/e\u0301.png"], ["é.png", "e\u0301-2.png"]),
        (["/p/__metadata__"], ["__metadata__-2"]),
        (["/p/a:b?.png", "/p/a\udcff\n.png"], ["a_b_.png", "a__.png"]),
        (["https://h/a/x.png?s=1", "https://h/a/x.png?s=2"], ["h__a__x.png", "h__a__x-2.png"]),
        (["https://h/"], ["h"]),
    ],
)
def test_names_are_short_unique_and_fit_for_files_and_keys(sources: list[str], names: list[str]) -> None:
    assert unique_names(sources) == names


def test_a_long_name_is_cut_and_stays_unique_and_keeps_its_extension() -> None:
    names = unique_names([f"/p/{'ü' * 120}{end}.png" for end in ("a", "b")])
    assert len(set(names)) == 2
    assert all(len(name.encode()) <= 200 and name.endswith(".png") for name in names)


def test_each_file_is_taken_once_in_the_order_typed(tmp_path: Path) -> None:
    first, second = picture(tmp_path / "b.png", 8, 8), picture(tmp_path / "a.png", 8, 8)
    os.symlink(first, tmp_path / "link.png")
    typed = [str(first), str(tmp_path / "absent.png"), str(tmp_path), str(tmp_path / "*.png")]
    found = resolve_inputs(typed)
    assert [entry.source for entry in found] == [first, str(tmp_path / "absent.png"), second]
    assert [bool(entry.error) for entry in found] == [False, True, False]
    assert resolve_inputs(typed, limit=1) == found[:1]


def test_nothing_but_absent_files_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(MediaError, match="no such file"):
        resolve_inputs([str(tmp_path / "a"), str(tmp_path / "b")])


def test_urls_are_taken_only_when_allowed_and_shown_without_secrets() -> None:
    url = "https://user:password@example.com/a.png?signature=1"
    with pytest.raises(ConfigError, match="--allow-urls") as refused:
        resolve_inputs([url])
    (entry,) = resolve_inputs([url], allow_urls=True)
    for text in (str(refused.value), entry.path, entry.shown, *unique_names([url])):
        assert "password" not in text
        assert "signature" not in text
