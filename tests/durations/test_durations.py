"""The cache of micro-benchmarks, and the benchmark itself."""

from __future__ import annotations

import itertools
import math
import re
import sqlite3
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from environments import switch_library_off
from slipstream.durations import Durations, TimingRequest, common_spread, durations, microbenchmark
from slipstream.durations.durations import machine_key, one_pool
from slipstream.durations.microbenchmark import random_tensor, run
from slipstream.errors import ChildError, StoreError
from slipstream.graph import Call, TensorSpec, cast
from slipstream.native import cpu_features
from slipstream.provenance import Provenance
from slipstream.techniques.lowbit.cost import Costs, required_timings
from tiny_models import captured

MM = "aten::mm(Tensor self, Tensor mat2) -> Tensor"


def dense(*shape: int, dtype: str = "float32") -> TensorSpec:
    return TensorSpec(dtype, shape, tuple(torch.empty(shape).stride()))


def mm(n: int) -> Call:
    return Call(MM, (dense(n, n), dense(n, n)), (dense(n, n),))


NOT_THERE = Call("aten::no_such_operator(Tensor self) -> Tensor", (dense(2, 2),))


class Benchmark:
    """Replacement for the child process that counts its questions."""

    def __init__(self) -> None:
        self.started = 0
        self.asked: list[str] = []

    def __call__(self, name: str, **options: Any) -> Benchmark:
        self.started += 1
        return self

    def __enter__(self) -> Benchmark:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def call(self, function: str, *, calls: list[Any], **options: Any) -> list[dict[str, Any]]:
        self.asked += [call[0] for call in calls]
        return [
            {"error": "no"} if "no_such" in call[0] else {"nanoseconds": 5.0, "spread": 0.1}
            for call in calls
        ]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Benchmark:
    made = Benchmark()
    monkeypatch.setattr(durations, "Child", made)
    return made


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "durations.db"


def test_nothing_is_known_initially_and_lookups_create_no_file(path: Path) -> None:
    assert Durations(1, path).lookup(mm(2)) is None
    assert not path.exists()


def test_a_measured_call_is_known_with_its_provenance(path: Path, benchmark: Benchmark) -> None:
    durations = Durations(1, path)
    durations.measure([mm(2)])
    answer = durations.lookup(mm(2))
    assert answer is not None
    assert (answer.nanoseconds, answer.spread) == (5.0, 0.1)
    assert answer.provenance is Provenance.MICROBENCHMARK


def test_a_second_measurement_starts_no_child(path: Path, benchmark: Benchmark) -> None:
    Durations(1, path).measure([mm(2), mm(3)])
    again = Durations(1, path)
    again.measure([mm(3), mm(2)])
    again.measure([])
    assert benchmark.started == 1
    assert again.lookup(mm(2)) == Durations(1, path).lookup(mm(3))


def test_an_error_of_the_environment_is_not_stored(path: Path, benchmark: Benchmark) -> None:
    missing = {"error": "ImportError: no module", "transient": True}
    benchmark.call = lambda *_, calls, **__: [missing] * len(calls)  # type: ignore[method-assign]
    Durations(1, path).measure([mm(2)])
    del benchmark.call
    again = Durations(1, path)
    again.measure([mm(2)])
    assert again.lookup(mm(2)) is not None


def test_one_child_serves_a_whole_measurement(path: Path, benchmark: Benchmark) -> None:
    durations = Durations(1, path)
    with durations.measuring():
        for size in (2, 3):
            durations.measure([mm(size)])
        assert benchmark.started == 1
        # The thread pools of its libraries cannot grow later.
        durations.measure([TimingRequest(mm(2), 2)])
        durations.measure([mm(4)])
        assert benchmark.started == 2
    durations.measure([mm(5)])
    durations.measure([mm(6)])
    assert benchmark.started == 4


