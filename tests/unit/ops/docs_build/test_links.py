"""Links between pages lead somewhere, every page is led to from the README, and files that it names are there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
README = ROOT / "README.md"
PAGES = sorted({README, ROOT / "CHANGELOG.md", *ROOT.glob("ops/docs/*.md"), *ROOT.glob("ops/adr/*.md")})


def targets(page: Path) -> set[Path]:
    """What its links name in this tree."""
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8"))
    return {(page.parent / link).resolve() for link in links if "://" not in link}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path):
    assert {str(target) for target in targets(page) if not target.exists()} == set()


def test_the_readme_leads_to_every_page():
    assert set(ROOT.glob("ops/docs/*.md")) - targets(README) == set()
    assert ROOT / "ops" / "adr" / "README.md" in targets(README)
    assert set(ROOT.glob("ops/adr/0*.md")) - targets(ROOT / "ops" / "adr" / "README.md") == set()


def test_paths_named_by_the_readme_are_there():
    named = re.findall(r"`([a-z_]+/[\w/]+(?:\.py|/))`", README.read_text(encoding="utf-8"))
    assert len(named) > 15
    assert {path for path in named if not (ROOT / path).exists()} == set()
