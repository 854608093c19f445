"""The keys of a Hugging Face ``config.json``, checked as they are read, and what is said of those that are wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cachesvc.model.errors import LayoutRejected
from cachesvc.model.layout import ITEM_BYTES
from cachesvc_client.layouts.dtypes import dtype_name

AUTO = "auto"
MAX_NUMBER = 1 << 20


class ConfigRejected(LayoutRejected):
    """The configuration does not describe a layout that can be built."""


class ConfigKeyMissing(ConfigRejected):
    """A key that the model type needs is not there."""

    def __init__(self, model_type: str, key: str, why: str = "") -> None:
        super().__init__(f"config of {model_type} has no {key}" + (f": {why}" if why else ""))
        self.model_type = model_type
        self.key = key


class ConfigValueRejected(ConfigRejected):
    """A key has a value that cannot be."""

    def __init__(self, model_type: str, key: str, value: object, wanted: str) -> None:
        super().__init__(f"config of {model_type}: {key} is {shortened(value)}, but must be {wanted}")
        self.model_type = model_type
        self.key = key
        self.value = value


class ConfigKeys:
    """The keys of one configuration, checked as they are read. ``null`` is as good as absent."""

    def __init__(self, model_type: str, config: Mapping[str, Any], outer: Mapping[str, Any] | None = None) -> None:
        self.model_type = model_type
        self._config = config
        self._outer = outer or {}

    def inner(self, key: str) -> ConfigKeys:
        """A configuration inside this one."""
        value = self._config.get(key)
        if value is None:
            raise ConfigKeyMissing(self.model_type, key)
        if not isinstance(value, Mapping):
            raise self.rejected(key, value, "an object")
        return ConfigKeys(self.model_type, value, outer=self._config)

    def find(self, key: str) -> Any:
        """Unchecked value of a key; None where the key is absent."""
        return self._config.get(key)

    def find_number(self, key: str, *, least: int = 1) -> int | None:
        """A whole number of at least ``least``, or None where none stands."""
        value = self._config.get(key)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MAX_NUMBER:
            raise self.rejected(key, value, f"a whole number in {least}..{MAX_NUMBER}")
        return value

    def number(self, key: str, default: int | None = None) -> int:
        """A positive number, or the default. Raises ConfigKeyMissing where there is neither."""
        value = self.find_number(key)
        if value is not None:
            return value
        if default is None:
            raise ConfigKeyMissing(self.model_type, key)
        return default

    def flags(self, key: str, meaning: Mapping[Any, bool], length: int) -> tuple[bool, ...] | None:
        """A list of ``length`` values, each translated by ``meaning``; None where it is absent."""
        values = self._config.get(key)
        if values is None:
            return None
        if not isinstance(values, list | tuple) or len(values) != length:
            raise self.rejected(key, values, f"a list with one entry for each of {length} layers")
        for value in values:
            if not isinstance(value, str | int) or value not in meaning:
                raise self.rejected(key, value, f"a list of {' and '.join(map(str, meaning))}")
        return tuple(meaning[value] for value in values)

    def dtype(self, wanted: str, default: str | None = None) -> str:
        """The dtype that the caller wants, or with ``auto`` the model's own."""
        if wanted != AUTO:
            return wanted
        for config in (self._config, self._outer):
            for key in ("dtype", "torch_dtype"):
                value = config.get(key)
                if value is not None:
                    try:
                        return dtype_name(value)
                    except LayoutRejected:
                        raise self.rejected(key, value, f"one of {', '.join(ITEM_BYTES)}") from None
        if default is None:
            raise ConfigKeyMissing(self.model_type, "dtype", "say what the cache holds by kv_dtype")
        return default

    def rejected(self, key: str, value: object, wanted: str) -> ConfigValueRejected:
        """The refusal of a value."""
        return ConfigValueRejected(self.model_type, key, value, wanted)


def shortened(value: object) -> str:
    """A value as a message shows it."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
