"""Stage 5: learn one byte-pair encoding over both languages (subword-nmt) and apply it."""

from pathlib import Path

from recipes.pipeline.experiment import Experiment

NUMBER = 5
TITLE = "learn and apply BPE"
PER_MODEL = False
SETTINGS = ("bpe_merges",)


def inputs(x: Experiment) -> list[Path]:
    return x.texts("tokenised")


def outputs(x: Experiment) -> list[Path]:
    return [x.work / "bpe" / "bpecodes", *x.texts("bpe")]


def run(x: Experiment) -> None:
    (x.work / "bpe").mkdir(parents=True, exist_ok=True)
    codes, *texts = outputs(x)
    part = codes.with_name(codes.name + ".tmp")
    train = " ".join(x.shell(path) for path in inputs(x)[:2])
    x.command(
        f"cat {train} | subword-nmt learn-bpe --symbols {x.settings['bpe_merges']} > {x.shell(part)} "
        f"&& mv {x.shell(part)} {x.shell(codes)}"
    )
    for tokenised, out in zip(inputs(x), texts, strict=True):
        part = out.with_name(out.name + ".tmp")
        x.command(
            f"subword-nmt apply-bpe --codes {x.shell(codes)} < {x.shell(tokenised)} > {x.shell(part)} "
            f"&& mv {x.shell(part)} {x.shell(out)}"
        )
