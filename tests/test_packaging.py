"""What is written about a release in several places agrees: its version, its date, its addresses."""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import torchcaps
import torchcaps.nn  # registers the routings
from torchcaps.models.presets.registry import get_preset, list_presets
from torchcaps.parts import PARTS

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
ADDRESS = PROJECT["project"]["urls"]["Repository"]
LINK = re.compile(r"(!?)\[[^\[\]]*\]\(([^)\s]+)\)")


def test_version_changelog_and_citation_agree() -> None:
    """The version is the newest release; one in development comes after it, under the heading Unreleased.

    The citation has the version of the code beside it, and a date if this version was released.
    """
    changelog, citation = ((ROOT / name).read_text(encoding="utf-8") for name in ("CHANGELOG.md", "CITATION.cff"))
    headings = re.findall(r"^## (\S+)(?: – (\S+))?$", changelog, re.MULTILINE)
    released = [heading for heading in headings if heading[0] != "Unreleased"]
    version = Version(torchcaps.__version__)
    assert (headings[0][0] == "Unreleased") == version.is_devrelease
    assert version > Version(released[0][0]) if version.is_devrelease else str(version) == released[0][0]
    cited = dict(re.findall(r"^([\w-]+): (\S+)$", citation, re.MULTILINE))
    assert cited["version"] == torchcaps.__version__
    assert cited.get("date-released") == (None if version.is_devrelease else released[0][1])
    assert f'repository-code: "{ADDRESS}"\n' in citation


def test_the_citation_names_the_paper_of_each_routing() -> None:
    """Sabour's for the dynamic one; that of EM serves its authors' code too."""
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    papers = re.findall(r"^  - type: article\n    notes: \"(.+)\"$", citation, re.MULTILINE)
    assert sum(not paper.startswith("network: ") for paper in papers) == len(PARTS["routing"]) - 1


def test_the_citation_names_the_paper_of_each_preset() -> None:
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    papers = {name: re.findall(r"arXiv:([\d.]+)", get_preset(name).source) for name in list_presets()}
    assert sum(bool(numbers) for numbers in papers.values()) > 10
    missing = {name for name, numbers in papers.items() if any(f"/{number}" not in citation for number in numbers)}
    assert missing == set()


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
    pictures = re.compile(r'(?:src|srcset)="([^"]+)"')
    assert pictures.findall(changed) == [raw + path for path in pictures.findall(readme)]
    assert [path for path in pictures.findall(readme) if not (ROOT / path).is_file()] == []
    assert pictures.findall(readme)


def test_the_picture_of_the_readme_has_its_dark_form_and_its_link() -> None:
    """GitHub ends a paragraph at a line that begins with ``<source``, unless the paragraph is a block of HTML."""
    (block,) = (each for each in (ROOT / "README.md").read_text(encoding="utf-8").split("\n\n") if "<source" in each)
    assert re.match(r"<p>\s*<a ", block)


def test_what_is_required_is_locked_within_its_range() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    locked = dict(line.split("==") for line in lines if not line.startswith("#"))
    extras = PROJECT["project"]["optional-dependencies"].values()
    required = [Requirement(each) for part in (PROJECT["project"]["dependencies"], *extras) for each in part]
    for each in required:
        if each.name != "torchcaps":
            assert each.specifier.contains(locked[canonicalize_name(each.name)]), each.name
