"""The pages in docs/ say what the code says: code in them is the code, names exist, every module is listed."""

import ast
import importlib
import re
import textwrap
from functools import reduce
from pathlib import Path

import pytest

import onereplay
from onereplay import checking
from tests.test_readme import ROOT, Block, blocks, by_place, call, commands

SOURCES = ROOT / "src" / "onereplay"
STRUCTURE = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8")
ADDING = ROOT / "docs" / "adding_a_model.md"
WALKED = ("adapters/qwen2_5_vl.py", "adapters/grids.py", "adapters/registry.py")
"""The files that the page about adding a model takes its code from."""
PAGES = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").glob("*.md"),
    ROOT / "benchmarks" / "README.md",
    ROOT / "examples" / "photos" / "README.md",
]
BLOCKS = [block for page in PAGES if page.name != "README.md" for block in blocks(page)]
PYTHON = [block for block in BLOCKS if block.language == "python"]
SHELL = [block for block in BLOCKS if block.language == "sh"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_inside_the_repository_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8"))
    inside = [target for target in targets if "://" not in target]
    assert [target for target in inside if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("block", PYTHON, ids=by_place)
def test_code_of_a_walk_through_is_the_code(block: Block) -> None:
    assert block.page == ADDING
    sources = "\n".join((SOURCES / file).read_text(encoding="utf-8") for file in WALKED)
    assert block.code in sources or textwrap.indent(block.code, "    ") in sources


@pytest.mark.parametrize("block", SHELL, ids=by_place)
def test_shell_blocks_run(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    if block.not_run:
        pytest.skip(block.not_run)
    monkeypatch.setattr(checking, "SMALL_BUDGETS", (16,))
    for program, *arguments in commands(block):
        assert program == "onereplay"
        assert "claims hold" in call(arguments)


def test_the_walk_through_shows_every_method_that_a_model_must_have() -> None:
    shown = {name for block in PYTHON for name in re.findall(r"def (\w+)", block.code)}
    assert shown >= {"merge", "size", "windows_capacity", "buffers", "piece", "batch", "forward", "stock_output"}
    text = ADDING.read_text(encoding="utf-8")
    for module in ("packed", "tiles", "base"):
        for name in abstract_methods(SOURCES / "adapters" / f"{module}.py"):
            assert f"`{name}`" in text or name in shown or name in OF_THE_ENGINES, name


OF_THE_ENGINES = {"join", "paths", "capacities", "pack", "assemble"}
"""Abstract in `Adapter`, written once for each engine."""


def abstract_methods(path: Path) -> list[str]:
    """Names of the abstract methods of a file."""
    return [
        node.name
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and any(ast.unparse(d) == "abstractmethod" for d in node.decorator_list)
    ]


def test_the_life_of_a_batch_has_eight_steps_whose_functions_exist() -> None:
    life = STRUCTURE.split("## The life of a batch")[1].split("\n## ")[0]
    assert re.findall(r"^\| (\d) \|", life, re.MULTILINE) == [str(step) for step in range(1, 9)]
    named = re.findall(r"`([\w/]+)\.py:([\w.]+)`", STRUCTURE)
    assert len(named) >= 9
    for module, name in named:
        found = reduce(getattr, name.split("."), importlib.import_module(f"onereplay.{module.replace('/', '.')}"))
        assert callable(found)


def test_every_module_has_one_line_and_every_line_a_module() -> None:
    listed = re.findall(r"^\| `([\w/]+\.py)` \| .+ \|$", STRUCTURE, re.MULTILINE)
    there = [
        str(path.relative_to(SOURCES))
        for path in SOURCES.rglob("*.py")
        if path.name not in ("__init__.py", "__main__.py") or _has_code(path)
    ]
    there.remove("__init__.py")
    assert sorted(listed) == sorted(there)


def test_the_page_about_models_is_what_the_command_prints() -> None:
    """Made anew with `onereplay models --markdown > docs/models.md`."""
    assert (ROOT / "docs" / "models.md").read_text(encoding="utf-8") == call(["models", "--markdown"])


def _has_code(path: Path) -> bool:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return any(isinstance(node, ast.FunctionDef | ast.ClassDef) for node in tree.body)


def test_the_changelog_speaks_of_this_version() -> None:
    assert f"## [{onereplay.__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
