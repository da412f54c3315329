"""Write the texts of RoFormer's experiments as lines of tokens for fairseq-preprocess. The scripts here call it.

    python -m recipes.paper.prepare bytes|text|pairs|triples DATA OUT [MODEL …]

The files in DATA can be gzipped. MODEL is SentencePiece's; without such a file, tokens are characters.
"""

import gzip
import json
import random
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from sentencepiece import SentencePieceTrainer

from fairseq_rope.errors import InputError, ending_in_one_sentence
from fairseq_rope.lines import GZIP, read_lines
from fairseq_rope.text.subwords import read_sentencepiece

BLOCK = 2**20  # bytes in a line of a language model's text
Tokenise = Callable[[str], list[str]]
SPECIAL = 4  # tokens besides the two texts: <s> B </s> </s> A </s>
TASKS = {  # columns of GLUE's tables: the texts and the label
    "own": ("sentence1", "sentence2", "label"),
    "MRPC": ("#1 String", "#2 String", "Quality"),
    "SST-2": ("sentence", "label"),
    "QNLI": ("question", "sentence", "label"),
    "STS-B": ("sentence1", "sentence2", "score"),
    "QQP": ("question1", "question2", "is_duplicate"),
    "MNLI": ("sentence1", "sentence2", "gold_label"),
}


def file_in(folder: Path, *names: str) -> Path:
    """Return the first file of *names* in *folder*, or of *names* with ``.gz``."""
    for path in (folder / f"{name}{end}" for name in names for end in ("", ".gz")):
        if path.is_file():
            return path
    raise InputError(f"{folder}: must contain {' or '.join(names)}, which can be gzipped")


def write_lines(lines: Iterable[str], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def prepare_bytes(data: Path, out: Path) -> None:
    """Write each byte as a token. *data* is a folder, or one file such as enwik8, which is split 90 : 5 : 5."""
    parts = ("train", "valid", "test")
    files = [data] if data.is_file() else [file_in(data, f"{part}.txt") for part in parts]
    contents = [path.read_bytes() for path in files]
    texts = [gzip.decompress(content) if content.startswith(GZIP) else content for content in contents]
    if data.is_file():
        ends = [len(texts[0]) * percent // 100 for percent in (0, 90, 95, 100)]
        texts = [texts[0][start:end] for start, end in zip(ends, ends[1:])]
    for part, text in zip(parts, texts):
        write_lines((text[n : n + BLOCK].hex(" ") for n in range(0, len(text), BLOCK)), out / f"{part}.txt")
    write_lines((f"{byte:02x} 1" for byte in range(256)), out / "dict.txt")


def documents_in(folder: Path, part: str) -> list[list[str]]:
    """Return the paragraphs of each document of *part*; blank lines separate the documents."""
    lines = read_lines(str(file_in(folder, f"text.{part}.txt", f"{part}.txt", f"{part}.en")))
    return [text.split("\n") for text in re.split("\n\n+", "\n".join(map(str.strip, lines)).strip("\n"))]


def tokeniser(model: str) -> Tokenise:
    """Return what splits a line into the subwords of *model* or, if there is no such file, into characters."""
    if not Path(model).exists():
        return lambda line: ["▁" if character.isspace() else character for character in line.strip()]
    processor = read_sentencepiece(model)
    return lambda line: [processor.id_to_piece(number) for number in processor.encode(line)]


def prepare_text(data: Path, out: Path, model: str, subwords: str) -> None:
    """Write each paragraph as a line. If *subwords* is not 0, SentencePiece learns so many first."""
    texts = {part: [line for document in documents_in(data, part) for line in document] for part in ("train", "valid")}
    Path(model).unlink(missing_ok=True)
    if int(subwords):
        options: dict[str, Any] = {"model_prefix": model.removesuffix(".model"), "vocab_size": int(subwords)}
        options |= {"model_type": "bpe", "character_coverage": 0.9999, "minloglevel": 2}
        options |= {"max_sentence_length": 2**30}  # bytes; the trainer skips longer lines
        SentencePieceTrainer.train(sentence_iterator=iter(texts["train"]), **options)
    tokenise = tokeniser(model)
    for part, lines in texts.items():
        write_lines((" ".join(tokenise(line)) for line in lines), out / f"{part}.txt")


def passages_of(document: list[str], length: int) -> list[str]:
    """Return the first *length* characters of each group of consecutive paragraphs that has so many."""
    passages = [""]
    for paragraph in document:
        passages[-1] = f"{passages[-1]} {paragraph}".lstrip()
        if len(passages[-1]) >= length:
            passages[-1:] = [passages[-1][:length], ""]
    return passages[:-1]


def following_pairs(documents: list[list[str]]) -> list[list[str]]:
    """Return pairs of passages, and "1" if the second one follows the first one, else "0" (arXiv:1810.04805, 3.1)."""
    draw, pairs = random.Random(1), []
    for number, passages in enumerate(documents):
        for first, second in zip(passages, passages[1:] if len(documents) > 1 else []):
            other = draw.randrange(len(documents) - 1)
            other += other >= number  # any document except this one
            if wrong := [passage for passage in documents[other] if passage not in passages]:
                pairs += [[first, second, "1"], [first, draw.choice(wrong), "0"]]
    return pairs


def write_examples(examples: list[list[str]], tokenise: Tokenise, longest: int | None, out: Path, part: str) -> None:
    """Write the texts of *examples*, cut to *longest* tokens, and their labels, which are last."""
    if not examples:
        raise InputError(f"{part} has no examples; a text must have blank lines between its documents")
    *texts, labels = zip(*examples)
    write_lines(labels, out / "label" / f"{part}.txt")
    for number, lines in enumerate(texts):
        write_lines((" ".join(tokenise(line)[:longest]) for line in lines), out / f"input{number}" / f"{part}.txt")


def prepare_pairs(data: Path, out: Path, model: str, task: str, length: str) -> None:
    """Write the examples of one of TASKS or, if *task* is "documents", pairs of passages of *length* characters."""
    for part, name in (("train", "train.tsv"), ("valid", "dev.tsv")):
        if task == "documents":
            documents = [passages_of(document, int(length)) for document in documents_in(data, part)]
            examples = following_pairs([passages for passages in documents if passages])
        else:
            names, *rows = (line.rstrip("\r").split("\t") for line in read_lines(str(file_in(data, name))))
            if not set(TASKS[task]) <= set(names):
                raise InputError(f"{data}: {name} has {', '.join(names)}; {task} needs {', '.join(TASKS[task])}")
            rows = [row for row in rows if len(row) == len(names)]  # a few rows of QQP have too few cells
            examples = [[row[names.index(column)] for column in TASKS[task]] for row in rows]
        write_examples(examples, tokeniser(model), None, out, part)


def prepare_triples(data: Path, out: Path, model: str, limit: str) -> None:
    """Write A, B and C of the triples of CAIL2019-SCM, cut so that A with B and A with C have *limit* tokens."""
    for part in ("train", "valid", "test"):
        triples = [json.loads(line) for line in read_lines(str(file_in(data, f"{part}.json")))]
        examples = [[*(triple[name] for name in "ABC"), str("BC".index(triple["label"]))] for triple in triples]
        write_examples(examples, tokeniser(model), (int(limit) - SPECIAL) // 2, out, part)


if __name__ == "__main__":
    with ending_in_one_sentence("recipes.paper.prepare"):
        kind, data, out, *more = sys.argv[1:]
        globals()[f"prepare_{kind}"](Path(data), Path(out), *more)
