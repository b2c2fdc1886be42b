"""Writes `ops/docs/configuration.md` from the docstrings of the configuration types.

`python -m kvferry.ops.docs_build.configuration` writes the file; with `--check` it only checks whether the file is so.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from kvferry.common.config.docs import KeyDoc, section_keys, section_text
from kvferry.common.config.schema import section_types
from kvferry.common.config.toml import toml_value

TARGET = Path(__file__).parents[1] / "docs" / "configuration.md"

_HEAD = """\
# Configuration

Generated from the docstrings in `common/config`. Edit those, then run `python -m kvferry.ops.docs_build.configuration`.

One TOML file describes a cluster: `kvferry serve|router|prefill|decode|colocated --config cluster.toml`. A key that is
not set has its default; a default given as "derived" is described with the key. `--set section.key=value` (TOML syntax;
plain words need no quotes) overrides the file and may be repeated. Options such as `--port` override one key each, and
`--set` overrides them. `--print-config` prints the resulting configuration as a file that can be used again. Unknown
keys and wrong types are errors that name the nearest valid key.

Units are in the names: `_s` is seconds, `_bytes` bytes, `_share` a fraction from 0 to 1.
"""

_MINDIE_HEAD = """\
## For users of MindIE

MindIE's keys and their counterparts here:

| MindIE | here | remark |
| --- | --- | --- |
"""

_MINDIE_ROWS = (
    ("maxSeqLen", "`node.max_model_len`", "2560 in both"),
    ("maxInputTokenLen", "`router.max_input_length`", "2048 in both"),
    ("maxIterTimes", "`router.max_iter_times`", "512 in both"),
    (
        "maxPrefillTokens",
        "`node.max_step_tokens`",
        "prompts are cut into chunks of it, so it may be smaller than the longest prompt",
    ),
    ("maxPrefillBatchSize", "`prefill.max_running`", ""),
    ("maxBatchSize", "`decode.max_running`", ""),
    ("cacheBlockSize", "`node.block_size`", "128 there, 16 here; a device may round it up"),
    ("maxPreemptCount", "`limits.max_preemptions`", "per request here"),
    ("npuMemSize", "`node.kv_cache_bytes`", "bytes here, GB there"),
    (
        "npuDeviceIds",
        "`model.device`, `prefill.device_index`, `decode.device_index`, `colocated.device_index`",
        "the kind of device, and which of several a node takes; its further ranks take those after it",
    ),
    ("ipAddress, port", "`router.host`, `router.port`", "1025 in both"),
    ("managementPort, metricsPort", "-", "health and metrics are served on `router.port`"),
    ("maxLinkNum", "`limits.queued_requests`, `limits.queued_tokens`", "bounds per prefill node; beyond them 429"),
    ("kv_trans_timeout", "`timers.piece_idle_timeout_s`, `timers.commit_timeout_s`", ""),
    ("kv_link_timeout", "`timers.link_timeout_s`", ""),
    ("max_retry", "`limits.max_attempts`", "5 in both"),
    ("heartbeat", "`timers.heartbeat_s`", "0.5 s here, 1 s there"),
    ("instance timeout", "`timers.dead_after_s`", "2.5 s here, 5 s there"),
    ("worldSize", "`node.tensor_parallel`", "ranks of one node, all on one host"),
)


def configuration_page() -> str:
    """The whole page."""
    lines = [_HEAD]
    for name, section in section_types().items():
        lines.append(f"## [{name}]\n\n{section_text(section)}\n")
        lines.append("| key | type | default | |\n| --- | --- | --- | --- |")
        lines.extend(_row(key) for key in section_keys(name, section))
        lines.append("")
    return "\n".join([*lines, _MINDIE_HEAD + "\n".join(_mindie_rows())]) + "\n"


def main(argv: list[str] | None = None) -> int:
    """Write the page, or compare it; 1 when it differs."""
    parser = argparse.ArgumentParser(prog="python -m kvferry.ops.docs_build.configuration", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    page = configuration_page()
    if not parser.parse_args(argv).check:
        TARGET.write_text(page, encoding="utf-8")
        return 0
    if TARGET.is_file() and TARGET.read_text(encoding="utf-8") == page:
        return 0
    sys.stderr.write(f"{TARGET.name} is not up to date: run python -m kvferry.ops.docs_build.configuration\n")
    return 1


def _row(key: KeyDoc) -> str:
    default = "derived" if key.default is None else f"`{toml_value(key.default)}`"
    return f"| `{key.section}.{key.name}` | {key.type} | {default} | {key.text} |"


def _mindie_rows() -> Iterator[str]:
    for theirs, ours, remark in _MINDIE_ROWS:
        yield f"| {theirs} | {ours} | {remark} |"


if __name__ == "__main__":
    sys.exit(main())
