"""Hooks of mkdocs: the README is the home page, files that pages link to are on the site, and patches have a page."""

import itertools
import logging
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
LINK_TO_PAGE = re.compile(r'href="(\w+)\.md(#[\w-]+)?"')
LINK_OUT_OF_DOCS = re.compile(r"\]\(\.\./([^)#]+)(?:#(\w+))?\)")


def _home() -> str:
    """The README with links as from a page in docs/."""
    text = re.sub(r"\]\((?!https?:|#|docs/)", "](../", (ROOT / "README.md").read_text())
    return text.replace("](docs/", "](")


def _copy(link: re.Match[str]) -> str:
    """The link to the copy of on_files. A name after # is a function, to which browsers scroll."""
    return f"](sources/{link[1]}.txt" + (f"#:~:text=def%20{link[2]}%28" if link[2] else "") + ")"


def _whole(code: re.Match[str]) -> str:
    """Inline code whose names and flags stay on one line; browsers otherwise divide a flag after a dash."""
    words = (f'<span class="whole">{word}</span>' if len(word) <= 36 else word for word in code[1].split(" "))
    return f"<code>{' '.join(words)}</code>"


DIFFERENCES = """# Differences from fairseq

Here you can look up what the plugin replaces in fairseq, why, and when each replacement can go.
[Compatibility](compatibility.md) has the differences that you can notice first.
"""


def _patches() -> str:
    """The list of the page of differences: each replacement of the plugin, with its docstring as the reason."""
    logging.basicConfig(level=logging.WARNING)  # otherwise, a module of fairseq lets mkdocs print all that it logs
    from fairseq_rope.plugin import REPLACEMENTS

    entries = []
    for _, patches in itertools.groupby(REPLACEMENTS, key=lambda patch: id(patch.replacement)):
        first, *others = patches
        headings = "\n\n".join(f"## `{patch.target}`" for patch in (first, *others))
        entries.append(f"{headings}\n\n{first.reason}\n\nPrevents {first.prevents}. It can go when {first.until}.")
    return "\n\n".join(entries)


def on_files(files: Files, config: Any) -> Files:
    """Add the page of differences, and each linked file of the repository as plain text, which browsers display."""
    files.append(File.generated(config, "differences.md", content=f"{DIFFERENCES}\n{_patches()}"))
    pages = [_home(), *(page.read_text() for page in (ROOT / "docs").glob("*.md"))]
    for path in sorted({path for page in pages for path, _ in LINK_OUT_OF_DOCS.findall(page)} - {"README.md"}):
        files.append(File.generated(config, f"sources/{path}.txt", content=(ROOT / path).read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The text of a page, whose links to files of the repository lead to their copies."""
    return LINK_OUT_OF_DOCS.sub(_copy, _home() if page.is_homepage else markdown)


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """The HTML of a page, whose flags are not divided between two lines.

    mkdocs-jupyter leaves the links of a notebook to pages as they are.
    """
    if page.file.src_uri.endswith(".ipynb"):
        html = LINK_TO_PAGE.sub(r'href="../\1/\2"', html)
    return re.sub(r"<code>([^<\n]+)</code>", _whole, html)
