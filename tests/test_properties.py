"""Properties of every encoding and every part of the block: what changes no output of a model, a search or a loss."""

from itertools import product

import pytest
import torch
from fairseq.criterions import CRITERION_REGISTRY
from fairseq.sequence_generator import SequenceGenerator

from fairseq_rope.modules.attention import SelfAttention
from fairseq_rope.positions import ENCODINGS
from fairseq_rope.search.cache import FIRST_CAPACITY
from tests.models import ENCODING_OPTIONS, EOS, MODELS, PAD, batch, with_different_norms
from tests.references import CASES, C, H, causal_mask
from tests.searches import assert_scores_of_the_full_pass, fast, search_both_ways, sentences

CLOSE = {"atol": 1e-5, "rtol": 1e-4}
ONE_SIDED = [*ENCODING_OPTIONS, "multi-query", "qk norm", "linear, half", "linear, favor", "normformer", "yarn"]
ONE_SIDED += ["scaled by length"]
SIDES = {"transformer_lm_rope": "decoder", "roberta_rope": "encoder"}


def translator(build, name):
    return with_different_norms(build(**MODELS[name]))


def of_one_side(build, arch, name):
    """The model *name* of an architecture that has only an encoder or only a decoder."""
    side = SIDES[arch]
    sizes = {f"{side}_{size}_dim": 64 for size in ("embed", "ffn_embed", "input", "output")}
    sizes.update({f"{side}_layers": 2, f"{side}_attention_heads": 2, "max_positions": 30, "max_target_positions": 30})
    own = {key: value for key, value in MODELS[name].items() if key.startswith(side) or "coder_" not in key}
    own.pop("cross_kv_heads", None)
    return with_different_norms(build(arch, **{**sizes, **own}))


def words_of(scores, tokens):
    """The *scores* of the words of *tokens*, without padding."""
    return scores[tokens != PAD]


# -- padding and other sentences -----------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_padding_on_either_side_and_other_sentences_change_nothing(build, name):
    model = translator(build, name)
    (source, lengths), (target, target_lengths) = batch([40, 4, 6], False), batch([5, 8, 3], False, seed=1)
    alone = [
        model(source[row : row + 1, : lengths[row]], lengths[row : row + 1], target[row : row + 1, :words])[0][0]
        for row, words in enumerate(target_lengths)
    ]
    for left_source, left_target in product((True, False), repeat=2):
        (source, _), (target, _) = batch([40, 4, 6], left_source), batch([5, 8, 3], left_target, seed=1)
        together = model(source, lengths, target)[0]
        torch.testing.assert_close(words_of(together, target), torch.cat(alone), **CLOSE)


@pytest.mark.parametrize("arch, name", [case for case in product(SIDES, ONE_SIDED) if case != ("roberta_rope", "xpos")])
@torch.no_grad()
def test_padding_and_other_sentences_change_nothing_in_models_of_one_side(build, arch, name):
    model, (tokens, lengths) = of_one_side(build, arch, name), batch([9, 4, 6], False)
    alone = [model(tokens[row : row + 1, :words])[0][0] for row, words in enumerate(lengths)]
    for left_pad in (True, False):
        tokens, _ = batch([9, 4, 6], left_pad)
        torch.testing.assert_close(words_of(model(tokens)[0], tokens), torch.cat(alone), **CLOSE)


