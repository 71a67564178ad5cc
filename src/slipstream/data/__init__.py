"""Data sets by name, and seeded generators with known ground truth."""

from __future__ import annotations

from slipstream.data._access import available, get, why_absent
from slipstream.data._integrity import RecordedFile, Verification, checksum, recorded_files, verify
from slipstream.data._traces import ORACLE_GENERAL
from slipstream.data._trees import parse_tree
from slipstream.data.catalogue import Entry, manifest
from slipstream.data.errors import CorruptDataError, MissingDataError
from slipstream.data.kinds import (
    Accesses,
    Audio,
    ClickRows,
    Clicks,
    Dataset,
    EncodedImages,
    Images,
    LayerProfile,
    ModelFiles,
    Pairs,
    ProfiledLayer,
    Ratings,
    Sentences,
    Tabular,
    Text,
    Traces,
    Tree,
    Trees,
)

__all__ = [
    "ORACLE_GENERAL",
    "Accesses",
    "Audio",
    "ClickRows",
    "Clicks",
    "CorruptDataError",
    "Dataset",
    "EncodedImages",
    "Entry",
    "Images",
    "LayerProfile",
    "MissingDataError",
    "ModelFiles",
    "Pairs",
    "ProfiledLayer",
    "Ratings",
    "RecordedFile",
    "Sentences",
    "Tabular",
    "Text",
    "Traces",
    "Tree",
    "Trees",
    "Verification",
    "available",
    "checksum",
    "get",
    "manifest",
    "parse_tree",
    "recorded_files",
    "verify",
    "why_absent",
]
