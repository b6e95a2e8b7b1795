"""The layer table of the design, held by parsing the imports."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "lightning_obs"
FILES = sorted(PACKAGE.rglob("*.py"))
LAYERED = [file for file in FILES if file != PACKAGE / "__init__.py"]  # lazy; it has a test of its own

ROOT = {"errors.py", "packages.py"}
#: the folders (and the files of ``ROOT``) from the lowest up, as CONTRIBUTING lists them: there is no other list
TABLE = (PACKAGE.parent / "CONTRIBUTING.md").read_text()
LAYERS = re.findall(r"^\| `(\w+/|\w+\.py)` \|", TABLE, flags=re.MULTILINE)[::-1]
#: third-party package -> lowest folder that may import it
LOWEST = {
    "lightning": "callbacks/",
    "lightning_fabric": "callbacks/",
    "pytorch_lightning": "callbacks/",
    "hydra": "app/",
    "omegaconf": "app/",
    "transformers": "checkpoint/",  # its names in files; inside functions, so that importing the package stays fast
}


def layer_of(path: str) -> int | None:
    """Position in the table, from below; ``__main__.py`` is the front door and stands on top."""
    if path == "__main__.py":
        return len(LAYERS)
    part = f"{path.split('/', maxsplit=1)[0]}/" if "/" in path else path
    return LAYERS.index(part) if part in LAYERS else None


def file_of(module: str) -> str:
    """The path, inside the package, of ``lightning_obs.a.b`` or of a name imported from it."""
    parts = module.split(".")[1:]
    for depth in range(len(parts), 0, -1):
        path = "/".join(parts[:depth])
        if (PACKAGE / f"{path}.py").is_file():
            return f"{path}.py"
        if (PACKAGE / path).is_dir():
            return f"{path}/__init__.py"
    return "__init__.py"


def imports_of(tree: ast.AST, path: str = "") -> list[str]:
    """Every imported module, functions' imports and relative ones included, as absolute dotted names."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                folders = ["lightning_obs", *Path(path).parts[:-1]]
                base = ".".join([*folders[: len(folders) - node.level + 1], *filter(None, [base])])
            found += [f"{base}.{alias.name}" for alias in node.names]
    return found


def violations(path: str, source: str) -> list[str]:
    layer = layer_of(path)
    assert layer is not None
    bad = []
    for name in imports_of(ast.parse(source), path):
        root = name.split(".")[0]
        if root == "lightning_obs":
            target = file_of(name)
            above = layer_of(target)
            if above is None or above > layer:
                bad.append(f"{path} (layer {layer}) imports {name} (layer {'all' if above is None else above})")
        elif root in LOWEST and LAYERS.index(LOWEST[root]) > layer:
            bad.append(f"{path} imports {name}, which only {LOWEST[root]} and above may")
    return bad


def test_every_file_imports_only_from_its_layer_and_below():
    files = {file.relative_to(PACKAGE).as_posix(): file for file in LAYERED}
    homeless = [path for path in files if layer_of(path) is None]
    assert not homeless, "no layer: add the folder to the table in CONTRIBUTING.md"
    assert [bad for path, file in files.items() for bad in violations(path, file.read_text())] == []


def test_every_folder_has_its_place_and_says_what_it_is_for():
    folders = {f"{path.name}/" for path in PACKAGE.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert folders | ROOT == set(LAYERS)
    for folder in folders:
        said = ast.get_docstring(ast.parse((PACKAGE / folder / "__init__.py").read_text()))
        assert said, folder
        assert "Start reading in" in said, folder


def test_the_root_holds_the_front_door_errors_and_packages_only():
    assert {path.name for path in PACKAGE.glob("*.py")} == {"__init__.py", "__main__.py", *ROOT}


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("numerics/qparams.py", "from lightning_obs.observers import Observer"),
        ("observers/observer.py", "def f():\n    import lightning_obs.calibration.session"),
        ("observers/observer.py", "from ..calibration.session import CalibrationSession"),
        ("schemes/planned_modules.py", "from lightning_obs import calibration"),
        ("errors.py", "from lightning_obs import CalibrationSession"),
        ("checkpoint/export.py", "import lightning.pytorch"),
        ("model/kinds.py", "from transformers import AutoModel"),
    ],
)
def test_an_upward_import_is_found(path, source):
    assert violations(path, source)


def lightning_imports(source: str) -> list[str]:
    """Modules of Lightning that a file imports at run time, which is not below ``if TYPE_CHECKING``."""
    roots = {name for name, folder in LOWEST.items() if folder == "callbacks/"}
    if not re.search(rf"\b(?:{'|'.join(roots)})\b", source):
        return []
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            node.body = []
    return [name for name in imports_of(tree) if name.split(".")[0] in roots]


def test_below_the_command_line_one_file_imports_lightning_so_that_no_other_asks_for_one_packages_class():
    files = [file for file in LAYERED if file.relative_to(PACKAGE).parts[0] != "app"]
    imports = {file.name: lightning_imports(file.read_text()) for file in files}
    assert {name: modules for name, modules in imports.items() if modules} == {}
    dynamic = [file.name for file in files if re.search(r"import_module\(.*lightning|_PYTORCH", file.read_text())]
    assert dynamic == ["lightning_package.py"]


def test_tests_of_the_callbacks_import_lightning_under_the_name_that_was_chosen():
    tests = Path(__file__).parent
    files = [*(tests / "callbacks").rglob("*.py"), *(tests / "support").glob("*.py")]
    imports = {file.name: lightning_imports(file.read_text()) for file in files}
    assert {name: modules for name, modules in imports.items() if modules} == {}


@pytest.mark.parametrize("source", ["import lightning as L", "def f():\n    from pytorch_lightning import Trainer"])
def test_an_import_of_lightning_is_found(source):
    assert lightning_imports(source)
    assert not lightning_imports(f"if TYPE_CHECKING:\n    {source.splitlines()[-1].strip()}")


def test_the_package_itself_imports_nothing_heavy_at_run_time():
    check = (
        "import sys, lightning_obs; print([n for n in sys.modules if n == 'torch' or n.startswith('lightning_obs.')])"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_lazy_name_is_there():
    import lightning_obs

    assert set(lightning_obs._HOME) == set(lightning_obs.__all__)
    assert all(getattr(lightning_obs, name).__name__ == name for name in lightning_obs.__all__)


def test_names_say_what_a_thing_is():
    assert [file for file in FILES if file.stem in ("utils", "helpers")] == []
    vague = re.compile(r"^ *class \w*(?:Manager|Handler|Mixin)\b", flags=re.MULTILINE)
    assert [file for file in FILES if vague.search(file.read_text())] == []


#: words of the command line: a group with its option, a key of a group with a value
COMMAND_WORDS = re.compile(
    r"\b(?:task|scheme|experiment|export|speed)=[a-z]|\b(?:task|export|data|model|trainer|report|hydra)\.\w+=|ignore_from"
)


def test_no_text_below_the_app_has_words_of_the_command_line():
    texts = []
    for file in LAYERED:
        path = file.relative_to(PACKAGE).as_posix()
        if path.startswith("app/") or path == "__main__.py":
            continue
        source = file.read_text()
        joined = re.sub(r"[\"']\s+\w?[\"']", "", source)  # strings beside each other are one
        if not COMMAND_WORDS.search(joined):
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and COMMAND_WORDS.search(node.value):
                texts.append(f"{path}:{node.lineno} {node.value}")
    assert texts == []
