"""Stage 7: train (fairseq-train). An interrupted training goes on from its last checkpoint."""

import json
import shutil
import sys
from pathlib import Path

from tqdm import tqdm

from recipes.pipeline import stage06_binarise
from recipes.pipeline.experiment import Experiment, write_whole

NUMBER = 7
TITLE = "train"
PER_MODEL = True
SETTINGS = (
    "layers",
    "width",
    "ffn_width",
    "heads",
    "dropout",
    "adam_betas",
    "warmup_init_lr",
    "label_smoothing",
    "learning_rate",
    "warmup_updates",
    "tokens_per_batch",
    "epochs",
    "average_checkpoints",
    "fairseq_train_flags",
)


def inputs(x: Experiment) -> list[Path]:
    return stage06_binarise.outputs(x)


def outputs(x: Experiment) -> list[Path]:
    return [x.model / "checkpoints" / "checkpoint_last.pt"]


def command(x: Experiment) -> str:
    """The fairseq-train command of *x*."""
    s = x.settings
    sizes = " ".join(
        f"--{side}-layers {s['layers']} --{side}-embed-dim {s['width']} "
        f"--{side}-ffn-embed-dim {s['ffn_width']} --{side}-attention-heads {s['heads']}"
        for side in ("encoder", "decoder")
    )
    return (
        f"fairseq-train {x.shell(x.work / 'data-bin')} --source-lang {x.source} --target-lang {x.target} "
        f"--user-dir fairseq_rope --arch {x.arch} {sizes} --share-all-embeddings --dropout {s['dropout']} "
        f"--optimizer adam --adam-betas '{s['adam_betas']}' --lr {s['learning_rate']} "
        f"--lr-scheduler inverse_sqrt --warmup-init-lr {s['warmup_init_lr']} "
        f"--warmup-updates {s['warmup_updates']} "
        f"--criterion label_smoothed_cross_entropy --label-smoothing {s['label_smoothing']} "
        f"--max-tokens {s['tokens_per_batch']} --max-epoch {s['epochs']} "
        f"--keep-last-epochs {s['average_checkpoints']} --save-dir {x.shell(x.model / 'checkpoints')} "
        f"--seed {x.seed} --log-format json --log-interval 20 {s['fairseq_train_flags']}"
    )


def run(x: Experiment) -> None:
    checkpoints = x.model / "checkpoints"
    wanted = json.dumps(x.fingerprint(sys.modules[__name__]), indent=1)
    begun = checkpoints / "begun.json"
    if checkpoints.exists() and (not begun.exists() or begun.read_text() != wanted):
        print(f"  {checkpoints} is of other data or settings: started anew", flush=True)
        shutil.rmtree(checkpoints)
    write_whole(begun, wanted)
    # Not drawn before the command is printed; in a log file, a line every half minute.
    every = 1 if sys.stderr.isatty() else 30
    with tqdm(total=x.settings["epochs"], bar_format=_BAR, mininterval=every, delay=0.1) as bar:
        x.command(command(x), on_line=lambda line: _show(bar, line))


_BAR = "  {l_bar}{bar}| epoch {n:.1f}/{total} [{elapsed}<{remaining}{postfix}]"


def _show(bar: tqdm, line: str) -> None:
    """Move *bar* to the epoch that *line*, one of fairseq's JSON log lines, tells of."""
    start = line.find("{")
    if start < 0 or not line.rstrip().endswith("}"):
        return
    try:
        told = json.loads(line[start:])
    except ValueError:
        return  # the configuration, printed once, is no JSON
    if "valid_loss" in told:
        bar.set_postfix(valid_loss=told["valid_loss"], refresh=False)
    elif "update" in told:  # in epochs, with a fraction
        bar.update(float(told["update"]) - bar.n)
    elif "train_loss" in told:
        bar.update(float(told["epoch"]) - bar.n)
