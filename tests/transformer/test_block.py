"""The parts of the block: each beside a float64 reference written with loops, and in whole models."""

import math
from itertools import product

import pytest
import torch
from fairseq import checkpoint_utils

from fairseq_rope.errors import InputError
from fairseq_rope.modules.attention import CrossAttention, SelfAttention
from fairseq_rope.modules.feed_forward import GatedLinear
from fairseq_rope.modules.norms import RMSNorm
from fairseq_rope.positions.rotary import RotaryEmbedding
from fairseq_rope.search.cache import Beams
from fairseq_rope.search.decoding import last_features
from fairseq_rope.search.ensemble import FastEnsemble
from fairseq_rope.tools.average import AverageError, average_checkpoints
from fairseq_rope.transformer.block import inner_width
from fairseq_rope.transformer.options import read
from tests.commands import train
from tests.models import BLOCK_OPTIONS, ENCODING_OPTIONS, FOUR_HEADS, LLAMA, batch, teacher_forced, with_different_norms
from tests.references import rotated
from tests.searches import assert_scores_of_the_full_pass, fast, search_both_ways, sentences

# -- each part beside its formula --------------------------------------------------------------------


def normalised(x, weight):
    """RMSNorm of the list *x*."""
    mean_square = sum(value * value for value in x) / len(x)
    return [value / math.sqrt(mean_square + 1e-6) * w for value, w in zip(x, weight, strict=True)]


def test_rms_norm_is_its_formula():
    norm = with_different_norms(torch.nn.ModuleDict({"norm": RMSNorm(6)})).double()["norm"]
    x = torch.randn(3, 2, 6, dtype=torch.float64) * torch.tensor([1e-3, 1.0, 1e3], dtype=torch.float64)[:, None, None]
    expected = [[normalised(vector, norm.weight.tolist()) for vector in row] for row in x.tolist()]
    torch.testing.assert_close(norm(x), torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0)
    with torch.no_grad():  # in a search
        torch.testing.assert_close(norm(x), torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0)

    def norm_with(inputs, weight):
        return torch.func.functional_call(norm, {"weight": weight}, inputs)

    for inputs in (x[1:], x[1:].transpose(0, 2).contiguous().transpose(0, 2)):
        for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
            assert check(norm_with, (inputs.requires_grad_(), norm.weight))
    assert [name for name, _ in norm.named_parameters()] == ["weight"] and torch.equal(RMSNorm(3).weight, torch.ones(3))


@pytest.mark.parametrize("dtype, rounding", [(torch.float16, 2**-11), (torch.bfloat16, 2**-8)])
def test_rms_norm_of_16_bits_is_computed_in_float32(dtype, rounding):
    norm = with_different_norms(torch.nn.ModuleDict({"norm": RMSNorm(8)})).to(dtype)["norm"]
    x = (torch.randn(5, 8) * 1000).to(dtype)  # the squares do not fit into float16
    actual, exact = norm(x), norm.double()(x.double())
    assert actual.dtype == dtype
    assert bool(((actual.double() - exact).abs() <= 1.01 * rounding * exact.abs()).all())  # rounded once


ACTIVATIONS = {
    "swish": lambda x: x / (1 + math.exp(-x)),
    "gelu": lambda x: x * (1 + math.erf(x / math.sqrt(2))) / 2,
    "relu": lambda x: max(x, 0.0),
}


@pytest.mark.parametrize("biases", [True, False])
@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_gated_layers_are_their_formula(build, name, biases):
    layer = build(ffn_type="glu", activation_fn=name, no_projection_bias=not biases).double().decoder.layers[1]
    assert {type(linear) for linear in (layer.fc1.gate, layer.fc1.up, layer.fc2)} == {torch.nn.Linear}

    def linear(module, vector):
        bias = module.bias.tolist() if biases else [0.0] * module.out_features
        rows = zip(module.weight.tolist(), bias, strict=True)
        return [sum(w * v for w, v in zip(row, vector, strict=True)) + b for row, b in rows]

    x = torch.randn(2, 64, dtype=torch.float64, requires_grad=True)
    expected = []
    for vector in x.tolist():
        gate, up = linear(layer.fc1.gate, vector), linear(layer.fc1.up, vector)
        expected.append(linear(layer.fc2, [ACTIVATIONS[name](g) * u for g, u in zip(gate, up, strict=True)]))
    hidden = layer.activation_dropout_module(layer.activation_fn(layer.fc1(x)))  # as in fairseq's layer
    exact = {"rtol": 0, "atol": 1e-6 if name == "gelu" else 1e-12}  # fairseq's gelu computes in float32
    torch.testing.assert_close(layer.fc2(hidden), torch.tensor(expected, dtype=torch.float64), **exact)
    if name == "swish":
        assert torch.autograd.gradcheck(layer.fc1, (x[:1, :],), fast_mode=True)


