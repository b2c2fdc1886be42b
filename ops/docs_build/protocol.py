"""Writes from the code: `ops/docs/states.md`, `ops/docs/rules_tested.md`, the message table in `ops/docs/protocol.md`.

`python -m kvferry.ops.docs_build.protocol` writes the pages; with `--check` it only reports those that are out of date.
"""

import argparse
import sys
from pathlib import Path

import msgspec

from kvferry.common.protocol.messages import MESSAGE_TYPES, PROTOCOL_VERSION, RAW_FIELDS, Message
from kvferry.common.protocol.request_spec import RequestSpec
from kvferry.ops.docs_build.rules import rules_page
from kvferry.ops.docs_build.states import states_page

DOCS = Path(__file__).parents[1] / "docs"
STATES = DOCS / "states.md"
PROTOCOL = DOCS / "protocol.md"
RULES_TESTED = DOCS / "rules_tested.md"
BEGIN = "<!-- messages: made by python -m kvferry.ops.docs_build.protocol from common/protocol/messages.py -->\n"
END = "<!-- end of messages -->\n"


def message_table() -> str:
    """One row per message of the protocol: type byte, direction and purpose, fields."""
    lines = [
        f"Version {PROTOCOL_VERSION}. Fields in **bold** travel as raw frames, those in (brackets) are optional.",
        "\n| type | message | from → to: purpose | fields |\n| --- | --- | --- | --- |",
    ]
    lines += [_row(number, cls) for number, cls in sorted(MESSAGE_TYPES.items())]
    return "\n".join(lines) + "\n"


def with_messages(page: str) -> str:
    """Replace the message table of the page. Raises ValueError when the page has no marks around it."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PROTOCOL.name} has lost its marks around the message table")
    return f"{before}{BEGIN}\n{message_table()}\n{END}{after}"


def pages() -> dict[Path, str]:
    """What each file must contain."""
    protocol = with_messages(PROTOCOL.read_text(encoding="utf-8"))
    return {STATES: states_page(), PROTOCOL: protocol, RULES_TESTED: rules_page(protocol)}


def main(argv: list[str] | None = None) -> int:
    """Write the pages, or compare them; returns 1 when one differs."""
    parser = argparse.ArgumentParser(prog="python -m kvferry.ops.docs_build.protocol", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; end with 1 if a page is out of date")
    check = parser.parse_args(argv).check
    stale = [path for path, page in pages().items() if not path.is_file() or path.read_text(encoding="utf-8") != page]
    for path in stale:
        if check:
            sys.stderr.write(f"{path.name} is out of date: run python -m kvferry.ops.docs_build.protocol\n")
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
