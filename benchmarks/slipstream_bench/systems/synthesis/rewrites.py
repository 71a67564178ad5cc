"""Rows of rewrites: planted subgraphs, near misses, speed, and models with nothing planted."""

from __future__ import annotations

import copy
import functools
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from slipstream.heap import keep_pages
from slipstream.surgery.fx import trace_of
from slipstream.techniques.rewrite.expression import Constant, Expression, Instruction, Ref, scalar
from slipstream.techniques.rewrite.regions import sizes_of, traced_steps
from slipstream.techniques.rewrite.rules import (
    Rule,
    RuleStore,
    find_rules,
    known_places,
    use_rules,
)
from slipstream.techniques.rewrite.tracing import TracingBackend
from slipstream.techniques.rewrite.verify import inputs_for, resized, why_different
from slipstream_bench import models
from slipstream_bench.harness import one_thread, paired
from slipstream_bench.rows import Bar, BenchOptions, at_least, at_most
from slipstream_bench.systems.synthesis.planted import PLANTED, Case, encoder, wide_encoder

_FAMILIES = (
    ("relu", "sigmoid", "tanh", "gelu", "gelu_tanh", "silu", "softplus", "exp", "abs", "neg",
     "square", "logsigmoid", "erf", "clone"),
    ("softmax", "log_softmax", "cumsum"), ("add", "mul", "sub", "div", "maximum"),
    ("sum", "mean", "amax", "logsumexp", "norm", "variance"), ("mean_all", "sum_all"),
)  # fmt: skip
"""Functions with the same arguments."""


@dataclass(frozen=True)
class _Search:
    """Result of the search of a model.

    Attributes:
        used: Python source of the replacements that the model uses.
        cpu_s: CPU time of the search.
        lookup_ms: time to find the places of all known rules in the model.
    """

    store: RuleStore
    used: tuple[str, ...]
    found: tuple[Rule, ...]
    cpu_s: float
    lookup_ms: float


def rewrite_rows(options: BenchOptions) -> Iterator[Bar]:
    """Yield the rows of rewrites."""
    keep_pages()
    with one_thread():
        yield from _planted_rows(options)
        yield from _near_miss_row(options)
        yield from _speed_rows(options)
        yield from _plain_rows(options)


@functools.cache
def _searched(make: Callable[[], Case]) -> _Search:
    """Search the forward pass of a model."""
    torch.manual_seed(0)
    model, inputs = make()
    with tempfile.TemporaryDirectory() as folder:
        store = RuleStore(Path(folder) / "rules.db", report=lambda key, value: None)
    result: list[_Search] = []

    def search(module: GraphModule) -> None:
        traced = trace_of(module)
        began = time.process_time()
        found = find_rules(traced, store, max_ops=2, budget_s=110)
        cpu_s, began = time.process_time() - began, time.process_time()
        places = list(known_places(traced, traced_steps(traced), store))
        lookup_ms = 1e3 * (time.process_time() - began)
        used = tuple(place.rule.replacement.source for place in places)
        result.append(_Search(store, used, tuple(found), cpu_s, lookup_ms))

    torch._dynamo.reset()
    backend: Any = TracingBackend(search)
    torch.compile(model, backend=backend, dynamic=False)(*inputs)
    if not result:
        raise RuntimeError("; ".join(backend.reasons))
    first, *others = result
    return functools.reduce(_joined, others, first)


def _joined(a: _Search, b: _Search) -> _Search:
    return _Search(
        a.store, a.used + b.used, a.found + b.found, a.cpu_s + b.cpu_s, a.lookup_ms + b.lookup_ms
    )


def _planted_rows(options: BenchOptions) -> Iterator[Bar]:
    bars = (
        "rewrites: planted subgraphs found",
        "rewrites: longest search of a model with four planted subgraphs",
        "rewrites: longest look-up of known rules in a model",
    )
    if not any(options.wants(bar, 60) for bar in bars):
        return
    searches = {}
    for make in PLANTED:
        options.progress(f"searching {make.__name__}")
        searches[make.__name__] = _searched(make)
    found = {
        name: name in {i.op for rule in searches[make.__name__].found
                       for i in rule.replacement.instructions}
        for make, names in PLANTED.items() for name in names
    }  # fmt: skip
    missing = ", ".join(name for name, is_found in found.items() if not is_found)
    yield at_least(
        bars[0], sum(found.values()), 10, f"of {len(found)}", n=len(found),
        detail=f"equal and at least 1.05 times as fast; not found: {missing or 'none'}",
        data={name: search.used for name, search in searches.items()},
    )  # fmt: skip
    cpu_s = {name: search.cpu_s for name, search in searches.items()}
    yield at_most(bars[1], max(cpu_s.values()), 120, "s of CPU time", n=len(cpu_s), data=cpu_s)
    lookup = {name: search.lookup_ms for name, search in searches.items()}
    yield at_most(bars[2], max(lookup.values()), 100, "ms", n=len(lookup), data=lookup)