def attention_by_loops(module, query, memory, is_allowed, is_self):
    """The attention of *query* (T, B, C) to *memory* (S, B, C), and its weights [b][h][t][s], one number at a time."""
    heads, dim, groups = module.num_heads, module.head_dim, module.k_proj.out_features // module.head_dim
    queries, batch_size = query.size(0), query.size(1)

    def head(projection, x, b, position, number, norm=None):
        vector = projection(x[position, b]).tolist()[number * dim : (number + 1) * dim]
        if norm is not None:
            vector = normalised(vector, norm.weight.tolist())
        return rotated(vector, position) if is_self and projection is not module.v_proj else vector

    out, weights = torch.zeros(queries, batch_size, heads * dim, dtype=torch.float64), {}
    for b, h, t in product(range(batch_size), range(heads), range(queries)):
        group = h // (heads // groups)
        q = head(module.q_proj, query, b, t, h, module.q_norm if is_self else None)
        allowed = [s for s in range(memory.size(0)) if is_allowed(b, t, s)]
        scores = []
        for s in allowed:
            k = head(module.k_proj, memory, b, s, group, module.k_norm if is_self else None)
            scores.append(sum(x * y for x, y in zip(q, k, strict=True)) / math.sqrt(dim))
        exponentials = [math.exp(score) for score in scores]
        for s, exponential in zip(allowed, exponentials, strict=True):
            weights[b, h, t, s] = exponential / sum(exponentials)
            v = head(module.v_proj, memory, b, s, group)
            out[t, b, h * dim : (h + 1) * dim] += weights[b, h, t, s] * torch.tensor(v, dtype=torch.float64)
    return module.out_proj(out), weights


TABLES = {"rtol": 0, "atol": 1e-7}  # cos and sin are float32


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("normalises", [False, True])
def test_self_attention_with_shared_keys_is_its_formula(groups, normalises):
    module = SelfAttention(16, 4, RotaryEmbedding(4)).double().eval()
    module.keep_key_value_heads(groups)
    if normalises:
        module.q_norm, module.k_norm = RMSNorm(4).double(), RMSNorm(4).double()
    with_different_norms(module)
    x, is_pad = torch.randn(5, 2, 16, dtype=torch.float64), torch.tensor([[0, 0, 0, 0, 1], [0, 0, 0, 0, 0]])
    causal = torch.full((5, 5), -math.inf, dtype=torch.float64).triu(1)
    with torch.no_grad():
        expected, weights = attention_by_loops(module, x, x, lambda b, t, s: s <= t and not is_pad[b, s], True)
        masks = {"key_padding_mask": is_pad, "attn_mask": causal}
        fused, nothing = module(x, x, x, need_weights=False, **masks)
        explicit, by_head = module(x, x, x, need_head_weights=True, **masks)
    assert nothing is None
    for actual in (fused, explicit):
        torch.testing.assert_close(actual, expected, **TABLES)
    for (b, h, t, s), weight in weights.items():
        assert by_head[h, b, t, s].item() == pytest.approx(weight, abs=1e-7)

    state, steps = {}, []
    with torch.no_grad():
        for t in range(5):
            pad = is_pad[:, t : t + 1]
            steps.append(module(x[t : t + 1], None, None, key_padding_mask=pad, incremental_state=state)[0])
    torch.testing.assert_close(torch.cat(steps), expected, **TABLES)
    saved = module._get_input_buffer(state)
    assert saved["prev_key"].shape == saved["prev_value"].shape == (2, groups, 5, 4)

    def loss(inputs):
        return module(inputs, inputs, inputs, need_weights=False, **masks)[0]

    assert torch.autograd.gradcheck(loss, (x.requires_grad_(),), fast_mode=True)


