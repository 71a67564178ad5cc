"""Only the given parameters of an optimizer change."""

from __future__ import annotations

import pytest
import torch

from slipstream.errors import WorkloadError
from slipstream.surgery import exchange_parameters


def parameters(count: int) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.randn(3)) for _ in range(count)]


def test_new_parameters_replace_the_first_old_one() -> None:
    a, b, c, d, new = parameters(5)
    optimizer = torch.optim.Adam([{"params": [a, b, c]}, {"params": [d]}], lr=0.1)
    for parameter in (a, b, c, d):
        parameter.grad = torch.ones(3)
    optimizer.step()
    exchange_parameters(optimizer, [b, d], new)
    groups = [[id(p) for p in group["params"]] for group in optimizer.param_groups]
    assert groups == [[id(a), id(new), id(c)], []]
    assert set(map(id, optimizer.state)) == {id(a), id(c)}
    new.grad = torch.ones(3)
    before = new.detach().clone()
    optimizer.step()
    assert not torch.equal(new, before)


def test_ignores_parameters_it_does_not_train() -> None:
    a, b, new = parameters(3)
    optimizer = torch.optim.SGD([a], lr=0.1)
    exchange_parameters(optimizer, [b], new)
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(a)]


def test_refuses_groups_with_different_settings() -> None:
    a, b, new = parameters(3)
    optimizer = torch.optim.SGD([{"params": [a]}, {"params": [b], "lr": 1.0}], lr=0.1)
    with pytest.raises(WorkloadError, match="different settings"):
        exchange_parameters(optimizer, [a, b], new)
