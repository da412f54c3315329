"""Reading FASTA files without a shell."""

from typing import Any

import numpy as np
from fairseq.data.fasta_dataset import fasta_file_path

from ..registry import replaces


@replaces(
    "fairseq.data.fasta_dataset.FastaDataset._build_index",
    prevents="code execution",
    until="fairseq reads these files without a shell",
)
def build_index(self: Any, path: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the byte offset and the length in bytes of each sequence of ``PATH.fasta``.

    fairseq passes the path of FASTA files to a shell. The languages in a checkpoint are part of that path, so a
    checkpoint can run any command if the files beside it have suitable names.
    """
    offsets, sizes, position = [], [], 0
    with open(fasta_file_path(path), "rb") as file:
        for line in file:
            if line.startswith(b">"):
                offsets.append(position)
                sizes.append(0)
            elif sizes:
                sizes[-1] += len(line.rstrip(b"\n"))
            position += len(line)
    return np.array(offsets, dtype=np.int64), np.array(sizes, dtype=np.int64)
