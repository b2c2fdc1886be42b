"""A checkpoint's settings with typed access that remembers what was asked for; what nobody asked for is refused.

So a setting that this project does not know cannot be ignored by accident. Does no IO.
"""

from collections.abc import Iterable, Mapping

from kvferry.common.base.errors import ModelLoadError


class Settings:
    """A mapping of names to JSON-like values. `where` names it in messages, e.g. `config.json`."""

    def __init__(self, values: Mapping[str, object], where: str) -> None:
        self._values = values
        self._where = where
        self._used: set[str] = set()

    def get(self, name: str) -> object:
        """The raw value or None; counts as used."""
        self._used.add(name)
        return self._values.get(name)

    def has(self, name: str) -> bool:
        """Whether it is there, be it null."""
        return name in self._values

    def ignore(self, *names: str) -> None:
        """These do not matter in this model, whatever they say."""
        self._used.update(names)

    def integer(self, name: str, default: int | None = None) -> int:
        """A positive whole number; without a default it must be there."""
        value = self.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise self._wrong(name, value, "a positive whole number")
        return value

    def whole_number(self, name: str, default: int) -> int:
        """A whole number, zero or more."""
        value = self.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self._wrong(name, value, "a whole number")
        return value

    def optional_integer(self, name: str) -> int | None:
        """A whole number or None."""
        value = self.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise self._wrong(name, value, "a whole number")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A number; without a default it must be there."""
        value = self.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(name, value, "a number")
        return float(value)

    def text(self, name: str, default: str | None = None) -> str:
        """A string; without a default it must be there."""
        value = self.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            raise self._wrong(name, value, "a string")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """A boolean."""
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._wrong(name, value, "true or false")
        return value

    def require(self, name: str, allowed: Iterable[object]) -> None:
        """Refuse any value but those allowed; an absent one and null are fine."""
        value = self.get(name)
        if value is not None and value not in tuple(allowed):
            raise self.unsupported(name, value)

    def refuse_rest(self, harmless: Iterable[str], harmless_prefixes: tuple[str, ...] = ()) -> None:
        """Refuse every setting that was not asked for, is not known as harmless, and says something.

        null, false, and empty values say nothing.
        """
        known = self._used.union(harmless)
        for name, value in self._values.items():
            says_nothing = value is None or value is False or value in ((), [], {}, "")
            if name not in known and not name.startswith(harmless_prefixes) and not says_nothing:
                raise self.unsupported(name, value)

    def unsupported(self, name: str, value: object) -> ModelLoadError:
        """The error for a setting that would change results."""
        return ModelLoadError(f"{self._where}: {name} = {_short(value)} is not supported")

    def _wrong(self, name: str, value: object, wanted: str) -> ModelLoadError:
        return ModelLoadError(f"{self._where}: {name} must be {wanted}, found {_short(value)}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
