"""The checks of an exported model: it scores, tokenises and translates sample sentences as the checkpoint does.

The checks are necessary because a model with wrong positions loads without an error and translates badly.
"""

import itertools
import math
import operator
import random
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from ..text.languages import default_tokenize
from ..text.segments import divided, joined
from ..text.tokens import Pair, Tokeniser, Tokens
from .ctranslate2_search import Search, log_probs
from .ctranslate2_support import position_of_side, scaling_of
from .exported_folder import ExportError, separator_of

if TYPE_CHECKING:
    from fairseq.data import Dictionary

# The allowed difference between the log-probabilities of a word in the exported model and in the checkpoint (see
# check_scores()). docs/serving.md has the differences of trained models.
BOUNDS = {"float32": 1e-4, "int16": 0.02, "float16": 0.02, "bfloat16": 0.1, "int8": 0.3, "int8_float32": 0.3}
SAMPLES = 64
LONGEST_SOURCE = 200  # tokens of the validation set's sources that the checkpoint translates
SHORTLIST_SAMPLES = 1000
SHORTLIST_LOSS = 0.2  # sacreBLEU that a shortlist may cost
LONGEST_SAMPLE = 128  # random words
LONGEST_SCALED_SAMPLE = 512  # with RoPE scaling, which is for long sentences
# The share of validation sentences that must have the same tokens when they are tokenised from plain text, and
# the share that the model must translate as the checkpoint does.
SAME_SOURCES, SAME_TRANSLATIONS = 58 / 64, 32 / 64
FEWEST_SOURCES = 20  # without unknown words, so that a check of the tokens says something

NEEDED = f"a validation set with sources of up to {LONGEST_SOURCE} tokens"  # by the checks

Pairs = list[tuple[list[int], list[int]]]
T = TypeVar("T")


def random_pairs(task: Any, longest: int) -> Pairs:
    """Return SAMPLES pairs of sentences of 1 to *longest* random words, which need no data, as numbers."""
    draw = random.Random(1)

    def sentence(dictionary: "Dictionary", length: int) -> list[int]:
        return [draw.randrange(dictionary.nspecial, len(dictionary)) for _ in range(length)]

    pairs = []
    for n in range(SAMPLES):
        length = 1 + longest * n * n // SAMPLES**2  # more short than long
        target = min(max(1, length + n % 5 - 2), longest)
        pairs.append((sentence(task.source_dictionary, length), sentence(task.target_dictionary, target)))
    return pairs


