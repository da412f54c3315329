"""Binary data for fairseq from lines of text, in characters or subwords, and the readers of the experiments' files."""

import io
import json
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from fairseq_rope.errors import InputError
from fairseq_rope.lines import read_lines
from fairseq_rope.text import subwords
from fairseq_rope.text.subwords import read_sentencepiece

SPACE = "▁"  # stands for a blank, as in SentencePiece
SUBWORDS = subwords.SUBWORDS["sentencepiece"]  # beside dict.txt, unless tokens are characters
Tokenise = Callable[[str], list[str]]


def characters(line: str) -> list[str]:
    """The characters of *line*, with SPACE for each blank between them."""
    return [SPACE if character.isspace() else character for character in line.strip()]


def learn_tokens(lines: Sequence[str], vocabulary: int, folder: Path) -> Tokenise:
    """Write the dictionary of the training text *lines* to *folder*, and return what splits a line into its tokens.

    *vocabulary* is the number of subwords that SentencePiece learns; 0: tokens are characters.
    """
    from fairseq.data import Dictionary

    folder.mkdir(parents=True, exist_ok=True)
    if vocabulary:
        import sentencepiece

        model = io.BytesIO()
        options: dict[str, Any] = {"sentence_iterator": iter(lines), "model_writer": model, "minloglevel": 2}
        options |= {"model_type": "bpe", "vocab_size": vocabulary, "character_coverage": 0.9999}
        options["max_sentence_length"] = 2**30  # bytes; the trainer skips longer lines
        try:
            sentencepiece.SentencePieceTrainer.train(**options)
        except RuntimeError as error:
            raise InputError(f"subwords: {vocabulary}: SentencePiece: {' '.join(str(error).split())}") from None
        (folder / SUBWORDS).write_bytes(model.getvalue())
    tokenise = tokens_in(folder)
    pieces = _pieces(folder) if vocabulary else None
    dictionary = Dictionary()
    for line in lines:
        for token in tokenise(line):
            if pieces is None or token in pieces:  # SentencePiece returns the text of characters that it does not know
                dictionary.add_symbol(token)
    dictionary.finalize(padding_factor=1)
    dictionary.save(str(folder / "dict.txt"))
    return tokenise


def _pieces(folder: Path) -> set[str]:
    model = read_sentencepiece(str(folder / SUBWORDS))
    return {model.id_to_piece(number) for number in range(len(model))}


def tokens_in(folder: Path) -> Tokenise:
    """What splits a line into the tokens of the dictionary in *folder*."""
    if not (folder / SUBWORDS).exists():
        return characters
    model = read_sentencepiece(str(folder / SUBWORDS))
    return lambda line: model.encode(line, out_type=str)


def binarise(lines: Iterable[Sequence[str]], dictionary: Path, prefix: Path) -> None:
    """Write the *lines* of tokens as fairseq-preprocess does: ``PREFIX.bin`` and ``PREFIX.idx``."""
    from fairseq.data import Dictionary

    words = Dictionary.load(str(dictionary))
    write_binary(
        (words.encode_line(line, line_tokenizer=list, add_if_not_exist=False) for line in lines), len(words), prefix
    )


def write_binary(items: Iterable[Any], vocabulary: int, prefix: Path) -> None:
    """Write *items*, each the tensor of a line's token numbers, to ``PREFIX.bin`` and ``PREFIX.idx``."""
    from fairseq.data.indexed_dataset import make_builder

    prefix.parent.mkdir(parents=True, exist_ok=True)
    builder = make_builder(f"{prefix}.bin", impl="mmap", vocab_size=vocabulary)
    for item in items:
        builder.add_item(item)
    builder.finalize(f"{prefix}.idx")


def pages_of(path: Path) -> list[list[str]]:
    """The paragraphs of each page or document in *path*; blank lines separate them."""
    pages: list[list[str]] = [[]]
    for line in read_lines(str(path)):
        if line.strip():
            pages[-1].append(line.strip())
        elif pages[-1]:
            pages.append([])
    return [page for page in pages if page]


def triples_of(path: Path) -> list[tuple[str, str, str, int]]:
    """A, B, C and the number (0 or 1) of the one of B and C that belongs to A, for each line of JSON in *path*.

    Raises an InputError that names the line.
    """
    triples = []
    for number, line in enumerate(read_lines(str(path)), 1):
        try:
            entry = json.loads(line)
            *texts, label = (entry[key] for key in ("A", "B", "C", "label"))
            if label not in ("B", "C") or not all(isinstance(text, str) and text.strip() for text in texts):
                raise ValueError
        except (ValueError, KeyError, TypeError):
            form = 'must be JSON with the texts "A", "B" and "C", and the "label" "B" or "C"'
            raise InputError(f"{path}, line {number}: {form}") from None
        triples.append((*texts, "BC".index(label)))
    return triples


def rows_of(path: Path, columns: Sequence[str]) -> list[list[str]]:
    """The *columns* of a tab-separated table with a header, one list for each row, in which no cell is empty.

    GLUE's files have no quoting. A few rows of QQP have too few cells: up to one row in a hundred is left out if it
    does not fit. Raises an InputError that names the line of the first one if there are more.
    """
    head, *lines = read_lines(str(path))
    names = head.rstrip("\r").split("\t")
    for column in columns:
        if column not in names:
            raise InputError(f"{path}: has no column {column}; it has {', '.join(names)}")
    rows, wrong = [], []
    for number, line in enumerate(lines, 2):
        cells = line.rstrip("\r").split("\t")
        row = [cells[names.index(column)].strip() for column in columns] if len(cells) == len(names) else []
        if row and all(row):
            rows.append(row)
        else:
            of_head = f"and must have {len(names)}, as its header, none of them empty"
            wrong.append(f"{path}, line {number}: has {len(cells)} cells, {of_head}")
    if len(wrong) * 100 > len(lines):
        raise InputError(wrong[0])
    if not rows:
        raise InputError(f"{path}: has a header and no rows")
    if wrong:
        print(f"{path}: {len(wrong)} of {len(lines)} rows are left out, the first one in {wrong[0]}", flush=True)
    return rows


def passages_of(page: Sequence[str], length: int) -> list[str]:
    """The first *length* characters of each group of consecutive paragraphs that has so many, joined by blanks."""
    passages, joined = [], ""
    for paragraph in page:
        joined = f"{joined} {paragraph}".lstrip()
        if len(joined) >= length:
            passages.append(joined[:length])
            joined = ""
    return passages


def following_pairs(pages: Sequence[Sequence[str]]) -> list[tuple[str, str, str]]:
    """Pairs of passages, and "1" if the second one follows the first one, else "0": BERT's next sentence prediction.

    Each passage of a page but the last is in one pair of each label. The wrong one is drawn from another page (Devlin
    et al. 2019, arXiv:1810.04805, section 3.1).
    """
    drawn = random.Random(1)
    pairs = []
    for number, page in enumerate(pages):
        for first, second in zip(page, page[1:] if len(pages) > 1 else []):
            other = drawn.randrange(len(pages) - 1)
            other += other >= number  # any page but this one
            wrong = [passage for passage in pages[other] if passage not in page]
            if wrong:
                pairs += [(first, second, "1"), (first, drawn.choice(wrong), "0")]
    return pairs
