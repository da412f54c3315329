"""Stage 9: translate the test set (fairseq-generate) and put it back into order and plain text."""

from pathlib import Path

from tqdm import tqdm

from recipes.pipeline import stage06_binarise, stage08_average
from recipes.pipeline.experiment import Experiment

NUMBER = 9
TITLE = "translate the test set"
PER_MODEL = True
SETTINGS = ("beam", "length_penalty", "max_len_b", "source_lang", "target_lang", "fairseq_generate_flags")


def inputs(x: Experiment) -> list[Path]:
    return [*stage08_average.outputs(x), *stage06_binarise.outputs(x)]


def outputs(x: Experiment) -> list[Path]:
    return [x.model / "generate.txt", x.model / f"hypotheses.{x.target}"]


def run(x: Experiment) -> None:
    s = x.settings
    generated, hypotheses = outputs(x)
    data = x.work / "data-bin"
    part = generated.with_name(generated.name + ".tmp")
    sentences = (x.work / "raw" / f"test.{x.source}").read_bytes().count(b"\n")
    with tqdm(total=sentences, unit=" sentences", desc="  translated", delay=0.1) as bar:
        x.command(
            f"fairseq-generate {x.shell(data)} --source-lang {x.source} --target-lang {x.target} "
            f"--user-dir fairseq_rope --path {x.shell(x.model / 'averaged.pt')} --gen-subset test "
            f"--beam {s['beam']} --lenpen {s['length_penalty']} --max-len-a 1 --max-len-b {s['max_len_b']} "
            f"--bpe subword_nmt --bpe-codes {x.shell(data / 'bpecodes')} "
            f"--tokenizer moses --moses-no-dash-splits --max-tokens 8000 --no-progress-bar "
            f"{s['fairseq_generate_flags']} | tee {x.shell(part)} && mv {x.shell(part)} {x.shell(generated)}",
            on_line=lambda line: bar.update() if line.startswith("D-") else None,
        )
    # Generated in order of length; D-<number> <tab> score <tab> detokenised text.
    part = hypotheses.with_name(hypotheses.name + ".tmp")
    x.command(
        f"grep '^D-' {x.shell(generated)} | LC_ALL=C sort -t- -k2,2n | cut -f3- > {x.shell(part)} "
        f"&& mv {x.shell(part)} {x.shell(hypotheses)}"
    )
