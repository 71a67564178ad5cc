"""Messages of different sizes that take different paths: fitted, saved, priced, simulated."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.cluster import (
    Cluster,
    Collective,
    Group,
    Job,
    LinkKind,
    Quantity,
    Regime,
    Tasks,
    simulate,
    star,
)
from slipstream.cluster.fitting import Fit, fit
from slipstream.cluster.samples import Operation, Sample
from slipstream.errors import InvalidArgumentError, UsageError
from slipstream.ranks.calibration import fitted_cluster

LINK = LinkKind.of("memory", 2e9)
# In cache 50 us and 0.1 ns per byte; outside it, from a million bytes on, 80 us and 0.5 ns.
CACHED, LARGE = Regime(0.0, 50e3, 0.2), Regime(1e6, 80e3, 1.0)


def here(ranks: int = 2) -> Cluster:
    return Cluster(
        "here", star(ranks, LINK), alpha_ns=Quantity(50e3), reduce_ns_per_byte=Quantity(0.3),
        regimes=(CACHED, LARGE),
    )  # fmt: skip


def message_ns(nbytes: float) -> float:
    return 50e3 + 0.1 * nbytes if nbytes < 1e6 else 80e3 + 0.5 * nbytes


def timed(duration: Any, *, noise: float = 0.0, kinds: tuple[str, ...] = ("p2p",)) -> list[Sample]:
    rng = np.random.default_rng(1)
    found = []
    for kind, power in itertools.product(kinds, range(20, 47)):
        size = int(2 ** (power / 2)) // 4 * 4
        exact = duration(size) if kind == "p2p" else 2 * duration(size / 2) + 0.3 * size / 2
        repeats = exact * (1 + noise * rng.standard_normal(9))
        operation = Operation(kind, size, (0, 1))
        found.append(Sample(operation, float(np.median(repeats)), tuple(repeats.tolist())))
    return found


def errors(found: Fit, samples: list[Sample]) -> list[float]:
    return [abs(found.predict_ns(s.operation) / s.duration_ns - 1) for s in samples]


def test_a_jump_is_found_at_its_position() -> None:
    samples = timed(message_ns, kinds=("p2p", "all_reduce"))
    found = fit(samples, most_regimes=3)
    first, second = found.regimes
    assert first.from_bytes == 0.0
    # Between the sizes around it.
    assert 2**19.5 < second.from_bytes < 2**20
    assert (first.alpha_ns, second.alpha_ns) == (pytest.approx(50e3), pytest.approx(80e3))
    assert first.slowdown * found.ns_per_byte == pytest.approx(0.1)
    assert found.ns_per_byte == pytest.approx(0.5)
    assert found.reduce_ns_per_byte == pytest.approx(0.3)
    assert found.alpha_ns == first.alpha_ns
    assert max(errors(found, samples)) < 1e-6
    assert found.intervals["ns_per_byte"][0] == pytest.approx(0.5)


def test_lines_that_meet_between_two_sizes_are_continuous() -> None:
    def handshake(nbytes: float) -> float:
        return 10e3 + 0.5 * nbytes if nbytes < 120e3 else 46e3 + 0.2 * nbytes

    found = fit(timed(handshake), most_regimes=3)
    assert [regime.from_bytes for regime in found.regimes] == [0.0, pytest.approx(120e3)]
    assert found.regimes[0].slowdown == pytest.approx(2.5)


def test_a_single_line_stays_single_and_costs_never_decrease_with_size() -> None:
    plain = fit(timed(lambda size: 20e3 + 0.4 * size, noise=0.05), most_regimes=3)
    assert plain.regimes == ()
    # A tenth less from 300,000 bytes on, which is noise.
    lower = timed(lambda size: (20e3 + 0.4 * size) * (1.0 if size < 3e5 else 0.9))
    found = fit(lower, most_regimes=3)
    sizes = np.geomspace(4, 1e8, 400).astype(int).tolist()
    for fitted in (found, fit(timed(message_ns, noise=0.05), most_regimes=3)):
        predicted = [fitted.predict_ns(Operation("p2p", size, (0, 1))) for size in sizes]
        assert np.all(np.diff(predicted) >= 0.0)


def test_held_out_sizes_are_predicted_better_than_by_one_line() -> None:
    samples = timed(message_ns, noise=0.03)
    several, single = (fit(samples[::2], most_regimes=most) for most in (3, 1))
    left = samples[1::2]
    assert np.median(errors(several, left)) < 0.03
    assert np.mean(errors(several, left)) < np.mean(errors(single, left)) / 3


def test_few_sizes_give_one_line() -> None:
    assert fit(timed(message_ns)[::5], most_regimes=3).regimes == ()


@pytest.mark.parametrize("nbytes", [0.0, 1e3, 999e3, 1e6, 1.9e6, 2e6, 5e8])
def test_closed_form_and_simulation_use_the_regime_of_the_message(nbytes: float) -> None:
    for collective, expected in (
        (Collective("p2p", nbytes, Group.of([0, 1])), message_ns(nbytes)),
        (
            Collective("all_reduce", nbytes, Group.of([0, 1]), "ring"),
            2 * message_ns(nbytes / 2) + 0.3 * nbytes / 2,
        ),
    ):
        cluster = here()
        assert cluster.cost(collective).duration_ns == pytest.approx(expected)
        tasks = Tasks()
        tasks.communicate(collective)
        timeline = simulate(cluster, Job(tasks))
        assert timeline.makespan_ns == pytest.approx(expected)
        # The count is of sent bytes, regardless of their time.
        assert timeline.link_bytes.max() == pytest.approx(nbytes)


def test_batched_costs_equal_single_ones_bitwise() -> None:
    cluster = here(16)
    rng = np.random.default_rng(0)
    size, ranks = 10 ** rng.uniform(0, 9, 200), rng.integers(1, 17, 200)
    many = cluster.cost_many_ns("all_reduce", size, ranks, ("ring", "auto", "tree"), [0])
    auto = cluster.cost_many_ns("all_reduce", size, ranks)
    for i in range(200):
        group = Group.of(range(ranks[i]))
        for algo, found in (("ring", many), ("auto", auto)):
            cost = cluster.cost(Collective("all_reduce", float(size[i]), group, algo))
            assert found[i] == cost.duration_ns


def test_large_messages_share_a_link_at_the_rate_they_take_alone() -> None:
    tasks = Tasks()
    tasks.communicate(Collective("p2p", 1e8))
    jobs = [Job(tasks, placement=Group.of([0, 1]))] * 2
    assert simulate(here(), jobs).makespan_ns == pytest.approx(80e3 + 2 * 0.5e8)


def test_a_file_stores_them_and_older_files_are_read(tmp_path: Path) -> None:
    samples = timed(message_ns, noise=0.02)
    found = fit(samples, most_regimes=3)
    made = fitted_cluster(2, "memory", False, found, samples, "gloo")
    path = tmp_path / "here.toml"
    made.save(path)
    back = Cluster.load(path)
    assert back.regimes == made.regimes == found.regimes
    assert len(back.regimes) == 2
    for nbytes in (1e3, 3e5, 1e7):
        operation = Collective("p2p", nbytes)
        assert back.cost(operation).duration_ns == pytest.approx(
            found.predict_ns(Operation("p2p", int(nbytes), (0, 1)))
        )
    older = [line for line in path.read_text().split("\n") if not line.startswith("regimes")]
    path.write_text("\n".join(older))
    assert Cluster.load(path).regimes == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[{ from_bytes = 5, alpha_ns = 1 }]", "begin at 5 bytes"),
        ("[{ from_bytes = 0, alpha_ns = 1 }, { from_bytes = 0, alpha_ns = 2 }]", "follows that"),
        ("[{ from_bytes = 0, alpha_ns = -1 }]", "alpha_ns = -1"),
        (
            "[{ from_bytes = 0, alpha_ns = 1, slowdown = nan }]",
            r"slowdown: nan",
        ),
        ("[{ from_bytes = 0, alpha = 1 }]", "'alpha'"),
        ("7", "7"),
    ],
)
def test_malformed_ones_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "c.toml"
    path.write_text(
        f'regimes = {text}\n[topology]\ngenerator = "star"\ndevices = 2\nlink = "nic"\n'
        "[links.nic]\nbytes_per_s = 1e9\n"
    )
    with pytest.raises(UsageError, match=r"(?s)" + message + ".*regimes|regimes.*" + message):
        Cluster.load(path)


def test_packets_are_refused() -> None:
    tasks = Tasks()
    tasks.communicate(Collective("p2p", 1e3))
    with pytest.raises(InvalidArgumentError, match=r"^fidelity: packets"):
        simulate(here(), Job(tasks), fidelity="packet")
