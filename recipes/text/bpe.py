"""Learn one byte-pair encoding over both languages, and apply it (subword-nmt or sentencepiece)."""

import argparse
import io
import os
import re
import tempfile
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, permutations
from pathlib import Path

from subword_nmt import learn_bpe

from fairseq_rope.errors import InputError, ending_in_one_sentence
from fairseq_rope.files import written_whole
from fairseq_rope.lines import chunks_of, count_lines, lines_of
from fairseq_rope.text.subwords import read_bpe, read_sentencepiece
from recipes.text.lines import Convert, convert_file, progress

MIN_FREQUENCY = 2  # a rarer pair of symbols is not merged; subword-nmt's default
PATH_LENGTH = 200  # bytes
CACHED_WORDS = 500_000  # words in a process's cache of subwords, about 150 MB


def count_words(paths: Sequence[str]) -> Counter[str]:
    """The number of occurrences of each word in the files *paths*. Memory holds the words, but not the text."""
    counts: Counter[str] = Counter()
    with progress(None, sum(map(count_lines, paths)), "count words") as bar:
        for path in paths:
            for chunk in chunks_of(path):
                counts.update(re.split("[ \r\n]", chunk))
                bar.update(chunk.count("\n"))
    del counts[""]  # the split gives empty words between two blanks
    if not counts:
        raise InputError(f"{' and '.join(paths)}: contains no words")
    return counts


def learn(counts: Mapping[str, int], vocab_size: int) -> list[str]:
    """The lines of a codes file that splits the words of *counts* into about *vocab_size* different subwords.

    They equal those of ``subword-nmt learn-bpe --total-symbols --symbols VOCAB_SIZE``: one merge for each subword
    that is not a character. A character counts twice if it occurs both inside and at the end of words. Raises an
    InputError with the limit if *vocab_size* is too small for the characters or too large for the words.
    """
    within = {character for word in counts for character in word[:-1]}
    characters = len(within) + len({word[-1] for word in counts})
    if vocab_size <= characters:
        raise InputError(f"vocab_size {vocab_size}: must be more than the corpus' {characters} characters")
    codes = io.StringIO()
    if within:
        # subword-nmt's own bar would print ten lines a second into a log file.
        learn_bpe.tqdm = lambda merges: progress(merges, len(merges), "learn", " merges")
        lines = (f"{word} {count}" for word, count in counts.items())
        learn_bpe.learn_bpe(lines, codes, vocab_size, MIN_FREQUENCY, is_dict=True, total_symbols=True)
    learnt = codes.getvalue().splitlines(keepends=True)
    largest = characters + len(learnt[1:])
    if largest < vocab_size:
        raise InputError(f"vocab_size {vocab_size}: must be at most {largest} for the words of this corpus")
    return learnt


def subword_nmt_converter(codes: str) -> Convert:
    """A function that splits lines as ``subword-nmt apply-bpe --codes CODES`` does."""
    bpe = read_bpe(codes)

    def convert(lines: list[str]) -> list[str]:
        if len(bpe.cache) > CACHED_WORDS:
            bpe.cache.clear()
        return [bpe.process_line(line) for line in lines]

    return convert


def normalisation_rules() -> Iterator[str]:
    """What a SentencePiece model does with text before it splits it, as lines of ``normalization_rule_tsv``.

    Blanks of all kinds and characters that do not print become spaces, and characters are composed (Unicode's NFC).
    SentencePiece's own rules also replace the ，！？ of Chinese and the ำ of Thai, so no model can write them.
    """

    def code_points(text: str) -> str:
        return " ".join(f"{ord(character):X}" for character in text)

    for character in map(chr, (*range(1, 0x30000), *range(0xE0000, 0xE1000))):  # no others are blank or composed
        composed = unicodedata.normalize("NFC", character)
        spellings = {character} if composed != character else _other_spellings(character)
        if unicodedata.category(character) in ("Cc", "Cf", "Zs", "Zl", "Zp"):
            composed, spellings = " ", {character} - {" "}
        yield from (f"{code_points(spelling)}\t{code_points(composed)}\n" for spelling in sorted(spellings))


