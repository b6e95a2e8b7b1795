"""Configs that cost less to compose than a user's, with the same values.

Hydra looks for its plugins, and parses each file, anew for each command; that is a third of the time of a compose.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.plugins import Plugins


@contextmanager
def quick_configs() -> Iterator[None]:
    """For a ``with`` block in which Hydra knows its plugins, and parses no file twice that stays as it is."""
    Plugins.instance()
    with pytest.MonkeyPatch.context() as patched:
        for scheme in ("file", "pkg"):
            source = SourcesRegistry.instance().resolve(scheme)
            patched.setattr(source, "load_config", _parsed_once(source.load_config))
        yield


def _parsed_once(load: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    """As ``load``, the method of a source of configs; each call gives a config of its own."""
    parsed: dict[tuple[object, ...], bytes] = {}

    def load_config(source: Any, config_path: str) -> Any:
        file = Path(source.path, source._normalize_file_name(config_path))
        version = (file.stat().st_mtime_ns, file.stat().st_size) if file.is_file() else None  # none in a package
        key = (source.provider, source.path, config_path, version)
        if key not in parsed:
            parsed[key] = pickle.dumps(load(source, config_path))
        return pickle.loads(parsed[key])

    return load_config
