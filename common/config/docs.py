"""The configuration as users see it: each key's type, default and description, and a whole configuration as TOML.

A key's description is the docstring below its field, read from the source. Writes no file.
"""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
from msgspec import inspect as types

from kvferry.common.config.schema import ClusterConfig, section_types
from kvferry.common.config.toml import TomlValue, toml_value

_WIDTH = 116


@dataclass(frozen=True, slots=True)
class KeyDoc:
    """The documentation of one key."""

    section: str
    name: str
    type: str
    """In words, e.g. `integer, at least 1`."""
    default: TomlValue | None
    """None: derived where it is used."""
    text: str


def section_text(section: type[msgspec.Struct]) -> str:
    """The section's own docstring, on one line."""
    return " ".join((section.__doc__ or "").split())


def section_keys(name: str, section: type[msgspec.Struct]) -> tuple[KeyDoc, ...]:
    """The keys of one section, in the order of its fields."""
    texts = _field_texts(section)
    info = types.type_info(section)
    assert isinstance(info, types.StructType)
    return tuple(
        KeyDoc(name, field.name, describe_type(field.type), field.default, texts.get(field.name, ""))
        for field in info.fields
    )


def describe_type(kind: types.Type) -> str:
    """A key's type in words."""
    match kind:
        case types.UnionType(types=members):
            return " or ".join(describe_type(member) for member in members if not isinstance(member, types.NoneType))
        case types.LiteralType(values=values):
            return "one of " + ", ".join(f'"{value}"' for value in values)
        case types.VarTupleType(item_type=types.LiteralType() as item):
            return "array, each " + describe_type(item)
        case types.VarTupleType(item_type=item):
            noun, comma, bounds = describe_type(item).partition(",")
            return f"array of {noun}s{comma}{bounds}"
        case types.IntType(ge=low, le=high):
            return "integer" + _bounds(low, high)
        case types.FloatType(gt=above):
            return "number" if above is None else f"number above {above:g}"
        case types.BoolType():
            return "true or false"
        case _:
            return "string"


def config_as_toml(config: ClusterConfig) -> str:
    """The whole configuration, each key with its description as a comment. Loading it gives the same configuration."""
    return "\n".join(_toml_lines(config)) + "\n"


def _toml_lines(config: ClusterConfig) -> Iterator[str]:
    for index, (name, section_type) in enumerate(section_types().items()):
        if index:
            yield ""
        yield from _comment(section_text(section_type))
        yield f"[{name}]"
        section = getattr(config, name)
        for key in section_keys(name, section_type):
            yield from _comment(key.text)
            value: TomlValue | None = getattr(section, key.name)
            yield f"# {key.name} =" if value is None else f"{key.name} = {toml_value(value)}"


def _comment(text: str) -> Iterator[str]:
    for line in textwrap.wrap(text, _WIDTH, break_long_words=False, break_on_hyphens=False):
        yield f"# {line}"


def _bounds(low: int | None, high: int | None) -> str:
    if low is not None and high is not None:
        return f" from {low} to {high}"
    return "" if low is None else f", at least {low}"


def _field_texts(section: type[msgspec.Struct]) -> dict[str, str]:
    """Field name -> the string literal that follows it in the class body, on one line."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(section)))
    body = tree.body[0]
    assert isinstance(body, ast.ClassDef)
    texts = {}
    for statement, following in zip(body.body, body.body[1:], strict=False):
        match statement, following:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                texts[name] = " ".join(text.split())
    return texts