def _other_spellings(character: str) -> set[str]:
    """The texts that Unicode regards as equal to *character*: a letter and its marks, some of them composed."""
    decomposed = unicodedata.normalize("NFD", character)
    texts = {decomposed[0] + "".join(marks) for marks in permutations(decomposed[1:])}
    parts = ((text[:end], text[end:]) for text in texts for end in range(1, len(text) + 1))
    partly = {unicodedata.normalize("NFC", begin) + end for begin, end in parts} - {character}
    return {text for text in partly if unicodedata.normalize("NFD", text) == decomposed}


def train_sentencepiece(paths: Sequence[str], vocab_size: int) -> bytes:
    """A SentencePiece BPE model with *vocab_size* pieces for the text in the files *paths*.

    Every character gets a piece, and lines may have any length. The pieces do not depend on the number of cores.
    """
    import sentencepiece

    # Read all of the text first, because the trainer would hide an error of the reader.
    if not sum(bool(line.split()) for path in paths for line in lines_of(path)):
        raise InputError(f"{' and '.join(paths)}: contains no words")
    lines = progress(chain.from_iterable(map(lines_of, paths)), sum(map(count_lines, paths)), "read")
    model = io.BytesIO()
    try:
        with tempfile.TemporaryDirectory() as folder:
            # The model contains this path, so it has the same length on all machines, and is removed from the model.
            rules = Path(folder, "_" * max(1, PATH_LENGTH - 1 - len(os.fsencode(folder))))
            rules.write_text("".join(normalisation_rules()))
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(lines), model_writer=model,
                model_type="bpe", vocab_size=vocab_size, character_coverage=1.0, normalization_rule_tsv=str(rules),
                max_sentence_length=2**30,  # bytes; the trainer skips longer lines
                minloglevel=2,  # errors only
            )  # fmt: skip
    except RuntimeError as error:  # it gives the limit if the size is too small or too large
        raise InputError(f"vocab_size {vocab_size}: {str(error).rpartition('] ')[2] or error}") from None
    return model.getvalue().replace(os.fsencode(rules), b"_" * len(os.fsencode(rules)))


def sentencepiece_converter(model: str) -> Convert:
    """A function that splits lines as fairseq's ``--bpe sentencepiece --sentencepiece-model MODEL`` does."""
    processor = read_sentencepiece(model)

    def convert(lines: list[str]) -> list[str]:
        return [" ".join(pieces) for pieces in processor.encode(lines, out_type=str, num_threads=1)]

    return convert


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="recipes.text.bpe", description=__doc__)
    tools = parser.add_subparsers(dest="tool", required=True)
    for name in ("learn", "sentencepiece-train"):
        flag = tools.add_parser(name, help="learn a byte-pair encoding").add_argument
        flag("--vocab-size", required=True, type=int, metavar="N", help="number of subwords")
        flag("--output", required=True, metavar="FILE")
        flag("inputs", nargs="+", metavar="INPUT", help="UTF-8 text of all languages")
    for name, flag_of_model in (("apply", "--codes"), ("sentencepiece-encode", "--model")):
        flag = tools.add_parser(name, help="split text into subwords").add_argument
        flag(flag_of_model, required=True, dest="learnt", metavar="FILE", help="the output of learning")
        flag("--input", required=True, metavar="FILE", help="UTF-8 text, one sentence a line")
        flag("--output", required=True, metavar="FILE", help="the same lines in subwords")
    args = parser.parse_args(argv)
    with ending_in_one_sentence("recipes.text.bpe"):
        if args.tool in ("apply", "sentencepiece-encode"):
            converter = subword_nmt_converter if args.tool == "apply" else sentencepiece_converter
            make_converter = partial(converter, args.learnt)
            convert_file(make_converter, args.input, args.output, f"{args.tool} {args.input}")
            return
        if args.tool == "learn":
            codes = learn(count_words(args.inputs), args.vocab_size)
            made, contents = f"{len(codes) - 1} merges", "".join(codes).encode("utf-8")
        else:
            made, contents = f"{args.vocab_size} pieces", train_sentencepiece(args.inputs, args.vocab_size)
        with written_whole(args.output) as (file,):
            file.write(contents)
        print(f"{args.output}: {made}")


if __name__ == "__main__":
    main()
