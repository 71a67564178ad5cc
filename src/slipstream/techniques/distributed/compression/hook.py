"""`compress`: gradients of a ``DistributedDataParallel`` model, exchanged in fewer bytes.

The hook hands every bucket to one thread (`BucketThread`) that encodes, communicates and decodes,
while the backward pass goes on.
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
    """Exchange the model's gradients compressed, from its next backward pass on.

    All ranks call it with the same arguments. Gradients that are not float32 are exchanged as they
    are; so are those of a step in which somebody's are not finite.

    Args:
        model: on a processor, without a communication hook; its process group may be any part of
            the default one.
        how: settings, or what they are written as: ``powersgd:rank=4``, ``topk:0.01``, ``sign``,
            ``cast:bf16``, ``block_int:4``, ``randomk:0.01``; ``auto`` measures which of several is
            fastest, and takes none unless it is faster than none.
        timeout_s: how long a rank waits for the others in one collective.
        patience_s: how long, after a failure, all are given to say that they live.

    Returns:
        The hook with its state, for checkpoints.

    Raises:
        InvalidArgumentError: not a DDP model, or one on another device; no time to wait.
        UsageError: the model has a communication hook already, or `how` names something else.
        CommunicationError: ranks disagree on settings or parameters. Later, from ``backward``: a
            rank ended, hung, or does something else than the others.
    """
    if not isinstance(model, DistributedDataParallel):
        raise InvalidArgumentError(
            "model", f"is a {type(model).__name__}, not a DistributedDataParallel",
            remedy="compress(DistributedDataParallel(model), ...)",
        )  # fmt: skip
    settings = settings_of(how)
    devices = {parameter.device.type for parameter in model.parameters()}
    if devices - {"cpu"}:
        raise InvalidArgumentError(
            "model", f"its parameters are on {', '.join(sorted(devices))}; encoders run on "
            "processors only", remedy="torch's own hooks: torch.distributed.algorithms",
        )  # fmt: skip
    need_no_hook(model)
    hook = Compression(model, settings, timeout_s, patience_s)
    put_hook(model, hook.on_bucket, hook.ranks)
    return hook


def _names() -> list[str]:
    return [name for name, kind in registry().items() if kind.traits.compresses]


def settings_of(how: str | Compressor | Auto) -> Compressor | Auto:
    """Settings as they are, or read from the grammar of techniques.

    Raises:
        UsageError: what is written is no way to compress.
        InvalidArgumentError: it is neither settings nor written.
    """
    if isinstance(how, (Auto, Compressor)):
        return how
    if not isinstance(how, str):
        raise InvalidArgumentError(
            "how", f"is {how!r}, not a way to compress",
            remedy="auto, or one of " + ", ".join(_names()) + ", as topk:0.01",
        )  # fmt: skip
    if how == "auto":
        return Auto()
    parsed = parse(how)
    if len(parsed) == 1 and isinstance(parsed[0], Compressor):
        return parsed[0]
    raise UsageError(
        f"'{how}' is not one way to compress gradients",
        remedy="auto, or one of " + ", ".join(_names()),
    )


class Compression:
    """A communication hook and its state on this rank.

    Attributes:
        settings: what was asked for.
        memory: what is kept between steps.
        dense_buckets: how many buckets were exchanged as they are because of a gradient that was
            not finite.
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
        # Only then may a parameter go unused without DDP complaining.
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
            works.append(partial(self._as_saved, resumed))
        result = self._thread.submit(flat, lambda: [work(where) for work in works], last=False)
        if bucket.is_last():
            self._finish()
        return result

    def _as_saved(self, resumed: Resumed, where: str) -> None:
        """Exchange all gradients of this step in the buckets that were saved."""
        for layout, flat, gradients in resumed.buckets():
            self._exchange(flat, layout, gradients)(where)
            resumed.give_back(layout, flat)

    def _work(self, bucket: Any, flat: torch.Tensor) -> Callable[[str], object]:
        """What the thread is to do with a bucket, given where that is."""
        if flat.numel() == 0:
            return lambda where: None
        if not _compressible(flat):
            return self._plainly(flat)
        return self._exchange(flat, self._layout(bucket), bucket.gradients())

    def _plainly(self, flat: torch.Tensor) -> Callable[[str], object]:
        plain = Bucket(flat, Layout((), (), (), flat.numel()))
        return lambda where: self.ranks.exchange(dense(plain, self.ranks.size), where)

    def _exchange(
        self, flat: torch.Tensor, layout: Layout, gradients: Sequence[torch.Tensor]
    ) -> Callable[[str], object]:
        """Of float32 gradients, which lie in `flat` as `layout` says."""
        size, compressor = self.ranks.size, self._compressor()
        if size == 1:
            return lambda where: None
        if compressor is None:
            return self._plainly(flat)
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
        """What this step's buckets are compressed with; None for as they are."""
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
                tuple(self._names[one] for one in key),
                tuple(tuple(parameter.shape) for parameter in parameters),
                tuple(
                    gradient.storage_offset() - buffer.storage_offset()
                    for gradient in bucket.gradients()
                ),
                buffer.numel(),
            )
        return self._layouts[key]

    def _names_in_use(self) -> list[tuple[str, ...]]:
        """Of each bucket since they were last rebuilt, in the order in which they are exchanged."""
        newest = {name: one for one in self._layouts.values() for name in one.names}
        return [one.names for one in self._layouts.values() if newest[one.names[0]] is one]

    def _finish(self) -> None:
        began = time.perf_counter()
        self._thread.wait()
        self.memory.step += 1
        if self.chooser is not None:
            self.chooser.step_ends(time.perf_counter() - began)

    def state_dict(self) -> dict[str, Any]:
        """Of this rank: save it beside the model, one file per rank."""
        # Loaded, and no step since: DDP's own are not yet what they will be.
        resumed = self._resumed
        names = self._names_in_use() if resumed is None else resumed.names
        return {
            "format": _FORMAT, "settings": str(self.settings), "rank": self.ranks.rank,
            "ranks": self.ranks.size, **self.memory.state_dict(),
            "buckets": [list(one) for one in names],
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was called.

        DDP lays out the buckets of its first step anew, and those of the next as they were; the
        first step's gradients are exchanged in the buckets that were saved, so that a run that is
        resumed computes the same bits.

        Raises:
            InvalidArgumentError: of another rank, number of ranks, settings or model.
        """
        if not isinstance(state, Mapping):
            raise InvalidArgumentError("state", f"is a {type(state).__name__}, no state_dict")
        expected = {
            "format": _FORMAT, "settings": str(self.settings), "rank": self.ranks.rank,
            "ranks": self.ranks.size,
        }  # fmt: skip
        for key, value in expected.items():
            if state.get(key) != value:
                raise InvalidArgumentError(
                    "state", f"its {key} is {state.get(key)!r}, here it is {value!r}",
                    remedy="every rank loads what it saved itself, with the same settings",
                )  # fmt: skip
        self.memory.load_state_dict(state, self._sizes)
        buckets = [tuple(names) for names in state["buckets"]]
        self._resumed = Resumed(buckets) if buckets else None


class Resumed:
    """The first step's gradients after a checkpoint, put together as before it.

    Attributes:
        names: of the parameters in each bucket, in the order in which they were exchanged.
    """

    def __init__(self, names: Sequence[tuple[str, ...]]) -> None:
        self.names = names
        self._gradients: dict[str, torch.Tensor] = {}

    def hold(self, layout: Layout, gradients: Sequence[torch.Tensor]) -> None:
        """Keep the gradients of one of DDP's buckets, which stay where they are."""
        self._gradients |= dict(zip(layout.names, gradients, strict=True))

    def buckets(self) -> Iterator[tuple[Layout, torch.Tensor, list[torch.Tensor]]]:
        """Each saved bucket with its numbers, float32 [layout.numel]; what it lacks comes last."""
        known = {name for names in self.names for name in names}
        rest = tuple(name for name in self._gradients if name not in known)
        for names in (*self.names, rest):
            here = [name for name in names if name in self._gradients]
            if here:
                gradients = [self._gradients[name] for name in here]
                shapes = {n: tuple(g.shape) for n, g in zip(here, gradients, strict=True)}
                flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
                yield Layout.of(shapes), flat, gradients

    def give_back(self, layout: Layout, flat: torch.Tensor) -> None:
        """Put the numbers of a bucket to where DDP looks for them."""
        for name, (at, count) in zip(layout.names, layout.spans, strict=True):
            gradient = self._gradients[name]
            gradient.copy_(flat[at : at + count].view(gradient.shape))


def _compressible(flat: torch.Tensor) -> bool:
    return flat.dtype is torch.float32 and flat.layout == torch.strided and flat.numel() > 0