def test_cross_attention_with_shared_keys_is_its_formula():
    module = CrossAttention(16, 4, kdim=12, vdim=12, encoder_decoder_attention=True).double().eval()
    module.keep_key_value_heads(2)
    x, memory = torch.randn(3, 2, 16, dtype=torch.float64), torch.randn(5, 2, 12, dtype=torch.float64)
    is_pad = torch.tensor([[0, 0, 0, 1, 1], [0, 0, 0, 0, 0]])
    with torch.no_grad():
        expected, _ = attention_by_loops(module, x, memory, lambda b, t, s: not is_pad[b, s], False)
        actual = module(x, memory, memory, key_padding_mask=is_pad, need_weights=False)[0]
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)
    with pytest.raises(ValueError, match="heads that share keys and values, and projections without"):
        module._get_reserve_head_index(2)


@pytest.mark.parametrize("name", list(ENCODING_OPTIONS))
def test_shared_keys_are_repeated_keys_with_every_encoding(build, name):
    """The reference has as many heads of keys as of queries, and the same weights in those that share one."""
    few = {f"{part}_kv_heads": 2 for part in ("encoder", "decoder", "cross")}
    shared = build(**ENCODING_OPTIONS[name], **FOUR_HEADS, **few, dropout=0.0).train()
    reference = build(**ENCODING_OPTIONS[name], **FOUR_HEADS, dropout=0.0).train()
    state = shared.state_dict()
    for key, value in state.items():
        if ".k_proj." in key or ".v_proj." in key:
            state[key] = value.unflatten(0, (2, 16)).repeat_interleave(2, dim=0).flatten(0, 1)
    reference.load_state_dict(state)
    source, lengths = batch([9, 4, 6], left_pad=True)
    target, _ = batch([7, 5, 3], left_pad=False, seed=1)
    outputs = []
    for model in (shared, reference):
        torch.manual_seed(2)  # shape draws random numbers
        outputs.append(teacher_forced(model, source, lengths, target))
    actual, expected = outputs
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    actual.square().mean().backward(), expected.square().mean().backward()
    gradients = {key: parameter.grad for key, parameter in reference.named_parameters()}
    for key, parameter in shared.named_parameters():
        if ".k_proj." in key or ".v_proj." in key:
            gradients[key] = gradients[key].unflatten(0, (2, 2, 16)).sum(1).flatten(0, 1)
        torch.testing.assert_close(parameter.grad, gradients[key], rtol=1e-4, atol=1e-5, msg=key)
    sample = sentences()
    fast(shared.eval()), reference.eval()
    with torch.no_grad():
        reference.decoder.output_projection.weight.copy_(shared.decoder.output_projection.weight)
    found = search_both_ways(shared, sample, max_len_b=5, bound=name not in ("shaw", "nezha", "deberta"))
    assert_scores_of_the_full_pass(reference, sample, found)


# -- whole models ------------------------------------------------------------------------------------


def test_each_part_is_where_its_flag_puts_it(build):
    def norms(model):
        return {side: {type(m) for m in getattr(model, side).modules() if "Norm" in type(m).__name__} for side in SIDES}

    layer_norm, rms = {torch.nn.LayerNorm}, {RMSNorm}
    every = {"layernorm_embedding": True, **LLAMA, "scale_attn": True, "scale_fc": True}
    assert norms(build(**every)) == {"encoder": rms, "decoder": rms}
    assert norms(build()) == {"encoder": layer_norm, "decoder": layer_norm}
    widths = {"scale_glu_width": True, "encoder_ffn_embed_dim": 100, "decoder_ffn_embed_dim": 64}
    gated, plain = build(ffn_type="glu", **widths), build(no_projection_bias=True)
    of_encoder = gated.encoder.layers[0]
    assert type(of_encoder.fc1) is GatedLinear and of_encoder.fc2.in_features == of_encoder.fc1.up.out_features == 72
    assert of_encoder.fc1.up.bias is not None and of_encoder.self_attn.q_proj.bias is not None
    for layer in (plain.encoder.layers[0], plain.decoder.layers[0]):
        assert type(layer.fc1) is torch.nn.Linear
        assert not {name for name, _ in layer.named_parameters() if name.endswith("bias") and "norm" not in name}
    model = build(qk_norm=True, **FOUR_HEADS, cross_kv_heads=1)
    for layer in (*model.encoder.layers, *model.decoder.layers):
        assert layer.self_attn.q_norm.weight.shape == layer.self_attn.k_norm.weight.shape == (16,)
        assert layer.self_attn.k_proj.out_features == 64
    assert not any("_norm" in name for name, _ in model.decoder.layers[0].encoder_attn.named_parameters())
    assert model.decoder.layers[0].encoder_attn.k_proj.out_features == 16


