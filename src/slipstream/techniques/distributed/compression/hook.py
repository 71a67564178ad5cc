"""`compress`: compressed exchange of the gradients of a ``DistributedDataParallel`` model.

The hook passes every bucket to one thread (`BucketThread`) that encodes, communicates and decodes
while the backward pass continues.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from slipstream.errors import InvalidArgumentError, UsageError
from slipstream.ranks.buckets import BucketThread, need_no_hook
from slipstream.ranks.group import PATIENCE_S, TIMEOUT_S, ProcessGroup
from slipstream.technique import parse, registry
from slipstream.techniques.distributed.compression.auto import Auto, Chooser
from slipstream.techniques.distributed.compression.bucket import Bucket, Layout, Memory
from slipstream.techniques.distributed.compression.compressor import Compressor, dense, mean
from slipstream.techniques.distributed.exposed import put_hook

_FORMAT = 2


def compress(
    model: DistributedDataParallel,
    how: str | Compressor | Auto = "auto",
    *,
    timeout_s: float = TIMEOUT_S,
    patience_s: float = PATIENCE_S,
) -> Compression:
    """Compress the exchange of the model's gradients, from its next backward pass on.

    All ranks must call it with the same arguments. Gradients are exchanged uncompressed if they are
    not float32, or if those of any rank are not finite in a step.

    Args:
        model: on CPU, without a communication hook; its process group may be any subgroup of the
            default one.
        how: settings or a technique spec: ``powersgd:rank=4``, ``topk:0.01``, ``sign``,
            ``cast:bf16``, ``block_int:4``, ``randomk:0.01``; ``auto`` times several, and chooses
            the fastest, or no compression unless one is faster.
        timeout_s: time limit of one collective.
        patience_s: time limit, after a failure, for every rank to report that it is alive.

    Returns:
        The hook, whose state belongs in checkpoints.

    Raises:
        InvalidArgumentError: the model is not in DDP or not on CPU, or a time limit is invalid.
        UsageError: the model already has a communication hook, or `how` is another technique.
        CommunicationError: ranks disagree on settings or parameters. Later, from ``backward``: a
            rank exited, hung, or made a different call.
    """
    if not isinstance(model, DistributedDataParallel):
        raise InvalidArgumentError(
            "model", f"is a {type(model).__name__}, not a DistributedDataParallel",
            remedy="call compress(DistributedDataParallel(model), ...)",
        )  # fmt: skip
    settings = settings_of(how)
    devices = {parameter.device.type for parameter in model.parameters()}
    if devices - {"cpu"}:
        raise InvalidArgumentError(
            "model", f"its parameters are on {', '.join(sorted(devices))}; encoders run on "
            "CPU only", remedy="use torch's own hooks: torch.distributed.algorithms",
        )  # fmt: skip
    need_no_hook(model)
    hook = Compression(model, settings, timeout_s, patience_s)
    put_hook(model, hook.on_bucket, hook.ranks)
    return hook


def _names() -> list[str]:
    return [name for name, kind in registry().items() if kind.traits.compresses]


def settings_of(how: str | Compressor | Auto) -> Compressor | Auto:
    """Parse a technique spec; settings are returned unchanged.

    Raises:
        UsageError: the spec is not a compressor.
        InvalidArgumentError: `how` is neither settings nor a string.
    """
    if isinstance(how, (Auto, Compressor)):
        return how
    if not isinstance(how, str):
        raise InvalidArgumentError(
            "how", f"is {how!r}, not a compressor",
            remedy="auto, or one of " + ", ".join(_names()) + ", for example topk:0.01",
        )  # fmt: skip
    if how == "auto":
        return Auto()
    parsed = parse(how)
    if len(parsed) == 1 and isinstance(parsed[0], Compressor):
        return parsed[0]
    raise UsageError(
        f"'{how}' is not a single gradient compressor",
        remedy="auto, or one of " + ", ".join(_names()),
    )


class Compression:
    """A communication hook and its state on this rank.

    Attributes:
        settings: the requested settings.
        memory: state between steps.
        dense_buckets: number of buckets exchanged uncompressed because a gradient was not finite.
    """

    def __init__(
        self, model: DistributedDataParallel, settings: Compressor | Auto, timeout_s: float,
        patience_s: float,
    ) -> None:  # fmt: skip
        self.settings = settings
        self.memory = Memory()
        self.dense_buckets = 0
        named = {n: p for n, p in model.module.named_parameters() if p.requires_grad}
        self._names = {id(parameter): name for name, parameter in named.items()}
        self._sizes = {name: parameter.numel() for name, parameter in named.items()}
        # Otherwise DDP raises an error for unused parameters.
        self._may_idle = bool(model.find_unused_parameters or model.static_graph)
        self._layouts: dict[tuple[int, ...], Layout] = {}
        self._resumed: Resumed | None = None
        self._thread = BucketThread("compression", sparse=True)
        self.ranks = ProcessGroup(model.process_group, timeout_s, patience_s, "compression")
        self.chooser = Chooser(settings, self.ranks) if isinstance(settings, Auto) else None
        shapes = ", ".join(f"{n}{list(p.shape)}" for n, p in named.items())
        self.ranks.agree(str(settings), "compression")
        self.ranks.agree(shapes, "list of parameters")

    def on_bucket(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """Exchange one bucket; DDP calls it in the same order on all ranks."""
        flat, resumed = bucket.buffer(), self._resumed
        if self.chooser is not None and not self._thread.begun:
            self.chooser.step_begins(time.perf_counter())
        where = f"step {self.memory.step}, bucket {bucket.index()}"
        works: list[Callable[[str], object]] = []
        if resumed is not None and _compressible(flat):
            resumed.hold(self._layout(bucket), bucket.gradients())
        else:
            works.append(self._work(bucket, flat))
        if resumed is not None and bucket.is_last():
            self._resumed = None
            works.append(partial(self._exchange_resumed, resumed))
        result = self._thread.submit(flat, lambda: [work(where) for work in works], last=False)
        if bucket.is_last():
            self._finish()
        return result

    def _exchange_resumed(self, resumed: Resumed, where: str) -> None:
        """Exchange all gradients of this step in the buckets of the checkpoint."""
        for layout, flat, gradients in resumed.buckets():
            self._exchange(flat, layout, gradients)(where)
            resumed.restore(layout, flat)

    def _work(self, bucket: Any, flat: torch.Tensor) -> Callable[[str], object]:
        """Return the work of the thread on a bucket, a function of its label for errors."""
        if flat.numel() == 0:
            return lambda where: None
        if not _compressible(flat):
            return self._exchange_dense(flat)
        return self._exchange(flat, self._layout(bucket), bucket.gradients())

    def _exchange_dense(self, flat: torch.Tensor) -> Callable[[str], object]:
        plain = Bucket(flat, Layout((), (), (), flat.numel()))
        return lambda where: self.ranks.exchange(dense(plain, self.ranks.size), where)

    def _exchange(
        self, flat: torch.Tensor, layout: Layout, gradients: Sequence[torch.Tensor]
    ) -> Callable[[str], object]:
        """Return the exchange of float32 gradients in `flat`, laid out by `layout`."""
        size, compressor = self.ranks.size, self._compressor()
        if size == 1:
            return lambda where: None
        if compressor is None:
            return self._exchange_dense(flat)
        idle: tuple[str, ...] = ()
        if self._may_idle:
            named = zip(layout.names, gradients, strict=True)
            idle = tuple(name for name, gradient in named if not gradient.any())
        ours = Bucket(flat, layout, idle)

        def exchange(where: str) -> None:
            if not self.ranks.exchange(mean(compressor, ours, self.memory, size), where):
                self.dense_buckets += 1

        return exchange

    def _compressor(self) -> Compressor | None:
        """Return the compressor of this step; None for no compression."""
        chosen = self.settings
        if isinstance(chosen, Auto):
            assert self.chooser is not None
            return self.chooser.current
        return chosen if self.memory.step >= chosen.start else None

    def _layout(self, bucket: Any) -> Layout:
        parameters = bucket.parameters()
        key = tuple(map(id, parameters))
        if key not in self._layouts:
            buffer = bucket.buffer()
            self._layouts[key] = Layout(
                tuple(self._names[identity] for identity in key),
                tuple(tuple(parameter.shape) for parameter in parameters),
                tuple(
                    gradient.storage_offset() - buffer.storage_offset()
                    for gradient in bucket.gradients()
                ),
                buffer.numel(),
            )
        return self._layouts[key]

    def _names_in_use(self) -> list[tuple[str, ...]]:
        """Return the parameter names of the current buckets, in the order of exchange."""
        newest = {name: layout for layout in self._layouts.values() for name in layout.names}
        return [x.names for x in self._layouts.values() if newest[x.names[0]] is x]

    def _finish(self) -> None:
        began = time.perf_counter()
        self._thread.wait()
        self.memory.step += 1
        if self.chooser is not None:
            self.chooser.step_ends(time.perf_counter() - began)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank, to be saved with the model in one file per rank."""
        # Without a step since loading, DDP has not rebuilt its buckets yet.
        resumed = self._resumed
        names = self._names_in_use() if resumed is None else resumed.names
        return {
            "format": _FORMAT, "settings": str(self.settings), "rank": self.ranks.rank,
            "ranks": self.ranks.size, **self.memory.state_dict(),
            "buckets": [list(bucket) for bucket in names],
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`.

        DDP uses other buckets in its first step than later. The gradients of that step are
        therefore exchanged in the saved buckets, so that a resumed run computes the same bits.

        Raises:
            InvalidArgumentError: the state has another rank, number of ranks, settings or model.
        """
        if not isinstance(state, Mapping):
            raise InvalidArgumentError("state", f"is a {type(state).__name__}, not a state_dict")
        expected = {
            "format": _FORMAT, "settings": str(self.settings), "rank": self.ranks.rank,
            "ranks": self.ranks.size,
        }  # fmt: skip
        for key, value in expected.items():
            if state.get(key) != value:
                raise InvalidArgumentError(
                    "state", f"its {key} is {state.get(key)!r}, but here it is {value!r}",
                    remedy="load on every rank the state it saved, with the same settings",
                )  # fmt: skip
        self.memory.load_state_dict(state, self._sizes)
        buckets = [tuple(names) for names in state["buckets"]]
        self._resumed = Resumed(buckets) if buckets else None


class Resumed:
    """Gradients of the first step after a checkpoint, in the buckets from before it.

    Attributes:
        names: parameter names of each bucket, in the order of exchange.
    """

    def __init__(self, names: Sequence[tuple[str, ...]]) -> None:
        self.names = names
        self._gradients: dict[str, torch.Tensor] = {}

    def hold(self, layout: Layout, gradients: Sequence[torch.Tensor]) -> None:
        """Reference the gradients of one of DDP's buckets."""
        self._gradients |= dict(zip(layout.names, gradients, strict=True))

    def buckets(self) -> Iterator[tuple[Layout, torch.Tensor, list[torch.Tensor]]]:
        """Yield each saved bucket as float32 [layout.numel]; other parameters come last."""
        saved = {name for names in self.names for name in names}
        others = tuple(name for name in self._gradients if name not in saved)
        for names in (*self.names, others):
            here = [name for name in names if name in self._gradients]
            if here:
                gradients = [self._gradients[name] for name in here]
                shapes = {n: tuple(g.shape) for n, g in zip(here, gradients, strict=True)}
                flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
                yield Layout.of(shapes), flat, gradients

    def restore(self, layout: Layout, flat: torch.Tensor) -> None:
        """Copy a bucket back to DDP's gradients."""
        for name, (at, count) in zip(layout.names, layout.spans, strict=True):
            gradient = self._gradients[name]
            gradient.copy_(flat[at : at + count].view(gradient.shape))


def _compressible(flat: torch.Tensor) -> bool:
    return flat.dtype is torch.float32 and flat.layout == torch.strided and flat.numel() > 0
