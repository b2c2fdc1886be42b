"""Every key is documented, the page is up to date, and a printed configuration reads back as itself."""

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.common.config.docs import config_as_toml, section_keys, section_text
from kvferry.common.config.load import load_config, parse_override
from kvferry.common.config.schema import section_types
from kvferry.common.config.toml import toml_value
from kvferry.ops.docs_build.configuration import TARGET, configuration_page, main

ALL_KEYS = [key for name, section in section_types().items() for key in section_keys(name, section)]


@pytest.mark.parametrize("key", ALL_KEYS, ids=lambda key: f"{key.section}.{key.name}")
def test_every_key_has_a_text(key):
    assert key.text.endswith(".")
    assert "|" not in key.text, "it goes into a table"


def test_every_section_has_a_text():
    assert all(section_text(section).endswith(".") for section in section_types().values())


def test_the_page_is_up_to_date():
    assert TARGET.read_text(encoding="utf-8") == configuration_page(), (
        "run python -m kvferry.ops.docs_build.configuration"
    )
    assert main(["--check"]) == 0


def test_mindie_names_point_at_keys_that_exist():
    page = configuration_page()
    table = page[page.index("## For users of MindIE") :]
    named = {word.strip("`,") for word in table.split() if word.startswith("`")}
    assert len(named) > 15
    assert named <= {f"{key.section}.{key.name}" for key in ALL_KEYS}


def test_a_printed_configuration_reads_back_as_itself(tmp_path: Path):
    settings = [
        "node.threads=3",
        "router.nodes=['tcp://a:1', 'tcp://b:2']",
        'model.path="/a\\"b"',
        "decode.device=cuda",
    ]
    config = load_config(None, [parse_override(text) for text in settings])
    file = tmp_path / "printed.toml"
    file.write_text(config_as_toml(config), encoding="utf-8")
    assert load_config(file) == config


def test_a_printed_configuration_shows_every_key_with_its_text():
    printed = config_as_toml(load_config())
    for key in ALL_KEYS:
        assert f"\n{key.name} = " in printed or f"\n# {key.name} =" in printed
        assert "# " + key.text.split(".")[0][:60] in printed


@given(
    st.recursive(st.text() | st.integers(-(2**63), 2**63 - 1) | st.booleans() | st.floats(allow_nan=False), st.lists)
)
def test_values_are_written_as_toml_reads_them(value):
    read = tomllib.loads(f"v = {toml_value(value)}")["v"]
    assert read == value
    assert type(read) is type(value)
