"""RoPE in cross-attention, whose target positions continue those of the source: formula, padding, search, layouts."""

import copy
import math
from argparse import Namespace
from itertools import product

import pytest
import torch

from fairseq_rope.modules.attention import CrossAttention
from fairseq_rope.positions.rotary import RotaryEmbedding
from fairseq_rope.tools.convert_layout import convert_layout
from tests.models import ENCODING_OPTIONS, EOS, PAD, batch
from tests.searches import assert_scores_of_the_full_pass, fast, search, sentences

ROPE = {"cross_attention_positions": "rope"}
C, H, D = 16, 2, 8
LAYOUTS = [("interleaved", 10000.0, 1.0), ("half", 50.0, 0.5)]


def rotated(x, position, layout, base, fraction):
    """The list *x* of D numbers rotated as RoPE rotates it at *position*."""
    dim, out = round(len(x) * fraction), list(x)
    for i in range(dim // 2):
        a, b = (2 * i, 2 * i + 1) if layout == "interleaved" else (i, i + dim // 2)
        cos, sin = (f(position * base ** (-2 * i / dim)) for f in (math.cos, math.sin))
        out[a], out[b] = x[a] * cos - x[b] * sin, x[a] * sin + x[b] * cos
    return out


def by_loops(module, target, source, *rotation):
    """The output (T, C) for the sentence *target* (T, C) and its *source* (S, C), one number at a time."""
    groups, out = module.k_proj.out_features // D, torch.zeros_like(target)

    def head(projection, x, number):
        return projection(x)[number * D : (number + 1) * D].tolist()

    for h, t in product(range(H), range(len(target))):
        q = rotated(head(module.q_proj, target[t], h), len(source) + t, *rotation)
        keys = [rotated(head(module.k_proj, x, h * groups // H), j, *rotation) for j, x in enumerate(source)]
        exps = [math.exp(sum(a * b for a, b in zip(q, k, strict=True)) / math.sqrt(D)) for k in keys]
        for x, e in zip(source, exps, strict=True):
            value = torch.tensor(head(module.v_proj, x, h * groups // H), dtype=torch.float64)
            out[t, h * D : (h + 1) * D] += e / sum(exps) * value
    return module.out_proj(out)


def padded(lengths, left):
    """Whether each place is padding: (B, longest)."""
    longest = max(lengths)
    return torch.tensor([[(i < longest - n) if left else (i >= n) for i in range(longest)] for n in lengths])


@pytest.mark.parametrize("rotation", LAYOUTS)
@pytest.mark.parametrize("groups", [1, 2])
def test_it_is_the_formula_with_padding_on_both_sides(rotation, groups):
    module = CrossAttention(C, H, kdim=C, vdim=C, encoder_decoder_attention=True).double().eval()
    module.rotary = RotaryEmbedding(D, rotation[1], rotation[0], rotation[2])
    module.keep_key_value_heads(groups)
    source, target = torch.randn(5, 3, C).double(), torch.randn(4, 3, C).double()
    for source_left, target_left, need_weights in product((False, True), repeat=3):
        pads = padded([5, 2, 4], source_left), padded([4, 3, 1], target_left)
        with torch.no_grad():
            out, _ = module(target, source, source, torch.cat(pads, dim=1), need_weights=need_weights)
            for b in range(3):
                words, expected = (
                    ~pads[1][b],
                    by_loops(module, target[~pads[1][b], b], source[~pads[0][b], b], *rotation),
                )
                torch.testing.assert_close(out[words, b], expected, rtol=0, atol=1e-6)  # tables are float32
    for source_left in (False, True):  # targets without padding need not be in the mask
        pad = padded([5, 2, 4], source_left)
        with torch.no_grad():
            out, _ = module(target, source, source, pad, need_weights=False)
            for b in range(3):
                expected = by_loops(module, target[:, b], source[~pad[b], b], *rotation)
                torch.testing.assert_close(out[:, b], expected, rtol=0, atol=1e-6)
    with torch.no_grad():
        alone, _ = module(target[:, :1], source[:, :1], source[:, :1], need_weights=False)
        torch.testing.assert_close(
            alone[:, 0], by_loops(module, target[:, 0], source[:, 0], *rotation), rtol=0, atol=1e-6
        )


@pytest.mark.parametrize("name", list(ENCODING_OPTIONS))
def test_padding_of_source_and_target_on_either_side_changes_nothing(build, name):
    model = build(**ENCODING_OPTIONS[name], **ROPE)
    (_, lengths), (_, target_lengths) = batch([9, 4], True), batch([3, 7], True)

    def previous(tokens):
        """*tokens* with the end of sentence in front of each sentence in the place of its last token."""
        turned = tokens.clone()
        for row in turned:
            row[row != PAD] = row[row != PAD].roll(1)
        return turned

    outputs = []
    for source_left, target_left in product((False, True), repeat=2):
        source, target = batch([9, 4], source_left)[0], batch([3, 7], target_left, seed=1)[0]
        words = previous(target)
        scores = model(source, lengths, words)[0]
        outputs.append([scores[row][words[row] != PAD] for row in range(2)])
        alone = model(source[1:][source[1:] != PAD][None], lengths[1:], words[1:][words[1:] != PAD][None])[0][0]
        torch.testing.assert_close(outputs[-1][1], alone, atol=1e-5, rtol=1e-4)
    for other in outputs[1:]:
        torch.testing.assert_close(other, outputs[0], atol=1e-5, rtol=1e-4)
    assert int(target_lengths.sum()) == sum(map(len, outputs[0]))


def test_a_search_with_prefixes_has_the_scores_of_the_full_pass(build):
    model, sample = fast(build(**ROPE, decoder_position_encoding="alibi")), sentences()
    prefixes = torch.randint(4, 44, (5, 3))
    found, is_bound = search(model, sample, prefix_tokens=prefixes)
    assert not is_bound and all(h[0]["tokens"][:3].equal(prefix) for h, prefix in zip(found, prefixes, strict=True))
    assert_scores_of_the_full_pass(model, sample, found)


def test_steps_on_left_padded_targets_are_those_of_the_full_pass(build):
    model = build(**ROPE)
    source, lengths = batch([9, 4], left_pad=True)
    words, state, steps = batch([3, 7], left_pad=True, seed=1)[0], {}, []
    with torch.no_grad():
        encoded = model.encoder(source, lengths)
        for n in range(1, 8):
            steps.append(model.decoder(words[:, :n], encoder_out=encoded, incremental_state=state)[0])
        expected = model.decoder(words, encoder_out=encoded)[0]
    torch.testing.assert_close(torch.cat(steps, dim=1)[words != PAD], expected[words != PAD], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["alibi", "rope"])
def test_the_other_layout_gives_the_same_output(build, name):
    options = {**ROPE, "position_encoding": name, "decoder_attention_heads": 4, "cross_kv_heads": 2}
    model, other = build(**options, rope_fraction=0.5), build(**options, rope_fraction=0.5, rope_layout="half")
    args = Namespace(arch="transformer_rope_tiny", **options, rope_fraction=0.5)
    converted = convert_layout({"model": copy.deepcopy(model.state_dict()), "args": args}, "half")
    other.load_state_dict(converted["model"])
    source, lengths = batch([9, 4], left_pad=True)
    words = torch.tensor([[EOS, 5, 6], [EOS, 7, 8]])
    torch.testing.assert_close(other(source, lengths, words)[0], model(source, lengths, words)[0], atol=1e-5, rtol=1e-4)


def test_a_step_without_the_padding_of_the_target_is_refused(build):
    """fairseq's extract_features_scriptable is for subclasses; it passes the padding of the source alone."""
    model = build(cross_attention_positions="rope")
    (source, lengths), target = batch([5, 4], left_pad=True), batch([3, 3], left_pad=False)[0]
    encoder_out = model.encoder(source, lengths)
    with pytest.raises(ValueError, match="needs the target's padding: call extract_features"):
        model.decoder.extract_features_scriptable(target[:, :1], encoder_out, {})
