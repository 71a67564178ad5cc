"""The predictor against planted distributions, whose parameters are known."""

from __future__ import annotations

import numpy as np
import pytest

from slipstream.engines.storage import AccessPredictor, AccessTrace, ShardCache
from slipstream.engines.storage.policies import BINS, CachePolicy, gittins
from slipstream.engines.storage.predictor import TASKS, Observations, observations
from slipstream.engines.storage.traces import OPS
from slipstream.errors import InvalidArgumentError, UnknownNameError


def planted(
    samples: int, censored: float = 0.0
) -> tuple[Observations, list[dict[str, str]], list[float], list[float]]:
    """Draw log-normal values of 12 contexts; a share of them ends beyond a random value."""
    rng = np.random.default_rng(0)
    features = [{"job": f"job{a}", "kind": f"kind{b}"} for a in range(4) for b in range(3)]
    mean, sd = rng.uniform(0, 8, 12), rng.uniform(0.3, 1.5, 12)
    classes = np.repeat(np.arange(12), samples).astype(np.int32)
    value = rng.normal(mean[classes], sd[classes])
    # Censoring that does not depend on the value: a normal limit, shifted to cut off this share.
    spread = sd[classes]
    shift = {0.0: 99.0, 0.3: 0.7416}[censored]
    limit = rng.normal(mean[classes] + shift * spread, spread)
    seen = Observations(classes, np.exp(np.minimum(value, limit)), value > limit)
    return seen, features, mean.tolist(), sd.tolist()


def fitted(seen: Observations, features: list[dict[str, str]]) -> AccessPredictor:
    return AccessPredictor(("interval_s",)).fit_observations(
        {"interval_s": seen}, features, ("job", "kind")
    )


@pytest.mark.parametrize("censored", [0.0, 0.3])
def test_forecasts_have_the_planted_parameters(censored: float) -> None:
    """Tolerances are four standard errors of 4,000 samples, of which some are censored."""
    seen, features, mean, sd = planted(4000, censored)
    assert np.mean(seen.censored) == pytest.approx(censored, abs=0.01)
    predictor = fitted(seen, features)
    for context, mu, sigma in zip(features, mean, sd, strict=True):
        forecast = predictor.predict_tokens(tuple(context.items()), "interval_s")
        assert forecast.mean_log == pytest.approx(mu, abs=4 * sigma / 4000**0.5 + 0.03)
        assert forecast.sd_log == pytest.approx(sigma, abs=4 * sigma / 5000**0.5 + 0.02)


def test_an_interval_covers_its_share() -> None:
    seen, features, *_ = planted(2000)
    predictor = fitted(seen, features)
    inside = []
    for number, context in enumerate(features):
        forecast = predictor.predict_tokens(tuple(context.items()), "interval_s")
        value = seen.value[seen.classes == number]
        inside.append((forecast.quantile(0.05) <= value) & (value <= forecast.quantile(0.95)))
    assert 0.88 <= np.mean(inside) <= 0.92


def test_an_interval_covers_its_share_of_later_values() -> None:
    """Each file is small or large, so that sizes are far from log-normal."""
    rng = np.random.default_rng(3)
    log_size = rng.normal(0, 0.1, 4000) + np.where(rng.random(4000) < 0.93, 0, 6.0)
    sizes = np.exp(log_size + 10).astype(np.int64)
    trace = AccessTrace.of([f"/run/{n:04d}" for n in range(4000)], sizes)
    forecast = AccessPredictor(("size",)).fit(trace.first(3000)).predict({}, "size", "/run/0001")
    later = sizes[3000:]
    covered = (forecast.quantile(0.25) <= later) & (later <= forecast.quantile(0.75))
    assert covered.mean() == pytest.approx(0.5, abs=0.06)


def test_an_unseen_context_backs_off_to_the_informative_key() -> None:
    seen, features, mean, _ = planted(500)
    predictor = fitted(seen, features)
    job0 = np.mean(mean[:3])
    unseen = predictor.predict_tokens((("job", "job0"), ("kind", "new")), "interval_s")
    assert unseen.mean_log == pytest.approx(job0, abs=0.3)
    nothing = predictor.predict_tokens((("job", "new"),), "interval_s")
    assert nothing.mean_log == pytest.approx(np.mean(mean), abs=0.1)
    assert nothing.sd_log > 1.5


def lifecycle() -> AccessTrace:
    """One object that is created, read twice and deleted; another that is created and stays."""
    names = ["/a", "/b", "/a", "/a", "/a"]
    ops = [OPS.index(op) for op in ("create", "create", "read", "read", "delete")]
    return AccessTrace.of(names, [8, 9, 8, 8, 8], time_ns=np.arange(5) * 10**9, ops=ops)


def test_observations_of_each_task() -> None:
    trace = lifecycle()
    found = {task: observations(trace, task) for task in TASKS}
    assert found["interval"].value.tolist() == [2, 4, 1, 1, 1]
    assert found["interval"].censored.tolist() == [False, True, False, False, True]
    assert found["interval_s"].value.tolist() == pytest.approx([2, 3, 1, 1, 0], abs=1e-6)
    assert found["lifetime_s"].value.tolist() == [4, 3]
    assert found["lifetime_s"].censored.tolist() == [False, True]
    assert found["size"].value.tolist() == [8, 9, 8, 8, 8]
    assert found["read_fraction"].value.tolist() == pytest.approx([0.5, 1e-3, 0.5, 0.5, 0.5])


def epochs(count: int = 20) -> AccessTrace:
    rng = np.random.default_rng(0)
    names = []
    for epoch in range(count):
        names += [f"/train/shard-{number:04d}.tar" for number in rng.permutation(50)]
        names.append(f"/checkpoint-{epoch:04d}.pt")
    return AccessTrace.of(names, [100] * len(names))


def test_hazards_of_a_trace_separate_shards_from_checkpoints() -> None:
    predictor = AccessPredictor().fit(epochs())
    shard = predictor.predict({}, object_name="/train/shard-9999.tar")
    checkpoint = predictor.predict({}, object_name="/checkpoint-9999.pt")
    assert shard.quantile(0.5) == pytest.approx(51, rel=0.25)
    assert shard.gittins()[0] > 5 * checkpoint.gittins()[0]
    np.testing.assert_array_equal(shard.gittins(), gittins(np.asarray(shard.hazard)))


def test_a_predictor_warms_up_a_cache(tmp_path: object) -> None:
    """A policy that knows that checkpoints never return does not store the first ones."""
    predictor = AccessPredictor().fit(epochs())
    hits = []
    for prepared in (None, predictor):
        cache = ShardCache(f"{tmp_path}/{prepared is None}", 2500, lambda name: bytes(100),
                           policy="learned", predictor=prepared)  # fmt: skip
        trace = epochs(3)
        for number in trace.objects:
            cache.read(trace.names[number])
        hits.append(cache.counts.hits)
    assert hits[1] > hits[0]


def test_bad_requests_are_refused() -> None:
    with pytest.raises(UnknownNameError, match="interval"):
        AccessPredictor(("intervals",))
    predictor = AccessPredictor(("size", "lifetime_s")).fit(epochs())
    for task in ("interval", "lifetime_s"):
        with pytest.raises(UnknownNameError, match="size"):
            predictor.predict({}, task)
    forecast = predictor.predict({}, "size")
    with pytest.raises(InvalidArgumentError, match="hazards"):
        forecast.gittins()
    with pytest.raises(InvalidArgumentError, match="between"):
        forecast.quantile(1.0)
    CachePolicy("lru", 1).set_prior(0, np.zeros(BINS))
