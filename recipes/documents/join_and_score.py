"""Divide translated segments into sentences, join these to documents, and score both with sacreBLEU.

    python -m recipes.documents.join_and_score --target-lang de --map data/test.segments.tsv \\
        --translations translations.de --references data/test.sentences.de --output translated

It writes ``translated.sentences``, one sentence a line, and ``translated.documents``, one document a line.
"""

import argparse
from collections.abc import Iterable, Sequence
from itertools import groupby, islice

from sacrebleu.metrics import BLEU

from fairseq_rope.errors import InputError, ending_in_one_sentence, refuse_output
from fairseq_rope.files import written_whole
from fairseq_rope.lines import read_lines
from fairseq_rope.text.languages import TOKENIZERS, default_tokenize
from fairseq_rope.text.segments import divided
from recipes.documents.segments import Segment, read_map


def join_documents(segments: Iterable[Segment], sentences: Sequence[str]) -> list[str]:
    """Return one line for each document: its *sentences*, joined by blanks. Empty sentences are left out."""
    pending = iter(sentences)
    by_document = groupby(segments, lambda segment: segment.document)
    sizes = (sum(segment.sentences for segment in document) for _, document in by_document)
    return [" ".join(filter(None, islice(pending, size))) for size in sizes]


def read(path: str, count: int, unit: str) -> list[str]:
    """Return the *count* lines of *path*. Raises an InputError if it has another number of lines."""
    lines = read_lines(path, may_be_blank=True)
    if len(lines) != count:
        raise InputError(f"{path}: has {len(lines)} lines, and the map has {count} {unit}")
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="recipes.documents.join_and_score", description=__doc__.partition("\n")[0])
    flag = parser.add_argument
    flag("--target-lang", required=True, metavar="LANG", help="selects the tokeniser of sacreBLEU")
    flag("--map", required=True, metavar="FILE", help="the map that recipes.documents.segments wrote")
    flag("--translations", required=True, metavar="FILE", help="plain text, one segment a line")
    flag("--references", required=True, nargs="+", metavar="FILE", help="plain text, one sentence a line")
    flag("--output", required=True, metavar="PREFIX", help="writes PREFIX.sentences and PREFIX.documents")
    flag("--tokenize", choices=TOKENIZERS, help="default: the one for --target-lang")
    args = parser.parse_args(argv)
    with ending_in_one_sentence("recipes.documents.join_and_score"):
        outputs = [f"{args.output}.{unit}" for unit in ("sentences", "documents")]
        for path in outputs:
            refuse_output(path)
        segments = read_map(args.map)
        translations = read(args.translations, len(segments), "segments")
        count = sum(segment.sentences for segment in segments)
        references = [read(path, count, "sentences") for path in args.references]
        sentences: list[str] = []
        different = 0
        for segment, translation in zip(segments, translations, strict=True):
            of_segment, is_same = divided(translation.split(), segment.sentences)
            sentences += map(" ".join, of_segment)
            different += not is_same
        documents = join_documents(segments, sentences)
        with written_whole(*outputs) as files:
            for file, lines in zip(files, (sentences, documents), strict=True):
                file.writelines(f"{line}\n".encode() for line in lines)
        print(f"{different} of {len(segments)} translated segments have another number of separators than their source")
        bleu = BLEU(tokenize=args.tokenize or default_tokenize(args.target_lang), force=True)
        of_documents = [join_documents(segments, reference) for reference in references]
        print(f"BLEU of {len(documents)} documents: {bleu.corpus_score(documents, of_documents).score:.2f}")
        print(f"BLEU of {len(sentences)} sentences: {bleu.corpus_score(sentences, references).score:.2f}")
        print(f"signature: {bleu.get_signature()}")


if __name__ == "__main__":
    main()
