"""Buckets of gradients handed to one thread, which communicates them in order.

DDP calls a hook for every bucket while the backward pass goes on; the thread works on one after
the other. At the last bucket the hook waits for all of them, so that what failed is raised by
``backward`` itself, as what it is.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch.nn.parallel import DistributedDataParallel

from slipstream.errors import InvalidArgumentError, UsageError


class BucketThread:
    """The thread, and the buckets of this step that it was given.

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
        """Whether it was given a bucket of this step already."""
        return bool(self._pending)

    def submit(
        self, flat: torch.Tensor, work: Callable[[], object], last: bool
    ) -> torch.futures.Future[torch.Tensor]:
        """Do `work` on a bucket's buffer after all before it; with the last one, `wait`.

        Returns:
            What a hook returns: `flat`, once it is done.

        Raises:
            InvalidArgumentError: gradients are sparse, and may not be. Else what failed.
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
        """Until all buckets of the step are done.

        Raises:
            What failed first.
        """
        pending, self._pending = self._pending, []
        errors = [one.exception() for one in pending]
        for error in errors:
            if error is not None:
                raise error


def need_no_hook(model: DistributedDataParallel) -> None:
    """Raise a `UsageError` where the one hook that DDP takes is on the model already."""
    if getattr(model, "_comm_hooks", None):
        raise UsageError(
            "the model has a communication hook already, and DDP takes one",
            remedy="wrap the module in a new DistributedDataParallel",
        )


def need_dense_gradient(gradient: torch.Tensor) -> None:
    """Raise an `InvalidArgumentError` where a gradient is sparse."""
    if gradient.layout != torch.strided:
        raise InvalidArgumentError(
            "model", "a gradient is sparse", remedy="torch.nn.Embedding(sparse=False)"
        )