@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients_of_both_criteria_are_sums_over_sentences(build, task, name):
    model = translator(build, name)
    (source, lengths), (target, target_lengths) = batch([9, 4, 6], True), batch([5, 8, 3], False, seed=1)
    together = [(source, lengths, target)]
    alone = [
        (source[row : row + 1, -lengths[row] :], lengths[row : row + 1], target[row : row + 1, :words])
        for row, words in enumerate(target_lengths)
    ]

    def run(name, batches):
        """The loss and the gradients of *batches*."""
        criterion = CRITERION_REGISTRY[name](task, sentence_avg=False, label_smoothing=0.1)
        model.zero_grad()
        losses = []
        for source, lengths, target in batches:
            previous = target.roll(1, dims=1)
            previous[:, 0] = EOS
            given = {"src_tokens": source, "src_lengths": lengths, "prev_output_tokens": previous}
            loss, *_ = criterion(model, {"net_input": given, "target": target, "ntokens": int(lengths.sum())})
            loss.backward()
            losses.append(loss.detach())
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        return sum(losses), torch.cat([gradient.flatten() for gradient in gradients])

    fairseqs, fused = "label_smoothed_cross_entropy", "fused_label_smoothed_cross_entropy"
    expected_loss, expected = run(fairseqs, together)
    for criterion, batches in ((fairseqs, alone), (fused, together), (fused, alone)):
        loss, gradients = run(criterion, batches)
        torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=0)
        torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-6 * float(expected.abs().max()))


# -- step by step --------------------------------------------------------------------------------------


def is_bound(name):
    """Whether the fast search binds the steps of the model *name*."""
    unbound = ("shaw", "nezha", "deberta", "scaled by length", "normformer", "odd heads")
    return name not in unbound and not name.startswith("linear")


@pytest.mark.parametrize("name", MODELS)
def test_both_searches_have_the_scores_of_all_words_of_a_sentence_at_once(build, name):
    model, sample = fast(build(**MODELS[name])), sentences()  # most sentences end at different times
    found = search_both_ways(model, sample, bound=is_bound(name), max_len_a=1, max_len_b=5, len_penalty=0.6)
    assert_scores_of_the_full_pass(model, sample, found)


def of(*names):
    """The *names* of MODELS, and the other encodings as slow tests."""
    return [*names, *(pytest.param(name, marks=pytest.mark.slow) for name in ENCODING_OPTIONS if name not in names)]


@pytest.mark.parametrize("name", of("rope", "all", "two heads of keys"))
def test_both_searches_of_long_outputs_have_the_scores_of_all_words_at_once(build, name):
    model, sample = translator(build, name).double(), sentences()
    model.make_generation_fast_(need_attn=False)
    longer = {"min_len": 2 * FIRST_CAPACITY + 1, "max_len_b": 2 * FIRST_CAPACITY + 5}
    assert_scores_of_the_full_pass(model, sample, search_both_ways(model, sample, bound=is_bound(name), **longer))


def test_both_searches_have_the_scores_of_a_scaling_by_the_longest_source(build):
    """All steps rotate with the frequencies of one length: that of the longest source of the batch."""
    dynamic = {"rope_type": "dynamic", "factor": 4, "original_max_position_embeddings": 6}
    model, sample = fast(build(rope_scaling=dynamic)), sentences((9, 9, 9))
    found = search_both_ways(model, sample, beam_size=2, min_len=20, max_len_b=40)
    assert_scores_of_the_full_pass(model, sample, found)


@pytest.mark.parametrize("name", ONE_SIDED)
@torch.no_grad()
def test_a_language_model_reads_earlier_words_only_and_step_by_step_is_all_at_once(build, name):
    model, (tokens, lengths) = of_one_side(build, "transformer_lm_rope", name), batch([9, 9], left_pad=False)
    expected, state, changed = model(tokens)[0], {}, tokens.clone()
    changed[:, 5] = 4 + (tokens[:, 5] - 3) % 40
    difference = (model(changed)[0] - expected).abs().amax(dim=(0, 2))
    assert float(difference[:5].max()) < 1e-6 and float(difference[5:].min()) > 1e-5
    for length in range(1, 10):
        step = model(tokens[:, :length], incremental_state=state)[0]
        torch.testing.assert_close(step[:, 0], expected[:, length - 1], **CLOSE)
    generator = SequenceGenerator([model], model.decoder.dictionary, beam_size=3, max_len_b=9, normalize_scores=False)
    sample = {"net_input": {"src_tokens": tokens[:, :4], "src_lengths": lengths}}
    for found in generator.generate([model], sample, prefix_tokens=tokens[:, :3], bos_token=EOS):
        for hypothesis in found:
            words = hypothesis["tokens"].unsqueeze(0)
            previous = torch.cat([torch.tensor([[EOS]]), words[:, :-1]], dim=1)
            scores = model(previous)[0].log_softmax(2).gather(2, words.unsqueeze(2)).flatten()
            torch.testing.assert_close(hypothesis["positional_scores"], scores, rtol=1e-4, atol=1e-4)


