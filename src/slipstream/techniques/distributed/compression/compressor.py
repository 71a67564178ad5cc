"""Base of gradient compressors: settings, and the exchange of one bucket.

An exchange is a generator, so that the same code serves communicating processes and workers that
one process simulates: it yields communication requests, receives their results, and replaces the
bucket by the mean over all workers. All workers yield the same sequence of requests and sizes.

Error feedback (Seide et al., Interspeech 2014; Karimireddy et al., ICML 2019): the unsent residual
is added to the next gradient, so that decoded gradients plus residual equal the sum of all
gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from slipstream.ranks.requests import Exchange, Gather, Reduce
from slipstream.technique import TechniqueSettings
from slipstream.techniques.distributed.compression import kernels

if TYPE_CHECKING:
    import torch

    from slipstream.techniques.distributed.compression.bucket import Bucket, Layout, Memory

HEADER_BYTES = 8


@dataclass(frozen=True)
class Message:
    """One collective of an exchange: ``all_reduce`` or ``all_gather``.

    Attributes:
        nbytes: size of every worker's tensor.
    """

    kind: str
    nbytes: int

    def collective(self, workers: int) -> tuple[str, float]:
        """Return kind and bytes of the result; two workers all-reduce by a gather."""
        if self.kind == "all_gather" or workers == 2:
            return "all_gather", float(self.nbytes * workers)
        return self.kind, float(self.nbytes)

    def sent_bytes(self, workers: int) -> float:
        """Return the bytes that one worker sends, in a ring all-reduce or an all-gather."""
        if self.kind == "all_reduce":
            return 2.0 * (workers - 1) / workers * self.nbytes
        return float(workers - 1) * self.nbytes


class Compressor(TechniqueSettings):
    """Base of compressors and their settings.

    Attributes:
        keeps: whether the unsent residual is retained (error feedback).
        start: number of initial steps without compression.
    """

    keeps: ClassVar[bool] = True
    start: int = 0

    def warmup_steps(self) -> int:
        """Return the number of initial steps without compression."""
        return self.start

    def exchange(self, bucket: Bucket, memory: Memory, workers: int, sound: bool) -> Exchange:
        """Replace the bucket by its mean; return False, with no state changed, if it cannot.

        Args:
            sound: whether this worker's gradients are finite. If those of any worker are not, all
                workers must return False.
        """
        raise NotImplementedError

    def messages(self, layout: Layout) -> list[Message]:
        """Return the collectives of one bucket's exchange."""
        raise NotImplementedError


def mean(compressor: Compressor, bucket: Bucket, memory: Memory, workers: int) -> Exchange:
    """Exchange a bucket, uncompressed if a gradient is not finite.

    Returns:
        Whether the bucket was compressed.
    """
    held = []
    if compressor.keeps:
        residual = memory.residual(bucket.layout)
        places = dict(zip(bucket.layout.names, bucket.layout.spans, strict=True))
        for name in bucket.idle:
            at, count = places[name]
            view = residual[at : at + count]
            held.append((view, view.clone()))
            view.zero_()
    sound = not compressor.keeps or kernels.finite(bucket.flat)
    compressed = yield from compressor.exchange(bucket, memory, workers, sound)
    for view, residual_before in held:
        view += residual_before
    if not compressed:
        yield from dense(bucket, workers)
    return compressed


def dense(bucket: Bucket, workers: int) -> Exchange:
    """Average a bucket without compression, as DistributedDataParallel does; return False."""
    bucket.flat.div_(workers)
    summed = yield Reduce(bucket.flat)
    if summed is not bucket.flat:
        bucket.flat.copy_(summed)
    return False


class GatheringCompressor(Compressor):
    """Base of compressors whose payloads are all-gathered and decoded by every worker."""

    def payload_bytes(self, layout: Layout) -> int:
        """Return the bytes of one worker's payload, without the header."""
        raise NotImplementedError

    def encode(self, gradient: torch.Tensor, residual: torch.Tensor, layout: Layout,
               payload: torch.Tensor) -> None:  # fmt: skip
        """Fill the payload, uint8 [payload_bytes], and update the residual."""
        raise NotImplementedError

    def decode(self, payload: torch.Tensor, layout: Layout, out: torch.Tensor, weight: float,
               add: bool) -> None:  # fmt: skip
        """Write one worker's gradient times `weight` to `out`, or add it if `add`."""
        raise NotImplementedError

    def messages(self, layout: Layout) -> list[Message]:
        return [Message("all_gather", HEADER_BYTES + self.payload_bytes(layout))]

    def exchange(self, bucket: Bucket, memory: Memory, workers: int, sound: bool) -> Exchange:
        """Encode, gather, and decode all payloads in rank order."""
        import torch

        layout = bucket.layout
        residual = memory.residual(layout)
        payload = torch.zeros(HEADER_BYTES + self.payload_bytes(layout), dtype=torch.uint8)
        payload[0] = sound
        if sound:
            self.encode(bucket.flat, residual, layout, payload[HEADER_BYTES:])
        payloads = yield Gather(payload)
        if not bool(payloads[:, 0].all()):
            if sound:
                decoded = torch.empty_like(bucket.flat)
                self.decode(payload[HEADER_BYTES:], layout, decoded, 1.0, add=False)
                residual.add_(decoded).sub_(bucket.flat)
            return False
        for worker, theirs in enumerate(payloads):
            self.decode(theirs[HEADER_BYTES:], layout, bucket.flat, 1.0 / workers, add=worker > 0)
        return True
