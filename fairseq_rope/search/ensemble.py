"""The fast search's place in fairseq: the ensemble through which a ``SequenceGenerator`` calls its models.

fairseq's ``EnsembleModel`` (``fairseq/sequence_generator.py``) encodes the sources, repeats the rows of the result for
each hypothesis, calls the decoders for each step, and reorders rows between steps. :class:`FastEnsemble` repeats and
reorders no rows: a :class:`.Beams` takes the place of a model's repeated output of the encoder.

Shapes: N sentences, K hypotheses of each (the beam), B = N * K rows, S source positions, V words.
"""

import math
import os
from typing import Any

import torch
from fairseq.sequence_generator import EnsembleModel, SequenceGenerator
from torch import Tensor, nn

from ..modules.overrides import is_exactly
from ..patches.registry import replaces
from ..transformer.decoder import Decoder
from ..transformer.encoder import Encoder
from .cache import Beams
from .decoding import begin, log_probabilities
from .projection import PackedProjection

SWITCH = "FAIRSEQ_ROPE_FAST_SEARCH"
FASTER_ON = ("cpu", "cuda")  # types of devices on which benchmarks have shown the search to be faster
# The largest beam that shares a cache. Each hypothesis also computes scores for the tokens of all others, so a shared
# cache is slower for larger beams.
LARGEST = 32


class _Encoded(dict[str, list[Tensor]]):
    """The output of an encoder whose rows have not been repeated for the hypotheses yet."""


class FastEnsemble(EnsembleModel):
    """fairseq's ensemble of models, which decodes with :class:`.Beams` the models that the fast search can decode."""

    def __init__(self, models: list[nn.Module]) -> None:
        super().__init__(models)
        self._projections = [PackedProjection() for _ in models]

    def forward_encoder(self, net_input: dict[str, Tensor]) -> list[Any] | None:
        outputs = super().forward_encoder(net_input)
        return outputs and [_Encoded(output) if type(output) is dict else output for output in outputs]

    def reorder_encoder_out(self, encoder_outs: list[Any] | None, new_order: Tensor) -> list[Any]:
        """Begin the searches of *encoder_outs* if ``forward_encoder`` has returned them; else reorder them.

        fairseq calls this first to repeat each row K times, and later after each ``reorder_incremental_state`` with
        the same *new_order* (B).
        """
        if encoder_outs is None:
            return []
        return [self._reordered(number, output, new_order) for number, output in enumerate(encoder_outs)]

    def _reordered(self, number: int, output: Any, new_order: Tensor) -> Any:
        if isinstance(output, Beams):
            output.reorder(new_order)
            return output
        model = self.models[number]
        is_ours = isinstance(output, _Encoded) and is_exactly(model.encoder, Encoder) and _has_fairseqs_output(model)
        if is_ours and is_on(new_order.device):
            beam = _hypotheses(output, new_order) if self.has_incremental_states() else 0
            beams = begin(model.decoder, output, beam, self._projections[number]) if beam else None
            if beams is not None:
                return beams
        return model.encoder.reorder_encoder_out(output, new_order)

    def reorder_incremental_state(self, incremental_states: list[Any], new_order: Tensor) -> None:
        """Reorder the states of models that fairseq decodes; ``reorder_encoder_out`` reorders each :class:`.Beams`."""
        if self.has_incremental_states():
            for model, state in zip(self.models, incremental_states):
                if state or type(model.decoder) is not Decoder:
                    model.decoder.reorder_incremental_state_scripting(state, new_order)

    def forward_decoder(
        self, tokens: Tensor, encoder_outs: list[Any], incremental_states: list[Any], temperature: float = 1.0
    ) -> tuple[Tensor, Tensor | None]:
        """Return the logarithms of the mean probabilities (B, V) of the next word, and the attention (B, S) or None.

        *tokens* (B, n) are those so far. As in fairseq, the attention is the sum over those models that return it,
        divided by the number of models.
        """
        if not any(isinstance(output, Beams) for output in encoder_outs or []):
            return super().forward_decoder(tokens, encoder_outs, incremental_states, temperature)
        results = [
            (log_probabilities(model, tokens, output, temperature), None)
            if isinstance(output, Beams)
            else EnsembleModel([model]).forward_decoder(tokens, [output], [state], temperature)
            for model, output, state in zip(self.models, encoder_outs, incremental_states)
        ]
        if len(results) == 1:
            return results[0]
        scores = torch.logsumexp(torch.stack([log_probs for log_probs, _ in results]), dim=0) - math.log(len(results))
        attentions = [attention for _, attention in results if attention is not None]
        return scores, torch.stack(attentions).sum(0) / len(results) if attentions else None


def _hypotheses(output: _Encoded, new_order: Tensor) -> int:
    """Return K if *new_order* repeats each row of *output* K times, and K can share a cache; else 0."""
    rows = output["encoder_out"][0].size(1)
    beam = new_order.numel() // max(rows, 1)
    repeated = torch.arange(rows, device=new_order.device).repeat_interleave(beam)
    return beam if beam <= LARGEST and torch.equal(new_order, repeated) else 0


def _has_fairseqs_output(model: Any) -> bool:
    """Return whether fairseq computes the probabilities of *model*, from nothing but the logits."""
    names = ("get_normalized_probs", "get_normalized_probs_scriptable")
    methods = (getattr(model, name, None) for name in names)  # also of a model in torch.compile's or DDP's wrapper
    return all((getattr(method, "__module__", None) or "").startswith("fairseq.models.") for method in methods)


def is_on(device: torch.device) -> bool:
    """Return whether the fast search is on for *device*; raise a ValueError if its variable is neither 0 nor 1."""
    choice = os.environ.get(SWITCH, "")
    if choice not in ("", "0", "1"):
        raise ValueError(f"the environment variable {SWITCH} is {choice!r}: must be 0 (off) or 1 (on)")
    return choice == "1" or choice == "" and device.type in FASTER_ON


_init_generator = SequenceGenerator.__init__
_generate = SequenceGenerator._generate


@replaces(
    "fairseq.sequence_generator.SequenceGenerator.__init__",
    prevents="lost time",
    until="fairseq's search does not copy what it caches",
    wraps=_init_generator,
)
def init_generator(self: Any, *args: Any, **kwargs: Any) -> None:
    """Let a generator of our models search fast. One with its own search or its own ensemble does as before.

    fairseq's search copies all keys and values in each step, and calls each module for one word. Here a search of this
    plugin's models finds the same in less time.
    """
    _init_generator(self, *args, **kwargs)
    if is_exactly(self.model, EnsembleModel) and type(self)._generate is _generate:
        models = list(self.model.models)
        if any(type(getattr(model, "decoder", None)) is Decoder for model in models):
            self.model = FastEnsemble(models).eval()
