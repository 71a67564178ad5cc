"""Environment of a measurement: all facts that may affect it, with a hash.

Facts are JSON values under dotted names (``"cpu.model"``). A fact that cannot be read is the string
``"unreadable"``, never a guess. The group ``now.`` has momentary values (clock frequency, free
memory, load) and how the run was started (command line, scheduling priority). It is recorded for
diagnosis but not hashed, because runs that differ only there remain comparable, and these values
change even within an experiment. Seeds and data checksums are hashed, since sparse or
data-dependent work depends on them.
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
# Linux names of x86 vector, x86 tile and Arm instructions.
_BF16 = frozenset(("avx512_bf16", "amx_bf16", "avx_vnni_bf16", "bf16", "svebf16"))
# Facts about the machine rather than its software; see `machine_id`.
_MACHINE_GROUPS = ("cpu.", "memory.", "gpu.", "machine.")
# Recorded by older versions, although it describes the run; see ``now.nice``.
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
        seeds: Seeds of random generators, by name.
        data_checksums: Checksums of data sets, by name.
        command: Command line of the run; recorded, not hashed. Default: ``sys.argv``.
        torch: Whether to import torch and record its settings; otherwise only its version is
            recorded, unless it is imported already.

    Returns:
        Facts without user names, host names and absolute paths.
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
    """Build an environment from `facts` (JSON values), sorted by name."""
    ordered = {name: facts[name] for name in sorted(facts)}
    return Environment(ordered, _hash(stable_facts(ordered)))


def stable_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts that `Environment.env_id` hashes."""
    return {name: value for name, value in facts.items() if not name.startswith(_UNHASHED)}


def differences(a: Environment, b: Environment) -> tuple[str, ...]:
    """Return the sorted names of hashed facts in which `a` and `b` differ; empty if comparable."""
    first, second = stable_facts(a.facts), stable_facts(b.facts)
    absent = object()
    return tuple(
        name
        for name in sorted(first.keys() | second.keys())
        if first.get(name, absent) != second.get(name, absent)
    )


def processor_flags() -> frozenset[str]:
    """Return the processor's instruction sets, by Linux's names; empty if unknown."""
    return frozenset(facts_machine.cpu_flags())


def computes_in_bf16() -> bool | None:
    """Whether this processor has bfloat16 instructions; None if unknown."""
    flags = facts_machine.cpu_flags()
    return bool(_BF16 & set(flags)) if flags else None


def machine_id(environment: Environment) -> str:
    """Hash the facts about the machine alone: processor, memory, accelerators, limits.

    The machine's history of prediction errors (see `ledger.py`) thus survives changes of software,
    code and seeds.
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
    # 64 bits suffice to avoid collisions between the at most millions of environments in a store.
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]
