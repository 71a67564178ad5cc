"""The DataLoaders of a plain script: its batch is made another size where it loads its data.

A script takes its batches from loaders that it makes itself. They are given another batch size when
they are made, leave out the shorter batch at the end of the data, and begin anew after it, so that
a short script has steps enough to be timed. All of this lasts as long as the process.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from typing import Any


class Loaders:
    """From `install` on, sees and sizes the batches that a script loads. Only ever in a child.

    Args:
        was: the batch size of loaders that shall have another; 0 for none.
        becomes: what it becomes.

    Attributes:
        size: of the loader whose batch the last optimizer step was made with; 0 where none was.
    """

    def __init__(self, was: int = 0, becomes: int = 0) -> None:
        self._was, self._becomes = was, becomes
        self.size = self._given = self._steps = 0

    def install(self) -> None:
        """Take the place of how loaders are made and gone through."""
        from torch.optim.optimizer import register_optimizer_step_post_hook
        from torch.utils.data import DataLoader

        make: Any = DataLoader.__init__
        give: Any = DataLoader.__iter__
        signature = inspect.signature(make)

        @functools.wraps(make)
        def sized(*given: Any, **named: Any) -> None:
            arguments = signature.bind(*given, **named).arguments
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
                    self._given = loader.batch_size or 0
                    yield batch
                if self._steps == before:
                    # Nothing is trained with it: an evaluation, which is over at its end.
                    return

        def note(optimizer: Any, args: Any, kwargs: Any) -> None:
            self._steps += 1
            self.size = self._given

        DataLoader.__init__ = sized  # type: ignore[method-assign]
        DataLoader.__iter__ = endless  # type: ignore[method-assign, assignment]
        register_optimizer_step_post_hook(note)


def _length(dataset: Any) -> float:
    """How many samples it has; none where it does not say."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return 0
