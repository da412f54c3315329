"""What fairseq needs on current Python, torch and NumPy: one table of replacements.

fairseq is archived. Each row names what is replaced, by what, why, and when the row can go. The rule for a
row: a command or call that works with fairseq alone does the same with the row in place, except where it
would lose data, give wrong results or run code. ``Patch.prevents`` says which of these. A row that only
changes the text of an error prevents "an unreadable error".

The replacements are seen by every model of the process.
"""

import fnmatch
import importlib
import sys
from typing import Any, List, NamedTuple

from fairseq import checkpoint_utils

from . import batches, ending, fasta, loading, options, saving


class Patch(NamedTuple):
    """One row of the table."""

    target: str  # dotted name of what is replaced; "fairseq.*.NAME" is a global of each loaded module of fairseq
    replacement: Any  # the object that takes its place
    prevents: str  # "code execution", "lost data", "wrong results" or "an unreadable error"
    reason: str  # what happens without the replacement
    until: str  # when the row can go


PATCHES: List[Patch] = [
    Patch(
        "fairseq.checkpoint_utils.torch",
        loading.TorchWithSafeLoad("torch"),
        "code execution",
        "torch >= 2.6 refuses fairseq's checkpoints, and fairseq's git main answers with weights_only=False, which "
        "runs any code in the file. Here weights_only is on, and the classes that checkpoints hold are allowed by "
        "name. A damaged file and a file of other software are refused. (torch < 2.6 has no such list and loads as "
        "fairseq does: load only files that you trust.)",
        "fairseq loads its own checkpoints with weights_only=True",
    ),
    Patch(
        "fairseq.*.eval",
        options.literal,
        "code execution",
        "fairseq evaluates options such as --adaptive-softmax-cutoff as Python, also those in a checkpoint: a "
        "checkpoint without any code in its pickle would be enough to run code. Here options are literals and "
        "arithmetic on them. (A script that imports * from a module of fairseq gets this eval too.)",
        "fairseq reads literals",
    ),
    Patch(
        "fairseq.data.fasta_dataset.FastaDataset._build_index",
        fasta.build_index,
        "code execution",
        "fairseq gives the path of FASTA files to a shell. The languages in a checkpoint are part of that path, so a "
        "checkpoint and the names of the files beside it could run any command.",
        "fairseq reads these files without a shell",
    ),
    Patch(
        "fairseq.checkpoint_utils.PathManager",
        saving.WholeFiles(checkpoint_utils.PathManager),
        "lost data",
        "fairseq copies a checkpoint to checkpoint_best.pt and checkpoint_last.pt in place. If it is killed then, "
        "training cannot resume from them. A file that is renamed before it reaches the disk can be empty after a "
        "power cut. Here each copy is written under a temporary name, synced and renamed. A hard link to such a file "
        "therefore keeps the old contents; a symbolic link leads to the new file.",
        "fairseq renames its copies and syncs before it renames",
    ),
    Patch(
        "fairseq.checkpoint_utils._torch_persistent_save",
        saving._save_with_retries,
        "lost data",
        "When a write fails, fairseq tries twice more and writes after what is already in the file. A file with half "
        "a checkpoint before a whole one then gets the final name. Here each try begins again at the start of the "
        "file.",
        "fairseq retries from the start of the file",
    ),
    Patch(
        "fairseq.checkpoint_utils.torch_persistent_save",
        saving.torch_persistent_save,
        "an unreadable error",
        "torch reports a full disk as an unexpected position in a file. Here the error names the checkpoint, the "
        "reason and the free space, and the temporary file is removed.",
        "fairseq names the checkpoint and the reason",
    ),
    Patch(
        "fairseq.checkpoint_utils.save_checkpoint",
        saving.save_checkpoint,
        "lost data",
        "fairseq leaves out a checkpoint of --save-interval-updates at the end of an epoch, even if it writes no "
        "checkpoint for that epoch (--no-epoch-checkpoints, --save-interval). The last five checkpoints are then not "
        "the last five.",
        "fairseq writes a checkpoint at every interval",
    ),
    Patch(
        "fairseq.tasks.FairseqTask.get_batch_iterator",
        batches.get_batch_iterator,
        "wrong results",
        "fairseq composes batches once a process, with seed + epoch. A process that starts in epoch 7 composes other "
        "batches than one that comes there from epoch 1, so a training that is resumed in the middle of an epoch "
        "misses sentences and sees others twice. Here the batches are those of a start in epoch 1.",
        "fairseq composes batches by the seed alone",
    ),
    Patch(
        "fairseq.data.data_utils.batch_by_size",
        batches.batch_by_size,
        "wrong results",
        "fairseq drops the last batch if its size is no multiple of --required-batch-size-multiple (8 by default), so "
        "up to 7 sentences of a test set are not translated (fairseq #5036, #5094, #5351).",
        "fairseq keeps the last batch",
    ),
    Patch(
        "fairseq.checkpoint_utils.load_checkpoint_to_cpu",
        loading.load_checkpoint_to_cpu,
        "wrong results",
        "With a joined dictionary, all weights of a model for the other direction fit, and so do those of another "
        "rotation. Both are refused, in one sentence that names the file.",
        "fairseq compares the languages and options of a checkpoint with those of the command",
    ),
    Patch(
        "fairseq.checkpoint_utils.load_checkpoint",
        loading.load_checkpoint_to_train,
        "wrong results",
        "The check in load_checkpoint_to_cpu needs the languages and the rotation of the training. This row provides "
        "them, and writes languages that fairseq read from file names into new checkpoints. It also names the file "
        "and the reason if weights do not fit, and warns if --restore-file does not exist.",
        "the row of load_checkpoint_to_cpu goes",
    ),
    Patch(
        "fairseq.checkpoint_utils.load_model_ensemble_and_task",
        loading.load_model_ensemble_and_task,
        "wrong results",
        "The check in load_checkpoint_to_cpu needs the languages of the data. This row provides them, and names the "
        "file and the reason if weights do not fit.",
        "the row of load_checkpoint_to_cpu goes",
    ),
    Patch(
        "sys.excepthook",
        ending.excepthook,
        "an unreadable error",
        "fairseq's programs end with a traceback, also if a file is missing or a flag is wrong. Here they end with "
        "one sentence where the message of the error explains it. Other programs keep their tracebacks.",
        "fairseq's programs end in one sentence",
    ),
]


def apply() -> None:
    """Put every replacement in its place. A second call changes nothing."""
    loading.allow_checkpoint_classes()
    for patch in PATCHES:
        for owner, name in owners(patch.target):
            setattr(owner, name, patch.replacement)


def owners(target: str) -> List[Any]:
    """Return (module or class, attribute) for each place that *target* of a ``Patch`` names."""
    path, _, name = target.rpartition(".")
    if "*" in path:
        names = [module for module in list(sys.modules) if fnmatch.fnmatch(module, path)]
        return [(sys.modules[module], name) for module in names if not module.startswith("fairseq.examples.")]
    try:
        return [(importlib.import_module(path), name)]
    except ModuleNotFoundError:  # a class in a module
        module_name, _, class_name = path.rpartition(".")
        return [(getattr(importlib.import_module(module_name), class_name), name)]
