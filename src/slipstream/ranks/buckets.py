"""A thread that communicates buckets of gradients in order.

DDP calls a hook for every bucket during the backward pass; the thread processes them sequentially.
At the last bucket the hook waits for all of them, so that ``backward`` itself raises their errors.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch.nn.parallel import DistributedDataParallel

from slipstream.errors import InvalidArgumentError, UsageError


class BucketThread:
    """The thread and its pending buckets of this step.

    Args:
        name: of the thread.
        sparse: whether buckets may be sparse.
    """

    def __init__(self, name: str, *, sparse: bool = False) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"slipstream-{name}")
        self._sparse = sparse
        self._pending: list[Future[None]] = []

    @property
    def begun(self) -> bool:
        """Whether a bucket of this step was submitted."""
        return bool(self._pending)

    def submit(
        self, flat: torch.Tensor, work: Callable[[], object], last: bool
    ) -> torch.futures.Future[torch.Tensor]:
        """Run `work` after that of earlier buckets; `wait` at the last bucket.

        Returns:
            The result of a hook, a future of `flat`.

        Raises:
            InvalidArgumentError: gradients are sparse, which `sparse` does not allow.
            Exception: the first error of a bucket, at the last one.
        """
        if not self._sparse:
            need_dense_gradient(flat)
        result: torch.futures.Future[torch.Tensor] = torch.futures.Future()

        def task() -> None:
            work()
            result.set_result(flat)

        self._pending.append(self._thread.submit(task))
        if last:
            self.wait()
        return result

    def wait(self) -> None:
        """Wait for all buckets of the step.

        Raises:
            Exception: the first error of a bucket.
        """
        pending, self._pending = self._pending, []
        errors = [bucket.exception() for bucket in pending]
        for error in errors:
            if error is not None:
                raise error


def need_no_hook(model: DistributedDataParallel) -> None:
    """Raise a `UsageError` if the model has a communication hook; DDP allows one."""
    if getattr(model, "_comm_hooks", None):
        raise UsageError(
            "the model already has a communication hook, and DDP allows only one",
            remedy="wrap the module in a new DistributedDataParallel",
        )


def need_dense_gradient(gradient: torch.Tensor) -> None:
    """Raise an `InvalidArgumentError` if `gradient` is sparse."""
    if gradient.layout != torch.strided:
        raise InvalidArgumentError(
            "model", "a gradient is sparse", remedy="use torch.nn.Embedding(sparse=False)"
        )
