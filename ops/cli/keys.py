"""`kvferry keys`: makes CURVE key pairs, and prints the public key of a secret one."""

import argparse
import os
from pathlib import Path

from kvferry.common.base.errors import ConfigError, KvferryError
from kvferry.common.config.keys import KEY_ROLES, PUBLIC_SUFFIX, Key, key_line, read_secret_file
from kvferry.ops.cli.errors import DONE

_ALLOWED = "allowed"
_SECRET_SUFFIX = ".secret"


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "keys", help="make the keys of a cluster", description="Makes and shows CURVE keys for [security]."
    )
    forms = parser.add_subparsers(dest="form", metavar="new|public", required=True, parser_class=type(parser))
    new = forms.add_parser(
        "new",
        help="make key pairs",
        description=f"Makes DIR/NAME{_SECRET_SUFFIX} (mode 600) and DIR/{_ALLOWED}/NAME{PUBLIC_SUFFIX}: a pair for "
        "nodes and a pair for routers, or one of them with --role. Does not replace files.",
    )
    new.add_argument("directory", type=Path, metavar="DIR")
    new.add_argument("--role", choices=KEY_ROLES, help="make only the pair of this role")
    new.add_argument("--name", help="base name of the files; requires --role (the role)")
    new.set_defaults(run=run_new)
    public = forms.add_parser(
        "public",
        help="print a public key",
        description="Prints the public key of a secret key file, in the form of an allowed-keys file.",
    )
    public.add_argument("file", type=Path, metavar="FILE")
    public.set_defaults(run=run_public)


def run_new(args: argparse.Namespace) -> int:
    """Make the files, and print where each belongs."""
    from kvferry.common.transport.security import new_pair

    if args.name is not None and args.role is None:
        raise ConfigError("--name requires --role: it names one pair")
    if args.name is not None and (not args.name or "/" in args.name):
        raise ConfigError(f"--name: {args.name!r} is not a file name")
    names = {args.name or args.role: args.role} if args.role else {role: role for role in KEY_ROLES}
    allowed = args.directory / _ALLOWED
    files = {name: (args.directory / (name + _SECRET_SUFFIX), allowed / (name + PUBLIC_SUFFIX)) for name in names}
    for path in (path for pair in files.values() for path in pair):
        if path.exists():
            raise ConfigError(f"{path} exists already and is not replaced")
    try:
        args.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        allowed.mkdir(exist_ok=True)
        for name, role in names.items():
            public, secret = new_pair(role)
            secret_file, public_file = files[name]
            _write(secret_file, key_line("secret", secret), 0o600)
            _write(public_file, key_line("public", public), 0o644)
            print(f"{secret_file}  keep it secret; copy it only to hosts whose {role}s use it")
            print(f"{public_file}  copy it to the {_ALLOWED} directory of every host")
    except (FileNotFoundError, FileExistsError, NotADirectoryError, PermissionError) as error:
        raise ConfigError(f"DIR: {error.filename}: {error.strerror}") from None
    except OSError as error:
        raise KvferryError(f"{error.filename}: {error.strerror}") from None
    return DONE


def run_public(args: argparse.Namespace) -> int:
    from kvferry.common.transport.security import public_of

    secret: Key = read_secret_file("FILE", args.file)
    print(key_line("public", public_of(secret)))
    return DONE


def _write(path: Path, line: str, mode: int) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="ascii") as file:
        file.write(line + "\n")
