"""Write docs/differences.md from the table of patches: ``python docs/differences.py``."""

import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "differences.md"
HEAD = """# Differences from fairseq

After this page you know what the plugin replaces in fairseq, why, and when each replacement can go.

With the plugin loaded, a command or call that works with fairseq alone does the same, except where it would
lose data, give wrong results or run code from a file. Some replacements only make an error readable. Each entry
below is one row of the table in `fairseq_rope/patches/table.py`: what is replaced, what the replacement
prevents, and when the row can go. The replacements apply to every model in the process.
`python docs/differences.py` writes this page.
"""


def page() -> str:
    """Return the page as Markdown."""
    from fairseq_rope.plugin import REPLACEMENTS

    parts = [HEAD]
    for patch in REPLACEMENTS:
        text = f"Prevents {patch.prevents}. {patch.reason} This row can go when {patch.until}."
        parts.append(f"## `{patch.target}`\n\n{textwrap.fill(text, 108, break_on_hyphens=False)}\n")
    return "\n".join(parts)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    PAGE.write_text(page(), encoding="utf-8")
