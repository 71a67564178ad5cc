"""Modules are named while they run, also in models that torch compiles in parts."""

from __future__ import annotations

import torch
from torch import nn

from slipstream.capture.modules import ModuleNames


def test_a_module_that_was_never_entered_ends_no_other() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with ModuleNames(model) as names:
        names._before(model, ())
        # torch may compile the entry of a module, and give up before its end.
        names._after(model[0], (), None)
        names._before(model[0], ())
        names._after(model[0], (), None)
        names._after(model, (), None)
    assert list(names.calls.values()) == [[0], [0]]


def test_modules_of_a_compiled_model_may_be_called_in_any_number() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    compiled = torch.compile(model, backend="eager")
    for _ in range(12):
        with ModuleNames(model):
            compiled(torch.zeros(1, 2))
