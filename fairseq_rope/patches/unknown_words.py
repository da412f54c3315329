"""``--replace-unk``: an unknown word of the output becomes the source word that it is aligned with.

These functions replace fairseq's; the table in ``patches/table.py`` says why.
"""

import functools
from typing import Any

import torch
from fairseq import tokenizer, utils
from fairseq.sequence_generator import SequenceGeneratorWithAlignment
from fairseq.tasks import FairseqTask

_build_generator = FairseqTask.build_generator
_get_interactive_tokens_and_lengths = FairseqTask.get_interactive_tokens_and_lengths
_load_align_dict = utils.load_align_dict
_post_process_prediction = utils.post_process_prediction
NO_FILE = "@@ "  # the value of --replace-unk without a file


class Alignment(list):  # type: ignore[type-arg]
    """An alignment as ``--print-alignment`` prints it, with the source word of each target token.

    Attributes:
        positions: of source tokens, by the position of a target token
        source: the source tokens, as text
    """

    positions: dict[int, int]
    source: list[str]


class Generator(SequenceGeneratorWithAlignment):
    """fairseq's search with hard or soft alignments, which are an :class:`Alignment` each.

    Args:
        task: its source dictionary may get unknown words after this call; the model still reads ``<unk>``
    """

    extract_alignment: Any

    def __init__(self, models: Any, tgt_dict: Any, *, task: Any, **kwargs: Any) -> None:
        super().__init__(models, tgt_dict, **kwargs)
        self.task, self.known, self.printed = task, len(task.source_dictionary), self.extract_alignment
        self.extract_alignment = self._extract

    def _extract(self, attention: torch.Tensor, *sentences: Any) -> Alignment:
        alignment = Alignment(self.printed(attention, *sentences))
        pairs = utils.extract_hard_alignment(attention, *sentences)
        alignment.positions = {target: source for source, target in pairs}
        return alignment

    def generate(self, models: Any, sample: dict[str, Any], **kwargs: Any) -> Any:
        net_input, dictionary = sample["net_input"], self.task.source_dictionary
        tokens = net_input["src_tokens"]
        known = tokens.masked_fill(tokens >= self.known, dictionary.unk())
        finalized = super().generate(models, {**sample, "net_input": {**net_input, "src_tokens": known}}, **kwargs)
        for source, hypotheses in zip(self._sources(sample), finalized):
            for hypothesis in hypotheses:
                hypothesis["alignment"].source = source
        return finalized

    def _sources(self, sample: dict[str, Any]) -> list[list[str]]:
        """Return the tokens of each source as text, without padding and the end."""
        dictionary = self.task.source_dictionary
        if "id" in sample:  # fairseq-generate: --dataset-impl raw keeps the text
            for dataset in self.task.datasets.values():
                if hasattr(getattr(dataset, "src", None), "get_original_text"):
                    texts = map(dataset.src.get_original_text, sample["id"].tolist())
                    return [tokenizer.tokenize_line(text) for text in texts]
        special = dictionary.pad(), dictionary.eos()
        rows = sample["net_input"]["src_tokens"].tolist()
        return [[dictionary[token] for token in row if token not in special] for row in rows]


@functools.wraps(_build_generator)
def build_generator(
    self: Any,
    models: Any,
    args: Any,
    seq_gen_cls: Any = None,
    extra_gen_cls_kwargs: Any = None,
    *more: Any,
    **kwargs: Any,
) -> Any:
    translates = getattr(self, "source_dictionary", None) is not None and all(hasattr(m, "encoder") for m in models)
    replaces = getattr(args, "replace_unk", None) is not None
    if translates and (replaces or getattr(args, "print_alignment", None)):
        for model in models:
            for module in model.modules():
                if hasattr(module, "need_attn"):  # turned off before, because no alignment is printed
                    module.need_attn = True
    if not replaces or seq_gen_cls is not None or not translates:
        return _build_generator(self, models, args, seq_gen_cls, extra_gen_cls_kwargs, *more, **kwargs)
    alignments = {"task": self, "print_alignment": getattr(args, "print_alignment", None) or "hard"}
    generator = _build_generator(
        self, models, args, Generator, {**(extra_gen_cls_kwargs or {}), **alignments}, *more, **kwargs
    )
    self.keeps_unknown_words = isinstance(generator, Generator)  # not with --score-reference
    return generator


@functools.wraps(_get_interactive_tokens_and_lengths)
def get_interactive_tokens_and_lengths(self: Any, lines: Any, encode_fn: Any) -> Any:
    if not getattr(self, "keeps_unknown_words", False):
        return _get_interactive_tokens_and_lengths(self, lines, encode_fn)

    def encode(line: str) -> str:
        tokens: str = encode_fn(line)
        for token in tokenizer.tokenize_line(tokens):
            self.source_dictionary.add_symbol(token, n=0)  # gets a number above those that the model knows
        return tokens

    return _get_interactive_tokens_and_lengths(self, lines, encode)


@functools.wraps(_load_align_dict)
def load_align_dict(replace_unk: str | None) -> Any:
    return _load_align_dict("" if replace_unk == NO_FILE else replace_unk)


@functools.wraps(_post_process_prediction)
def post_process_prediction(
    hypo_tokens: Any,
    src_str: str,
    alignment: Any,
    align_dict: dict[str, str] | None,
    tgt_dict: Any,
    remove_bpe: str | None = None,
    extra_symbols_to_ignore: Any = None,
) -> Any:
    if align_dict is None or not isinstance(alignment, Alignment):
        return _post_process_prediction(
            hypo_tokens, src_str, alignment, align_dict, tgt_dict, remove_bpe, extra_symbols_to_ignore
        )
    # Tokens are replaced before subwords are joined, because alignments are between tokens.
    tokens = hypo_tokens.tolist()
    for target, source in alignment.positions.items():
        if tokens[target] == tgt_dict.unk() and source < len(alignment.source):
            word = alignment.source[source]
            tokens[target] = tgt_dict.add_symbol(align_dict.get(word, word), n=0)
    text = tgt_dict.string(torch.tensor(tokens), remove_bpe, extra_symbols_to_ignore=extra_symbols_to_ignore)
    return tgt_dict.encode_line(text, add_if_not_exist=True), text, alignment
