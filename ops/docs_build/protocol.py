"""Writes `ops/docs/states.md`, and the message table within `ops/docs/protocol.md`, from the code.

`python -m kvferry.ops.docs_build.protocol` writes; with `--check` it only checks whether both are up to date.
"""

import argparse
import sys
from pathlib import Path

import msgspec

from kvferry.common.protocol.messages import MESSAGE_TYPES, PROTOCOL_VERSION, RAW_FIELDS, Message
from kvferry.common.protocol.request_spec import RequestSpec
from kvferry.ops.docs_build.states import states_page

STATES = Path(__file__).parents[1] / "docs" / "states.md"
PROTOCOL = Path(__file__).parents[1] / "docs" / "protocol.md"
BEGIN = "<!-- messages: made by python -m kvferry.ops.docs_build.protocol from common/protocol/messages.py -->\n"
END = "<!-- end of messages -->\n"


def message_table() -> str:
    """Every message of the protocol: its byte, its direction and purpose, its fields."""
    lines = [
        f"Version {PROTOCOL_VERSION}. Fields in **bold** travel as raw frames, those in (brackets) are optional.",
        "\n| type | message | from → to: what it says | fields |\n| --- | --- | --- | --- |",
    ]
    lines += [_row(number, cls) for number, cls in sorted(MESSAGE_TYPES.items())]
    return "\n".join(lines) + "\n"


def with_messages(page: str) -> str:
    """The page with its message table made anew. Raises ValueError when the page has no place for it."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PROTOCOL.name} has lost its marks around the message table")
    return f"{before}{BEGIN}\n{message_table()}\n{END}{after}"


def pages() -> dict[Path, str]:
    """What the files should hold."""
    return {STATES: states_page(), PROTOCOL: with_messages(PROTOCOL.read_text(encoding="utf-8"))}


def main(argv: list[str] | None = None) -> int:
    """Write the pages, or compare them; 1 when one differs."""
    parser = argparse.ArgumentParser(prog="python -m kvferry.ops.docs_build.protocol", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args(argv).check
    stale = [path for path, page in pages().items() if not path.is_file() or path.read_text(encoding="utf-8") != page]
    for path in stale:
        if check:
            sys.stderr.write(f"{path.name} is not up to date: run python -m kvferry.ops.docs_build.protocol\n")
        else:
            path.write_text(pages()[path], encoding="utf-8")
    return int(check and bool(stale))


def _row(number: int, cls: type[Message]) -> str:
    first_paragraph = (cls.__doc__ or "").partition("\n\n")[0]
    text = " ".join(first_paragraph.split()).replace(" -> ", " → ").replace("|", "\\|")
    return f"| {number} | {cls.__name__} | {text} | {', '.join(_field_names(cls)) or '-'} |"


def _field_names(cls: type[msgspec.Struct]) -> list[str]:
    raw = RAW_FIELDS.get(cls, ())
    names, defaults = cls.__struct_fields__, cls.__struct_defaults__
    padded = (msgspec.NODEFAULT,) * (len(names) - len(defaults)) + defaults
    required = {name for name, default in zip(names, padded, strict=True) if default is msgspec.NODEFAULT}
    shown = []
    for name in names:
        if cls.__annotations__[name] is RequestSpec:
            shown.append(f"{name}: {{{', '.join(_field_names(RequestSpec))}}}")
        else:
            shown.append(f"**{name}**" if name in raw else name if name in required else f"({name})")
    return shown


if __name__ == "__main__":
    sys.exit(main())
