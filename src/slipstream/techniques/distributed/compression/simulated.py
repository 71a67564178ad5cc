"""Workers simulated in one process, to train with compression without a cluster."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from slipstream.arguments import as_integer
from slipstream.errors import InvalidArgumentError
from slipstream.ranks.requests import Exchange, Gather, Reduce
from slipstream.techniques.distributed.compression.bucket import Bucket, Layout, Memory
from slipstream.techniques.distributed.compression.compressor import Compressor, dense, mean


def exchange_all(exchanges: Sequence[Exchange]) -> list[bool]:
    """Run the workers' exchanges in lockstep, and return their results."""
    results: list[bool] = [False] * len(exchanges)
    answers: list[torch.Tensor | None] = [None] * len(exchanges)
    while True:
        requests: list[Reduce | Gather] = []
        for worker, exchange in enumerate(exchanges):
            try:
                requests.append(exchange.send(answers[worker]))  # type: ignore[arg-type]
            except StopIteration as done:
                results[worker] = bool(done.value)
        if not requests:
            return results
        if len(requests) < len(exchanges):
            raise AssertionError("workers request different numbers of collectives")
        answers = list(_communicate(requests))


def _communicate(requests: Sequence[Reduce | Gather]) -> Sequence[torch.Tensor]:
    tensors = [request.tensor for request in requests]
    if isinstance(requests[0], Gather):
        everybody = torch.stack(tensors)
        return [everybody] * len(tensors)
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    for tensor in tensors:
        tensor.copy_(total)
    return tensors


class SimulatedWorkers:
    """Data-parallel workers that share one model and take turns.

    A step begins with the optimizer's ``zero_grad``. For each worker, run a backward pass and call
    `collect`; after the last one, `reduce` sets the gradients of the parameters to those of
    training on that many machines.

    Args:
        model: float32 on CPU.
        compressor: settings; None for exact means.
        workers: number of workers.
        delay: number of steps until a mean gradient arrives, as in asynchronous training; there is
            no gradient before the first one arrives.

    Raises:
        InvalidArgumentError: `workers` is below 1, `delay` below 0, `compressor` is not a
            compressor, or parameters are not float32.
    """

    def __init__(
        self, model: torch.nn.Module, compressor: Compressor | None, workers: int, delay: int = 0
    ) -> None:
        if compressor is not None and not isinstance(compressor, Compressor):
            raise InvalidArgumentError(
                "compressor", f"is {compressor!r}, not a compressor",
                remedy="for example ss.distributed.TopK(0.01); None for exact means",
            )  # fmt: skip
        others = {p.dtype for p in model.parameters() if p.requires_grad} - {torch.float32}
        if others:
            raise InvalidArgumentError(
                "model", f"its parameters are {', '.join(sorted(map(str, others)))}, not float32",
                remedy="call model.float()",
            )  # fmt: skip
        workers = as_integer("workers", workers)
        delay = as_integer("delay", delay, 0)
        self.compressor = compressor
        self.parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.layout = Layout.of({n: tuple(p.shape) for n, p in self.parameters.items()})
        self.memories = [Memory() for _ in range(workers)]
        self.delay = delay
        self._turns: list[Bucket] = []
        self._in_flight: deque[dict[str, torch.Tensor]] = deque()

    def collect(self) -> None:
        """Store the gradients of the parameters as the next worker's, and clear them."""
        flat = torch.zeros(self.layout.numel)
        idle = []
        for (name, parameter), (at, count) in zip(
            self.parameters.items(), self.layout.spans, strict=True
        ):
            if parameter.grad is None or not parameter.grad.any():
                idle.append(name)
            else:
                flat[at : at + count] = parameter.grad.reshape(-1)
            parameter.grad = None
        self._turns.append(Bucket(flat, self.layout, tuple(idle)))

    def reduce(self) -> None:
        """Set the gradients of the parameters to the mean, or that of `delay` steps ago.

        Raises:
            InvalidArgumentError: `collect` was not called once per worker.
        """
        turns, workers = self._turns, len(self.memories)
        if len(turns) != workers:
            raise InvalidArgumentError(
                "workers", f"collect() was called for {len(turns)} of {workers}"
            )
        self._turns = []
        pairs = list(zip(turns, self.memories, strict=True))
        chosen = self.compressor
        if chosen is None or self.memories[0].step < chosen.start:
            exchange_all([dense(bucket, workers) for bucket, _ in pairs])
        else:
            exchange_all([mean(chosen, bucket, memory, workers) for bucket, memory in pairs])
        for memory in self.memories:
            memory.step += 1
        unused = set.intersection(*(set(bucket.idle) for bucket in turns))
        spans = zip(self.parameters, self.layout.spans, strict=True)
        flat = turns[0].flat
        self._in_flight.append({n: flat[at : at + c] for n, (at, c) in spans if n not in unused})
        if len(self._in_flight) > self.delay:
            for name, gradient in self._in_flight.popleft().items():
                parameter = self.parameters[name]
                parameter.grad = gradient.view_as(parameter).clone()
