"""Beam search and sampling with an exported model in CTranslate2, with the results and scores of fairseq's."""

import itertools
import logging
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..text.tokens import Pair, Tokens
from .exported_folder import INT8, LONGEST_LINE, TranslateError, separator_of, source_vocabulary

# Tokens in a batch. On a CPU each core translates one batch; docs/gpus.md has the speed of these sizes.
BATCH_TOKENS = {**dict.fromkeys(INT8, 512), "cuda": 8192}
DEFAULT_BATCH_TOKENS = 1024
# Search._ranked scores hypotheses again if their order changes with log-probabilities that are lower by this
# amount. CTranslate2's are too high by it if the end of the sentence has a probability of 0.63 at the first step.
CLOSE = 1.0
SCORED_TOKENS = 1024  # in a batch of sentences or hypotheses that are scored

Hypotheses = list[tuple[Tokens, float]]  # the best first, with scores


@dataclass(frozen=True)
class Sampling:
    """CTranslate2's random sampling, instead of a beam search.

    Attributes:
        topk: CTranslate2's sampling_topk: draws each word from this number of most probable words; 0: from all words
        seed: of the random numbers, from 0 to 2**32 - 2
    """

    topk: int
    seed: int = 1


def in_batches(order: Sequence[int], sources: Sequence[Sequence[str]], tokens: int) -> Iterator[list[int]]:
    """Yield *order*, indices of *sources* with the longest first, in batches of *tokens* tokens, padding included."""
    batch: list[int] = []
    for n in order:
        if batch and (len(batch) + 1) * (len(sources[batch[0]]) + 1) > tokens:
            yield batch
            batch = []
        batch.append(n)
    if batch:
        yield batch


def _is_marked(words: Sequence[str]) -> bool:
    """Return whether CTranslate2 may treat a source of *words* as empty, and would not translate it."""
    return not words or "<s>" in words or "</s>" in words


def with_copies(words: Tokens, line: Tokens, attention: Sequence[Sequence[float]], separator: str = "") -> Tokens:
    """Return *words* with the word of *line* that an <unk> attends to most in its place.

    Args:
        attention: of each word to those of *line* without padding, and to the end
        separator: the word between the sentences of a segment, which is never copied; "" if there is none
    """
    copied = [word for word in line if word != "<pad>"]
    places = [n for n, word in enumerate(copied) if word != separator]
    if not places:
        return words
    return [
        copied[max(places, key=weights.__getitem__)] if word == "<unk>" else word
        for word, weights in zip(words, attention)
    ]


def available_cores() -> int:
    """Return how many cores this process may use."""
    on_macos = not hasattr(os, "sched_getaffinity")
    return os.cpu_count() or 1 if on_macos else len(os.sched_getaffinity(0))


def log_probs(folder: str, pairs: Sequence[Pair]) -> tuple[list[list[float]], str]:
    """Return log-probabilities by the model in *folder*, on the CPU, and the type of the computation, as "float32".

    Each pair has a list with the log-probability (base e) of each token of its target and of the end.
    """
    import ctranslate2

    ctranslate2.set_log_level(logging.ERROR)  # it warns if the CPU has no 16-bit arithmetic
    model = ctranslate2.Translator(folder, device="cpu", compute_type="default")
    sides = [[["<blank>" if word == "<pad>" else word for word in pair[n]] for pair in pairs] for n in (0, 1)]
    results = model.score_batch(*sides, max_input_length=0, max_batch_size=SCORED_TOKENS, batch_type="tokens")
    return [list(result.log_probs) for result in results], model.compute_type


