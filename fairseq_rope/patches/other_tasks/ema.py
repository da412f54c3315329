"""The average of the weights over the training (``--store-ema``)."""

from typing import Any

from fairseq.models.ema.ema import EMA

from ..registry import replaces

_restore = EMA.restore


@replaces(
    "fairseq.models.ema.ema.EMA.restore", prevents="wrong results", until="fairseq keeps the versions", wraps=_restore
)
def restore(self: Any, state_dict: Any, build_fp32_params: bool = False) -> None:
    """Set the average of the weights, with the versions of encoder and decoder.

    fairseq does not average the versions of the decoder and the encoder, and so takes the average for a model of 2017,
    which had no norms after the layers. With --encoder-normalize-before or --decoder-normalize-before, the average that
    --store-ema saves has none. Here the versions stay in it.
    """
    own = self.model.state_dict()
    versions = {name: own[name] for name in own if "version" in name}  # also in place of those that fairseq alone saved
    _restore(self, {**state_dict, **versions}, build_fp32_params)
