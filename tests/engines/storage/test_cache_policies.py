"""Cache policies compared with plain Python, on random requests and by their laws."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.engines.storage.policies import (
    BINS,
    NEVER,
    POLICIES,
    CachePolicy,
    bin_edges,
    gittins,
    next_requests,
    numbered,
)
from slipstream.errors import InvalidArgumentError, UnknownNameError

Requests = tuple[list[int], list[int]]


@st.composite
def requests(draw: st.DrawFn) -> Requests:
    """Draw objects and the size of each request; an object keeps its size."""
    objects = draw(st.lists(st.integers(0, 12), min_size=1, max_size=120))
    sizes = draw(st.lists(st.integers(0, 6), min_size=13, max_size=13))
    return objects, [sizes[item] for item in objects]


def queue(objects: list[int], sizes: list[int], capacity: int, promote: bool) -> list[bool]:
    """LRU, or FIFO without `promote`."""
    cached: OrderedDict[int, int] = OrderedDict()
    hits = []
    for item, size in zip(objects, sizes, strict=True):
        hits.append(item in cached)
        if item in cached:
            if promote:
                cached.move_to_end(item)
        elif size <= capacity:
            while sum(cached.values()) + size > capacity:
                cached.popitem(last=False)
            cached[item] = size
    return hits


def belady(objects: list[int], sizes: list[int], capacity: int) -> list[bool]:
    """Evict what is requested last; of several that never are, the one with the largest number."""
    cached: dict[int, int] = {}
    hits = []
    for at, (item, size) in enumerate(zip(objects, sizes, strict=True)):

        def due(other: int, at: int = at) -> tuple[float, int]:
            rest = objects[at + 1 :]
            return (rest.index(other) if other in rest else float("inf")), other

        hits.append(item in cached)
        if item not in cached and size <= capacity:
            while sum(cached.values()) + size > capacity:
                # The requested object is not among the candidates.
                del cached[max(cached, key=due)]
            cached[item] = size
    return hits


def sieve(objects: list[int], sizes: list[int], capacity: int) -> list[bool]:
    order: list[int] = []  # oldest first
    size_of: dict[int, int] = {}
    visited: dict[int, bool] = {}
    hits, hand = [], 0
    for item, size in zip(objects, sizes, strict=True):
        hits.append(item in size_of)
        if item in size_of:
            visited[item] = True
        elif size <= capacity:
            while sum(size_of.values()) + size > capacity:
                hand = hand if hand < len(order) else 0
                while visited[order[hand]]:
                    visited[order[hand]] = False
                    hand = (hand + 1) % len(order)
                del size_of[order.pop(hand)]
                # Behind the newest object, the hand starts again at the oldest, even if newer ones
                # arrive first.
                hand = hand if hand < len(order) else 0
            order.append(item)
            size_of[item], visited[item] = size, False
    return hits


def run(name: str, objects: list[int], sizes: list[int], capacity: int) -> list[bool]:
    policy = CachePolicy(name, capacity)
    columns = np.array(objects, np.int32), np.array(sizes, np.int64)
    hit: list[bool] = policy.simulate(*columns, None, next_requests(columns[0])).tolist()
    return hit


@settings(max_examples=150, deadline=None)
@given(requests(), st.integers(1, 20))
def test_simple_policies_equal_plain_python(drawn: Requests, capacity: int) -> None:
    objects, sizes = drawn
    assert run("lru", objects, sizes, capacity) == queue(objects, sizes, capacity, True)
    assert run("fifo", objects, sizes, capacity) == queue(objects, sizes, capacity, False)
    assert run("belady", objects, sizes, capacity) == belady(objects, sizes, capacity)
    assert run("sieve", objects, sizes, capacity) == sieve(objects, sizes, capacity)


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=40, deadline=None)
@given(drawn=requests(), capacity=st.integers(1, 20))
def test_a_policy_never_holds_more_than_its_capacity(
    name: str, drawn: Requests, capacity: int
) -> None:
    """Hits and evictions that are reported agree with the contents."""
    objects, sizes = drawn
    policy = CachePolicy(name, capacity)
    held: dict[int, int] = {}
    hits = []
    for item, size in zip(objects, sizes, strict=True):
        hit, stored = policy.request(item, size)
        assert hit == (item in held)
        hits.append(hit)
        evicted = policy.evicted()
        for other in evicted:
            held.pop(other, None)
        if stored:
            held[item] = size
        assert stored == (item in held)
        assert sum(held.values()) <= capacity
    if name != "belady":
        assert hits == run(name, objects, sizes, capacity)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=150), st.integers(1, 12))
def test_no_policy_that_admits_everything_beats_belady(objects: list[int], room: int) -> None:
    ones = [1] * len(objects)
    bound = sum(run("belady", objects, ones, room))
    for name in ("lru", "fifo", "sieve"):
        assert sum(run(name, objects, ones, room)) <= bound


def test_auto_follows_the_policy_with_the_most_hits() -> None:
    """A loop that is larger than the cache: LRU never hits, and the learned policy does."""
    objects = np.tile(np.arange(100, dtype=np.int32), 60)
    sizes = np.ones(objects.size, np.int64)
    lru, auto = (CachePolicy(name, 50).simulate(objects, sizes).mean() for name in ("lru", "auto"))
    assert lru == 0
    assert auto > 0.4


def test_a_learned_context_separates_what_is_read_again() -> None:
    """Half of the requests are to objects that never return, in a separate context."""
    rng = np.random.default_rng(0)
    objects = np.where(np.arange(8000) % 2, np.arange(8000) + 200, rng.integers(0, 200, 8000))
    numbers, _ = numbered(objects.astype(np.uint64))
    context = (np.arange(8000) % 2).astype(np.int32)
    sizes = np.ones(8000, np.int64)
    with_text = CachePolicy("learned", 100).simulate(numbers, sizes, context)
    lru = CachePolicy("lru", 100).simulate(numbers, sizes)
    assert with_text[4000:].mean() > 1.4 * lru[4000:].mean()


def test_contents_of_a_job_that_ended_are_evicted_first() -> None:
    """The new job's objects fit once the old job's are gone, which LRU would also evict."""
    old = np.tile(np.arange(50, dtype=np.int32), 30)
    new = np.tile(np.arange(50, 100, dtype=np.int32), 8)
    objects, context = np.concatenate([old, new]), np.repeat([0, 1], [old.size, new.size])
    hit = CachePolicy("learned", 50).simulate(
        objects, np.ones(objects.size, np.int64), context.astype(np.int32)
    )
    assert hit[old.size + 200 :].mean() > 0.9


def test_a_prior_decides_before_anything_was_seen() -> None:
    """Objects of context 1 return soon, says the prior; context 0 never returns."""
    rng = np.random.default_rng(1)
    context = (np.arange(400) % 2).astype(np.int32)
    objects = np.where(context == 1, rng.integers(0, 20, 400), np.arange(400) + 20)
    hits = []
    for prepared in (False, True):
        policy = CachePolicy("learned", 20)
        if prepared:
            policy.set_prior(0, np.full(BINS, 1e-6), 200.0)
            policy.set_prior(1, np.full(BINS, 0.2), 200.0)
        found = policy.simulate(objects.astype(np.int32), np.ones(400, np.int64), context)
        hits.append(found.sum())
    assert hits[1] > hits[0]


def test_hit_density_is_that_of_the_definition() -> None:
    """Compared with a sum over every horizon, for a random distribution."""
    hazard = np.random.default_rng(2).uniform(0, 0.4, BINS)
    edges = bin_edges()
    middle = (edges[:-1] + edges[1:]) / 2
    for age in (0, 5, 40):
        alive = np.concatenate([[1.0], np.cumprod(1 - hazard[age:])])
        ends = -np.diff(alive)
        wait = middle[age:] - middle[age] + 1
        values = [
            ends[:h].sum() / ((ends[:h] * wait[:h]).sum() + alive[h] * wait[h - 1])
            for h in range(1, len(ends) + 1)
        ]
        assert gittins(hazard)[age] == pytest.approx(max(values), rel=1e-5)


@given(st.lists(st.integers(0, 2**64 - 1), max_size=60))
def test_numbers_and_next_requests(keys: list[int]) -> None:
    numbers, count = numbered(np.array(keys, np.uint64))
    assert count == len(set(keys))
    order = list(dict.fromkeys(keys))
    assert [order[number] for number in numbers] == keys
    following = next_requests(numbers)
    for at, key in enumerate(keys):
        rest = keys[at + 1 :]
        assert following[at] == (at + 1 + rest.index(key) if key in rest else NEVER)


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(UnknownNameError, match="lru"):
        CachePolicy("lruu", 10)
    with pytest.raises(InvalidArgumentError, match="capacity: 0 is less than 1"):
        CachePolicy("lru", 0)
    policy, objects, sizes = CachePolicy("lru", 10), np.zeros(2, np.int32), np.ones(2, np.int64)
    for bad in (sizes[:1], -sizes):
        with pytest.raises(InvalidArgumentError, match="do not fit"):
            policy.simulate(objects, bad)
    with pytest.raises(InvalidArgumentError, match="contexts: 1 values do not fit"):
        policy.simulate(objects, sizes, objects[:1])
    with pytest.raises(InvalidArgumentError, match="next_request"):
        CachePolicy("belady", 10).simulate(objects, sizes)
    for number, size in ((-1, 1), (2**31 - 1, 1), (0, -1)):
        with pytest.raises(InvalidArgumentError, match="out of range"):
            policy.request(number, size)
    with pytest.raises(InvalidArgumentError, match="hazard"):
        policy.set_prior(0, np.zeros(3))


def test_a_capacity_beyond_64_bits_holds_everything() -> None:
    assert CachePolicy("lru", 1 << 70).request(0, 5) == (False, True)
