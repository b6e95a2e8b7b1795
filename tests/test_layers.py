"""The layer table of the design, held by parsing the imports."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "lightning_obs"
FILES = sorted(PACKAGE.rglob("*.py"))
LAYERED = [file for file in FILES if file != PACKAGE / "__init__.py"]  # lazy; it has a test of its own

#: path inside the package (a folder ends in /) -> layer
LAYERS = {
    "errors.py": 0,
    "numerics/": 0,
    "observers/": 1,
    "attention.py": 2,
    "attention_hooks.py": 2,
    "adapters.py": 2,
    "flat_shards.py": 2,
    "compile_stance.py": 2,
    "fusion.py": 2,
    "experts.py": 2,
    "expert_checks.py": 2,
    "modules.py": 2,
    "fake_forward.py": 2,
    "training_forward.py": 2,
    "schemes.py": 2,
    "plan.py": 2,
    "agreement.py": 2,
    "buckets.py": 2,
    "collectives.py": 2,
    "sync.py": 2,
    "shards.py": 2,
    "checks.py": 3,
    "findings.py": 3,
    "merging.py": 3,
    "expert_watch.py": 3,
    "siblings.py": 3,
    "hooks.py": 3,
    "result.py": 3,
    "learned_scales.py": 3,
    "quantized_training.py": 3,
    "saved_state.py": 3,
    "compressed_rows.py": 3,
    "session.py": 3,
    "shared_reads.py": 3,
    "token_mask.py": 3,
    "metrics.py": 4,
    "report.py": 4,
    "plots.py": 4,
    "compressed_state.py": 4,
    "export.py": 4,
    "loading.py": 4,
    "callbacks/": 5,
    "app/": 6,
    "__main__.py": 6,
}
#: third-party package -> lowest layer that may import it
LOWEST = {
    "lightning": 5,
    "lightning_fabric": 5,
    "pytorch_lightning": 5,
    "hydra": 6,
    "omegaconf": 6,
    "transformers": 6,
}


def layer_of(path: str) -> int | None:
    return next((n for part, n in LAYERS.items() if path == part or (part[-1] == "/" and path.startswith(part))), None)


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
        elif LOWEST.get(root, 0) > layer:
            bad.append(f"{path} (layer {layer}) imports {name}, which only layers >= {LOWEST[root]} may")
    return bad


@pytest.mark.parametrize("file", LAYERED, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_a_file_imports_only_from_its_layer_and_below(file):
    path = file.relative_to(PACKAGE).as_posix()
    assert layer_of(path) is not None, f"{path} has no layer: add it to LAYERS in {__file__}"
    assert not violations(path, file.read_text())


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("numerics/qparams.py", "from lightning_obs.observers import Observer"),
        ("observers/base.py", "def f():\n    import lightning_obs.session"),
        ("observers/base.py", "from ..session import CalibrationSession"),
        ("fusion.py", "from lightning_obs import session"),
        ("errors.py", "from lightning_obs import CalibrationSession"),
        ("export.py", "import lightning.pytorch"),
        ("callbacks/calibration.py", "from transformers import AutoModel"),
    ],
)
def test_an_upward_import_is_found(path, source):
    assert violations(path, source)


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


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_names_say_what_a_thing_is(file):
    assert file.stem not in ("utils", "helpers")
    classes = [n.name for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.ClassDef)]
    assert [name for name in classes if name.endswith(("Manager", "Handler", "Mixin"))] == []
