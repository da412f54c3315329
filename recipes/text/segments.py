"""Join consecutive sentences of documents to segments, divide translated segments, and join whole documents.

    python -m recipes.text.segments join --source-lang en --target-lang de --input bpe/train --output segments/train …
    python -m recipes.text.segments divide --segments segments/test.en --generated generate.txt --output test.de …
    python -m recipes.text.segments documents --boundaries raw/test.de --input sentences.de --output documents.de

The texts of ``join`` and ``--boundaries`` have one sentence a line, and blank lines between documents.
"""

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import NamedTuple

from fairseq_rope.errors import InputError, ending_in_one_sentence, refuse_output
from fairseq_rope.files import write_whole, written_whole
from fairseq_rope.lines import lines_of
from fairseq_rope.text.generated import read_generated
from fairseq_rope.text.segments import SEPARATOR, divided, joined, segments
from fairseq_rope.text.subwords import SUBWORDS
from fairseq_rope.text.tokens import Tokeniser
from recipes.text.lines import pairs_of

SEED = 1  # of the lengths of training segments

Pair = tuple[list[str], list[str]]  # the tokens of a sentence and of its translation


# -- from documents to segments ----------------------------------------------------------------------


def read_documents(paths: Sequence[str], is_training: bool = False) -> Iterator[list[Pair]]:
    """Yield the documents of the two files *paths* that are not empty, as pairs of tokens.

    Raises an InputError if a line is blank on one side only, has the separator as a token, or lacks its translation.
    In training, pairs with one blank side are left out. sentencepiece makes such sides of characters without a piece.
    """
    document: list[Pair] = []
    for number, pair in enumerate(pairs_of(paths), 1):
        if is_training and any(pair) and not all(pair):
            continue
        for path, tokens in zip(paths, pair, strict=True):
            if not tokens and any(pair):
                problem = "is blank on this side only; a blank line separates documents, and is blank on both sides"
            elif SEPARATOR in tokens:
                problem = f"contains {SEPARATOR} as a token, which separates the sentences of a segment"
            else:
                continue
            raise InputError(f"{path}, line {number}: {problem}")
        if any(pair):
            document.append(pair)
        elif document:
            yield document
            document = []
    if document:
        yield document


def longest_segments(document: Sequence[Pair], tokens: int) -> list[range]:
    """The numbers of the sentences of each segment, if a segment contains as many as fit.

    The length of a sentence is that of its longer side. So a segment has at most *tokens* on both sides.
    """
    return segments([max(map(len, pair)) for pair in document], lambda: tokens)


class Mixture:
    """Divides training documents into segments of all lengths, or into single sentences.

    The limit of each segment, in tokens on a side, is drawn uniformly from 1 to *tokens*. A document is divided if that
    brings the share of the sentences in segments so far closer to *share*. Otherwise each sentence is a line by itself.
    """

    def __init__(self, tokens: int, share: float) -> None:
        self._tokens, self._share = tokens, share
        self._draw = random.Random(SEED)
        self.sentences = self.in_segments = 0
        self.joined = 0  # sentences on a line with others

    def __call__(self, document: Sequence[Pair]) -> list[range]:
        size = len(document)
        in_segments = self.in_segments + size / 2 <= self._share * (self.sentences + size)
        self.sentences += size
        if not in_segments:
            return [range(n, n + 1) for n in range(size)]
        self.in_segments += size
        divisions = segments([max(map(len, pair)) for pair in document], lambda: self._draw.randint(1, self._tokens))
        self.joined += sum(len(segment) for segment in divisions if len(segment) > 1)
        return divisions


def join(sources: Sequence[str], outputs: Sequence[str], tokens: int, share: float | None) -> str:
    """Write the segments of the two files *sources*, and return a sentence with their number.

    For training, *share* is that of :class:`Mixture`. With None, the segments are as long as *tokens* allows.
    """
    mixture = None if share is None or tokens == 1 else Mixture(tokens, share)  # with 1, no sentences are joined
    documents = sentences = lines = longest = 0
    with written_whole(*outputs) as files:
        for document in read_documents(sources, is_training=share is not None):
            divisions = longest_segments(document, tokens) if mixture is None else mixture(document)
            for segment in divisions:
                for side, file in enumerate(files):
                    line = joined([document[n][side] for n in segment])
                    longest = max(longest, len(line))
                    file.write(" ".join(line).encode("utf-8") + b"\n")
            documents, sentences, lines = documents + 1, sentences + len(document), lines + len(divisions)
        if not documents:
            raise InputError(f"{' and '.join(sources)}: all lines are blank")
    sizes = f"{documents} documents, {sentences} sentences, {lines} lines of up to {longest} subwords"
    if mixture is None:
        return sizes
    divided = f"{mixture.in_segments / sentences:.1%} of the sentences in segments"
    return f"{sizes}, {divided}, and {mixture.joined / sentences:.1%} on a line with others"


# -- from segments back to sentences and documents ----------------------------------------------------


class Divided(NamedTuple):
    """The result of :func:`divide`: the number of segments, and of those with other separators than their source."""

    segments: int
    with_other_separators: int

    def __str__(self) -> str:
        return (
            f"{self.with_other_separators} of {self.segments} translated segments have another number of separators "
            "than their source"
        )


