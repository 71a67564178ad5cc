"""The table as ``nn.Embedding`` has it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from slipstream.techniques.embedding.formats.format import (
    Choice,
    Exchange,
    Start,
    TableFacts,
    TableFormat,
)


class Dense(TableFormat):
    """Nothing is changed."""

    name: ClassVar[str] = "dense"

    def choices(self, table: TableFacts) -> Iterator[Choice]:
        """One."""
        yield Choice(self.name, {}, table.nbytes, 0.0)

    def module(self, one: Exchange, start: Start) -> Any:
        """The module itself."""
        return one.old
