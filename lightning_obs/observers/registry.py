"""Observers by name: compressed-tensors' registry, in which a user's class may take the place of a built-in one."""

from __future__ import annotations

from typing import Any, ClassVar

from compressed_tensors.registry.registry import RegistryMixin, standardize_lookup_name

from lightning_obs.errors import CalibrationError, likely, warn


class Registry(RegistryMixin):
    """The registry that the base class of all observers inherits; names are registered under that one class."""

    _replaced: ClassVar[dict[str, type]] = {}

    @classmethod
    def _root(cls) -> Any:
        return next(base for base in reversed(cls.__mro__) if issubclass(base, Registry) and base is not Registry)

    @classmethod
    def _known_names(cls) -> list[str]:
        return [*cls._root().registered_names(), *cls._root().registered_aliases()]

    @classmethod
    def register_value(cls, value: Any, name: str | None = None, alias: str | list[str] | None = None) -> None:
        """Register a class by name; a class of the user's takes the place of a built-in one, and says so once."""
        key = standardize_lookup_name(name or value.__name__)
        if key not in cls._known_names():
            super(Registry, cls._root()).register_value(value, name=key, alias=alias)
            return
        current = cls.get_value_from_registry(key)
        if (current.__module__, current.__qualname__) != (value.__module__, value.__qualname__):
            warn(
                f"observer {name!r} is now {value.__module__}.{value.__qualname__}; it replaces "
                f"{current.__module__}.{current.__qualname__}"
            )
        cls._replaced[key] = value

    @classmethod
    def get_value_from_registry(cls, name: str) -> Any:
        """The class registered under ``name`` (``-`` and ``_`` are the same).

        Raises:
            CalibrationError: no such name; the message lists the names there are.
        """
        known = cls._known_names()
        names = sorted(name.replace("-", "_") for name in known)  # as users write them
        if not isinstance(name, str):
            raise CalibrationError("an observer has a name", got=repr(name), expected=f"one of {', '.join(names)}")
        key = standardize_lookup_name(name)
        if key in cls._replaced:
            return cls._replaced[key]
        if key not in known:
            raise CalibrationError(
                f"unknown observer {name!r}{likely(name, names)}", expected=f"one of {', '.join(names)}"
            )
        return super(Registry, cls._root()).get_value_from_registry(key)
