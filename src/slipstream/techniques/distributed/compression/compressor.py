"""What every way to compress gradients is: settings, and the exchange of one bucket.

An exchange is a generator, so that the same lines serve processes that communicate and workers
simulated in one: it yields what is to be communicated, is sent what comes back, and leaves in the
bucket the mean over all workers. Order and sizes of what it yields are the same on every worker.

Error feedback (Seide et al., Interspeech 2014; Karimireddy et al., ICML 2019): what is not sent is
kept and added to the next gradient, so that what was decoded and what is kept add up to all
gradients there ever were.
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
    """One collective of an exchange, as it is predicted: ``all_reduce`` or ``all_gather``.

    Attributes:
        nbytes: of every worker's tensor.
    """

    kind: str
    nbytes: int

    def collective(self, workers: int) -> tuple[str, float]:
        """Kind and bytes of the result: two workers have a sum when each has the other's terms."""
        if self.kind == "all_gather" or workers == 2:
            return "all_gather", float(self.nbytes * workers)
        return self.kind, float(self.nbytes)

    def sent_bytes(self, workers: int) -> float:
        """What one worker sends: a ring's all-reduce sends 2 (p - 1) / p, a gather p - 1 times."""
        if self.kind == "all_reduce":
            return 2.0 * (workers - 1) / workers * self.nbytes
        return float(workers - 1) * self.nbytes


class Compressor(TechniqueSettings):
    """Base of the settings of one way to compress.

    Attributes:
        keeps: whether what is not sent is kept (error feedback).
        start: how many steps are exchanged as they are first.
    """

    keeps: ClassVar[bool] = True
    start: int = 0

    def warmup_steps(self) -> int:
        """Those that are exchanged as they are."""
        return self.start

    def exchange(self, bucket: Bucket, memory: Memory, workers: int, sound: bool) -> Exchange:
        """The mean of the bucket, in place; False, and nothing changed, where that cannot be.

        Args:
            sound: whether this worker's gradients are finite. Where anybody's are not, everybody
                has to return False.
        """
        raise NotImplementedError

    def messages(self, layout: Layout) -> list[Message]:
        """What one bucket's exchange communicates."""
        raise NotImplementedError


def mean(compressor: Compressor, bucket: Bucket, memory: Memory, workers: int) -> Exchange:
    """The exchange, and the exact one in its place where a gradient is not finite.

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
    for view, kept in held:
        view += kept
    if not compressed:
        yield from dense(bucket, workers)
    return compressed


def dense(bucket: Bucket, workers: int) -> Exchange:
    """The mean as torch's own data-parallel training computes it."""
    bucket.flat.div_(workers)
    summed = yield Reduce(bucket.flat)
    if summed is not bucket.flat:
        bucket.flat.copy_(summed)
    return False


class GatheringCompressor(Compressor):
    """Sends bytes that cannot be added up: everybody gets everybody's and decodes them all."""

    def payload_bytes(self, layout: Layout) -> int:
        """Of what one worker sends, without the header."""
        raise NotImplementedError

    def encode(self, gradient: torch.Tensor, residual: torch.Tensor, layout: Layout,
               payload: torch.Tensor) -> None:  # fmt: skip
        """Fill the payload, uint8 [payload_bytes]; the residual keeps what it leaves out."""
        raise NotImplementedError

    def decode(self, payload: torch.Tensor, layout: Layout, out: torch.Tensor, weight: float,
               add: bool) -> None:  # fmt: skip
        """out = one worker's gradient * weight, or out += where `add`."""
        raise NotImplementedError

    def messages(self, layout: Layout) -> list[Message]:
        return [Message("all_gather", HEADER_BYTES + self.payload_bytes(layout))]

    def exchange(self, bucket: Bucket, memory: Memory, workers: int, sound: bool) -> Exchange:
        """Encode, gather, decode everybody's in the order of their ranks."""
        import torch

        layout = bucket.layout
        residual = memory.residual(layout)
        payload = torch.zeros(HEADER_BYTES + self.payload_bytes(layout), dtype=torch.uint8)
        payload[0] = sound
        if sound:
            self.encode(bucket.flat, residual, layout, payload[HEADER_BYTES:])
        everybody = yield Gather(payload)
        if not bool(everybody[:, 0].all()):
            if sound:
                decoded = torch.empty_like(bucket.flat)
                self.decode(payload[HEADER_BYTES:], layout, decoded, 1.0, add=False)
                residual.add_(decoded).sub_(bucket.flat)
            return False
        for worker, theirs in enumerate(everybody):
            self.decode(theirs[HEADER_BYTES:], layout, bucket.flat, 1.0 / workers, add=worker > 0)
        return True
