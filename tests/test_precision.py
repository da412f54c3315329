"""Self-attention in 16 bits with every encoding: errors of outputs and gradients beside those of fairseq's."""

import copy
import functools
import math

import pytest
import torch

from tests.every_model import MODELS, build

# The allowed errors, as multiples of those of fairseq's attention: outputs, gradients of inputs and of projections; and
# gradients of the encoding's numbers, each a sum over all pairs, in which most terms cancel out.
FACTORS = (2.5, 2.5, 2.5, 8.0)


def results(attention, x, grad):
    """Return the output, the gradients of the input and of the projections, and those of positions, if any."""
    x = x.detach().clone().requires_grad_()
    mask = torch.full((len(x), len(x)), -math.inf, dtype=x.dtype).triu(1)
    out, _ = attention(x, x, x, attn_mask=mask, need_weights=False)
    out.backward(grad)
    gradients = {name: p.grad.flatten() for name, p in attention.named_parameters()}
    of_positions = [gradients.pop(name) for name in list(gradients) if name.startswith("position.")]
    parts = [out.detach(), x.grad, torch.cat(list(gradients.values())), *(of_positions and [torch.cat(of_positions)])]
    return [part.double() for part in parts]


def errors(options, arch, dtype, tokens):
    """Return the relative errors of *results* in *dtype*, compared with float64."""
    attention = build({"max_target_positions": tokens, **options}, arch).decoder.layers[0].self_attn
    exact = copy.deepcopy(attention).double()
    attention.to(dtype)
    with torch.no_grad():
        for wide, narrow in zip(exact.parameters(), attention.parameters(), strict=True):
            wide.copy_(narrow)
    torch.manual_seed(1)
    sentences = 1 if tokens > 1000 else 2
    x, grad = torch.randn(2, tokens, sentences, attention.embed_dim).to(dtype)
    pairs = zip(results(attention, x, grad), results(exact, x.double(), grad.double()), strict=True)
    return [float((actual - expected).norm() / expected.norm()) for actual, expected in pairs]


fairseqs_errors = functools.cache(lambda dtype, tokens: errors({}, "transformer", dtype, tokens))


@pytest.mark.parametrize(
    "dtype, tokens",
    [
        (torch.bfloat16, 128),
        *(pytest.param(*row, marks=pytest.mark.slow) for row in ((torch.float16, 128), (torch.bfloat16, 2048))),
    ],
)
@pytest.mark.parametrize("name", MODELS)
def test_16_bits_are_as_exact_as_in_fairseqs_attention_times_a_factor(name, dtype, tokens):
    output, of_input, of_projections = fairseqs_errors(dtype, tokens)
    allowed = [f * e for f, e in zip(FACTORS, (output, of_input, of_projections, of_projections), strict=True)]
    found = errors(MODELS[name], "transformer_rope", dtype, tokens)
    assert all(error <= limit for error, limit in zip(found, allowed, strict=False)), (found, allowed)
