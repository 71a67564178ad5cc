"""The table as it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from slipstream.techniques.embedding.ways.way import Choice, Setting, TableFacts


class Dense:
    """Nothing is changed."""

    name: ClassVar[str] = "dense"
    trains: ClassVar[bool] = True

    def choices(self, table: TableFacts) -> Iterator[Choice]:
        """One."""
        yield Choice(self.name, {}, table.nbytes, 0.0)

    def module(
        self, old: Any, table: TableFacts, settings: Mapping[str, Setting], made: Any
    ) -> Any:
        """The module itself."""
        return old