SIDES = ("encoder", "decoder")


@pytest.mark.parametrize("width, scaled", [(2048, 1368), (4096, 2736), (1024, 688), (12, 8), (13, 16)])
def test_the_scaled_width_is_two_thirds_rounded_up(width, scaled):
    assert inner_width(width) == scaled
    assert scaled % 8 == 0 and 2 * width / 3 <= scaled < 2 * width / 3 + 8


def test_other_parameters_start_as_without_the_parts(build):
    def built(**options):
        torch.manual_seed(7)
        return build(**{**options, **FOUR_HEADS}).state_dict()

    plain = built()
    for name in ("rms", "no biases", "two heads of keys", "multi-query", "qk norm", "swiglu"):
        for key, value in built(**{**BLOCK_OPTIONS[name], "layernorm_embedding": False}).items():
            same = plain.get(key.replace(".fc1.gate.", ".fc1."))
            if same is None:
                assert "q_norm" in key or "k_norm" in key or ".fc1.up." in key, key
            else:
                assert torch.equal(value, same[: value.size(0)]), (name, key)
    gated = built(ffn_type="glu", position_encoding="shaw")
    of_positions = gated["encoder.layers.0.self_attn.position.relative_position_keys"].flatten()
    of_block = gated["encoder.layers.0.fc1.up.weight"].flatten()[: of_positions.numel()]
    assert abs(float(torch.corrcoef(torch.stack([of_positions, of_block]))[0, 1])) < 0.3
    assert not torch.equal(gated["encoder.layers.0.fc1.gate.weight"], gated["encoder.layers.0.fc1.up.weight"])
    assert not torch.equal(gated["encoder.layers.0.fc1.up.weight"], gated["encoder.layers.1.fc1.up.weight"])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_bound_steps_of_16_bits_are_close_to_the_layers(build, dtype):
    model, tokens = with_different_norms(build(**BLOCK_OPTIONS["all"])).to(dtype), torch.randint(4, 44, (5, 8))
    model.make_generation_fast_(need_attn=False)
    ensemble, source = FastEnsemble([model]), sentences()["net_input"]
    with torch.no_grad():
        encoder_out = model.encoder(**source)
        expected = model.decoder(tokens, encoder_out=encoder_out)[0].float()
        (beams,) = ensemble.reorder_encoder_out(ensemble.forward_encoder(source), torch.arange(5))
        for length in range(1, 9):
            actual = model.decoder.output_layer(last_features(model.decoder, tokens[:, :length], beams))
            assert actual.dtype == dtype
            differences = (actual[:, 0].float() - expected[:, length - 1]).norm() / expected[:, length - 1].norm()
            assert float(differences) < 20 * torch.finfo(dtype).eps


@pytest.mark.parametrize("is_fast", [True, False])
def test_with_a_quarter_of_the_heads_keys_and_values_need_a_quarter_of_the_memory(build, is_fast):
    eight = {"encoder_attention_heads": 8, "decoder_attention_heads": 8}

    def cached(**options):
        """Numbers in the keys and values of self-attention and of cross-attention, after four steps."""
        model, state = build(**eight, **options), {}
        model.make_generation_fast_(need_attn=not is_fast)
        ensemble = FastEnsemble([model])
        with torch.no_grad():
            (out,) = ensemble.reorder_encoder_out(ensemble.forward_encoder(sentences()["net_input"]), torch.arange(5))
            for length in range(1, 5):
                ensemble.forward_decoder(torch.full((5, length), 5), [out], [state])
        assert isinstance(out, Beams) is is_fast
        if is_fast:
            beams = out
            tensors = [beams._cache.values(), [x for pair in beams.source.values() for x in pair]]
        else:
            entries = [
                [x for name, entry in state.items() if module._incremental_state_id in name for x in entry.values()]
                for layer in model.decoder.layers
                for module in (layer.self_attn, layer.encoder_attn)
            ]
            tensors = [sum(entries[0::2], []), sum(entries[1::2], [])]
        return [sum(x.numel() for x in of_attention if x is not None and x.dim() > 2) for of_attention in tensors]

    whole, quarter = cached(), cached(decoder_kv_heads=2, cross_kv_heads=2)
    assert min(whole) > 0 and whole == [4 * count for count in quarter]