def test_a_failed_child_is_replaced(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Dies(Benchmark):
        def call(self, function: str, *, calls: list[Any], **options: Any) -> list[dict[str, Any]]:
            if self.started == 1:
                raise ChildError("it died")
            return super().call(function, calls=calls, **options)

    child = Dies()
    monkeypatch.setattr(durations, "Child", child)
    table = Durations(1, path)
    with table.measuring():
        with pytest.raises(ChildError, match="it died"):
            table.measure([mm(2)])
        table.measure([mm(2)])
    assert child.started == 2
    assert table.lookup(mm(2)) is not None


def test_a_call_is_timed_once_even_if_it_occurs_often(path: Path, benchmark: Benchmark) -> None:
    Durations(1, path).measure([mm(2)] * 40)
    assert len(benchmark.asked) == 1


def test_only_missing_calls_are_measured(path: Path, benchmark: Benchmark) -> None:
    durations = Durations(1, path)
    durations.measure([mm(2)])
    durations.measure([mm(2), NOT_THERE])
    assert benchmark.asked[:2] == [MM, NOT_THERE.op]
    # And the machine's limits, once.
    measured_before = len(benchmark.asked)
    durations.measure([mm(2), NOT_THERE])
    assert len(benchmark.asked) == measured_before


def test_no_batch_begins_after_the_deadline(
    path: Path, benchmark: Benchmark, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = [mm(n) for n in range(2, 60)]
    Durations(1, path).measure(calls, until=time.monotonic())
    assert not benchmark.started
    # Each reading of the clock is ten seconds later: two batches of 24 are begun.
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr(durations, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    Durations(1, path).measure(calls, until=25)
    assert len(benchmark.asked) == 48


def test_rough_measurements_are_not_stored(path: Path, benchmark: Benchmark) -> None:
    durations = Durations(1, path)
    durations.measure([mm(2)], roughly=True)
    assert durations.lookup(mm(2)) is not None
    assert Durations(1, path).lookup(mm(2)) is None
    Durations(1, path).measure([mm(2)])
    assert Durations(1, path).lookup(mm(2)) is not None


def test_a_rough_measurement_takes_fewer_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds: list[int] = []

    def counting(*arguments: Any) -> Any:
        timer = microbenchmark_timer(*arguments)
        rounds.append(0)

        def sample() -> float:
            rounds[-1] += 1
            return timer.sample()

        return replace(timer, sample=sample)

    microbenchmark_timer = microbenchmark._timer
    monkeypatch.setattr(microbenchmark, "_timer", counting)
    for roughly in (False, True):
        (answer,) = run([mm(8).to_json()], 1, roughly=roughly)
        assert answer["nanoseconds"] > 0
    assert rounds[0] > 3 * rounds[1] > 0


def test_a_call_that_cannot_run_is_stored_as_failed(path: Path, benchmark: Benchmark) -> None:
    Durations(1, path).measure([NOT_THERE])
    again = Durations(1, path)
    again.measure([NOT_THERE])
    assert again.lookup(NOT_THERE) is None
    assert benchmark.started == 1


def test_another_machine_has_no_durations(
    path: Path, benchmark: Benchmark, monkeypatch: pytest.MonkeyPatch
) -> None:
    Durations(1, path).measure([mm(2)])
    monkeypatch.setattr(durations, "_cpu_model", lambda: "another processor")
    assert Durations(1, path).lookup(mm(2)) is None


def test_another_number_of_threads_has_no_durations(path: Path, benchmark: Benchmark) -> None:
    Durations(1, path).measure([mm(2)])
    assert Durations(2, path).lookup(mm(2)) is None


def test_the_machine_key_is_stable_and_depends_on_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine_key() == machine_key()
    before = machine_key()
    monkeypatch.setattr("importlib.metadata.version", lambda name: "9.9")
    assert machine_key() != before


def test_the_machine_key_depends_on_our_own_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    before = machine_key()
    monkeypatch.setattr("slipstream.native.build", lambda: "another one")
    assert machine_key() != before
    monkeypatch.undo()
    switch_library_off(monkeypatch)
    assert machine_key() != before


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SLIPSTREAM_INSTRUCTION_SET", "scalar"),
        ("ATEN_CPU_CAPABILITY", "default"),
        ("ONEDNN_MAX_CPU_ISA", "SSE41"),
    ],
)
def test_durations_at_one_instruction_set_are_unknown_at_another(
    path: Path, benchmark: Benchmark, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.delenv(name, raising=False)
    if cpu_features().best == value:
        pytest.skip("this CPU has a single level")
    # Of a call, and of the fitted costs of low-bit layers.
    Durations(1, path).measure([mm(2), *required_timings(3, 3)])
    monkeypatch.setenv(name, value)
    lower = Durations(1, path)
    assert lower.lookup(mm(2)) is None
    assert Costs.fitted(lower, 3, 3) is None
    monkeypatch.delenv(name)
    again = Durations(1, path)
    assert again.lookup(mm(2)) is not None
    assert Costs.fitted(again, 3, 3) is not None


def corrupt(path: Path) -> None:
    path.write_bytes(b"this is no database, and long enough to be looked at as one" * 50)


def foreign(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE notes (text TEXT)")


def newer(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")


def a_folder(path: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize("spoil", [corrupt, foreign, newer, a_folder])
def test_a_foreign_file_is_a_clear_error(
    path: Path, benchmark: Benchmark, spoil: Callable[[Path], None]
) -> None:
    path.parent.mkdir()
    spoil(path)
    with pytest.raises(StoreError) as caught:
        Durations(1, path).lookup(mm(2))
    assert caught.value.where == str(path)
    assert caught.value.remedy
    with pytest.raises(StoreError):
        Durations(1, path).measure([mm(2)])


def test_the_cache_is_in_the_folder_the_user_chose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, benchmark: Benchmark
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    Durations(1).measure([mm(2)])
    assert list((tmp_path / "slipstream").glob("durations-*.db"))


def test_one_pool_keeps_the_libraries_at_their_threads() -> None:
    assert one_pool(3)["OMP_NUM_THREADS"] == "3"
    assert one_pool(0) == {}


def test_a_real_child_measures_and_reports_failures_per_call(path: Path) -> None:
    durations = Durations(1, path)
    lines: list[str] = []
    durations.measure([mm(8), mm(256), NOT_THERE, cast(dense(64, 64), "bfloat16")], lines.append)
    small, large = durations.lookup(mm(8)), durations.lookup(mm(256))
    assert small is not None
    assert large is not None
    # 32,768 times the arithmetic: hundreds of times as long, even under load.
    assert large.nanoseconds > small.nanoseconds
    assert durations.lookup(NOT_THERE) is None
    assert durations.lookup(cast(dense(64, 64), "bfloat16")) is not None
    assert len(lines) == 2
    assert re.search(r"\boperators 1 \w+ 4 of 4$", lines[0])
    assert re.search(r"\bmachine\b", lines[1])


@pytest.mark.parametrize(
    "spec",
    [
        TensorSpec("float32", (3, 4), (4, 1)),
        TensorSpec("float32", (3, 4), (1, 3)),
        TensorSpec("bfloat16", (3, 4), (0, 1)),
        TensorSpec("int64", (5,), (2,)),
        TensorSpec("uint8", (5,), (1,)),
        TensorSpec("bool", (2, 2), (2, 1)),
        TensorSpec("float64", (), ()),
        TensorSpec("float32", (0, 3), (3, 1)),
        TensorSpec("complex64", (2,), (1,)),
    ],
)
def test_a_random_tensor_matches_its_specification(spec: TensorSpec) -> None:
    made = random_tensor(spec, bound=7)
    assert str(made.dtype) == f"torch.{spec.dtype}"
    assert (tuple(made.shape), made.stride()) == (spec.shape, spec.strides)
    if not made.is_complex() and made.numel():
        assert made.double().min() >= 0
        assert made.double().max() < 7


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.durations.microbenchmark._ROUNDS", 2)
    monkeypatch.setattr("slipstream.durations.microbenchmark._SAMPLE_NS", 1e4)


def test_indices_are_within_bounds(quick: None) -> None:
    embedding = "aten::embedding(Tensor weight, Tensor indices, SymInt padding_idx=-1, "
    embedding += "bool scale_grad_by_freq=False, bool sparse=False) -> Tensor"
    gather = "aten::gather(Tensor self, int dim, Tensor index, *, bool sparse_grad=False) -> Tensor"
    loss = "aten::nll_loss_forward(Tensor self, Tensor target, Tensor? weight, int reduction, "
    loss += "SymInt ignore_index) -> (Tensor output, Tensor total_weight)"
    calls = [
        Call(embedding, (dense(3, 4), dense(9, dtype="int64"), -1, False, False)),
        Call(gather, (dense(2, 5), 1, dense(2, 5, dtype="int64"), False)),
        Call(loss, (dense(6, 3), dense(6, dtype="int64"), None, 1, -100)),
    ]
    assert all("nanoseconds" in found for found in run([call.to_json() for call in calls], 1))
    # As many as there are rows, so that the whole table is read as in the step.
    assert [microbenchmark._index_bound(call) for call in (*calls, mm(4))] == [3, 5, 3, 1]


def test_an_in_place_operator_does_not_produce_denormals(
    quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def halved() -> float:
        """A value that only denormals, which take a hundred times as long, can represent."""
        return float(torch.full((1,), 2.0**-126) * 0.5)

    assert halved() > 0
    monkeypatch.setattr(microbenchmark, "_timer", lambda *_: microbenchmark._Timer(halved))
    (found,) = run([mm(4).to_json()], 1)
    assert found["nanoseconds"] == 0
    assert halved() > 0


def test_no_unused_inputs_are_created(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[TensorSpec] = []
    original = microbenchmark.random_tensor

    def counted(spec: TensorSpec, bound: int = 1) -> Any:
        made.append(spec)
        return original(spec, bound)

    monkeypatch.setattr(microbenchmark, "random_tensor", counted)
    # As if one call lasted a whole sample, and as if many fitted into one.
    for sample_ns, sets in ((microbenchmark._SAMPLE_NS, 1), (1.0, microbenchmark._MAX_SETS)):
        made.clear()
        ticks = itertools.count(step=int(sample_ns))
        microbenchmark._operator_timer(mm(8), lambda ticks=ticks: next(ticks))
        assert len(made) == 2 * sets


def test_an_invalid_call_fails_alone(quick: None) -> None:
    found = run([["aten::nonsense", [], []], mm(4).to_json(), ["aten::mm(", [3], []]], 1)
    assert "error" in found[0]
    assert "nanoseconds" in found[1]
    assert "error" in found[2]


def test_questions_with_other_threads_or_clock_have_separate_answers(
    path: Path, benchmark: Benchmark
) -> None:
    durations = Durations(1, path)
    durations.measure(
        [mm(2), TimingRequest(mm(2)), TimingRequest(mm(2), 2), TimingRequest(mm(2), 1, wall=True)]
    )
    # A plain call is a question without conditions.
    assert len(benchmark.asked) == 3
    again = Durations(1, path)
    assert again.lookup(TimingRequest(mm(2), 2)) is not None
    assert again.lookup(TimingRequest(mm(2), 2, wall=True)) is None
    assert Durations(2, path).lookup(mm(2)) == again.lookup(TimingRequest(mm(2), 2))


def test_threads_and_clock_of_each_call_reach_the_benchmark(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}

    class Watched(Benchmark):
        def __call__(self, name: str, **options: Any) -> Benchmark:
            seen.update(options)
            return super().__call__(name, **options)

        def call(self, function: str, **options: Any) -> list[dict[str, Any]]:
            seen.update(options)
            return super().call(function, **options)

    monkeypatch.setattr(durations, "Child", Watched())
    Durations(1, path).measure([mm(2), TimingRequest(mm(2), 3, wall=True)])
    assert (seen["threads"], seen["wall"]) == ([1, 3], [False, True])
    # The thread pools must hold the largest number.
    assert seen["environment"].items() >= one_pool(3).items()


def test_each_call_runs_on_its_own_threads(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    counts: list[int] = []
    original = torch.set_num_threads
    monkeypatch.setattr(torch, "set_num_threads", lambda n: (counts.append(n), original(n)))
    try:
        found = run([mm(4).to_json()] * 2, [1, 2], [True, True])
    finally:
        original(before)
    assert all("nanoseconds" in timing for timing in found)
    assert counts[:2] == [1, 2]
    assert counts.count(1) == counts.count(2)


def test_waiting_for_a_core_widens_the_uncertainty_equally(
    quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, threads, wall = [mm(4).to_json()] * 3, [1, 1, 2], [False, True, True]
    before = torch.get_num_threads()
    try:
        # As if our threads waited for a second before every reading: longer than any sample.
        ticks = itertools.count(step=10**9)
        monkeypatch.setattr(microbenchmark, "waited_ns", lambda: next(ticks))
        by_cpu, first, two = run(calls, threads, wall)
        monkeypatch.setattr(microbenchmark, "waited_ns", lambda: 0)
        calm = run(calls, threads, wall)
    finally:
        torch.set_num_threads(before)
    assert by_cpu["waited"] == 0
    assert first["waited"] == two["waited"] == pytest.approx(0.99)
    # A hundredth of the time may be sufficient.
    assert min(first["spread"], two["spread"]) >= math.log(100) - 1e-6
    assert [found["waited"] for found in calm] == [0, 0, 0]


@pytest.mark.skipif(not Path("/proc/thread-self/schedstat").exists(), reason="no schedstat")
def test_waiting_for_a_core_sums_over_all_threads() -> None:
    this_thread = int(Path("/proc/thread-self/schedstat").read_text().split()[1])
    assert microbenchmark.waited_ns() >= this_thread > 0


def test_a_call_that_waited_for_a_core_is_measured_again_next_time(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Busy(Benchmark):
        def call(self, function: str, *, calls: list[Any], **options: Any) -> list[dict[str, Any]]:
            found = super().call(function, calls=calls, **options)
            return [{**timing, "waited": 0.5 * i} for i, timing in enumerate(found)]

    monkeypatch.setattr(durations, "Child", Busy())
    table = Durations(2, path)
    table.measure([mm(2), mm(3)])
    assert table.lookup(mm(3)) is not None
    again = Durations(2, path)
    assert [again.lookup(call) is not None for call in (mm(2), mm(3))] == [True, False]


def test_allocating_a_batch_costs_more_the_larger_it_is(quick: None) -> None:
    small, large = (
        Call("slipstream::take_batch()", (dense(n), dense(4, dtype="int64"))) for n in (8, 1 << 22)
    )
    taken, more = run([small.to_json(), large.to_json()], 1)
    # Sixteen megabytes are four thousand pages to map and touch.
    assert 0 < taken["nanoseconds"] < more["nanoseconds"]


def test_a_common_spread_gives_the_sum_that_uncertainty() -> None:
    graph = captured("mlp")
    tasks = [t for t in range(len(graph)) if graph.tasks.call[t] >= 0]
    spread = common_spread(graph, tasks, 0.2)
    by_call: dict[str, float] = {}
    for t in tasks:
        key = graph.calls[graph.tasks.call[t]].key
        by_call[key] = by_call.get(key, 0.0) + float(graph.tasks.duration_ns[t])
    independent = sum((spread * duration) ** 2 for duration in by_call.values()) ** 0.5
    assert independent == pytest.approx(0.2 * sum(by_call.values()))
    assert common_spread(graph, [], 0.2) == 0.2


def test_a_user_without_a_home_has_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", nowhere)
    assert durations.cache_folder().is_relative_to(tempfile.gettempdir())


LSTM = (
    "aten::mkldnn_rnn_layer(Tensor input, Tensor weight0, Tensor weight1, Tensor weight2, "
    "Tensor weight3, Tensor hx_, Tensor cx_, bool reverse, int[] batch_sizes, int mode, "
    "int hidden_size, int num_layers, bool has_biases, bool bidirectional, bool batch_first, "
    "bool train) -> (Tensor, Tensor, Tensor, Tensor)"
)


def test_output_and_workspace_of_an_operator_are_measured_with_its_time() -> None:
    rows, sums = dense(64, 1000), dense(64)
    # The exponentials of all values exist together with the output until they are summed.
    op = "aten::logsumexp(Tensor self, int[1] dim, bool keepdim=False) -> Tensor"
    reduction = Call(op, (rows, (1,), False), (sums,))
    calls = [mm(32), reduction, NOT_THERE]
    product, reduced, failed = run([call.to_json() for call in calls], threads=1)
    assert product["made"] == [32 * 32 * 4]
    assert reduced["made"] == [sums.nbytes]
    assert rows.nbytes <= reduced["workspace"] < 2 * rows.nbytes
    assert "made" not in failed
    assert "workspace" not in failed


def test_the_reserve_of_an_lstm_for_its_backward_pass_is_measured() -> None:
    hidden, steps, batch = 8, 3, 2
    gates, state = dense(4 * hidden, hidden), dense(1, batch, hidden)
    bias = dense(4 * hidden)
    arguments = (
        dense(steps, batch, hidden), gates, gates, bias, bias, state, state, False, (), 2, hidden,
        1, True, False, False, True,
    )  # fmt: skip
    (found,) = run([Call(LSTM, arguments, (dense(steps, batch, hidden),)).to_json()], threads=1)
    output, _, _, saved = found["made"]
    assert output == steps * batch * hidden * 4
    assert saved > steps * batch * 4 * hidden, "at least four gates of every step"


def test_memory_is_stored_with_the_duration(tmp_path: Path) -> None:
    first = Durations(path=tmp_path / "durations.db")
    first.measure([mm(16)])
    estimate = first.lookup(mm(16))
    assert estimate is not None
    assert estimate.made == (16 * 16 * 4,)
    assert Durations(path=tmp_path / "durations.db").lookup(mm(16)) == estimate


def test_a_ratio_is_as_uncertain_as_both_calls_together(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = Durations(1, path)
    spreads = {mm(2).key: 0.3, mm(4).key: 0.4}
    answers = {
        key: durations.Timing(1e3, spread, Provenance.MICROBENCHMARK)
        for key, spread in spreads.items()
    }
    monkeypatch.setattr(table, "lookup", lambda call: answers.get(call.key))
    for old, new in ((mm(2), mm(4)), (mm(4), mm(2))):
        ratio = table.ratio(old, new)
        assert ratio is not None
        assert ratio.spread == pytest.approx(0.5)
    # Likewise if one of them is on a curve through its neighbours.
    monkeypatch.setattr(
        table, "_fitted", lambda call: durations.Timing(2e3, 1.2, Provenance.FITTED)
    )
    ratio = table.ratio(mm(4), mm(8))
    assert ratio is not None
    assert ratio.spread == pytest.approx(math.hypot(0.4, 1.2))
    ratio = table.ratio(mm(8), mm(2))
    assert ratio is not None
    assert ratio.spread == pytest.approx(math.hypot(0.3, 1.2))


def test_a_call_with_cached_operands_has_a_separate_answer(
    path: Path, benchmark: Benchmark
) -> None:
    durations = Durations(1, path)
    durations.measure([mm(2)])
    assert durations.lookup(TimingRequest(mm(2), warm=True)) is None
    durations.measure([TimingRequest(mm(2), warm=True)])
    assert len(benchmark.asked) == 2
    again = Durations(1, path)
    assert again.lookup(TimingRequest(mm(2), warm=True)) is not None
    assert again.lookup(TimingRequest(mm(4), warm=True)) is None
