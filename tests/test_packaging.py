"""What is written about a release in several places agrees: its version, its date, its addresses."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.version import Version

import torchcaps

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
ADDRESS = PROJECT["project"]["urls"]["Repository"]
LINK = re.compile(r"(!?)\[[^\]]*\]\(([^)\s]+)\)")

Release = tuple[str, str]


def headings(changelog: str) -> list[Release]:
    """Version and date of each part of the changelog, the newest first; what is unreleased has no date."""
    return re.findall(r"^## (\S+)(?: – (\S+))?$", changelog, re.MULTILINE)


def cited(citation: str) -> Release:
    """Version and date that CITATION.cff tells to cite."""
    fields = dict(re.findall(r"^([\w-]+): (\S+)$", citation, re.MULTILINE))
    return fields["version"], fields["date-released"]


def disagreement(version: str, changes: list[Release], citation: Release) -> str | None:
    """What is wrong; None where all is right.

    A release stands on top of the changelog, and is what is cited. A version in development comes after the newest
    release, which is what is cited meanwhile, and its changes stand above it as unreleased ones.
    """
    newest, *_ = (release for release in changes if release[0] != "Unreleased")
    if citation != newest:
        return f"CITATION.cff cites {citation}, but the newest release of the changelog is {newest}"
    in_development = Version(version).is_devrelease
    if in_development != (changes[0][0] == "Unreleased"):
        return f"{version} does not go with a changelog that begins with {changes[0][0]}"
    if in_development and Version(version) <= Version(newest[0]):
        return f"{version} comes before {newest[0]}, which is released"
    return None if in_development or version == newest[0] else f"{version} is not the newest release, {newest[0]}"


def test_version_changelog_and_citation_agree() -> None:
    changelog, citation = ((ROOT / name).read_text(encoding="utf-8") for name in ("CHANGELOG.md", "CITATION.cff"))
    assert disagreement(torchcaps.__version__, headings(changelog), cited(citation)) is None


OLD, NEW, NEXT = ("0.1.0", "2026-11-20"), ("0.2.0", "2027-01-01"), ("Unreleased", "")


@pytest.mark.parametrize(
    ("version", "changes", "citation", "said"),
    [
        ("0.2.0.dev0", [NEXT, OLD], OLD, None),
        ("0.2.0", [NEW, OLD], NEW, None),
        ("0.1.0", [NEXT, OLD], OLD, "0.1.0 does not go with a changelog that begins with Unreleased"),
        ("0.2.0.dev0", [NEW, OLD], NEW, "0.2.0.dev0 does not go with a changelog that begins with 0.2.0"),
        ("0.2.0.dev0", [NEXT, NEW, OLD], NEW, "0.2.0.dev0 comes before 0.2.0, which is released"),
        ("0.3.0", [NEW, OLD], NEW, "0.3.0 is not the newest release, 0.2.0"),
        ("0.2.0", [NEW, OLD], OLD, "CITATION.cff cites ('0.1.0', '2026-11-20'), but the newest release of the"),
        ("0.2.0", [NEW, OLD], ("0.2.0", "2026-11-20"), "CITATION.cff cites ('0.2.0', '2026-11-20'), but the newest"),
    ],
)
def test_disagreement(version: str, changes: list[Release], citation: Release, said: str | None) -> None:
    found = disagreement(version, changes, citation)
    assert found == said if said is None else str(found).startswith(said)


def test_the_citation_names_the_repository() -> None:
    assert f'repository-code: "{ADDRESS}"\n' in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def test_links_and_images_of_the_readme_lead_somewhere_from_pypi_too() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    changed = readme
    for each in PROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        changed = re.sub(each["pattern"], each["replacement"], changed)
    raw = ADDRESS.replace("github.com", "raw.githubusercontent.com") + "/main/"
    wanted = [
        (mark, target if "://" in target else (raw if mark else f"{ADDRESS}/blob/main/") + target)
        for mark, target in LINK.findall(readme)
    ]
    assert LINK.findall(changed) == wanted
    assert {mark for mark, _ in wanted} == {"", "!"}
