"""Observers by name: compressed-tensors' registry, in which a user's class may take the place of a built-in one."""

from __future__ import annotations

from typing import Any, ClassVar

from compressed_tensors.registry.registry import RegistryMixin, standardize_lookup_name

from lightning_obs.errors import CalibrationError, likely, warn


class Registry(RegistryMixin):
    """The registry that the base class of all observers inherits; names are registered under that one class."""

    #: classes of users that took the place of a built-in one, by name
    _replacements: ClassVar[dict[str, type]] = {}

    @classmethod
    def register_value(cls, value: Any, name: str | None = None, alias: str | list[str] | None = None) -> None:
        """Register a class by name; ``@Observer.register("name")`` calls this.

        A user's class under the name of another takes its place, with a warning.

        Args:
            value: the class.
            name: of the observer; None: the name of the class.
            alias: further names.
        """
        key = standardize_lookup_name(name or value.__name__)
        if key not in _registered_names(cls):
            super(Registry, _base_class(cls)).register_value(value, name=key, alias=alias)
            return
        current = cls.get_value_from_registry(key)
        if _full_name(current) != _full_name(value):
            warn(f"observer {name!r} is now {_full_name(value)}; it replaces {_full_name(current)}")
        cls._replacements[key] = value

    @classmethod
    def get_value_from_registry(cls, name: str) -> Any:
        """The class registered under ``name`` (``-`` and ``_`` are the same); called by ``load_from_registry``.

        Raises:
            CalibrationError: no such name; the message lists the names there are.
        """
        registered = _registered_names(cls)
        names = sorted(key.replace("-", "_") for key in registered)  # as users write them
        if not isinstance(name, str):
            raise CalibrationError("an observer has a name", got=repr(name), expected=f"one of {', '.join(names)}")
        key = standardize_lookup_name(name)
        if key in cls._replacements:
            return cls._replacements[key]
        if key not in registered:
            raise CalibrationError(
                f"unknown observer {name!r}{likely(name, names)}", expected=f"one of {', '.join(names)}"
            )
        return super(Registry, _base_class(cls)).get_value_from_registry(key)


def _base_class(cls: type) -> Any:
    """The first class below :class:`Registry` among a class's ancestors: names are registered under it."""
    for ancestor in reversed(cls.__mro__):
        if issubclass(ancestor, Registry) and ancestor is not Registry:
            return ancestor
    raise TypeError(f"{cls.__name__} has no base class to register under")


def _registered_names(cls: type) -> list[str]:
    base = _base_class(cls)
    return [*base.registered_names(), *base.registered_aliases()]


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
