"""What a measurement was made on: every fact that may change it, under one hash.

Facts are JSON values under dotted names (``"cpu.model"``). A fact that this machine does not
reveal is the text ``"unreadable"``, never a guess. The group ``now.`` holds what changes from one
second to the next or says how a run was started (clock frequency, free memory, load, the command
line, the scheduling priority): it is recorded, for people who look for a reason, but not hashed,
because two runs that differ only there are meant to be compared, and blocks of one experiment live
through such changes. Seeds and data checksums are hashed: with other numbers in them, sparse or
data-dependent work is other work.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from slipstream.measure import _facts_software, facts_machine
from slipstream.measure.records import Environment
from slipstream.measure.redact import Redactor

_UNHASHED = "now."
# As Linux names them: x86 vectors, x86 tiles, Arm.
_BF16 = frozenset(("avx512_bf16", "amx_bf16", "avx_vnni_bf16", "bf16", "svebf16"))
# The part of the facts that is the machine rather than what runs on it; see `machine_id`.
_MACHINE_GROUPS = ("cpu.", "memory.", "gpu.", "machine.")
# Recorded among them by older versions; says how a run was started, see ``now.nice``.
_NOT_THE_MACHINE = frozenset(("machine.nice",))


def capture(
    *,
    seeds: Mapping[str, int] | None = None,
    data_checksums: Mapping[str, str] | None = None,
    command: str | None = None,
    torch: bool = True,
) -> Environment:
    """Record this machine, its software and the state of the code in the current directory.

    Args:
        seeds: name -> seed, of whatever was drawn at random.
        data_checksums: data set -> checksum.
        command: how the run was started; recorded, not hashed. Ours (``sys.argv``) by default.
        torch: import torch to ask it for its settings; otherwise only its version is recorded
            (unless it is imported already).

    Returns:
        Facts without names of users or hosts and without absolute paths.
    """
    redact = Redactor()
    facts = facts_machine.facts()
    facts |= _facts_software.facts(redact, command, import_torch=torch)
    for name, seed in (seeds or {}).items():
        facts[f"seed.{redact(name)}"] = seed
    for name, checksum in (data_checksums or {}).items():
        facts[f"data.{redact(name)}"] = checksum
    return from_facts(facts)


def from_facts(facts: Mapping[str, Any]) -> Environment:
    """The environment made of `facts`, which must be JSON values, in the order of their names."""
    ordered = {name: facts[name] for name in sorted(facts)}
    return Environment(ordered, _hash(stable_facts(ordered)))


def stable_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts that `Environment.env_id` is a hash of."""
    return {name: value for name, value in facts.items() if not name.startswith(_UNHASHED)}


def differences(a: Environment, b: Environment) -> tuple[str, ...]:
    """Names of the hashed facts in which `a` and `b` differ, sorted; empty when comparable."""
    ours, theirs = stable_facts(a.facts), stable_facts(b.facts)
    absent = object()
    return tuple(
        name
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name, absent) != theirs.get(name, absent)
    )


def processor_flags() -> frozenset[str]:
    """The instruction sets of this processor, by Linux's names; none where it does not say."""
    return frozenset(facts_machine.cpu_flags())


def computes_in_bf16() -> bool | None:
    """Whether this processor has bfloat16 instructions; None where it does not say what it has."""
    flags = facts_machine.cpu_flags()
    return bool(_BF16 & set(flags)) if flags else None


def machine_id(environment: Environment) -> str:
    """Hash of the facts about the machine alone: same processor, memory, accelerators, limits.

    Software, code and seeds change from day to day; the machine's own history of prediction
    errors (see `ledger.py`) should outlive that.
    """
    facts = stable_facts(environment.facts)
    return _hash(
        {
            name: value
            for name, value in facts.items()
            if name.startswith(_MACHINE_GROUPS) and name not in _NOT_THE_MACHINE
        }
    )


def _hash(facts: Mapping[str, Any]) -> str:
    canonical = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    # 64 bits: no two of the at most millions of environments in a store will meet by chance.
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]
