"""Hooks of the documentation site: pages that lie elsewhere in the repository, and formulas.

Formulas become MathML when the site is built, so that no script has to be fetched to read them.
"""

from __future__ import annotations

import html
import posixpath
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Link, Navigation
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]

#: Files outside docs/ and their pages on the site.
PAGES = {
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "CODE_OF_CONDUCT.md": "code-of-conduct.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "src/torchcaps/explorer/page/playground.css": "assets/playground.css",
    "src/torchcaps/explorer/page/playground.js": "assets/playground.js",
}
#: Addresses of the site that other sites may link to, and where their text is now.
MOVED = {
    "against-the-sources": "networks.html#compared-with",
    "course": "teach.html",
    "few-images": "own-data.html#few-images",
    "gallery": "commands.html#figures",
    "instruments": "commands.html#figures",
    "interests": "sequences.html#interests",
    "labels-and-numbers": "own-data.html#several-labels-or-numbers",
    "leaderboard": "results.html#heads-on-four-tests",
    "lesson": "lesson-sheet.html",
    "named-data": "own-data.html#named-data-sets",
    "photos": "explorer.html#photos-of-digits",
    "policy": "contributing.html#versions-and-deprecation",
    "recorded-runs": "results.html#provenance",
    "reproducing": "a-study.html#repeat-a-result",
    "scaling": "speed.html#precision",
    "what-did-not-work": "paper.html#ten-lessons",
}
STUB = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>Moved</title>
<meta http-equiv="refresh" content="0; url={target}">
<link rel="canonical" href="{target}">
<p>This page is now <a href="{target}">here</a>.</p>
</html>
"""
#: Factors on the rank of a page in the search: pages that explain come first, pages that list or derive last.
SEARCH_BOOST = dict.fromkeys(
    ("answers.md", "capsules.md", "glossary.md", "lesson-sheet.md", "routing.md", "teach.md"), 2.0
)
SEARCH_BOOST |= dict.fromkeys(("api/", "architecture.md", "changelog.md"), 0.3)
#: Pages that the search leaves out, so that students do not meet the answers.
NOT_SEARCHED = ("lesson-answers.md",)
LINK = re.compile(r"(?<=\]\()([^)#:\s]+)(?=[)#])")
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
#: A link with all that it holds, or a picture that is in no link.
LINK_OR_PICTURE = re.compile(r'<a [^>]*>.*?</a>|<img [^>]*?src="([^"]+)"[^>]*>', re.DOTALL)
#: An option of a command between backticks, which a line must not break at its hyphens.
OPTION = re.compile(r"(?<![\w-])--?[a-z][\w-]*")
#: A space that a line must not break at, except in narrow columns: between a number and its percent sign.
BEFORE_PERCENT = re.compile(r"(?<=\d) (?=%(?!</t))")
INLINE_CODE = re.compile(r"(?<=<code>)[^<]+(?=</code>)")
#: Code and tags, in which notebooks have no formulas; and a formula of a notebook.
CODE_OR_TAG = re.compile(r"(<(pre|code|script|style)\b.*?</\2>|<[^>]+>)", re.DOTALL)
NOTEBOOK_FORMULA = re.compile(r"\$([^$\n]+)\$")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what lies outside docs/."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_nav(nav: Navigation, **_: Any) -> None:
    """Add the explorer's page, which is no page of docs/, after the first."""
    nav.items.insert(1, Link("Try it", "try/index.html"))


def on_post_build(config: MkDocsConfig) -> None:
    """Write the explorer's page, which runs in the visitor's browser, to ``try/``, and a page for each old address."""
    from torchcaps.explorer import open_explorer, write_page
    from torchcaps.models.files import SHIPPED
    from torchcaps.training import load_run

    site = Path(config.site_dir)
    write_page(open_explorer(load_run(SHIPPED["compact"])), site / "try")
    for page, target in MOVED.items():
        (site / f"{page}.html").write_text(STUB.format(target=target), encoding="utf-8")


def on_post_page(output: str, **_: Any) -> str:
    """Leave out the theme's question to GitHub for stars and releases: a page fetches nothing from elsewhere."""
    return output.replace('data-md-component="source"', "")


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, **_: Any) -> str:
    """Turn links between files into links between pages or to the repository, and rank the page for the search."""
    here = page.file.src_uri
    page.meta["search"] = {"boost": SEARCH_BOOST.get("api/" if here.startswith("api/") else here, 1.0)}
    page.meta["search"] |= {"exclude": True} if here in NOT_SEARCHED else {}
    origin = next((source for source, target in PAGES.items() if target == here), f"docs/{here}")

    def site_link(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(origin), link[1]))
        if target not in PAGES and not target.startswith("docs/"):
            return f"{config.repo_url}/blob/main/{target}"
        return posixpath.relpath(PAGES.get(target, target.removeprefix("docs/")), posixpath.dirname(here) or ".")

    assert config.site_url
    markdown = markdown.replace(
        f'href="{config.site_url}', 'href="'
    )  # GitHub needs the address, a copy of the site must not
    return LINK.sub(site_link, markdown)


def on_page_content(html_text: str, page: Page, **_: Any) -> str:
    """Write formulas as MathML, keep options and percentages in one line, and let a click enlarge each picture."""
    if page.file.src_uri.endswith(".ipynb"):
        # split at tags and code: every third piece is text, all other pieces are not changed
        pieces = CODE_OR_TAG.split(html_text)
        for n in range(0, len(pieces), 3):
            pieces[n] = NOTEBOOK_FORMULA.sub(lambda formula: _mathml(formula[1], "inline"), pieces[n])
        return "".join(piece for n, piece in enumerate(pieces) if n % 3 != 2)  # the third is the name of the tag

    def mathml(formula: re.Match[str]) -> str:
        if formula[1] == "span":
            return _mathml(formula[2], "inline")
        return f'<div class="formula">{_mathml(formula[2], "block")}</div>'

    text = INLINE_CODE.sub(lambda code: OPTION.sub(r'<span class="option">\g<0></span>', code[0]), html_text)
    text = BEFORE_PERCENT.sub("&nbsp;", text)
    return LINK_OR_PICTURE.sub(_with_link, FORMULA.sub(mathml, text))


def _with_link(picture: re.Match[str]) -> str:
    return f'<a href="{picture[1]}">{picture[0]}</a>' if picture[1] else picture[0]


def _mathml(latex: str, display: str) -> str:
    return convert(html.unescape(latex), display=display)
