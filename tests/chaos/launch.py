"""`kvferry serve` whose children run where a plan says: `python -m tests.chaos.launch PLACES.json serve ...`.

A place has words before the child's command (which enter a network namespace) and words after it (settings of that
child alone). Everything else, restarts too, is the launcher's own.
"""

import sys
from dataclasses import replace
from pathlib import Path

import msgspec

from kvferry.common.base.log import setup_logging
from kvferry.ops.cli.main import build_parser
from kvferry.ops.cli.options import read_config
from kvferry.ops.cli.serve import overrides
from kvferry.ops.launcher.process import ChildSpec
from kvferry.ops.launcher.serve import serve
from kvferry.ops.model_choice import with_model


class Place(msgspec.Struct, frozen=True):
    """How one child runs."""

    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


def write_places(path: Path, places: dict[str, Place]) -> None:
    path.write_bytes(msgspec.json.encode(places))


def main(argv: list[str]) -> None:
    places = msgspec.json.decode(Path(argv[0]).read_bytes(), type=dict[str, Place])

    def placed(spec: ChildSpec) -> ChildSpec:
        place = places.get(spec.plan.name, Place())
        return replace(spec, argv=(*place.before, *spec.argv, *place.after))

    args = build_parser().parse_args(argv[1:])
    config = read_config(args, overrides(args))
    setup_logging(config.log, "serve")
    serve(with_model(config), placed)


if __name__ == "__main__":
    main(sys.argv[1:])
