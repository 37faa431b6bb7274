"""Typed, checked reading of configurations: config.json and GGUF metadata."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from octavo.errors import ModelLoadError

MAX_INT = 1 << 31
MAX_LAYERS = 1 << 12
MAX_WIDTH = 1 << 20  # most columns of a row of activations


class ConfigReader:
    """Reads keys of a configuration. Every error is a ModelLoadError that names the key and its value."""

    def __init__(self, values: Mapping[str, object], prefix: str = "") -> None:
        """Read from `values`.

        prefix: prefix of every key, for example `llama.`.
        """
        self.values = values
        self.prefix = prefix
        self.keys_read: set[str] = set()  # with the prefix; shared with readers derived from this one

    def with_defaults(self, defaults: Mapping[str, object]) -> ConfigReader:
        """Return the configuration with defaults for keys that it lacks; they are given without the prefix."""
        return self._with_values({**{self.prefix + k: v for k, v in defaults.items()}, **self.values})

    def renamed(self, names: Mapping[str, str]) -> ConfigReader:
        """Return the configuration with values under unusual keys copied to the usual ones, where those are missing.

        names: unusual key -> usual key.
        """
        return self.with_defaults({new: self.values[self.prefix + old] for old, new in names.items() if self.has(old)})

    def replaced(self, key: str, value: object) -> ConfigReader:
        """Return the configuration with one key's value replaced."""
        return self._with_values({**self.values, self.prefix + key: value})

    def with_largest(self, key: str, length: int) -> ConfigReader:
        """Return the configuration with a list of `length` whole numbers replaced by the largest of them.

        A single number is kept.
        """
        return self.replaced(key, max(self.counts(key, length)))

    def _with_values(self, values: Mapping[str, object]) -> ConfigReader:
        reader = ConfigReader(values, self.prefix)
        reader.keys_read = self.keys_read
        return reader

    def value(self, key: str) -> object:
        """Return the value unchecked, or None if the key is missing or null."""
        self.keys_read.add(self.prefix + key)
        return self.values.get(self.prefix + key)

    def has(self, key: str) -> bool:
        """Return True if the key exists and is not null."""
        return self.value(key) is not None

    def is_null(self, key: str) -> bool:
        """Return True if the key exists and is null."""
        return self.prefix + key in self.values and not self.has(key)

    def integer(self, key: str, default: int | None = None, *, low: int = 1, high: int = MAX_INT) -> int:
        """Read an integer from low to high."""
        value = self._get(key, default)
        if isinstance(value, (list, tuple, np.ndarray)) and len(value) > 0:
            # GGUF files may give one number per layer; a graph needs them to be equal.
            if any(v != value[0] for v in value):
                raise self.error(key, value, "differs between layers, but this architecture needs one value")
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not low <= value <= high:
            raise self.error(key, value, f"must be a whole number from {low} to {high}")
        return int(value)

    def number(self, key: str, default: float | None = None, *, low: float = 0.0, high: float = 1e12) -> float:
        """Read a finite number greater than low and at most high."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
            raise self.error(key, value, "must be a number")
        if not low < value <= high:  # also false for NaN
            raise self.error(key, value, f"must be more than {low} and at most {high}")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        """Read a positive number. Returns None if the key is missing or null."""
        return self.number(key) if self.has(key) else None

    def text(self, key: str, default: str | None = None) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.error(key, value, "must be a string")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, (bool, np.bool_)):
            raise self.error(key, value, "must be true or false")
        return bool(value)

    def section(self, key: str) -> ConfigReader:
        """Return the reader of a nested object, which is empty if it is missing or null."""
        value = self._get(key, {})
        if not isinstance(value, Mapping):
            raise self.error(key, value, "must be an object")
        name = f"{self.prefix}{key}."
        return ConfigReader({name + str(k): v for k, v in value.items()}, name)

    def numbers(self, key: str, length: int, *, low: float = 0.0, high: float = 1e12) -> tuple[float, ...]:
        """Read a list of `length` finite numbers, each greater than low and at most high."""
        value = self._get(key, None)
        if not isinstance(value, (list, tuple, np.ndarray)) or len(value) != length:
            raise self.error(key, value, f"must be {length} numbers")
        numbers = ConfigReader({f"{self.prefix}{key}[{i}]": v for i, v in enumerate(value)})
        return tuple(numbers.number(k, low=low, high=high) for k in numbers.values)

    def counts(self, key: str, length: int) -> tuple[int, ...]:
        """Read `length` non-negative integers, or one that applies to all."""
        value = self._get(key, None)
        values = [value] * length if isinstance(value, (int, np.integer)) else value
        if not isinstance(values, (list, tuple, np.ndarray)) or len(values) != length:
            raise self.error(key, value, f"must be {length} whole numbers")
        numbers = ConfigReader({f"{self.prefix}{key}[{i}]": v for i, v in enumerate(values)})
        return tuple(numbers.integer(k, low=0) for k in numbers.values)

    def flags(self, key: str, length: int) -> tuple[bool, ...]:
        """Read the first `length` elements of a list of booleans, or of ones and zeros."""
        value = self._get(key, None)
        if not isinstance(value, (list, tuple, np.ndarray)) or len(value) < length:
            raise self.error(key, value, f"must be {length} values")
        for flag in value[:length]:
            if not isinstance(flag, (bool, int, np.bool_, np.integer)) or flag not in (0, 1):
                raise self.error(key, flag, "must be true or false")
        return tuple(bool(flag) for flag in value[:length])

    def texts(self, key: str, length: int, allowed: Collection[str] | None = None) -> tuple[str, ...]:
        """Read `length` strings, each of which must be one of `allowed`. None allows any string."""
        value = self._get(key, None)
        if not isinstance(value, (list, tuple)) or len(value) != length or not all(isinstance(v, str) for v in value):
            raise self.error(key, value, f"must be {length} strings")
        for each in value:
            if allowed is not None and each not in allowed:
                raise self.error(key, each, f"must be {' or '.join(allowed)}")
        return tuple(value)

    def error(self, key: str, value: object, reason: str) -> ModelLoadError:
        return ModelLoadError(f"{self.prefix}{key} is {value!r:.100}: {reason}")

    def _get(self, key: str, default: object) -> object:
        """Return the value. If the key is missing or null, return the default, or raise an error if that is None."""
        value = self.value(key)
        if value is None:
            value = default
        if value is None:
            raise ModelLoadError(f"{self.prefix}{key} is missing")
        return value


def max_positions(reader: ConfigReader) -> int:
    """Return the maximum sequence length of a decoder in config.json, in tokens.

    Some Llama 1 files use an older key.
    """
    newer, older = "max_position_embeddings", "max_sequence_length"
    return reader.integer(older if reader.has(older) and not reader.has(newer) else newer)


def is_classifier(reader: ConfigReader) -> bool:
    """Return True if config.json names a model with a sequence-classification head."""
    names = reader.value("architectures")
    return isinstance(names, list) and any(str(name).endswith("ForSequenceClassification") for name in names)
