"""Rows of ``slipstream bench lowbit`` on decoding at batch 1: speed, memory, quality.

One thread. A decoder reads every weight once per token, so that the number of bytes dominates.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from slipstream_bench.harness import one_thread, paired
from slipstream_bench.rows import Bar, BenchOptions, at_most, not_judged

_WIDTH, _LAYERS, _HEADS = 2048, 2, 16
_TOKENS, _READ = 6, 16
_PROMPT = f"decoding: a prompt of {_READ} tokens, w4a8 against torch int8"


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Compare a decoder of 101 million weights with torch's int8, its matmuls with other runtimes'
    four bits, and the quality of a small trained one."""
    with one_thread(gradients=False):
        yield from _token_rows(options)
        yield from _product_rows(options)
        yield from _quality_rows(options)


def _token_rows(options: BenchOptions) -> Iterator[Bar]:
    rows = {
        "decoding: w4a8 against torch int8, batch 1": ("int8", "w4a8", 2.0),
        "decoding: w3a8 against torch int8, batch 1": ("int8", "w3a8", 2.5),
        "decoding: w8a8 against torch int8, batch 1": ("int8", "w8a8", 1.0),
        "decoding: w4a8 against float32, batch 1": ("float32", "w4a8", 4.0),
        _PROMPT: ("int8", "w4a8", 1.0),
    }
    selected = [bar for bar in rows if options.wants(bar)]
    if not selected:
        return
    import torch

    from slipstream_bench.systems.lowbit.decoder import Decoder

    torch.manual_seed(0)
    model = Decoder(_WIDTH, _LAYERS, _HEADS).eval()
    ids = torch.randint(0, 256, (1, _READ))
    models: dict[str, Any] = {"float32": model, "int8": _int8(model)}
    for bar in selected:
        name = rows[bar][1]
        if name not in models:
            options.progress(f"decoding: {name}")
            models[name] = _low_bit(model, ids, int(name[1]), edge_bits=int(name[1]))
    blocks = 9 if options.full else 6
    tokens = {name: _tokens(decoder, ids) for name, decoder in models.items()}
    taken = paired(tokens, blocks=blocks, budget_s=60.0)
    sizes = {name: _weight_bytes(decoder) for name, decoder in models.items()}
    for bar in selected:
        slow, fast, target = rows[bar]
        if bar == _PROMPT:
            prompts = {name: partial(models[name], ids) for name in (slow, fast)}
            read = paired(prompts, blocks=blocks, budget_s=20.0)
            each = ", ".join(f"{arm} {read.median_s(arm) * 1e3:.1f} ms" for arm in (fast, slow))
            yield read.ratio(slow, fast).at_least(bar, target, detail=each)
            continue
        rates = {name: _TOKENS / taken.median_s(name) for name in (fast, slow)}
        each = ", ".join(
            f"{name} {rate:.1f} tokens/s, {sizes[name] / 2**20:.0f} MiB of weights at "
            f"{rate * sizes[name] / 1e9:.1f} GB/s"
            for name, rate in rates.items()
        )
        yield taken.ratio(slow, fast).at_least(bar, target, detail=each)


