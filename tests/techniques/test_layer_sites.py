"""Which tasks are a layer's: its forward product, and those that autograd ties to it."""

from __future__ import annotations

import numpy as np

from slipstream.graph import StepPhase, replace_tasks
from slipstream.techniques.layer_sites import layer_sites
from small_steps import tail_heavy


def test_a_layer_has_its_own_products_of_the_backward_pass() -> None:
    graph = tail_heavy()
    sites = list(layer_sites(graph))
    assert [site.layer[0] for site in sites] == [48] * 6 + [300]
    # The first layer's input wants no gradient.
    assert [len(site.backward) for site in sites] == [1] + [2] * 6
    tasks = [task for site in sites for task in site.tasks]
    assert len(tasks) == len(set(tasks))
    for site in sites:
        assert (graph.tasks.phase[list(site.backward)] == StepPhase.BACKWARD).all()


def test_what_autograd_did_not_number_is_tied_to_nothing() -> None:
    graph = tail_heavy()
    without = replace_tasks(graph, sequence=np.full(len(graph), -1))
    assert [site.backward for site in layer_sites(without)] == [()] * 7
