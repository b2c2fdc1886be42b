"""Seeded defects of links, Hello, announcements and placement. See mutations.py."""

from collections.abc import Sequence
from dataclasses import replace

import kvferry.router.core.placer
from kvferry.common.cluster.links import (
    Link,
    LinkTable,
)
from kvferry.common.cluster.node_core import NodeCore
from kvferry.common.protocol.messages import Status
from kvferry.common.protocol.model_info import Compatibility
from kvferry.router.core.router_core import RouterCore
from kvferry.router.policy.placement import DecodeView, PrefillView
from tests.simulation.mutation import Mutation, Patched, none

Views = Sequence[PrefillView | DecodeView]


def _lose_by_silence_alone(right: Patched) -> Patched:
    def lose(self: LinkTable, link: Link, now: float) -> None:
        silent = now - link.last_heard > self.timers.dead_after_s
        stalled = now - link.last_progress > self.timers.engine_stall_s
        right(self, link, now)
        if not silent and not stalled:
            self._lost.pop()

    return lose


def _pair_anything(right: Patched) -> Patched:
    def choose(prefills: Views, decodes: Views, **named: object) -> object:
        kinds = {view.compatibility for view in (*prefills, *decodes)}
        views = [[replace(view, compatibility=min(kinds, key=str)) for view in side] for side in (prefills, decodes)]
        return right(*views, **named)

    return choose


def _always_progress(right: Patched) -> Patched:
    def on_status(self: LinkTable, link: Link, message: Status, now: float) -> None:
        right(self, link, message, now)
        link.last_progress = now

    return on_status


def _never_stuck(right: Patched) -> Patched:
    def on_tick(self: NodeCore, now: float) -> object:
        self.progress.last_progress = now
        return right(self, now)

    return on_tick


def _static_only(right: Patched) -> Patched:
    def add(self: LinkTable, endpoint: str, now: float, *, static: bool = False) -> object:
        return right(self, endpoint, now, static=static) if static or self.hello.kind != "worker" else []

    return add


def _take_more(right: Patched) -> Patched:
    def not_ready_reason(self: RouterCore, model: str | None) -> object:
        since, self.draining_since = self.draining_since, None
        try:
            return right(self, model)
        finally:
            self.draining_since = since

    return not_ready_reason


LINK_MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        "an end that is known at once is not followed", "1", LinkTable, "_lose", _lose_by_silence_alone, "crashes"
    ),
    Mutation(
        "nodes that do not fit are made a pair",
        "6",
        kvferry.router.core.placer,
        "choose",
        _pair_anything,
        "incompatible",
    ),
    Mutation("every Hello is welcome", "6", Compatibility, "difference", none, "incompatible"),
    Mutation("an engine that makes no step is not judged", "10", LinkTable, "on_status", _always_progress, "wedges"),
    Mutation("a node whose engine makes no step lives on", "10", NodeCore, "_on_tick", _never_stuck, "wedges"),
    Mutation("announcements are not heeded", "11", LinkTable, "add", _static_only, "none"),
    Mutation("a draining worker takes new requests", "37", RouterCore, "not_ready_reason", _take_more, "drain"),
)
