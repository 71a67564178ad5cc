"""Transformers of torch and Hugging Face with low-bit layers, end to end."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
import torch
from torch import nn

from slipstream.techniques.lowbit import LowBitLinear, load, quantise_model
from slipstream.techniques.lowbit.attention import SplitAttention, split_attention, why_not_split

# Eight bits of static range: the loss is below this share of the output's norm.
LOST = 0.03


def lost(made: torch.Tensor, expected: torch.Tensor) -> float:
    return float((made - expected).norm() / expected.norm())


def low_bit_layers(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, LowBitLinear)}


class Attends(nn.Module):
    """A model that is more than its attention."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, **settings)

    def forward(self, *tensors: torch.Tensor, **how: Any) -> Any:
        return self.attention(*tensors, **how)


@pytest.mark.parametrize(
    "settings", [{}, {"batch_first": True}, {"kdim": 6, "vdim": 10}, {"bias": False}], ids=str
)
def test_decomposed_attention_is_equal(settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Attends(**settings).eval()
    query, key, value = (
        torch.randn(5, 5, size) for size in (16, settings.get("kdim", 16), settings.get("vdim", 16))
    )
    causal = nn.Transformer.generate_square_subsequent_mask(5)
    padding = torch.zeros(5, 5, dtype=torch.bool)
    padding[1:3, 3:] = True
    ways: list[dict[str, Any]] = [
        {}, {"need_weights": False}, {"average_attn_weights": False},
        {"attn_mask": causal}, {"attn_mask": causal, "is_causal": True, "need_weights": False},
        {"key_padding_mask": padding}, {"attn_mask": causal.repeat(20, 1, 1) < 0},
        {"key_padding_mask": padding, "attn_mask": causal < 0, "need_weights": False},
    ]  # fmt: skip
    expected = [model(query, key, value, **how) for how in ways]
    alone = model(query[:, 0], key[:, 0], value[:, 0])
    assert list(split_attention(model)) == ["attention"]
    assert isinstance(model.attention, SplitAttention)
    for how, (out, weights) in zip(ways, expected, strict=True):
        made, made_weights = model(query, key, value, **how)
        torch.testing.assert_close(made, out)
        assert (made_weights is None) == (weights is None)
        if weights is not None:
            torch.testing.assert_close(made_weights, weights)
    torch.testing.assert_close(model(query[:, 0], key[:, 0], value[:, 0]), alone)


def test_attention_that_stays_has_a_reason() -> None:
    class Own(nn.MultiheadAttention):
        pass

    assert re.search("subclass", str(why_not_split(Own(8, 2))))
    assert re.search(
        r"\bkey\b", str(why_not_split(nn.MultiheadAttention(8, 2, add_zero_attn=True)))
    )
    model = Attends(add_bias_kv=True)
    assert split_attention(model) == {}


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("how", ["plain", "mask", "padding"])
def test_encoders_of_torch(batch_first: bool, how: str) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=batch_first)
    model = nn.TransformerEncoder(layer, 2).eval()
    x = torch.randn(6, 6, 32)
    more: dict[str, Any] = {}
    read = torch.ones(6, 6, dtype=torch.bool)
    if how == "mask":
        more = {"mask": nn.Transformer.generate_square_subsequent_mask(6)}
    if how == "padding":
        read[2, 4:] = False
        more = {"src_key_padding_mask": ~read}
        read = read if batch_first else read.T
    with torch.no_grad():
        expected = model(x, **more)
        names = quantise_model(model, [{"src": x, **more}], wbits=8, abits=8)
        assert len(names) == 2 * 6
        assert lost(model(x, **more)[read], expected[read]) < LOST
        fresh = nn.TransformerEncoder(layer, 2).eval()
        load(fresh, model.state_dict())
        assert torch.equal(fresh(x, **more)[read], model(x, **more)[read])


def test_unselected_layers_stay_in_float() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 5, 32)
    for except_, unconverted in (("*attn*", "linear1"), ("*linear*", "self_attn.q_proj")):
        model = nn.Sequential(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)).eval()
        with torch.no_grad():
            expected = model(x)
            quantise_model(model, [x], wbits=8, abits=8, except_=except_)
            assert lost(model(x), expected) < LOST
        layers = low_bit_layers(model)
        assert f"0.{unconverted}" in layers
        assert len(layers) == (2 if "attn" in except_ else 4)


def hugging_face(kind: str) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    small = {"vocab_size": 200, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    if kind == "bert":
        return transformers.BertModel(transformers.BertConfig(
            hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
            **small,
        ))  # fmt: skip
    if kind == "gpt2":
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, **small)
        )
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=128, **small,
    ))  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "layers"), [("bert", 13), ("gpt2", 9), ("llama", 15)])
def test_hugging_face_from_config(kind: str, layers: int) -> None:
    model, twin = hugging_face(kind).eval(), hugging_face(kind).eval()
    ids = torch.randint(3, 200, (3, 24))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    cacheless = {} if kind == "bert" else {"use_cache": False}
    with torch.no_grad():
        expected = model(**batch)[0]
        assert len(quantise_model(model, [batch], wbits=8, abits=8)) == layers
        made = model(**batch)[0]
        assert lost(made, expected) < LOST
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        load(twin, torch.load(file, weights_only=True))
        assert torch.equal(twin(**batch)[0], made)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert lost(model(**batch)[0].float(), expected) < LOST
        program = torch.export.export(model, (), kwargs={**batch, **cacheless})
        assert torch.equal(program.module()(**batch, **cacheless)[0], made)
        assert lost(model.bfloat16()(**batch)[0].float(), expected) < LOST


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_decoding_with_a_cache_gives_the_same_tokens(kind: str) -> None:
    model = hugging_face(kind).eval()
    ids = torch.randint(3, 200, (2, 24))
    quantise_model(model, [{"input_ids": ids}], wbits=4, abits=8)
    settings = {"max_new_tokens": 10, "do_sample": False}
    cached = model.generate(ids[:1], **settings)
    assert cached.shape[1] > 24
    assert torch.equal(cached, model.generate(ids[:1], use_cache=False, **settings))
