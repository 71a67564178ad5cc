"""The ledger: predictions are scored by measurements, and the next interval is calibrated."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_up import ENVIRONMENT, claim, environment, experiment, prediction

from slipstream.errors import UnknownNameError
from slipstream.measure.ledger import Calibration, Ledger, Score, calibrate
from slipstream.measure.measured import Measured
from slipstream.measure.records import ArmRecord, Verdict
from slipstream.measure.store import Store


@pytest.fixture
def store(tmp_path: Path):
    with Store(tmp_path / "results.db") as opened:
        yield opened


def _score(stretch: float, sign: int = 1) -> Score:
    half = math.log(1.25)
    residual = sign * stretch * half
    measured = claim(ratio=0.5 * math.exp(residual))
    return Score(prediction(), measured, "id", residual, stretch)


def test_a_later_measurement_of_the_same_technique_scores_a_prediction(store: Store) -> None:
    ledger = Ledger(store)
    ledger.record(prediction(), ENVIRONMENT)
    assert ledger.scores() == ()
    identity = store.save(experiment(), [claim(ratio=0.6)])
    (score,) = ledger.scores()
    assert score.experiment_id == identity
    assert score.residual == pytest.approx(math.log(0.6 / 0.5))
    # The interval reaches log(0.625 / 0.5) upwards.
    assert score.stretch == pytest.approx(math.log(1.2) / math.log(1.25))
    assert score.inside


def test_a_miss_on_the_short_side_is_scored_by_that_side(store: Store) -> None:
    Ledger(store).record(prediction(low=0.45))
    store.save(experiment(), [claim(ratio=0.4)])
    (score,) = Ledger(store).scores()
    assert score.stretch == pytest.approx(math.log(0.5 / 0.4) / math.log(0.5 / 0.45))
    assert not score.inside


def test_a_prediction_is_scored_once_by_the_first_measurement(store: Store) -> None:
    Ledger(store).record(prediction())
    first = store.save(experiment(), [claim(ratio=0.6)])
    store.save(experiment(), [claim(ratio=0.9)])
    assert [s.experiment_id for s in Ledger(store).scores()] == [first]


@pytest.mark.parametrize(
    "other",
    [
        {"workload": "other.py:step"},
        {"technique": "lowrank:0.5"},
        {"metric": "wall"},
        {"env_id": "another"},
        {"created": "2030-01-01T00:00:00Z"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_other_measurements_score_nothing(store: Store, other: dict[str, str]) -> None:
    Ledger(store).record(prediction(**other))
    store.save(experiment(), [claim()])
    assert Ledger(store).scores() == ()


def test_an_experiment_scores_the_prediction_it_started_with(store: Store) -> None:
    attached = prediction(env_id="made elsewhere")
    arms = (ArmRecord("base"), ArmRecord("fast"))
    store.save(experiment(arms=arms, predictions={"fast": attached}), [claim()])
    assert [s.prediction for s in Ledger(store).scores()] == [attached]


def _proved(
    store: Store, created: str, ratio: float = 0.6, threads: int = 1, **more: object
) -> str:
    """Return an experiment like those of `prove`: arms by technique, prediction, torch facts."""
    attached = prediction(
        ratio=0.6, low=0.55, high=0.65, created=created, detail={"threads": threads}
    )
    arms = (ArmRecord("base"), ArmRecord("lowrank:0.25"))
    proved = experiment(
        title="train.py:step",
        created=created,
        arms=arms,
        predictions={"lowrank:0.25": attached},
        environment=environment(torch_config="asked for by the runner"),
        **more,
    )
    return store.save(proved, [claim(arm="lowrank:0.25", ratio=ratio)])


def test_a_proof_scores_only_the_prediction_it_started_with(store: Store) -> None:
    ledger = Ledger(store)
    older = prediction(ratio=0.9, low=0.8, high=0.95, created="2026-01-01T00:00:00Z")
    ledger.record(older, ENVIRONMENT)
    _proved(store, "2026-01-03T00:00:00Z")
    (score,) = ledger.scores()
    assert (score.prediction.ratio, score.inside) == (0.6, True)
    # Proved again, it is still one observation: the latest measurement.
    _proved(store, "2026-01-04T00:00:00Z", ratio=0.7)
    assert [score.inside for score in ledger.scores()] == [True, False]
    found = ledger.calibration(ENVIRONMENT, "cpu")
    assert (found.n, found.coverage) == (1, 0.0)
    assert "outside" in found.note


def test_the_latest_of_several_predictions_is_scored(store: Store) -> None:
    ledger = Ledger(store)
    for day in (1, 2):
        ledger.record(prediction(ratio=0.5 + day / 100, created=f"2026-01-0{day}"), ENVIRONMENT)
    store.save(experiment(created="2026-01-03"), [claim()])
    store.save(experiment(created="2026-01-04"), [claim()])
    assert [score.prediction.ratio for score in ledger.scores()] == [0.52]


def test_an_equal_machine_shares_the_history_before_its_first_record(
    store: Store,
) -> None:
    _proved(store, "2026-01-03T00:00:00Z")
    ledger = Ledger(store)
    assert ledger.calibration(environment(git_dirty="never seen"), "cpu").n == 1
    assert ledger.calibration(environment(cpu_model="another"), "cpu").n == 0


def test_a_measurement_is_inside_or_outside_unless_untrustworthy() -> None:
    def found(low: float, high: float, **changes: Any) -> dict[str, Any]:
        predicted = prediction(ratio=0.6, low=low, high=high)
        return Measured(claim(ratio=0.6, **changes), "2026-01-03", predicted=predicted).to_json()

    inside = found(0.5, 0.8)
    assert inside["inside"] is True
    assert inside["predicted_speedup_interval"] == pytest.approx([1.25, 2.0])
    assert found(0.5, 0.59)["inside"] is found(0.61, 0.7)["inside"] is False
    assert found(0.5, 0.7, verdict=Verdict.UNTRUSTWORTHY)["inside"] is None


def test_an_inconclusive_claim_around_the_predicted_interval_scores_nothing(store: Store) -> None:
    noisy = claim(ratio=1.0, low=0.35, high=1.5, verdict=Verdict.INCONCLUSIVE)
    assert Measured(noisy, "", predicted=prediction()).inside is None
    reaches = claim(ratio=1.0, low=0.45, high=1.5, verdict=Verdict.INCONCLUSIVE)
    assert Measured(reaches, "", predicted=prediction()).inside is False
    Ledger(store).record(prediction())
    store.save(experiment(), [noisy])
    assert Ledger(store).scores() == ()


def test_an_untrustworthy_claim_scores_nothing(store: Store) -> None:
    Ledger(store).record(prediction())
    store.save(experiment(), [claim(verdict=Verdict.UNTRUSTWORTHY)])
    store.save(experiment(), [claim(ratio=math.nan, verdict=Verdict.INCONCLUSIVE)])
    assert Ledger(store).scores() == ()


def test_an_empty_history_widens_nothing_and_is_reported(store: Store) -> None:
    store.save(experiment(), [claim()])
    found = Ledger(store).calibration(ENVIRONMENT.env_id, "cpu")
    assert (found.factor, found.level, found.n, found.coverage) == (1.0, None, 0, None)
    assert f"{store.path} has no prediction" in found.note


def test_few_rows_claim_only_the_level_they_can_support() -> None:
    found = calibrate([_score(3.0), _score(0.2)])
    assert found.factor == 3.0
    assert found.level == pytest.approx(2 / 3)
    # Their number, how many held, the effect, and the supported level.
    assert re.search(r"\b2\b.*\b1\b.*\b3\.00\b.*\b67 %", found.note)
    assert "90 %" in found.note
    assert found.coverage == 0.5
    assert found.coverage_low < 0.15
    assert found.coverage_high > 0.85


def test_the_note_describes_the_history_and_its_effect() -> None:
    (calibration,) = (calibrate([_score(0.5)]),)
    assert re.search(r"\b1\b.*`slipstream prove`.*inside.*90 %.*50 %", calibration.note)
    assert (calibration.factor, calibration.n, calibration.level) == (1.0, 1, 0.5)
    assert "times as wide" not in calibration.note, "nothing was widened"
    assert "vouch" not in calibrate([_score(0.5)] * 9).note


def test_nine_rows_reach_90_percent() -> None:
    found = calibrate([_score(n / 3) for n in range(1, 10)])
    assert (found.level, found.factor) == (0.9, 3.0)
    twenty = calibrate([_score(n / 10) for n in range(1, 21)])
    # Rank ceil(0.9 * 21) = 19 of 20: the largest may be excluded.
    assert twenty.factor == pytest.approx(1.9)


def test_good_predictions_are_not_narrowed() -> None:
    assert calibrate([_score(0.1)] * 30).factor == 1.0


def test_the_bias_shows_the_direction_of_errors() -> None:
    assert calibrate([_score(1.0, sign=1)] * 3).bias == pytest.approx(math.log(1.25))
    assert calibrate([_score(1.0, sign=-1)] * 3).bias == pytest.approx(-math.log(1.25))


@pytest.mark.parametrize("n", [3, 9, 30])
def test_the_next_of_the_same_kind_is_covered_at_the_promised_level(n: int) -> None:
    """Any continuous distribution works, since only ranks count; most errors here exceed 1."""
    rng = np.random.default_rng(n)
    runs, held, level = 2000, 0, 0.0
    for _ in range(runs):
        *past, following = rng.lognormal(1.5, 1.0, n + 1)
        found = calibrate([Score(prediction(), claim(), "id", 0.0, float(s)) for s in past])
        assert found.level is not None
        level = found.level
        held += following <= found.factor
    # Three standard errors of the simulation.
    assert held / runs >= level - 3 * math.sqrt(level * (1 - level) / runs)


def test_widening_is_symmetric_in_the_logarithm() -> None:
    calibration = Calibration(2.0, 0.9, 9, 0.5, 0.2, 0.8, 0.0, "")
    assert calibration.widen(0.5, 0.4, 0.625) == pytest.approx((0.32, 0.78125))
    assert calibration.widen(0.5, 0.0, 0.625)[0] == 0.0


def _history(store: Store, place: object, ratio: float, technique: str) -> None:
    store.save(
        experiment(
            environment=place,
            arms=(ArmRecord("base"), ArmRecord("fast", workload="w", technique=technique)),
            predictions={
                "fast": prediction(
                    workload="w",
                    technique=technique,
                    env_id=place.env_id,  # type: ignore[attr-defined]
                )
            },
        ),
        [claim(ratio=ratio)],
    )


def test_the_history_survives_new_software_but_not_a_new_machine(store: Store) -> None:
    newer = environment(torch_version="99")
    elsewhere = environment(cpu_model="another")
    _history(store, ENVIRONMENT, 0.5, "a")
    _history(store, newer, 0.9, "b")
    _history(store, elsewhere, 0.5, "c")
    ledger = Ledger(store)
    assert ledger.calibration(ENVIRONMENT.env_id, "cpu").n == 2
    assert ledger.calibration(newer.env_id, "cpu").factor > 2
    assert ledger.calibration(elsewhere.env_id, "cpu").n == 1
    assert ledger.calibration(ENVIRONMENT.env_id, "wall").n == 0


def test_repeating_one_prediction_adds_no_evidence(store: Store) -> None:
    for n in range(12):
        _history(store, environment(seed_x=n), 0.5, "a")
    assert Ledger(store).calibration(environment(seed_x=0).env_id, "cpu").n == 1


def test_an_unknown_environment_has_no_history(store: Store) -> None:
    with pytest.raises(UnknownNameError):
        Ledger(store).calibration("nowhere")