class Search:
    """The model of an exported folder on a device, and the search with it.

    Args:
        folder: an exported folder whose files were checked
        settings: of *folder*
        cores: CPU threads, which have no use on a GPU; None: all that this process may use
        device: "cpu", "cuda" or "auto"
        shortlist: whether the search uses the shortlist of the folder, which must exist
        replace_unk: whether <unk> in a hypothesis becomes the word of the source that it attends to most
        sampling: draws a hypothesis instead of searching the best, from all words, also with a shortlist

    Attributes:
        at_once: the number of batches that are translated at once
    """

    def __init__(
        self,
        folder: str,
        settings: dict[str, Any],
        cores: int | None = None,
        device: str = "cpu",
        shortlist: bool = False,
        replace_unk: bool = False,
        sampling: Sampling | None = None,
    ) -> None:
        import ctranslate2

        # CTranslate2 warns if the CPU has no 16-bit arithmetic and it computes with 32 bits instead.
        ctranslate2.set_log_level(logging.ERROR)
        self.settings, self.replace_unk, self.sampling = settings, replace_unk, sampling
        self.separator = separator_of(settings)
        self.shortlist = shortlist and sampling is None
        self.folder, self.process = folder, os.getpid()
        cores = 1 if sampling is not None else cores or available_cores()  # each thread of CTranslate2 draws by itself
        try:
            if device == "auto":
                device = "cuda" if ctranslate2.get_cuda_device_count() else "cpu"
            # One batch for each core is faster than all cores for one batch. A GPU translates one batch at a time.
            self.at_once = cores if device == "cpu" else 1
            workers = {"inter_threads": cores, "intra_threads": 1} if device == "cpu" else {}
            self.model = ctranslate2.Translator(folder, device=device, **workers)
            if sampling is not None:
                ctranslate2.set_random_seed(sampling.seed)
        except (RuntimeError, ValueError) as error:
            raise TranslateError(f"--model {folder}, --device {device}: {error}") from None
        # CTranslate2 looks a word up in the shortlist as it is.
        self._known = frozenset(source_vocabulary(folder) if self.shortlist else ())
        kind = settings["quantization"] if device == "cpu" else device
        self.batch_tokens = BATCH_TOKENS.get(kind, DEFAULT_BATCH_TOKENS)

    def close(self) -> None:
        """Free the memory of the model."""
        while self.model.model_is_loaded:  # CTranslate2 does nothing while its threads finish their last batch
            self.model.unload_model()
            time.sleep(0.001)

    def __call__(
        self, sources: Sequence[Tokens], done: Callable[[int], object] = lambda count: None, nbest: int = 0
    ) -> list[Hypotheses]:
        """Return the best hypotheses for each of *sources*, in tokens, with their scores.

        As in fairseq, ``<pad>`` in *sources* is padding and ``<blank>`` an unknown word. *done* is called with the
        number of sources of each batch that has been translated. With 0 as *nbest*, there is only the best hypothesis,
        with an approximate score.
        """
        if os.getpid() != self.process:  # CTranslate2's threads are not there, and it would wait forever
            raise TranslateError(f"--model {self.folder}: was loaded before os.fork(); load it in the new process")
        beam, lenpen = self.settings["beam"], self.settings["lenpen"]
        positions: int | None = self.settings["positions"]["target"]
        longest = sys.maxsize if positions is None else positions - 1  # the end takes one, too
        limits = [min(len(source) + 1 + self.settings["max_len_b"], longest) for source in sources]  # + 1: the end
        words = [self._in_ctranslate2(source) for source in sources]
        best: list[Hypotheses] = [[([], 0.0)]] * len(sources)

        def start(batch: Sequence[int]) -> list[Any]:  # the first of a batch has the most tokens
            return self._start([words[n] for n in batch], beam, lenpen, limits[batch[0]])

        def finish(batch: Sequence[int], results: Sequence[Any]) -> None:
            for n, pending in zip(batch, results):
                result = pending.result()
                if any(len(hypothesis) > limits[n] for hypothesis in result.hypotheses):  # too long
                    result = start([n])[0].result()
                best[n] = self._ranked(sources[n], words[n], result, lenpen, limits[n], nbest)
            done(len(batch))

        searches: deque[tuple[list[int], list[Any]]] = deque()
        done(sum(not source for source in sources))
        try:
            for batch in self._batches(sources, words):
                # This many searches at a time need no more memory than one search for the longest line. Their results
                # can have the weights of attention.
                if len(searches) >= max(1, LONGEST_LINE // (len(sources[batch[0]]) + 1)) ** 2:
                    finish(*searches.popleft())
                searches.append((batch, start(batch)))
            while searches:
                finish(*searches.popleft())
        except RuntimeError as error:
            raise TranslateError(f"CTranslate2 cannot search with this model: {error}") from None
        return best

    def _in_ctranslate2(self, source: Tokens) -> Tokens:
        """Return *source* without padding, which CTranslate2 calls <blank> and attends to."""
        known = self._known
        return ["<unk>" if w == "<blank>" or known and w not in known else w for w in source if w != "<pad>"]

    def _batches(self, sources: Sequence[Tokens], words: Sequence[Tokens]) -> Iterator[list[int]]:
        """Yield the indices of *sources* that are not empty, in batches of similar lengths, marked ones alone."""
        order = sorted((n for n in range(len(sources)) if sources[n]), key=lambda n: -len(sources[n]))
        share = sum(len(source) + 1 for source in sources) // self.at_once  # a few lines use all cores, too
        unmarked = [n for n in order if not _is_marked(words[n])]
        marked = ([n] for n in order if _is_marked(words[n]))
        return itertools.chain(in_batches(unmarked, sources, min(self.batch_tokens, share)), marked)

    def _start(self, inputs: list[Tokens], beam: int, lenpen: float, limit: int) -> list[Any]:
        """Start the search for a batch, and return CTranslate2's pending results."""
        cut = 0
        if _is_marked(inputs[0]):
            # CTranslate2 decides that a source is empty before it truncates it to the maximum length, so three words
            # are added.
            inputs, cut = [[*inputs[0], "<unk>", "<unk>", "<unk>"]], len(inputs[0]) + 1
        pending: list[Any] = self.model.translate_batch(
            inputs,
            **self._method(beam, lenpen),
            return_scores=True,
            return_attention=self.replace_unk,
            suppress_sequences=[["<blank>"]],  # fairseq's search never selects padding
            use_vmap=self.shortlist,
            max_input_length=cut,
            max_decoding_length=limit,
            asynchronous=True,
        )
        return pending

    def _method(self, beam: int, lenpen: float) -> dict[str, Any]:
        """Return the options of CTranslate2 for the beam search, or for sampling."""
        if self.sampling is not None:
            return {"beam_size": 1, "sampling_topk": self.sampling.topk}
        # With 0, CTranslate2 stops at the first finished hypothesis; fairseq stops after *beam* of them.
        return {"beam_size": beam, "length_penalty": lenpen or 1e-9, "num_hypotheses": beam}

    def _ranked(self, line: Tokens, source: Tokens, result: Any, lenpen: float, limit: int, nbest: int) -> Hypotheses:
        """Return the hypotheses that fairseq (sequence_generator.py) ranks first, with their scores.

        *source* is *line* as CTranslate2 reads it.

        At the first step, CTranslate2 removes the end of the sentence before the softmax, and fairseq after
        it. So CTranslate2 adds the same amount to the log-probabilities of all hypotheses, and the length
        penalty reduces it more in longer ones. At the length limit, CTranslate2 leaves out the end, and
        fairseq adds its log-probability. So three kinds of results are ranked again by the model's scores of
        the complete hypotheses: n-best lists, results with close scores, and results with a hypothesis that
        reached the limit. (Such a hypothesis may have displaced a finished one. Then the output differs.)
        """
        hypotheses, scores = result.hypotheses, result.scores
        weights = [(len(words) + 1) ** -lenpen for words in hypotheses]  # + 1: the end
        close = [score - CLOSE * weight for score, weight in zip(scores, weights)]
        if nbest or any(len(words) >= limit for words in hypotheses) or max(close) > close[0]:
            sources = [source] * len(hypotheses)
            options = {"max_input_length": 0, "max_batch_size": SCORED_TOKENS, "batch_type": "tokens"}
            whole = self.model.score_batch(sources, hypotheses, **options)
            scores = [sum(words.log_probs) * weight for words, weight in zip(whole, weights)]
        order = sorted(range(len(hypotheses)), key=lambda n: -scores[n])
        chosen = order[: nbest or 1]
        if self.replace_unk and any("<unk>" in hypotheses[n] for n in chosen):  # the weights need much memory
            with_weights = zip(hypotheses, result.attention)
            hypotheses = [with_copies(words, line, weights, self.separator) for words, weights in with_weights]
        return [(hypotheses[n], scores[n] / math.log(2)) for n in chosen]
