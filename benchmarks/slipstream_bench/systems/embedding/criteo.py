"""Numbers of ids of the 26 fields of Criteo's logs, the sizes of benchmark tables."""

from __future__ import annotations

from collections.abc import Sequence

KAGGLE_ROWS = (
    1_460, 583, 10_131_227, 2_202_608, 305, 24, 12_517, 633, 3, 93_145, 5_683, 8_351_593, 3_194,
    27, 14_992, 5_461_306, 10, 5_652, 2_173, 4, 7_046_547, 18, 15, 286_181, 105, 142_572,
)  # fmt: skip
"""The log of seven days of the Kaggle challenge."""

TERABYTE_ROWS = (
    9_980_333, 36_084, 17_217, 7_378, 20_134, 3, 7_112, 1_442, 61, 9_758_201, 1_333_352, 313_829,
    10, 2_208, 11_156, 122, 4, 970, 14, 9_994_222, 7_267_859, 9_946_608, 415_421, 12_420, 101, 36,
)  # fmt: skip
"""The terabyte log, with at most ten million ids per field."""

TERABYTE_40M_ROWS = (
    39_884_406, 39_043, 17_289, 7_420, 20_263, 3, 7_120, 1_543, 63, 38_532_951, 2_953_546, 403_346,
    10, 2_208, 11_938, 155, 4, 976, 14, 39_979_771, 25_641_295, 39_664_984, 585_935, 12_972, 108,
    36,
)  # fmt: skip
"""The terabyte log, with at most forty million: the tables of MLPerf's click model."""


def scaled_rows(counts: Sequence[int], total: float) -> list[int]:
    """Scale the fields to about `total` ids together, with at least three in each."""
    scale = total / sum(counts)
    return [max(3, round(count * scale)) for count in counts]
