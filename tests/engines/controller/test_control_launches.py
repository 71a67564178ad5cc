"""Launches on real hosts: values, order, shares, memory, and what fails."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import control_functions as functions
import pytest
import torch

from slipstream.engines.controller import (
    REPLICATED,
    Controller,
    DeviceSlice,
    TracedProgram,
    launch_graph,
    sharded,
)
from slipstream.engines.controller.host import HostGroup
from slipstream.engines.controller.local import LocalEngine
from slipstream.engines.controller.scheduling import FairQueue, QueuedClient
from slipstream.engines.controller.watching import HostWatch
from slipstream.errors import (
    CommunicationError,
    InvalidArgumentError,
    UsageError,
    WorkloadError,
)

LIMIT_S = 60.0


def summing(pool: Controller, name: str, part: DeviceSlice) -> TracedProgram:
    """Return a program with a sum over all devices of a slice."""
    with pool.program(name) as program:
        x = program.input("x", torch.arange(12.0).reshape(4, 3), part, sharded(0))
        program.output("y", functions.plus_one(functions.product(x, x)))
    return program


def test_values_equal_one_process(pool: Controller) -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 4)
    four, two = pool.slice(4), pool.slice(2)
    with pool.program("mixed") as program:
        a = program.input("a", x, four, sharded(0))
        b = functions.scaled(a, factor=3.0)
        program.output("b", b)
        program.output("gram", functions.product(a, b))
        program.output("across", functions.scaled(b, on=two))
        program.output("sum", functions.plus_one(functions.product(a, b), on=two))
    # The parts of a lazily conjugated tensor are its values.
    with pool.program("complex") as lazy:
        c = lazy.input("c", torch.full((4,), 1j).conj(), two, sharded(0))
        lazy.output("c", functions.scaled(c))
    assert pool.launch(lazy).result("c", LIMIT_S).tolist() == [-2j] * 4
    future = pool.launch(program)
    expected = {"b": 3 * x, "gram": x.T @ (3 * x), "across": 6 * x, "sum": x.T @ (3 * x) + 1}
    for name, value in expected.items():
        torch.testing.assert_close(future.result(name, LIMIT_S), value)


@pytest.mark.parametrize("size", [1, 2, 7])
def test_sums_within_functions(forked: None, size: int) -> None:
    with Controller(3) as pool:
        part = pool.slice(3)
        with pool.program("p") as program:
            x = program.input("x", torch.arange(6.0 * size).view(2 * size, 3), part, sharded(1))
            y, total = functions.with_sum(x)
            program.output("y", y)
            program.output("total", total)
        future = pool.launch(program)
        assert future.result("total", LIMIT_S) == torch.arange(6.0 * size).sum()
        assert torch.equal(future.result("y"), program.examples["x"] - 1)


def test_outputs_are_inputs_of_later_launches(pool: Controller) -> None:
    with pool.program("count") as program:
        x = program.input("x", torch.zeros(4), pool.slice(2), sharded(0))
        program.carry("x", functions.scaled(functions.plus_one(x), factor=1.0))
    future = pool.launch(program)
    with pytest.raises(InvalidArgumentError, match="value like the one"):
        pool.launch(program, {"x": torch.zeros(5)})
    for _ in range(9):
        future = pool.launch(program, future.carried())
    assert torch.equal(future.result(timeout_s=LIMIT_S), torch.full((4,), 10.0))
    future.release()
    with pytest.raises(UsageError, match="released"):
        future.result()


def test_released_outputs_are_freed_on_their_hosts(pool: Controller) -> None:
    program = summing(pool, "freed", pool.slice(4))
    future = pool.launch(program)
    for _ in range(300):
        future = pool.launch(program)
    future.wait(LIMIT_S)
    time.sleep(0.5)
    pool.peak_bytes.clear()
    pool.launch(program).wait(LIMIT_S)
    # Values of one launch and outputs of the last ones, not of hundreds.
    assert max(pool.peak_bytes.values()) < 300 * 36


def test_messages_per_launch_are_one_per_host(pool: Controller) -> None:
    program = summing(pool, "messages", pool.slice(4))
    pool.launch(program).wait(LIMIT_S)
    before = pool.messages.copy()
    futures = [pool.launch(program) for _ in range(10)]
    for future in futures:
        future.wait(LIMIT_S)
    sent = pool.messages - before
    assert (sent["launch sent"], sent["done received"], sent["install sent"]) == (20, 20, 0)


def test_a_traced_launch_is_a_graph(pool: Controller) -> None:
    program = summing(pool, "traced", pool.slice(4))
    graph = launch_graph(pool.launch(program, traced=True))
    assert graph.lanes == ("host 0", "host 1")
    assert len(graph) == 2 * len(program.nodes)
    with pytest.raises(UsageError, match="recorded no times"):
        launch_graph(pool.launch(program))


def test_a_function_that_fails_on_one_host_is_named(forked: None) -> None:
    with Controller(2) as pool:
        with pool.program("fragile") as program:
            x = program.input("x", torch.ones(2), pool.slice(2), sharded(0))
            program.output("y", functions.fails_on_negative(x))
        bad = pool.launch(program, {"x": torch.tensor([1.0, -1.0])})
        # The other host does not hang, and the next launch works.
        good = pool.launch(program)
        with pytest.raises(WorkloadError, match=r"fails_on_negative.*on host 1: ZeroDivision"):
            bad.wait(LIMIT_S)
        assert torch.equal(good.result(timeout_s=LIMIT_S), torch.full((2,), 5.0))


def test_a_shape_that_differs_from_the_traced_one_is_named(pool: Controller) -> None:
    with pool.program("p") as program:
        x = program.input("x", torch.ones(4), pool.slice(2), sharded(0))
        program.output("y", functions.grows(x))
    with pytest.raises(WorkloadError, match=r"returned \[4\].*but \[2\]"):
        pool.launch(program).wait(LIMIT_S)


def test_all_reduce_needs_a_device_per_host(pool: Controller) -> None:
    with pool.program("p") as program:
        x = program.input("x", torch.ones(4, 4), pool.slice(4), sharded(1))
        program.output("y", functions.with_sum(x)[1])
    with pytest.raises(WorkloadError, match="several devices"):
        pool.launch(program).wait(LIMIT_S)


def test_a_killed_host_is_named_and_its_slice_can_be_rebound(forked: None) -> None:
    with Controller(3) as pool:
        other, both = pool.slice(1), pool.slice(2)
        with pool.program("other") as unaffected:
            x = unaffected.input("x", torch.ones(2), other)
            unaffected.output("y", functions.plus_one(x))
        with pool.program("fragile") as program:
            x = program.input("x", torch.ones(2), both, sharded(0))
            y = functions.dies_on_negative(x)
            program.output("y", functions.scaled(functions.plus_one(y)))
        pool.launch(unaffected).wait(LIMIT_S)
        pool.launch(program).wait(LIMIT_S)
        dying = pool.launch(program, {"x": torch.tensor([1.0, -1.0])})
        with pytest.raises(CommunicationError, match="host 2 died") as raised:
            dying.wait(LIMIT_S)
        assert raised.value.ranks == (2,)
        pool.launch(unaffected).wait(LIMIT_S)
        with pytest.raises(CommunicationError, match="host 2 is dead"):
            pool.launch(program)
        pool.rebind(both)
        assert torch.equal(pool.launch(program).result(timeout_s=LIMIT_S), torch.full((2,), 6.0))


def test_a_suspended_host_does_not_block_others(forked: None) -> None:
    engine = LocalEngine()
    with Controller(2, engine=engine) as pool:
        first, second = pool.slice(1), pool.slice(1)
        programs = []
        for part in (first, second):
            with pool.program("p") as program:
                x = program.input("x", torch.ones(2), part)
                program.output("y", functions.plus_one(x))
            pool.launch(program).wait(LIMIT_S)
            programs.append(program)
        pid = engine.members.pid(second.hosts[0])
        os.kill(pid, signal.SIGSTOP)
        try:
            waiting = pool.launch(programs[1])
            pool.launch(programs[0]).wait(LIMIT_S)
            with pytest.raises(CommunicationError, match="did not end within"):
                waiting.wait(0.2)
        finally:
            os.kill(pid, signal.SIGCONT)
        waiting.wait(LIMIT_S)


class Unordered(LocalEngine):
    """Delivers every second launch of host 1 before the first: no gang order."""

    def __init__(self) -> None:
        super().__init__()
        self._held: list[tuple[Mapping[str, Any], bytes]] = []

    def send(self, host: int, message: Mapping[str, Any], payload: bytes = b"") -> None:
        if host == 1 and message["do"] == "launch":
            self._held.append((message, payload))
            if len(self._held) < 2:
                return
            for message, payload in reversed(self._held):
                super().send(host, message, payload)
            self._held.clear()
            return
        super().send(host, message, payload)


def test_without_gang_order_a_deadlock_is_detected(forked: None) -> None:
    with Controller(2, engine=Unordered(), stall_s=1.0) as pool:
        part = pool.slice(2)
        futures = [pool.launch(summing(pool, name, part)) for name in ("first", "second")]
        with pytest.raises(CommunicationError, match="a deadlock") as raised:
            futures[0].wait(LIMIT_S)
        text = str(raised.value)
        assert "host 0 waits for host 1" in text
        assert "host 1 waits for host 0" in text
        assert "'first'" in text


def test_random_gangs_do_not_hang(forked: None) -> None:
    """Two clients launch programs with sums on overlapping slices of three hosts."""
    with Controller(3) as pool:
        parts = [pool.slice(size) for size in (2, 2, 3, 1)]
        programs = []
        for number, part in enumerate(parts):
            with pool.program(f"gang {number}") as program:
                x = program.input("x", torch.ones(6, 3), part, sharded(0))
                y = functions.plus_one(functions.product(x, x), on=parts[number - 1])
                program.output("y", y)
            programs.append(program)
        clients = [pool.client(name) for name in "ab"]
        order = torch.randint(0, 4, (100,), generator=torch.manual_seed(0)).tolist()
        futures = [
            pool.launch(programs[at], client=clients[number % 2]) for number, at in enumerate(order)
        ]
        for future in futures:
            assert torch.equal(future.result(timeout_s=LIMIT_S), torch.full((3, 3), 7.0))


def test_memory_limits_launches_in_flight(forked: None) -> None:
    x = torch.ones(1024)
    with Controller(1, device_bytes=5 * x.nbytes) as pool:
        part = pool.slice(1)
        with pool.program("p") as program:
            value = program.input("x", x, part)
            program.output("y", functions.plus_one(functions.plus_one(value)))
        for _ in range(20):
            future = pool.launch(program)
        future.wait(LIMIT_S)
        assert pool.peak_bytes[0] <= 5 * x.nbytes
        futures = [pool.launch(program) for _ in range(6)]
        with pytest.raises(InvalidArgumentError, match="release futures"):
            futures[-1].wait(LIMIT_S)
        with pool.program("large") as large:
            value = large.input("x", torch.ones(8192), part)
            large.output("y", functions.plus_one(value))
        with pytest.raises(InvalidArgumentError, match=r"needs 64\.0 KiB on host 0"):
            pool.launch(large)


class Item:
    def __init__(self, hosts: Sequence[int]) -> None:
        self.hosts = list(hosts)


def test_shares_are_proportional_and_a_blocked_launch_is_not_overtaken() -> None:
    queue: FairQueue[Item] = FairQueue()
    weights = {"a": 1.0, "b": 2.0, "c": 4.0}
    queue.clients = [QueuedClient(name, weight) for name, weight in weights.items()]
    taken = dict.fromkeys(weights, 0)
    for client in queue.clients:
        for _ in range(70):
            queue.add(client, Item([0]))
    for _ in range(70):
        before = {client.name: len(client.waiting) for client in queue.clients}
        queue.take(lambda item: True)
        (client,) = [c for c in queue.clients if len(c.waiting) < before[c.name]]
        client.time += 1.0 / client.weight
        taken[client.name] += 1
    assert taken == {"a": 10, "b": 20, "c": 40}
    queue.clients = [QueuedClient("a", 1.0), QueuedClient("b", 1.0, time=1.0)]
    wide, narrow, apart = Item([0, 1]), Item([1]), Item([2])
    queue.add(queue.clients[0], wide)
    queue.add(queue.clients[1], narrow)
    assert queue.take(lambda item: item is not wide) is None
    queue.clients[1].waiting[0] = apart
    assert queue.take(lambda item: item is not wide) is apart


def test_strangers_are_refused(forked: None) -> None:
    engine = LocalEngine()
    with Controller(1, engine=engine):
        assert engine.members.address[0] == "127.0.0.1"
        empty = b"\x02\0\0\0" + b"\0" * 8 + b"{}"
        for sent in (b"GET / HTTP/1.1\r\n\r\n", empty, b"\xff" * 64):
            with socket.create_connection(engine.members.address) as stranger:
                stranger.sendall(sent)
                # Connections are accepted while hosts are started.
                engine.start([number := 1])
                with contextlib.suppress(ConnectionResetError):
                    assert stranger.recv(1) == b""
                engine.stop([number])


def test_a_closed_controller_fails_waiting_launches(forked: None) -> None:
    with Controller(1) as pool:
        with pool.program("p") as program:
            x = program.input("x", torch.ones(2), pool.slice(1), REPLICATED)
            program.output("y", functions.rests(x, seconds=30.0))
        future = pool.launch(program)
    with pytest.raises(UsageError, match="closed"):
        future.wait(LIMIT_S)
    with pytest.raises(UsageError, match="closed"):
        pool.launch(program)


def test_a_message_with_a_host_that_ended_names_it(tmp_path: Path) -> None:
    """Also where the host ended before the message was posted."""
    with ThreadPoolExecutor(2) as threads:
        groups = list(
            threads.map(lambda n: HostGroup(str(tmp_path), "group", [4, 7], n, LIMIT_S), [4, 7])
        )
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda group: group.sum(torch.ones(1), [4, 7], 0), groups))
    # Destroyed at once, a message would spin until gloo's thread has left it.
    assert [len(group.ended) for group in groups] == [2, 2]
    left = groups.pop(0)
    pending = left.receive(torch.ones(1), 7, 1)
    groups.clear()
    with pytest.raises(CommunicationError):
        pending()
    for post in (left.receive, left.send):
        with pytest.raises(CommunicationError, match="between hosts 4 and 7") as raised:
            post(torch.ones(1), 7, 2)()
        assert raised.value.ranks == (7,)


def test_hosts_are_stuck_only_without_progress() -> None:
    watch = HostWatch(5.0, lambda launch: f"program {launch}")

    def answer(host: int, waits_for: int | None, steps: int, now: float) -> None:
        watch.ask([0, 1, 2], now)
        watch.answer(host, {"at": [7, "3 (sum)"], "steps": steps, "waits_for": waits_for}, now)

    for now in (0.0, 4.0, 8.0):
        for host, waits_for, steps in ((0, 1, 5), (1, 2, 5), (2, None, int(now))):
            answer(host, waits_for, steps, now)
        # Host 2 computes, so that hosts 0 and 1 will continue.
        assert list(watch.stuck(now)) == []
    for now in (9.0, 15.0):
        answer(2, 1, 9, now)
    ((hosts, reason),) = watch.stuck(15.0)
    assert sorted(hosts) == [1, 2]
    assert "host 1 waits for host 2 in node 3 (sum) of launch 7 of 'program 7'" in reason
    watch.ask([0], 16.0)
    ((hosts, reason),) = watch.stuck(16.0)
    assert (hosts, reason.endswith("which runs nothing")) == ([0], True)
    assert next(watch.stuck(60.0)) == ([0], "it did not answer for 30 s")
