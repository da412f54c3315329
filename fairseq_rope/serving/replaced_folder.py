"""Writing a folder that gets its name, or replaces an older folder, only when it is complete."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator

from ..files import naming


@contextlib.contextmanager
def replacing(output: str) -> Iterator[str]:
    """Yield the name of a new folder that replaces *output* when the block ends without an error.

    The new folder is written inside a hidden one, into which *output* is moved before the new folder gets its name. If
    the process is killed, the hidden folder remains. If it is killed between these two renames, there is no *output*,
    and the hidden folder has both.
    """
    with naming(f"--output {output}"):
        hidden = tempfile.mkdtemp(prefix=f".{os.path.basename(output)}.", dir=os.path.dirname(output))
    new, old = os.path.join(hidden, "new"), os.path.join(hidden, "old")
    try:
        yield new
        with naming(f"--output {output}"):
            if os.path.exists(output):
                os.rename(output, old)
            os.rename(new, output)
    finally:
        if os.path.exists(old) and not os.path.exists(output):
            os.rename(old, output)
        shutil.rmtree(hidden, ignore_errors=True)
