"""A checkpoint's settings with typed access that tracks which were read; `refuse_rest` refuses the others.

So a setting that the project does not know cannot be ignored by accident. Does no IO.
"""

from collections.abc import Iterable, Mapping

from kvferry.common.base.errors import ModelLoadError


class Settings:
    """A mapping of names to JSON-like values. `where` names the source in messages, e.g. `config.json`.

    The typed getters return the default for an absent or null setting. They raise ModelLoadError if the value has the
    wrong type, or if it is absent and there is no default.
    """

    def __init__(self, values: Mapping[str, object], where: str) -> None:
        self._values = values
        self._where = where
        self._used: set[str] = set()

    def get(self, name: str) -> object:
        """The raw value or None; marks the setting as read."""
        self._used.add(name)
        return self._values.get(name)

    def has(self, name: str) -> bool:
        """Whether the setting is present, even if null; does not mark it as read."""
        return name in self._values

    def ignore(self, *names: str) -> None:
        """Mark settings as read that have no effect on this model, whatever their values."""
        self._used.update(names)

    def integer(self, name: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise self._wrong(name, value, "a positive integer")
        return value

    def whole_number(self, name: str, default: int) -> int:
        """An integer >= 0."""
        value = self.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self._wrong(name, value, "an integer >= 0")
        return value

    def optional_integer(self, name: str) -> int | None:
        """An integer or None."""
        value = self.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise self._wrong(name, value, "an integer")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(name, value, "a number")
        return float(value)

    def text(self, name: str, default: str | None = None) -> str:
        value = self.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            raise self._wrong(name, value, "a string")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._wrong(name, value, "true or false")
        return value

    def require(self, name: str, allowed: Iterable[object]) -> None:
        """Refuse any value but those allowed; absent and null are accepted."""
        value = self.get(name)
        if value is not None and value not in tuple(allowed):
            raise self.unsupported(name, value)

    def refuse_rest(self, harmless: Iterable[str], harmless_prefixes: tuple[str, ...] = ()) -> None:
        """Refuse every setting that was not read, is not harmless, and is not null, false or empty."""
        known = self._used.union(harmless)
        for name, value in self._values.items():
            is_unset = value is None or value is False or value in ((), [], {}, "")
            if name not in known and not name.startswith(harmless_prefixes) and not is_unset:
                raise self.unsupported(name, value)

    def unsupported(self, name: str, value: object) -> ModelLoadError:
        """The error to raise for a setting that would change results."""
        return ModelLoadError(f"{self._where}: {name} = {_short(value)} is not supported")

    def _wrong(self, name: str, value: object, wanted: str) -> ModelLoadError:
        return ModelLoadError(f"{self._where}: {name} must be {wanted}, found {_short(value)}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