def near_misses(rule: Rule) -> Iterator[Expression]:
    """Yield replacements that differ from that of a rule in a function, an argument or a step."""
    old = rule.replacement
    for n, instruction in enumerate(old.instructions):
        for family in _FAMILIES:
            for op in family if instruction.op in family else ():
                yield _changed(old, n, Instruction(op, instruction.arguments))
        for k, argument in enumerate(instruction.arguments):
            for value in _others(argument, old):
                arguments = (*instruction.arguments[:k], value, *instruction.arguments[k + 1 :])
                yield _changed(old, n, Instruction(instruction.op, arguments))
    last = Ref(old.inputs + len(old.instructions))
    for op in _FAMILIES[0]:
        rows = (*old.instructions, Instruction(op, (old.result,)))
        yield replace(old, instructions=rows, result=last)
    for factor in (0.5, 0.9, 0.99, 0.999, 1.001, 1.01, 1.1, 2.0):
        for op, value in (("mul", factor), ("add", factor - 1)):
            rows = (*old.instructions, Instruction(op, (old.result, value)))
            yield replace(old, instructions=rows, result=last)


def _changed(old: Expression, n: int, instruction: Instruction) -> Expression:
    rows = (*old.instructions[:n], instruction, *old.instructions[n + 1 :])
    return replace(old, instructions=rows)


def _others(argument: Any, old: Expression) -> Iterator[Any]:
    if isinstance(argument, bool):
        yield not argument
    elif isinstance(argument, (float, Constant)):
        value = scalar(argument, old.constants)
        yield from (value * factor for factor in (0.5, 0.9, 0.99, 1.01, 1.1, 2.0))
    elif isinstance(argument, int):
        yield from (-3, -2, -1, 0, 1)
    elif argument is None or (isinstance(argument, Ref) and argument.index < old.inputs):
        yield from map(Ref, range(old.inputs))


def _is_different(rule: Rule, other: Expression) -> bool:
    """Whether another replacement has the same shape but other values, in float64."""
    generator = torch.Generator().manual_seed(3)
    sizes = sizes_of(rule.pattern, rule.specs)[0]
    inputs = inputs_for(resized(rule.specs, sizes), "normal", generator)
    try:
        expected, actual = rule.pattern.run(inputs, sizes), other.run(inputs, sizes)
    except (RuntimeError, IndexError, ValueError, TypeError):
        return False
    return expected.shape == actual.shape and not torch.allclose(
        actual.double(), expected.double(), rtol=1e-10, atol=1e-12
    )


def _near_miss_row(options: BenchOptions) -> Iterator[Bar]:
    bar = "rewrites: near misses accepted as rules"
    count = 1000 if options.full else 200
    if not options.wants(bar, 30):
        return
    rules = [rule for make in PLANTED for rule in _searched(make).store.rules()]
    streams = [(rule, near_misses(rule)) for rule in rules]
    accepted: list[str] = []
    tried = 0
    while streams and tried < count:
        for rule, stream in list(streams):
            other = next((m for m in stream if _is_different(rule, m)), None)
            if other is None:
                streams.remove((rule, stream))
            elif tried < count:
                tried += 1
                options.progress(f"{bar}: {tried} of {count}")
                if why_different(rule.pattern, other, rule.specs) is None:
                    accepted.append(f"{rule.pattern.source} -> {other.source}")
    yield at_most(
        bar, len(accepted), 0, f"of {tried}", n=tried,
        detail=f"changed replacements of {len(rules)} rules, equal in shape; {accepted or 'none'}",
    )  # fmt: skip


def _speed_rows(options: BenchOptions) -> Iterator[Bar]:
    for make in (*PLANTED, wide_encoder):
        bar = f"rewrites: {make.__name__}, forward and backward pass over rewritten"
        if not options.wants(bar, 20):
            continue
        options.progress(bar)
        store = _searched(encoder if make is wide_encoder else make).store
        torch.manual_seed(0)
        model, inputs = make()
        rewritten = copy.deepcopy(model)
        torch._dynamo.reset()
        replaced, _ = use_rules(rewritten, store, training=True)
        arms = {
            name: functools.partial(_step, changed, inputs)
            for name, changed in (("rewritten", rewritten), ("as written", model))
        }
        for step in arms.values():
            step()
        taken = paired(arms, blocks=30 if options.full else 10)
        ratio = taken.ratio("as written", "rewritten")
        detail = f"{'; '.join(replaced)}; {taken}"
        if make is wide_encoder:
            yield ratio.reported(bar, detail=detail)
        else:
            yield ratio.at_least(bar, 1.3, detail=detail)


def _step(model: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> None:
    output = model(*inputs)
    parts = output if isinstance(output, tuple) else (output,)
    torch.stack([part.square().mean() for part in parts]).sum().backward()


def _resnet() -> Case:
    from transformers import ResNetConfig, ResNetModel

    config = ResNetConfig(depths=[2, 2, 2, 2], layer_type="basic", hidden_sizes=[64, 128, 256, 512])
    return ResNetModel(config), (torch.randn(2, 3, 96, 96),)


def _language_model() -> Case:
    model, batch, *_ = models.tiny_language_model()
    return model, (batch[0],)


def _plain_rows(options: BenchOptions) -> Iterator[Bar]:
    for name, make in (("ResNet-18", _resnet), ("language model", _language_model)):
        bar = f"rewrites: {name} with nothing planted, rules found"
        if not options.wants(bar, 40):
            continue
        options.progress(bar)
        search = _searched(make)
        gains = (f"{rule.replacement.source} {max(rule.gains):.2f}x" for rule in search.found)
        shown = "; ".join(itertools.islice(gains, 4)) or "nothing is faster"
        yield Bar(
            bar, len(search.found), "rules", "reported", None,
            detail=f"no bar; {len(search.used)} places in {search.cpu_s:.0f} s; {shown}",
        )  # fmt: skip