def _product_rows(options: BenchOptions) -> Iterator[Bar]:
    rows = {
        "decoding: products of a token in 4 bits against torch int8": ("torch", 2.0),
        "decoding: products of a token in 4 bits against ONNX Runtime": ("onnxruntime", 1.3),
        "decoding: products of a token in 4 bits against OpenVINO": ("openvino", 1.3),
    }
    selected = [bar for bar in rows if options.wants(bar)]
    if not selected:
        return
    import torch
    from torch import nn

    from slipstream.techniques.lowbit.nn import LowBitLinear
    from slipstream_bench.systems.lowbit import peers
    from slipstream_bench.systems.lowbit.decoder import Layer

    shapes = [
        layer.weight.shape
        for layer in Layer(_WIDTH, _HEADS).modules()
        if isinstance(layer, nn.Linear)
    ] * _LAYERS
    floats = [nn.Linear(k, n, bias=False) for n, k in shapes]
    layers = [
        LowBitLinear.from_float(layer, 4, 8, (-3.0, 3.0), least_error=False) for layer in floats
    ]
    inputs = {k: torch.randn(1, k) for _, k in shapes}

    def ours() -> None:
        for layer, (_, k) in zip(layers, shapes, strict=True):
            layer(inputs[k])

    for bar in selected:
        options.progress(bar)
        peer, target = rows[bar]
        runs: list[Any]
        if peer == "torch":
            eights = [_int8(nn.Sequential(layer)) for layer in floats]
            pairs = zip(eights, shapes, strict=True)
            runs = [partial(layer, inputs[k]) for layer, (_, k) in pairs]
            about = "theirs in eight bits"
        else:
            runs = [getattr(peers, peer)(4, 1, n, k) for n, k in shapes]
            about = "theirs in blocks of 32"
        if isinstance(runs[0], str):
            yield not_judged(bar, "x", f">= {target:g}", runs[0])
            continue

        def theirs(runs: list[Any] = runs) -> None:
            for run in runs:
                run()

        taken = paired({"theirs": theirs, "ours": ours}, blocks=9, budget_s=20.0)
        detail = f"{len(shapes)} products of one row, floats around; {about}"
        yield taken.ratio("theirs", "ours").at_least(bar, target, detail=detail)


def _quality_rows(options: BenchOptions) -> Iterator[Bar]:
    rows = {
        "decoding: perplexity of w8a8 over float32": (8, 1.02),
        "decoding: perplexity of w4a8 over float32": (4, 1.10),
        "decoding: perplexity of w3a8 over float32": (3, 1.30),
    }
    selected = [bar for bar in rows if options.wants(bar)]
    if not selected:
        return
    import torch

    from slipstream_bench.systems.lowbit.decoder import batch, perplexity, text, trained

    options.progress("decoding: a decoder is trained")
    with torch.enable_grad():
        model = trained(600 if options.full else 200)
    before, int8 = perplexity(model), perplexity(_int8(model))
    calibrated = batch(text()[0], 16, 64)[:, :-1]
    for bar in selected:
        bits, most = rows[bar]
        after = perplexity(_low_bit(model, calibrated, bits))
        detail = (
            f"{after:.2f} on held-out bytes, float32 {before:.2f}, torch int8 {int8:.2f}; not "
            "retrained, first and last layer in 8 bits"
        )
        yield at_most(bar, after / before, most, "x", detail=detail)


def _int8(model: Any) -> Any:
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantise: Any = torch.ao.quantization.quantize_dynamic
        return quantise(model, {torch.nn.Linear}, dtype=torch.qint8)


def _low_bit(model: Any, ids: Any, bits: int, **settings: Any) -> Any:
    from slipstream.techniques.lowbit.qat import quantise_model

    copied = copy.deepcopy(model)
    quantise_model(copied, [ids], wbits=bits, abits=8, **settings)
    return copied


def _tokens(model: Any, ids: Any) -> Callable[[], object]:
    from slipstream_bench.systems.lowbit.decoder import Decoder

    assert isinstance(model, Decoder)
    # The prompt is read once beforehand: it has many rows, and is not part of a token's time.
    logits, cache = model(ids)
    return lambda: model.decode(logits, cache, _TOKENS)


def _weight_bytes(model: Any) -> int:
    """Return the bytes of linear layers' weights as the matmuls read them."""
    import torch

    from slipstream.techniques.lowbit.layer import LowBitLayer

    total = 0
    for module in model.modules():
        if isinstance(module, LowBitLayer):
            total += sum(packed.nbytes for packed in module.packed)
        elif isinstance(module, torch.nn.Linear):
            total += module.weight.nbytes
        elif callable(getattr(module, "weight", None)):
            total += module.weight().numel()
    return total
