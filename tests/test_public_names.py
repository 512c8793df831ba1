"""The public surface is listed, light, documented; imports point one way."""

import ast
import importlib
import importlib.metadata
import importlib.util
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import onereplay

SOURCES = Path(onereplay.__file__).parent
PUBLIC = {
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
}
"""A name that goes is a breaking change: say so in the changelog before changing this."""
OBJECTS = sorted(PUBLIC - {"__version__"})

LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors",),
    ("core.budgets",),  # integers and errors only; the options of `config` are checked by its rules
    ("config",),
    ("core", "fetch", "geometry"),
    ("attention", "optimize", "models"),
    ("adapters", "loading", "media", "presets"),
    ("preprocess",),
    ("encoder",),
    ("acceleration", "checking", "parallel", "wrapping"),
    ("bench",),
    ("cli", "offline", "server"),
)
"""Lowest first. A module imports from its own layer and from those below."""

FOREIGN = {"transformers", "huggingface_hub", "safetensors", "PIL", "http", "urllib", "socket", "typer", "requests"}
"""What `core` and `geometry` do not know: Hugging Face, HTTP, files of pictures, the command line."""


# ---------------------------------------------------------------------------------------------------------------------
# Names
# ---------------------------------------------------------------------------------------------------------------------


def fresh(code: str) -> str:
    """What a new interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_public_names_are_exactly_these() -> None:
    assert set(onereplay.__all__) == PUBLIC
    assert len(onereplay.__all__) == len(PUBLIC)
    assert dir(onereplay) == sorted(PUBLIC)


def test_a_name_that_is_not_public_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'encode'"):
        _ = onereplay.encode


def test_importing_the_package_imports_neither_torch_nor_transformers_nor_numpy() -> None:
    heavy = fresh("import onereplay, sys; print({'torch', 'transformers', 'numpy', 'rich'} & sys.modules.keys())")
    assert heavy == "set()"


def test_accelerate_is_the_function_before_and_after_its_module_is_imported() -> None:
    """The public function and the module that it lives in must not be taken for each other."""
    kinds = fresh(
        "from onereplay import accelerate, Accelerated, accelerate as again\n"
        "print(type(accelerate).__name__, type(again).__name__)"
    )
    assert kinds == "function function"


@pytest.mark.parametrize("name", OBJECTS)
def test_a_public_name_is_no_module_and_says_in_a_sentence_what_it_gives(name: str) -> None:
    found = getattr(onereplay, name)
    assert not isinstance(found, ModuleType)
    assert _has_first_sentence(found)
    for method, value in vars(found).items() if inspect.isclass(found) else ():
        if not method.startswith("_") and (callable(value) or isinstance(value, property | classmethod)):
            assert _has_first_sentence(getattr(found, method) if isinstance(value, classmethod) else value), method


def test_the_version_is_that_of_the_distribution() -> None:
    assert onereplay.__version__ == importlib.metadata.version("onereplay")


def _has_first_sentence(found: object) -> bool:
    first = (inspect.getdoc(found) or "").partition("\n\n")[0]
    return ("." in first or first.endswith(":")) and not first.startswith(getattr(found, "__name__", "\0") + "(")


# ---------------------------------------------------------------------------------------------------------------------
# Direction of imports
# ---------------------------------------------------------------------------------------------------------------------


def modules() -> dict[str, Path]:
    """Every module of the package by its name below `onereplay`; the package itself is left out."""
    found = {}
    for path in sorted(SOURCES.rglob("*.py")):
        parts = path.relative_to(SOURCES).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if name:
            found[name] = path
    return found


MODULES = modules()


def imports(path: Path) -> Iterator[str]:
    """Dotted names that a file imports anywhere, inside functions and for types too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner.removeprefix("onereplay.") in MODULES else node.module


def layer(module: str) -> int:
    """The layer of the longest name that covers the module."""
    covering = [
        (len(name), height)
        for height, names in enumerate(LAYERS)
        for name in names
        if module == name or module.startswith(f"{name}.")
    ]
    assert covering, f"{module} is in no layer; put it into one"
    return max(covering)[1]


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_one_way(module: str) -> None:
    inside = [name.removeprefix("onereplay.") for name in imports(MODULES[module]) if name.startswith("onereplay.")]
    assert [name for name in inside if layer(name) > layer(module)] == []


@pytest.mark.parametrize("module", [name for name in MODULES if name.partition(".")[0] in ("core", "geometry")])
def test_core_and_geometry_know_no_hugging_face_and_no_http(module: str) -> None:
    assert FOREIGN & {name.partition(".")[0] for name in imports(MODULES[module])} == set()


def test_the_core_runs_without_transformers() -> None:
    loaded = fresh(
        "import sys, onereplay.core.manager, onereplay.geometry, onereplay.attention\n"
        "print({'transformers', 'huggingface_hub'} & sys.modules.keys())"
    )
    assert loaded == "set()"


NEED_TRITON = ("attention.short", "optimize.triton_kernels")
"""Imported when a kernel first runs; PyTorch for a CPU brings no Triton."""


def test_every_module_can_be_imported_and_says_what_it_is() -> None:
    for name, path in MODULES.items():
        assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), name
        without = name in NEED_TRITON and importlib.util.find_spec("triton") is None
        if not name.endswith("__main__") and not without:
            importlib.import_module(f"onereplay.{name}")


def test_nothing_needs_triton_before_a_kernel_runs() -> None:
    loaded = fresh(
        "import sys, onereplay, onereplay.encoder\n"
        "print({'onereplay.attention.short', 'onereplay.optimize.triton_kernels'} & sys.modules.keys())"
    )
    assert loaded == "set()"
