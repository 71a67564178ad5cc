"""Tables of the results store. Script k migrates version k to k + 1; never edit a script."""

from __future__ import annotations

# Rows are never changed, except that the blocks of a running experiment (`chunk`, `event`) are
# packed into `sample_blob` and one row of `event` when it finishes. Records are stored as JSON
# (`record`), whose floats read back bit for bit; the other columns of their tables serve queries.
_VERSION_1 = """
CREATE TABLE environment (
    env_id TEXT PRIMARY KEY,
    facts TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE experiment (
    number INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    title TEXT NOT NULL,
    created TEXT NOT NULL,
    env_id TEXT NOT NULL REFERENCES environment,
    momentary TEXT NOT NULL,
    settings TEXT NOT NULL,
    software TEXT NOT NULL,
    writer TEXT,
    finished TEXT
);
CREATE TABLE arm (
    experiment INTEGER NOT NULL REFERENCES experiment,
    position INTEGER NOT NULL,
    name TEXT NOT NULL,
    record TEXT NOT NULL,
    PRIMARY KEY (experiment, position)
) WITHOUT ROWID;
CREATE TABLE block (
    experiment INTEGER NOT NULL REFERENCES experiment,
    sequence INTEGER NOT NULL,
    block INTEGER NOT NULL,
    at_ms INTEGER NOT NULL,
    PRIMARY KEY (experiment, sequence)
) WITHOUT ROWID;
CREATE TABLE chunk (
    experiment INTEGER NOT NULL REFERENCES experiment,
    sequence INTEGER NOT NULL,
    samples TEXT NOT NULL,
    PRIMARY KEY (experiment, sequence)
) WITHOUT ROWID;
CREATE TABLE sample_blob (
    experiment INTEGER NOT NULL REFERENCES experiment,
    arm TEXT NOT NULL,
    metric TEXT NOT NULL,
    phase TEXT NOT NULL,
    n INTEGER NOT NULL,
    "values" BLOB NOT NULL,
    blocks BLOB NOT NULL,
    UNIQUE (experiment, arm, metric, phase)
);
CREATE TABLE event (
    number INTEGER PRIMARY KEY,
    experiment INTEGER NOT NULL REFERENCES experiment,
    events BLOB NOT NULL
);
CREATE INDEX event_of ON event (experiment);
CREATE TABLE claim (
    experiment INTEGER NOT NULL REFERENCES experiment,
    position INTEGER NOT NULL,
    arm TEXT NOT NULL,
    metric TEXT NOT NULL,
    verdict TEXT NOT NULL,
    record TEXT NOT NULL,
    PRIMARY KEY (experiment, position)
) WITHOUT ROWID;
CREATE TABLE prediction (
    number INTEGER PRIMARY KEY,
    workload TEXT NOT NULL,
    technique TEXT NOT NULL,
    metric TEXT NOT NULL,
    env_id TEXT NOT NULL,
    created TEXT NOT NULL,
    record TEXT NOT NULL UNIQUE
);
CREATE INDEX prediction_of ON prediction (workload, technique, metric);
CREATE TABLE experiment_prediction (
    experiment INTEGER NOT NULL REFERENCES experiment,
    arm TEXT NOT NULL,
    prediction INTEGER NOT NULL REFERENCES prediction,
    PRIMARY KEY (experiment, arm)
) WITHOUT ROWID;
"""

# A block of a running experiment is one row, because each statement of a commit evicts cache lines
# of the measured program. `block` has the blocks of finished experiments.
_VERSION_2 = """
ALTER TABLE chunk ADD COLUMN block INTEGER NOT NULL DEFAULT 0;
ALTER TABLE chunk ADD COLUMN at_ms INTEGER NOT NULL DEFAULT 0;
UPDATE chunk SET (block, at_ms) = (
    SELECT block.block, block.at_ms FROM block
    WHERE block.experiment = chunk.experiment AND block.sequence = chunk.sequence
);
DELETE FROM block WHERE experiment IN (SELECT experiment FROM chunk);
"""

MIGRATIONS = (_VERSION_1, _VERSION_2)
