"""``--replace-unk``: an unknown word of the output becomes the source word that it is aligned with."""

from typing import Any

import torch
from fairseq import tokenizer, utils
from fairseq.sequence_generator import SequenceGeneratorWithAlignment
from fairseq.tasks import FairseqTask

from .registry import replaces

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


@replaces(
    "fairseq.tasks.FairseqTask.build_generator",
    prevents="wrong results",
    until="fairseq's search returns the alignment that its replace_unk expects",
    wraps=_build_generator,
)
def build_generator(
    self: Any,
    models: Any,
    args: Any,
    seq_gen_cls: Any = None,
    extra_gen_cls_kwargs: Any = None,
    *more: Any,
    **kwargs: Any,
) -> Any:
    """Return a search that keeps alignments for --replace-unk.

    With --replace-unk, fairseq's search returns no alignment, or with --print-alignment one of another form than the
    replacement expects. So the first unknown word in an output ends the program. Here the search returns alignments for
    --replace-unk, also if none are printed. It turns attention weights on for print_alignment, also if
    make_generation_fast_ has turned them off.
    """
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


@replaces(
    "fairseq.tasks.FairseqTask.get_interactive_tokens_and_lengths",
    prevents="wrong results",
    until="fairseq-interactive copies the words of its input",
    wraps=_get_interactive_tokens_and_lengths,
)
def get_interactive_tokens_and_lengths(self: Any, lines: Any, encode_fn: Any) -> Any:
    """Return the tokens of lines, whose unknown words are added to the source dictionary.

    With --replace-unk, fairseq-interactive forgets the words that are not in the source dictionary, and could only copy
    <unk>. Here they are kept, and the S- lines show them; the model still reads <unk>.
    """
    if not getattr(self, "keeps_unknown_words", False):
        return _get_interactive_tokens_and_lengths(self, lines, encode_fn)

    def encode(line: str) -> str:
        tokens: str = encode_fn(line)
        for token in tokenizer.tokenize_line(tokens):
            self.source_dictionary.add_symbol(token, n=0)  # gets a number above those that the model knows
        return tokens

    return _get_interactive_tokens_and_lengths(self, lines, encode)


@replaces(
    "fairseq.utils.load_align_dict",
    prevents="an unreadable error",
    until="fairseq's --replace-unk works without a file",
    wraps=_load_align_dict,
)
def load_align_dict(replace_unk: str | None) -> Any:
    """Return the dictionary of --replace-unk, which is empty without a file.

    --replace-unk without a file looks for a file with the name '@@ '. Here it copies source words.
    """
    return _load_align_dict("" if replace_unk == NO_FILE else replace_unk)


@replaces(
    "fairseq.utils.post_process_prediction",
    prevents="wrong results",
    until="fairseq replaces unknown words before it joins subwords",
    wraps=_post_process_prediction,
)
def post_process_prediction(
    hypo_tokens: Any,
    src_str: str,
    alignment: Any,
    align_dict: dict[str, str] | None,
    tgt_dict: Any,
    remove_bpe: str | None = None,
    extra_symbols_to_ignore: Any = None,
) -> Any:
    """Return the tokens and the text of a hypothesis, with its unknown words replaced.

    fairseq joins subwords before it replaces unknown words, although alignments are between subwords. Here unknown
    words are replaced first.
    """
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
