"""Patches of DataLoaders that change the batch size of a plain script.

The patched loaders have another batch size, drop an incomplete last batch, and start again after
the end of the data, so that a short script has enough steps for timing. The patches last until the
process ends.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from typing import Any


class Loaders:
    """Observes and resizes the batches that a script loads, after `install`, in a child process.

    Args:
        was: the batch size of the loaders to change; 0 for none.
        becomes: their new batch size.

    Attributes:
        size: the batch size of the loader that provided the batch of the last optimizer step; 0
            if no loader did.
    """

    def __init__(self, was: int = 0, becomes: int = 0) -> None:
        self._was, self._becomes = was, becomes
        self.size = self._loaded = self._steps = 0

    def install(self) -> None:
        """Patch the construction and iteration of loaders."""
        from torch.optim.optimizer import register_optimizer_step_post_hook
        from torch.utils.data import DataLoader

        make: Any = DataLoader.__init__
        give: Any = DataLoader.__iter__
        signature = inspect.signature(make)

        @functools.wraps(make)
        def sized(*args: Any, **kwargs: Any) -> None:
            arguments = signature.bind(*args, **kwargs).arguments
            size = arguments.get("batch_size", 1)
            if size is not None and arguments.get("batch_sampler") is None:
                if size == self._was:
                    size = arguments["batch_size"] = self._becomes
                if _length(arguments["dataset"]) >= size:
                    arguments["drop_last"] = True
            make(arguments.pop("self"), **arguments)

        def endless(loader: Any) -> Iterator[Any]:
            while True:
                before = self._steps
                for batch in give(loader):
                    self._loaded = loader.batch_size or 0
                    yield batch
                if self._steps == before:
                    # No optimizer step: an evaluation, which ends with the data.
                    return

        def note(optimizer: Any, args: Any, kwargs: Any) -> None:
            self._steps += 1
            self.size = self._loaded

        DataLoader.__init__ = sized  # type: ignore[method-assign]
        DataLoader.__iter__ = endless  # type: ignore[method-assign, assignment]
        register_optimizer_step_post_hook(note)


def _length(dataset: Any) -> float:
    """Return the number of samples; 0 if the dataset has no length."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return 0