def divide(path: str, generated: str, output: str, text: Tokeniser) -> Divided:
    """Write one plain sentence for each sentence of the source, from the output of fairseq-generate.

    *path* has the segments of the source, and the H- lines of *generated* have subwords, which *text* converts.
    """
    counts = [line.split(" ").count(SEPARATOR) + 1 for line in lines_of(path)]
    translated = read_generated(lines_of(generated), generated)
    hypotheses = translated.in_order(translated.hypotheses, len(counts), path)
    differing = 0
    with written_whole(output) as (file,):
        for hypothesis, count in zip(hypotheses, counts, strict=True):
            sentences, is_same_number = divided(hypothesis.split(), count)
            differing += not is_same_number
            for sentence in sentences:
                file.write(text.plain(sentence).encode("utf-8") + b"\n")
    return Divided(len(counts), differing)


def join_documents(boundaries: str, sentences: str, output: str) -> int:
    """Write each document as one line: its *sentences*, joined by blanks. Returns the number of documents.

    *boundaries* has blank lines between documents, and the same number of other lines as *sentences*.
    """
    lines = list(lines_of(sentences))
    by_text = groupby(lines_of(boundaries), lambda line: bool(line.strip()))
    sizes = [len(list(document)) for is_text, document in by_text if is_text]
    if sum(sizes) != len(lines):
        raise InputError(f"{sentences}: has {len(lines)} lines, and {boundaries} has {sum(sizes)} that are not blank")
    pending = iter(lines)
    with written_whole(output) as (file,):
        for size in sizes:
            document = " ".join(filter(None, islice(pending, size)))
            file.write(document.replace("\r", " ").encode("utf-8") + b"\n")  # sacrebleu ends lines at CR too
    return len(sizes)


# -- the command -------------------------------------------------------------------------------------


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="recipes.text.segments", description=__doc__.partition("\n")[0])
    tools = parser.add_subparsers(dest="tool", required=True)

    flag = tools.add_parser("join", help="join consecutive sentences of documents to segments").add_argument
    flag("--source-lang", required=True, metavar="LANG")
    flag("--target-lang", required=True, metavar="LANG")
    flag("--input", required=True, metavar="PREFIX", help="reads PREFIX.LANG of both, in subwords")
    flag("--output", required=True, metavar="PREFIX", help="writes PREFIX.LANG of both")
    flag("--tokens", required=True, type=int, metavar="N", help="subwords of the longest segments, on either side")
    share = "for training: share of the sentences in segments, of random lengths; default: all, in the longest that fit"
    flag("--share", type=float, metavar="P", help=share)

    flag = tools.add_parser("divide", help="write the sentences of translated segments as plain text").add_argument
    flag("--segments", required=True, metavar="FILE", help="the segments of the source, in subwords")
    flag("--generated", required=True, metavar="FILE", help="the output of fairseq-generate")
    flag("--output", required=True, metavar="FILE", help="one sentence a line, as many as in the source")
    flag("--counts", required=True, metavar="FILE", help="writes the numbers of segments as JSON")
    flag("--subwords", required=True, metavar="FILE", help="the subword model")
    languages = "a tokeniser of Moses for these languages was used; default: none"
    flag("--moses", nargs=2, metavar=("SOURCE", "TARGET"), help=languages)

    flag = tools.add_parser("documents", help="join the sentences of each document to one line").add_argument
    flag("--boundaries", required=True, metavar="FILE", help="a text with blank lines between documents")
    flag("--input", required=True, metavar="FILE", help="a sentence for each line of --boundaries that is not blank")
    flag("--output", required=True, metavar="FILE", help="one document a line")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    with ending_in_one_sentence("recipes.text.segments"):
        if args.tool == "join":
            if args.tokens < 1:
                raise InputError(f"--tokens {args.tokens}: must be 1 or more")
            if args.share is not None and not 0 <= args.share <= 1:
                raise InputError(f"--share {args.share}: must be from 0 to 1")
            langs = (args.source_lang, args.target_lang)
            sources, outputs = ([f"{prefix}.{lang}" for lang in langs] for prefix in (args.input, args.output))
            for path in outputs:
                refuse_output(path)
            print(f"{args.output}: {join(sources, outputs, args.tokens, args.share)}")
            return
        refuse_output(args.output)
        if args.tool == "documents":
            print(f"{args.output}: {join_documents(args.boundaries, args.input, args.output)} documents")
            return
        kind = "sentencepiece" if args.subwords.endswith(SUBWORDS["sentencepiece"]) else "subword_nmt"
        moses = args.moses and {"source": args.moses[0], "target": args.moses[1], "dash_splits": False}
        text = Tokeniser("", {"moses": moses, "subwords": {"kind": kind, "file": args.subwords}})
        counts = divide(args.segments, args.generated, args.output, text)
        write_whole(Path(args.counts), json.dumps(counts._asdict()) + "\n")
        print(f"{args.output}: {counts}")


if __name__ == "__main__":
    main()