def evenly(items: Sequence[T], count: float) -> list[T]:
    """Return up to *count* of *items*, from all parts of them."""
    taken = int(min(count, len(items)))
    return [items[n * len(items) // taken] for n in range(taken)]


def validation_pairs(task: Any, count: float = SAMPLES, longest: float = LONGEST_SOURCE) -> Pairs:
    """Return up to *count* pairs from all parts of the validation set, with sources of up to *longest* tokens.

    There are none if the data have no such set.
    """
    from fairseq.tasks.translation import TranslationTask

    if not isinstance(task, TranslationTask):
        return []
    try:
        if "valid" not in task.datasets:
            task.load_dataset("valid")
        data = task.dataset("valid")
        sizes = zip(data.src_sizes, data.tgt_sizes) if data.tgt is not None else ()
        fit = [n for n, (source, target) in enumerate(sizes) if 1 < source <= longest + 1 and target > 1]
        return [(data.src[n].tolist()[:-1], data.tgt[n].tolist()[:-1]) for n in evenly(fit, count)]
    except FileNotFoundError:
        return []
    except Exception as error:  # fairseq does not check its files; struct, NumPy and mmap raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        damage = f"--data {task.cfg.data}: its validation set is damaged and cannot be read ({reason})"
        raise ExportError(damage) from error


def torch_scores(model: Any, task: Any, pairs: Pairs) -> list[list[float]]:
    """Return, for each target, the log-probability of each word and of the end in the checkpoint's model."""
    import torch

    end = task.target_dictionary.eos()
    scores = []
    with torch.no_grad():
        for source, target in pairs:
            src_tokens = torch.tensor([[*source, task.source_dictionary.eos()]])
            expected = torch.tensor([[*target, end]])
            out = model(src_tokens, torch.tensor([src_tokens.size(1)]), torch.tensor([[end, *target]]))
            lprobs = model.get_normalized_probs(out, log_probs=True)
            scores.append(lprobs.gather(2, expected.unsqueeze(2)).flatten().tolist())
    return scores


class Reference:
    """The checkpoint's scores and translations of sample sentences, each computed when it is first needed.

    The model is in eval mode, float32 and on the CPU. *settings* are those of the exported folder.
    """

    def __init__(self, model: Any, task: Any, settings: dict[str, Any]) -> None:
        self.model, self.task, self.settings = model, task, settings
        most = [settings["positions"][side] or math.inf for side in ("source", "target")]
        is_scaled = any(scaling_of(position_of_side(side)) is not None for side in (model.encoder, model.decoder))
        limit = LONGEST_SCALED_SAMPLE if is_scaled else LONGEST_SAMPLE
        longest = int(min(limit, *(count - 1 for count in most)))
        self.validation = [
            pair
            for pair in validation_pairs(task)
            if all(len(line) < count for line, count in zip(pair, most))
            and (longest == limit or max(map(len, pair)) <= longest)
        ]
        self.pairs = [*random_pairs(task, longest), *self.validation]

    @cached_property
    def scores(self) -> list[list[float]]:
        """:func:`torch_scores` of ``pairs``."""
        return torch_scores(self.model, self.task, self.pairs)

    @cached_property
    def translations(self) -> list[tuple[list[str], list[str]]]:
        """The sources of ``validation``, sorted by length, with their translations by fairseq's search."""
        import torch
        from fairseq.sequence_generator import SequenceGenerator

        source_words, target_words, settings = self.task.source_dictionary, self.task.target_dictionary, self.settings
        options = {"beam_size": settings["beam"], "len_penalty": settings["lenpen"]}
        options |= {"max_len_a": 1, "max_len_b": settings["max_len_b"]}
        # The exported model has no limit but the number of its positions.
        options["max_len"] = settings["positions"]["target"] or sys.maxsize
        generator = SequenceGenerator([self.model], target_words, **options)
        translations = []
        # In batches of one length, because fairseq has one output limit for a whole batch.
        for _, batch in itertools.groupby(sorted((source for source, _ in self.validation), key=len), key=len):
            sources = list(batch)
            tokens = torch.tensor([[*source, source_words.eos()] for source in sources])
            net_input = {"src_tokens": tokens, "src_lengths": torch.full((len(sources),), tokens.size(1))}
            with torch.no_grad():
                hypotheses = generator.generate([self.model], {"net_input": net_input})
            for source, nbest in zip(sources, hypotheses):
                best = [target_words[word] for word in nbest[0]["tokens"][:-1].tolist()]
                translations.append(([source_words[word] for word in source], best))
        return translations


def agreeing(translations: Sequence[Tokens], expected: Sequence[Tokens], separator: str) -> tuple[int, int]:
    """Return how many sentences of *translations* are those of *expected*, and the number of all sentences.

    Both are in words. Each sentence of a segment counts; *separator* divides segments, if it is not "".
    """
    same = total = 0
    for segments in zip(translations, expected):
        # With an end, the last sentence of a translation is only equal to another last one.
        translated, reference = (
            divided([*words, "</s>"], words.count(separator) + 1, separator)[0] for words in segments
        )
        same += sum(map(operator.eq, translated, reference))
        total += len(reference)
    return same, total


def refuse_below(needed: float, count: int, report: str, force: bool) -> None:
    """Raise an ExportError that begins with *report* if *count* is below *needed*, unless *force*."""
    if count < needed and not force:
        raise ExportError(
            f"{report}, and {math.ceil(needed)} are needed: nothing was written (--force writes it anyway)"
        )


def refuse_lower_bleu(lower: float, score: float, loss: float, report: str, force: bool) -> None:
    """Raise an ExportError that begins with *report* if BLEU *lower* is more than *loss* below *score*."""
    if lower < score - loss and not force:
        raise ExportError(f"{report} may be {loss} lower: nothing was written (--force writes it anyway)")


def bleu(translations: Sequence[str], references: Sequence[str], language: str) -> float:
    """Return sacreBLEU of *translations* into *language*, with its tokeniser for that language."""
    import sacrebleu

    options = {"tokenize": default_tokenize(language), "force": True}
    return float(sacrebleu.corpus_bleu(translations, [references], **options).score)


def check_scores(
    exported: Sequence[Sequence[float]], computed: str, expected: Sequence[Sequence[float]], quantization: str
) -> tuple[str, str]:
    """Compare the scores of the exported model with *expected*, and return the type of the weights and a sentence.

    The score of a sentence is the mean log-probability of its words and its end. In float32, BOUNDS are for each
    sentence; quantised, for the mean. An ExportError is raised if the scores differ by more.

    Args:
        exported: the log-probabilities of each word and of the end of each sentence
        computed: the type of the computation on this machine
        expected: those of the checkpoint
        quantization: the type of the weights
    """
    if [len(scores) for scores in exported] != [len(scores) for scores in expected]:
        raise ExportError("CTranslate2 does not score every word: nothing was written")
    if quantization != "float32":
        distances = [[abs(a - b) for a, b in zip(*scores)] for scores in zip(expected, exported)]
        measured, what = statistics.mean(map(statistics.mean, distances)), "on average"
    else:
        means = [abs(sum(a) - sum(b)) / len(a) for a, b in zip(expected, exported)]
        measured, what = math.nan if any(map(math.isnan, means)) else max(means), "at most"
    bound, name = BOUNDS[quantization], quantization
    if computed not in (name, f"{name}_float32"):  # this CPU does not support the type
        bound = max(bound, BOUNDS.get(computed, 0.0))
        name += f" (computed in {computed} on this machine)"
    if not measured <= bound:  # also true for NaN
        differ = f"the exported model's scores differ from the checkpoint's by {measured:.2g} per word {what}"
        raise ExportError(f"{differ}, and {bound:g} is allowed: nothing was written")
    report = f"{name}: the scores of {len(expected)} sentences differ from the checkpoint's by {measured:.1e} per "
    return name, f"{report}word {what} ({bound:g} is allowed)"


def check_model(folder: str, reference: Reference, quantization: str, force: bool = False) -> str:
    """Compare the model in *folder* with the checkpoint, and return sentences that report the differences.

    :func:`check_scores` says what is allowed. SAME_TRANSLATIONS is needed, too, without *force*: scores do not show
    what is wrong in a search, such as its positions.
    """
    pairs = list(words_of_pairs(reference.task, reference.pairs))
    name, report = check_scores(*log_probs(folder, pairs), reference.scores, quantization)
    if reference.validation:
        search = Search(folder, reference.settings)
        translations = [best for [(best, _)] in search([source for source, _ in reference.translations])]
        search.close()
        expected = [translation for _, translation in reference.translations]
        same, count = agreeing(translations, expected, separator_of(reference.settings))
        translated = "sentences of the validation set are translated into the same words as by the checkpoint"
        compared = f"{name}: {same} of {count} {translated}"
        refuse_below(SAME_TRANSLATIONS * count, same, compared, force)
        report += f"\n{compared}"
    return report


def check_text(folder: str, settings: dict[str, Any], task: Any, force: bool = False) -> list[str]:
    """Return a list with a sentence: how many sources of the validation set are tokenised as there; [] without such.

    Without *force*, SAME_SOURCES is needed, of at least half of the set and of FEWEST_SOURCES, if it has so many.
    """
    # The set contains only tokens. Moses' detokeniser for the source language converts them to plain text, also to show
    # whether data were tokenised that should not be. Pieces of SentencePiece alone become plain text without it.
    source, pieces = settings["source"], (settings["subwords"] or {}).get("kind") == "sentencepiece"
    moses = {"source": source, "target": source, "dash_splits": False}
    back = Tokeniser(folder, {**settings, "moses": settings["moses"] and moses if pieces else moses})
    text = Tokeniser(folder, settings)
    symbols, unknown = task.source_dictionary.symbols, task.source_dictionary.unk()
    separator = separator_of(settings)

    def from_plain_text(line: list[str]) -> list[str]:
        sentences, _ = divided(line, line.count(separator) + 1, separator)
        return joined([text.tokens(back.plain(sentence)) for sentence in sentences], separator)

    pairs = validation_pairs(task)
    lines = [[symbols[n] for n in source] for source, _ in pairs if unknown not in source]
    if not pairs:
        return []
    report = f"{len(lines)} of {len(pairs)} sources of the validation set have no unknown words and can be checked"
    refuse_below(max(len(pairs) / 2, min(FEWEST_SOURCES, len(pairs))), len(lines), report, force)
    same = sum(from_plain_text(line) == line for line in lines)
    report = f"{same} of {len(lines)} sources of the validation set are tokenised from plain text as in the data"
    cause = "--tokenizer or the subwords are not those of the data"
    refuse_below(SAME_SOURCES * len(lines), same, f"{report} ({cause})", force)
    return [report]


def words_of_pairs(task: Any, pairs: Iterable[tuple[list[int], list[int]]]) -> Iterator[Pair]:
    """Yield *pairs* of numbers of words as words."""
    sources, targets = task.source_dictionary.symbols, task.target_dictionary.symbols
    for source, target in pairs:
        yield [sources[n] for n in source], [targets[n] for n in target]


def shortlist_samples(settings: dict[str, Any], task: Any, force: bool) -> list[Pair]:
    """Return the pairs of the validation set that :func:`check_shortlist` translates: those that the model can."""
    limits = [settings["positions"][side] or math.inf for side in ("source", "target")]
    numbers = validation_pairs(task, SHORTLIST_SAMPLES)
    pairs = words_of_pairs(
        task, (pair for pair in numbers if all(len(line) < most for line, most in zip(pair, limits)))
    )
    samples = list(pairs)
    if not samples and not force:
        raise ExportError(f"--shortlist: cannot be checked without {NEEDED} (--force writes it anyway)")
    return samples


def check_shortlist(folder: str, settings: dict[str, Any], pairs: Sequence[Pair], force: bool) -> str:
    """Return a sentence that compares translations with and without the shortlist; refuse a loss of SHORTLIST_LOSS."""
    if not pairs:
        return f"the shortlist was not checked: the data lack {NEEDED}"
    text = Tokeniser(folder, settings)
    references = [text.plain(target) for _, target in pairs]
    translations = []
    for shortlist in (False, True):
        search = Search(folder, settings, shortlist=shortlist)
        translations.append([text.plain(words) for ((words, _), *_) in search([source for source, _ in pairs])])
        search.close()
    without, with_it = (bleu(lines, references, settings["target"]) for lines in translations)
    same = sum(map(operator.eq, *translations))
    report = (
        f"shortlist: sacreBLEU {with_it:.2f}, and {without:.2f} without it, on {len(pairs)} sentences of the "
        f"validation set; {same} of the translations are the same"
    )
    refuse_lower_bleu(with_it, without, SHORTLIST_LOSS, f"{report}; sacreBLEU", force)
    return report
