"""Links between pages resolve, the index lists every page, and files and folders that pages name exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
README = ROOT / "README.md"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
INDEX = ROOT / "ops" / "docs" / "README.md"
DECISIONS = ROOT / "ops" / "adr" / "README.md"
TREE = ROOT / "ops" / "docs" / "tree.md"
PAGES = sorted({README, CONTRIBUTING, ROOT / "CHANGELOG.md", *ROOT.glob("ops/docs/*.md"), *ROOT.glob("ops/adr/*.md")})
TOP_FOLDERS = ("router", "prefill_node", "decode_node", "common", "ops", "tests", "src")
OF_THE_PAST = {ROOT / "CHANGELOG.md", *ROOT.glob("ops/adr/0*.md")}
"""May name files that have been moved since."""


def page_id(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def targets(page: Path) -> set[Path]:
    """What its links name in this tree."""
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8"))
    return {(page.parent / link).resolve() for link in links if "://" not in link}


def named_paths(page: Path) -> set[str]:
    """Paths in backquotes below a top folder: files, `file::function` without the function, and folders."""
    named = re.findall(r"`([a-z_]+/[\w./]*)(?:::[\w.]+)?`", page.read_text(encoding="utf-8"))
    return {path for path in named if path.split("/")[0] in TOP_FOLDERS}


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_resolve(page: Path):
    assert {str(target) for target in targets(page) if not target.exists()} == set()


def test_the_readme_leads_to_the_index_and_the_decisions():
    assert {CONTRIBUTING, INDEX, DECISIONS} <= targets(README)


def test_every_page_is_in_the_index():
    assert {README, CONTRIBUTING, DECISIONS, *ROOT.glob("ops/docs/*.md")} - {INDEX} - targets(INDEX) == set()


def test_every_decision_is_in_the_list_of_decisions():
    assert set(ROOT.glob("ops/adr/0*.md")) - targets(DECISIONS) == set()


@pytest.mark.parametrize("page", sorted(set(PAGES) - OF_THE_PAST), ids=page_id)
def test_paths_that_a_page_names_exist(page: Path):
    assert {path for path in named_paths(page) if not (ROOT / path).exists()} == set()


def test_paths_are_found_on_the_pages_that_name_many():
    assert len(named_paths(TREE)) > 30
    assert len(named_paths(CONTRIBUTING)) > 30


def test_every_folder_of_the_source_is_in_the_tree():
    tree = TREE.read_text(encoding="utf-8")
    folders = {
        path.parent.relative_to(ROOT).as_posix()
        for top in ("router", "prefill_node", "decode_node", "common")
        for path in (ROOT / top).rglob("*.py")
    }
    nested = {"common", "router", "common/device/native"}  # named by their parts, or with their parent
    assert {folder for folder in folders - nested if f"`{folder}/`" not in tree} == set()
