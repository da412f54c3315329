"""Keep the epochs of fairseq-train's log in a file, and show its progress as a bar.

    fairseq-train … --log-format json 2>&1 | python -m recipes.run.history HISTORY

copies the log, and appends the lines that summarise an epoch to the file HISTORY.
"""

import json
import os
import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tqdm import tqdm


def logged(line: str) -> dict[str, Any]:
    """The JSON in *line* of fairseq's log, or {} if it has none."""
    start = line.find("{")
    try:  # fairseq also prints its configuration in braces
        return json.loads(line[start:]) if start >= 0 and line.rstrip().endswith("}") else {}
    except ValueError:
        return {}


def number_of(updates: str) -> int:
    """The number of *updates* in fairseq's log, which has six digits, and from a million on the form 1.23457e+06."""
    return int(float(updates))


def training_bar(updates: int, epochs: int, disable: bool) -> tqdm:
    """A bar of *updates*, or of *epochs* if the updates are not limited, which :func:`follow` moves."""
    return tqdm(
        total=updates or epochs,
        unit="update" if updates else "epoch",
        bar_format="  {l_bar}{bar}| {unit} {n:.1f}/{total} [{elapsed}<{remaining}{postfix}]",
        mininterval=1 if sys.stderr.isatty() else 30,
        delay=0.1,  # after the command has been printed
        disable=disable,
    )


def follow(bar: tqdm, line: str) -> None:
    """Move *bar* to the epoch or update that *line* of fairseq's log names."""
    entry = logged(line)
    if "valid_loss" in entry:
        bar.set_postfix(valid_loss=entry["valid_loss"], refresh=False)
    elif bar.unit == "update":
        updates = entry.get("num_updates", entry.get("train_num_updates"))
        if updates is not None:
            bar.update(number_of(updates) - bar.n)
    elif "update" in entry:  # in epochs, with a fraction
        bar.update(float(entry["update"]) - bar.n)
    elif "train_loss" in entry:
        bar.update(float(entry["epoch"]) - bar.n)


def keep_history(lines: Iterable[bytes], path: Path) -> None:
    """Copy *lines* to standard output, and append those about whole epochs to *path*.

    If the recipe is killed, fairseq-train continues. Nothing reads the output then, but *path* still gets the epochs.
    """
    for line in lines:
        entry = logged(line.decode("utf-8", "replace"))
        if "valid_loss" in entry or "train_loss" in entry:
            with path.open("a") as file:
                file.write(json.dumps(entry) + "\n")
        try:
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends when fairseq-train does
    keep_history(sys.stdin.buffer, Path(sys.argv[1]))