def test_with_queries_of_another_length_the_norm_keeps_the_scores(build):
    model, source = build(qk_norm=True), batch([7, 7], left_pad=False)
    expected = model.encoder(*source)["encoder_out"][0]
    with torch.no_grad():
        for layer in model.encoder.layers:
            for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
                projection.weight.mul_(50), projection.bias.mul_(50)
    torch.testing.assert_close(model.encoder(*source)["encoder_out"][0], expected, atol=1e-4, rtol=1e-4)


# -- options -----------------------------------------------------------------------------------------


# options, and what encoder and decoder then have
OF_SIDES = [
    ({"norm_type": "rms"}, "norm_type", ("rms", "rms")),
    ({"encoder_attention_type": "linear"}, "attention_type", ("linear", "softmax")),
    ({"cross_kv_heads": 1}, "kv_heads", (8, 8)),
    ({"encoder_kv_heads": 4}, "kv_heads", (4, 8)),
]


@pytest.mark.parametrize("given, name, expected", OF_SIDES)
def test_a_side_replaces_a_choice_and_adds_to_a_switch(given, name, expected):
    options = read({"position_encoding": "rope", **given})
    assert tuple(getattr(side, name) for side in options.sides) == expected


FLAGS = (
    "--norm-type rms --ffn-type glu --activation-fn swish --scale-glu-width --decoder-kv-heads 1 "
    "--cross-kv-heads 1 --qk-norm --no-projection-bias"
).split()


def test_a_model_trains_resumes_averages_and_refuses_other_options(data_bin, trained, tmp_path):
    resume = ("--restore-file", tmp_path / "checkpoint1.pt", "--save-dir", tmp_path / "other", "--max-epoch", 2)
    train(data_bin, tmp_path, *FLAGS, "--max-epoch", 2)
    paths = [str(tmp_path / f"checkpoint{epoch}.pt") for epoch in (1, 2)]
    # A choice of this kind changes no shape, only the result.
    weights = checkpoint_utils.load_checkpoint_to_cpu(paths[0])
    assert average_checkpoints(paths)["model"].keys() == weights["model"].keys()
    weights["cfg"]["model"].decoder_attention_heads, weights["cfg"]["model"].decoder_kv_heads = 4, 2
    torch.save(weights, tmp_path / "other_heads.pt")
    with pytest.raises(AverageError, match="--decoder-kv-heads is 2 in the former and 1 in the latter"):
        average_checkpoints([paths[0], str(tmp_path / "other_heads.pt")])
    log = train(data_bin, tmp_path / "resumed", *FLAGS, *resume)
    assert "Loaded checkpoint" in log
    with pytest.raises(InputError, match="was trained with --rope-base 10000.0, not 500.0"):
        train(data_bin, tmp_path / "resumed", *FLAGS, *resume, "--rope-base", 500)
    start = ("--finetune-from-model", trained / "checkpoint_last.pt")
    with pytest.raises(Exception, match="checkpoint_last.pt; please ensure that the architectures match"):
        train(data_bin, tmp_path / "finetuned", *start, "--qk-norm")


def test_quantisation_noise_reaches_every_projection(build):
    noise = {"quant_noise_pq": 0.1, "quant_noise_pq_block_size": 8}
    model = build(**noise, ffn_type="glu", attention_type="linear")
    for layer in (*model.encoder.layers, *model.decoder.layers):
        linear = {name: module for name, module in layer.named_modules() if isinstance(module, torch.nn.Linear)}
        assert len(linear) >= 7 and not [name for name, module in linear.items() if not module._forward_pre_hooks]
