"""A click model (DLRM): dense numbers, embedding tables, and pairwise dot products.

Source: Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation
Systems", 2019.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn


class ClickNetwork(nn.Module):
    """The part of the model without its tables.

    Args:
        fields: number of categorical fields, one table each.
        dense: number of numeric fields.
        dim: columns of all tables.
        bottom, top: widths of the hidden layers of the networks before and after the dot products.
    """

    def __init__(
        self, fields: int, dense: int, dim: int, bottom: Sequence[int], top: Sequence[int]
    ) -> None:
        super().__init__()
        products = (fields + 1) * fields // 2
        self.bottom = _network((dense, *bottom, dim), last=nn.ReLU())
        self.top = _network((dim + products, *top, 1), last=None)
        self.pairs: torch.Tensor
        self.register_buffer("pairs", torch.tril_indices(fields + 1, fields + 1, -1))

    def forward(self, rows: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        """Map rows [batch, fields, dim] and numbers [batch, dense] to log-odds [batch]."""
        numbers = self.bottom(dense)
        vectors = torch.cat([numbers[:, None], rows], 1)
        products = vectors @ vectors.transpose(1, 2)
        chosen = products[:, self.pairs[0], self.pairs[1]]
        made: torch.Tensor = self.top(torch.cat([numbers, chosen], 1))
        return made.squeeze(1)


class DLRM(nn.Module):
    """A model of the log-odds of a click.

    Args:
        cardinalities: ids of each categorical field, one table each.
        dense, dim, bottom, top: see `ClickNetwork`.
        sparse: whether tables have sparse gradients.
    """

    def __init__(
        self,
        cardinalities: Sequence[int],
        dense: int,
        dim: int = 16,
        *,
        bottom: Sequence[int] = (64,),
        top: Sequence[int] = (128, 64),
        sparse: bool = False,
    ) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            nn.Embedding(rows, dim, sparse=sparse) for rows in cardinalities
        )
        for table in self.tables:
            assert isinstance(table, nn.Embedding)
            # As in the paper: the smaller the table, the larger its initial numbers.
            bound = table.num_embeddings**-0.5
            nn.init.uniform_(table.weight, -bound, bound)
        self.network = ClickNetwork(len(cardinalities), dense, dim, bottom, top)

    def forward(self, ids: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        """Map ids, int64 [batch, fields], and numbers, [batch, dense], to log-odds [batch]."""
        rows = torch.stack([table(ids[:, field]) for field, table in enumerate(self.tables)], 1)
        made: torch.Tensor = self.network(rows, dense)
        return made


def _network(widths: Sequence[int], last: nn.Module | None) -> nn.Sequential:
    layers: list[nn.Module] = []
    for number, (inputs, outputs) in enumerate(pairwise(widths)):
        if number:
            layers.append(nn.ReLU())
        layers.append(nn.Linear(inputs, outputs))
    return nn.Sequential(*layers, *([last] if last is not None else []))
