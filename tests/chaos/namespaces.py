"""Links through network namespaces: this process is the hub, every part has a namespace and a cable of its own.

The hub routes between them; a cut is a rule of its routing by which packets vanish on the way, for one direction or
both. Nothing outlives this process: the namespaces are held by children that end with it.
"""

import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence

from tests.chaos.launch import Place
from tests.chaos.links import CONTROL_PORT, KV_PORT, node_words

HUB = "KVFERRY_CHAOS_HUB"
"""Set in the environment of a process that is in a namespace of its own."""
_TOOLS = ("ip", "unshare", "nsenter")
_HOLD = "import os, sys; os.write(1, b'!'); sys.stdin.read()"


def can_have_namespaces() -> bool:
    """Whether this user may make them here."""
    if not all(shutil.which(tool) for tool in _TOOLS):
        return False
    script = "ip link set lo up && echo 1 > /proc/sys/net/ipv4/ip_forward && ip link add v1 type veth peer name v2"
    script += " && ip rule add from 10.77.1.2 to 10.77.2.2 blackhole"
    return subprocess.run(("unshare", "-n", "sh", "-c", script), capture_output=True).returncode == 0


def enter_hub(argv: Sequence[str]) -> None:
    """Become a process in a fresh namespace, with the same command. Returns where it is one already."""
    if os.environ.get(HUB):
        return
    path = shutil.which("unshare")
    assert path is not None
    os.execve(path, (path, "-n", sys.executable, *argv), {**os.environ, HUB: "1"})


class NamespaceLinks:
    """A namespace for each part. Only for a process that is in a hub."""

    kind = "network namespaces (packets vanish on the way)"

    def __init__(self, parts: Sequence[str]) -> None:
        self._parts = {name: number for number, name in enumerate(parts, 1)}
        self._holders: dict[str, subprocess.Popen[bytes]] = {}
        self._cuts: dict[tuple[str, str], list[tuple[str, str]]] = {}
        self._rules: Counter[tuple[str, str]] = Counter()
        _run("ip", "link", "set", "lo", "up")
        with open("/proc/sys/net/ipv4/ip_forward", "w") as forward:
            forward.write("1")
        for name in parts:
            self._add(name)

    def places(self) -> dict[str, Place]:
        return {name: Place(self._enter(name), self._words(name)) for name in self._parts}

    def cut(self, one: str, other: str, *, one_way: bool) -> None:
        there, back = (self._net(one), self._net(other)), (self._net(other), self._net(one))
        cut = self._cuts[one, other] = [there] if one_way else [there, back]
        for rule in cut:
            self._rules[rule] += 1
            if self._rules[rule] == 1:
                self._rule("add", rule)

    def heal(self, one: str, other: str) -> None:
        for rule in self._cuts.pop((one, other)):
            self._rules[rule] -= 1
            if not self._rules[rule]:
                self._rule("del", rule)

    def close(self) -> None:
        for holder in self._holders.values():
            holder.kill()
            holder.wait()

    def _add(self, name: str) -> None:
        holder = subprocess.Popen(
            ("unshare", "-n", sys.executable, "-I", "-S", "-c", _HOLD), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._holders[name] = holder
        assert holder.stdout is not None
        assert holder.stdout.read(1) == b"!", f"no namespace for {name}"
        hub, own, cable = self._address(name, 1), self._address(name, 2), f"v{self._parts[name]}"
        _run("ip", "link", "add", cable, "type", "veth", "peer", "name", "e0", "netns", str(holder.pid))
        _run("ip", "addr", "add", f"{hub}/30", "dev", cable)
        _run("ip", "link", "set", cable, "up")
        for words in (
            ("link", "set", "lo", "up"),
            ("addr", "add", f"{own}/30", "dev", "e0"),
            ("link", "set", "e0", "up"),
            ("route", "add", "default", "via", hub),
        ):
            _run(*self._enter(name), _tool("ip"), *words)

    def _enter(self, name: str) -> tuple[str, ...]:
        return (_tool("nsenter"), f"--net=/proc/{self._holders[name].pid}/ns/net", "--")

    def _words(self, name: str) -> tuple[str, ...]:
        if name == "router":
            return ()
        bind, kv_bind = (f"tcp://{self._address(name, 2)}:{port}" for port in (CONTROL_PORT, KV_PORT))
        return (*node_words(name, {"bind": bind, "kv_bind": kv_bind}), "--set", "node.allow_remote=true")

    def _rule(self, verb: str, rule: tuple[str, str]) -> None:
        source, target = rule
        _run("ip", "rule", verb, "from", source, "to", target, "blackhole")

    def _net(self, name: str) -> str:
        return "all" if name == "*" else self._address(name, 2)

    def _address(self, name: str, host: int) -> str:
        return f"10.77.{self._parts[name]}.{host}"


def _tool(name: str) -> str:
    path = shutil.which(name)
    assert path is not None, name
    return path


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