def attention_of(name, side, options, dtype=torch.float32):
    return SelfAttention(C, H, ENCODINGS[name].build(side, C, H, **options)).to(dtype).eval()


@pytest.mark.parametrize("name, side, options", [case for case in CASES if case.values[1] == "decoder"])
@torch.no_grad()
def test_steps_of_attention_with_left_padding_and_reordered_beams_equal_all_at_once(name, side, options):
    """Steps of 4, 1, 1, … and 5 words; the hypotheses begin after 0, 2 and 6 pads."""
    attention, x, state = attention_of(name, side, options), torch.randn(45, 3, C), {}
    pad = torch.arange(45) < torch.tensor([[0], [2], [6]])
    begin = 0
    for length in [4, *36 * [1], 5]:
        if begin in (6, 20, 33):
            order = torch.tensor([2, 0, 0]) if begin == 6 else torch.tensor([1, 0, 2])
            attention.reorder_incremental_state(state, order)
            x[:begin], pad[:, :begin] = x[:begin, order], pad[order, :begin]
        end = begin + length
        masks = {"key_padding_mask": pad[:, begin:end], "attn_mask": causal_mask(length, end)}
        step, _ = attention(x[begin:end], None, None, incremental_state=state, need_weights=False, **masks)
        masks = {"key_padding_mask": pad[:, :end], "attn_mask": causal_mask(end)}
        all_at_once, _ = attention(x[:end], None, None, need_weights=False, **masks)
        words = ~pad[:, begin:end].T
        torch.testing.assert_close(step[words], all_at_once[begin:end][words], **CLOSE)
        begin = end


# -- positions -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, side, options", CASES)
@torch.no_grad()
def test_a_constant_offset_of_positions_changes_no_score(name, side, options):
    attention, x = attention_of(name, side, options, torch.float64), torch.randn(9, 1, C, dtype=torch.float64)

    def scores(offset):
        q, k = (attention._split_heads(x) for _ in range(2))
        turned_q, turned_k = attention.position.queries_and_keys(q, k, offset)
        return (turned_q @ turned_k.transpose(2, 3)).tril()

    for offset in (1, 90, 700):
        torch.testing.assert_close(scores(offset), scores(0), atol=1e-5, rtol=1e-5)
    mask = (lambda n: causal_mask(n, dtype=torch.float64)) if side == "decoder" else lambda n: None
    padded, pad = torch.cat([torch.randn(30, 1, C, dtype=torch.float64), x]), torch.arange(39).unsqueeze(0) < 30
    shifted, _ = attention(padded, padded, padded, pad, attn_mask=mask(39))
    torch.testing.assert_close(shifted[30:], attention(x, x, x, attn_mask=mask(9))[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ENCODING_OPTIONS)
@torch.no_grad()
def test_an_encoder_knows_the_order_of_words_unless_it_has_no_positions(build, name):
    model, order, (source, lengths) = build(**ENCODING_OPTIONS[name]), [1, 0, 2, 3, 4, 5], batch([6], left_pad=False)
    swapped, straight = (model.encoder(tokens, lengths)["encoder_out"][0] for tokens in (source[:, order], source))
    assert torch.allclose(swapped, straight[order], atol=1e-5) is (name == "none")


@pytest.mark.parametrize("name", [name for name in ONE_SIDED if name != "xpos"])
@torch.no_grad()
def test_every_word_of_an_encoder_reads_all_words(build, name):
    model, (tokens, _) = of_one_side(build, "roberta_rope", name), batch([6], left_pad=False)
    changed = tokens.clone()
    changed[:, 3] = 4 + (tokens[:, 3] - 3) % 40
    assert float((model(changed)[0] - model(tokens)[0]).abs().amax(dim=2).min()) > 1e-6
