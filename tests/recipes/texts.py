"""Text files for tests of the recipes' text tools, and the tools as separate processes."""

import subprocess
import sys

from tests.commands import ENVIRONMENT, ROOT

DIRTY_LINES = [
    "carriage\rreturn", "at the end\r", "next\x85line", "line\u2028separator", "paragraph\u2029separator",
    "vertical\x0btab", "form\x0cfeed", "file\x1cseparator", "record\x1eseparator", "zero\u200bwidth",
    "\ufeffbyte order mark", "soft\u00adhyphen", "null\x00byte", "Windows' \x84quote", "private\ue000use",
]  # fmt: skip


def write_lines(path, lines):
    """Write *lines* into the file *path*, and return its name."""
    path.write_bytes("".join(line + "\n" for line in lines).encode())
    return str(path)


def read_lines(path):
    """The lines of the file *path*. Only a line feed ends a line."""
    text = path.read_bytes().decode()
    assert text.endswith("\n")
    return text.split("\n")[:-1]


def start_tool(*words, module="tokenise", **kwargs):
    """Start the text tool *module* in a separate process."""
    command = [sys.executable, "-m", f"recipes.text.{module}", *map(str, words)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, text=True, **pipes, **kwargs)
