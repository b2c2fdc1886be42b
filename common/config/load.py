"""Loads a `ClusterConfig` from a TOML file and `--set` overrides, and checks it. Reads one file.

Overrides take precedence over the file, and later overrides over earlier ones. Every error is a ConfigError.
"""

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from kvferry.common.base.errors import ConfigError
from kvferry.common.config.checks import check_config
from kvferry.common.config.docs import section_keys
from kvferry.common.config.schema import ClusterConfig, section_types
from kvferry.common.config.toml import TomlValue, quote, toml_value

Tables = dict[str, dict[str, TomlValue]]
"""section -> key -> value, as parsed from TOML."""

_PATHS = {
    "model": ("path",),
    "security": ("allowed_keys", "node_key_file", "router_key_file"),
}
"""Keys that are paths: relative to the configuration file, or in an override to the working directory."""


class Override(NamedTuple):
    """One `section.key=value` from the command line."""

    section: str
    key: str
    value: TomlValue


def load_config(path: Path | None = None, overrides: Iterable[Override] = ()) -> ClusterConfig:
    """Read and check a configuration. ConfigError names the key, its value and what is expected."""
    tables: Tables = {}
    if path is not None:
        tables = _read_file(path)
        try:
            _convert(tables)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None
    for section, key, value in overrides:
        tables.setdefault(section, {})[key] = value
    _make_absolute(tables, Path.cwd(), ("security",))  # model.path is made absolute where the model is chosen
    config = _convert(tables)
    check_config(config)
    return config


def parse_override(text: str) -> Override:
    """Parse `section.key=value`. The value is TOML; anything else is a string without quotes."""
    name, equals, raw = text.partition("=")
    section, dot, key = name.strip().partition(".")
    if not (equals and dot and section and key):
        raise ConfigError(f"--set {text!r}: expected section.key=value")
    try:
        parsed = tomllib.loads(f"value = {raw}")
    except (ValueError, RecursionError):  # not TOML, or nested too deeply for the parser
        return Override(section, key, raw.strip())
    if len(parsed) > 1:
        raise ConfigError(f"--set {text!r}: expected one value")
    return Override(section, key, parsed["value"])


def _read_file(path: Path) -> Tables:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except RecursionError:
        raise ConfigError(f"{path}: not TOML: nested too deeply") from None
    except ValueError as error:  # not TOML, not UTF-8, a number with too many digits, or an invalid path
        raise ConfigError(f"{quote(str(path), 4096)}: not TOML: {quote(str(error), 300)}") from None
    for name, section in content.items():
        if name in section_types() and not isinstance(section, dict):
            raise ConfigError(f"{path}: {name}: expected a section, [{name}]")
    _make_absolute(content, path.absolute().parent, tuple(_PATHS))
    return content


def _make_absolute(tables: Tables, folder: Path, sections: Iterable[str]) -> None:
    for section in sections:
        table = tables.get(section, {})
        for key in _PATHS[section]:
            value = table.get(key)
            if isinstance(value, str) and value:
                table[key] = str(folder / Path(value).expanduser())


def _convert(tables: Mapping[str, Mapping[str, TomlValue]]) -> ClusterConfig:
    _refuse_unknown(tables)
    try:
        return msgspec.convert(tables, ClusterConfig, strict=True)
    except msgspec.ValidationError as error:
        raise ConfigError(_readable(str(error), tables)) from None


def _refuse_unknown(tables: Mapping[str, Mapping[str, TomlValue]]) -> None:
    sections = section_types()
    for name, content in tables.items():
        if name not in sections:
            hint = _nearest(name, sections, "[{}]") or "; the sections are " + ", ".join(sections)
            raise ConfigError(f"[{quote(name)}]: unknown section{hint}")
        known = [field.name for field in msgspec.structs.fields(sections[name])]
        for key in content:
            if key not in known:
                raise ConfigError(f"{name}.{quote(key)}: unknown key{_hint(name, key, known)}")


def _hint(section: str, key: str, known: list[str]) -> str:
    """Suggest the nearest key of the section, else of any section, else list the section's keys."""
    nearest = _nearest(key, known, section + ".{}")
    if nearest:
        return nearest
    all_keys = {
        field.name: f"{name}.{field.name}"
        for name, struct in section_types().items()
        for field in msgspec.structs.fields(struct)
    }
    match = difflib.get_close_matches(key, all_keys, n=1)
    if match:
        return f"; did you mean {all_keys[match[0]]}?"
    return f"; the keys of [{section}] are " + ", ".join(known)


def _nearest(name: str, known: Iterable[str], form: str) -> str:
    match = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {form.format(match[0])}?" if match else ""


def _readable(message: str, tables: Mapping[str, Mapping[str, TomlValue]]) -> str:
    """msgspec's message, rewritten to start with the key and to name the expected type and the value."""
    text, _, where = message.partition(" - at `$.")
    place = where.rstrip("`")
    section, _, key = re.sub(r"\[.*", "", place).partition(".")
    struct = section_types().get(section)
    doc = next((doc for doc in section_keys(section, struct) if doc.name == key), None) if struct else None
    if doc is None:
        return f"{place}: {text}"
    return f"{place}: expected {doc.type}, got {_quoted(tables[section][key])}"


def _quoted(value: TomlValue) -> str:
    try:
        text = toml_value(value)
    except TypeError:  # a table or a date, which no key accepts
        text = str(value)
    return quote(text)
