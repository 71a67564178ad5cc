"""The environment: complete, sensitive to relevant changes, without names of users or places."""

from __future__ import annotations

import importlib
import json
import os
import re
import socket
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

import pytest

from slipstream.measure import facts_machine
from slipstream.measure.environment import capture, differences, from_facts, machine_id
from slipstream.measure.records import Environment
from slipstream.measure.redact import Redactor

# Required facts, by the beginning of their names.
_REQUIRED = (
    "cpu.model", "cpu.stepping", "cpu.flags", "cpu.logical", "cpu.physical", "cpu.smt",
    "machine.affinity", "machine.cpu_quota", "cpu.numa_nodes", "cpu.cache", "cpu.governor",
    "cpu.max_khz", "now.temperature_millidegrees", "memory.total_mib", "kernel.release",
    "kernel.libc", "machine.container", "machine.hypervisor", "python.version", "torch.version",
    "torch.config", "torch.cpu_capability", "torch.threads", "onednn.max_isa", "blas",
    "runtime.onnxruntime", "runtime.litert", "package.numpy", "gpu.count", "git.revision",
    "git.dirty", "seed.", "data.", "now.command",
)  # fmt: skip


def _captured(program: str = "", cwd: Path | None = None, **variables: str) -> Environment:
    """`capture` in a fresh process, after `program`."""
    code = f"{program}\nimport json\nfrom slipstream.measure.environment import capture\n" + (
        "print(json.dumps(dict(capture(torch='torch' in __import__('sys').modules).facts)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return from_facts(json.loads(done.stdout))


@pytest.fixture(scope="module")
def here() -> Environment:
    return capture(seeds={"model": 1}, data_checksums={"digits": "sha256:1"}, command="train.py")


@pytest.mark.parametrize("name", _REQUIRED)
def test_every_required_field_is_present(here: Environment, name: str) -> None:
    assert any(found.startswith(name) for found in here.facts)


def test_facts_are_json_and_unreadable_ones_are_marked(here: Environment) -> None:
    assert from_facts(json.loads(json.dumps(dict(here.facts)))) == here
    assert not [name for name, value in here.facts.items() if value == ""]


def test_capturing_twice_gives_the_same_id(here: Environment) -> None:
    again = capture(seeds={"model": 1}, data_checksums={"digits": "sha256:1"}, command="other.py")
    assert differences(here, again) == ()
    assert again.env_id == here.env_id


def test_momentary_facts_are_recorded_but_not_hashed() -> None:
    a = from_facts({"cpu.model": "x", "now.cpu_mhz": "800"})
    b = from_facts({"cpu.model": "x", "now.cpu_mhz": "3600"})
    assert a.facts["now.cpu_mhz"] == "800"
    assert a.env_id == b.env_id
    assert differences(a, b) == ()


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("seed.model", {"seeds": {"model": 2}}),
        ("data.digits", {"data_checksums": {"digits": "sha256:2"}}),
    ],
)
def test_seeds_and_data_change_the_id(
    here: Environment, field: str, change: Mapping[str, object]
) -> None:
    settings = {"seeds": {"model": 1}, "data_checksums": {"digits": "sha256:1"}, **change}
    other = capture(**settings)  # type: ignore[arg-type]
    assert other.env_id != here.env_id
    assert differences(here, other) == (field,)


def test_torch_s_threads_and_flags_change_the_id() -> None:
    import torch

    before = capture()
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    try:
        torch.set_num_threads(threads + 1)
        assert "torch.threads" in differences(before, capture())
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision("medium" if precision != "medium" else "high")
        assert differences(before, capture()) == ("torch.float32_matmul_precision",)
        torch.set_float32_matmul_precision(precision)
        torch.use_deterministic_algorithms(True)
        assert differences(before, capture()) == ("torch.deterministic",)
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)
        torch.use_deterministic_algorithms(False)
    assert capture().env_id == before.env_id


def test_a_cap_on_the_instruction_set_changes_the_id(monkeypatch: pytest.MonkeyPatch) -> None:
    before = capture(torch=False)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert "env.ONEDNN_MAX_CPU_ISA" in differences(before, capture(torch=False))


def test_affinity_changes_the_id() -> None:
    if not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one processor")
    before, cpus = capture(torch=False), os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(cpus)})
        after = capture(torch=False)
    finally:
        os.sched_setaffinity(0, cpus)
    assert differences(before, after) == ("machine.affinity",)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for variable in ("GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM"):
        monkeypatch.setenv(variable, os.devnull)
    (tmp_path / "train.py").write_text("x = 1\n")
    for command in (
        ["init", "-q"],
        ["add", "train.py"],
        ["-c", "user.name=n", "-c", "user.email=e", "commit", "-q", "-m", "one"],
    ):
        subprocess.run(["git", *command], check=True, capture_output=True)
    return tmp_path


def test_the_state_of_the_code_changes_the_id(repository: Path) -> None:
    clean = capture(torch=False)
    assert re.fullmatch("[0-9a-f]{40}", clean.facts["git.revision"])
    assert clean.facts["git.dirty"] is None

    (repository / "train.py").write_text("x = 2\n")
    changed = capture(torch=False)
    assert differences(clean, changed) == ("git.dirty",)
    (repository / "train.py").write_text("x = 3\n")
    assert differences(changed, capture(torch=False)) == ("git.dirty",)
    (repository / "train.py").write_text("x = 1\n")
    assert capture(torch=False).env_id == clean.env_id

    (repository / "new_module.py").write_text("y = 1\n")
    assert differences(clean, capture(torch=False)) == ("git.dirty",)


def test_outputs_do_not_make_a_new_environment(repository: Path) -> None:
    clean = capture(torch=False)
    (repository / "result.json").write_text("{}")
    (repository / ".slipstream").mkdir()
    (repository / ".slipstream" / "results.db").write_text("x")
    assert capture(torch=False).env_id == clean.env_id


def test_a_repository_s_settings_run_no_programs(repository: Path) -> None:
    trap = repository / "trap"
    trap.write_text("#!/bin/sh\ntouch sprung\n")
    trap.chmod(0o755)
    for key in ("core.fsmonitor", "diff.external"):
        subprocess.run(["git", "config", key, str(trap)], check=True)
    (repository / "train.py").write_text("x = 2\n")
    capture(torch=False)
    assert not (repository / "sprung").exists()


def test_works_outside_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    facts = capture(torch=False).facts
    assert (facts["git.revision"], facts["git.dirty"]) == (None, None)


def test_works_without_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert capture(torch=False).facts["git.revision"] is None


def test_torch_is_imported_only_on_request() -> None:
    facts = _captured("import sys").facts
    assert facts["torch.version"]
    assert "torch.threads" not in facts
    assert _captured("import torch").facts["torch.threads"] == 1
    # If it is already imported, it is queried.
    threads = importlib.import_module("torch").get_num_threads()
    assert capture(torch=False).facts["torch.threads"] == threads


def test_capturing_does_not_affect_the_user_s_code() -> None:
    before = dict(os.environ)
    capture(torch=False)
    assert dict(os.environ) == before


def test_no_names_of_users_hosts_or_folders_are_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home" / "zaphod"
    project = home / "secret-project"
    project.mkdir(parents=True)
    monkeypatch.chdir(project)
    monkeypatch.setenv("HOME", str(home))
    for name in ("LOGNAME", "USER", "USERNAME"):
        monkeypatch.setenv(name, "beeblebrox")
    monkeypatch.setattr(socket, "gethostname", lambda: "heartofgold.example.org")
    monkeypatch.setenv("LD_PRELOAD", "/opt/beeblebrox/lib/libfast.so")
    monkeypatch.setenv("TORCH_HOME", str(home / "models"))
    monkeypatch.setenv("MKL_NOTE", "tuned by beeblebrox on heartofgold")
    monkeypatch.setenv("NOT_ON_THE_LIST", "password")
    environment = capture(
        command=f"python {project}/train.py --data /mnt/zaphod/set --out={home}/x",
        data_checksums={f"{home}/digits.npz": "sha256:1"},
    )
    text = json.dumps(dict(environment.facts))
    for secret in (
        "zaphod", "beeblebrox", "heartofgold", "example.org", "secret-project", str(tmp_path),
        sys.prefix, "password", "/opt/", "/mnt/",
    ):  # fmt: skip
        assert secret not in text, secret
    assert environment.facts["now.command"] == "python ./train.py --data …/set --out=~/x"
    assert environment.facts["env.LD_PRELOAD"] == "…/libfast.so"
    assert environment.facts["data.~/digits.npz"] == "sha256:1"


def test_no_fact_of_this_machine_is_an_absolute_path(here: Environment) -> None:
    path = re.compile(r"(?<![\w.~/…<>-])/[a-z]+/")
    assert [(n, v) for n, v in here.facts.items() if path.search(json.dumps(v))] == []


@pytest.mark.parametrize(
    "text", ["GNU/Linux", "12 MB/s", "https://example.com/a", "a/b/c.py", "x = 4 / 2", "-O2 -fPIC"]
)
def test_a_value_that_is_not_an_absolute_path_stays(text: str) -> None:
    assert Redactor()(text) == text


def test_facts_of_the_machine_are_separate_from_those_of_the_process(here: Environment) -> None:
    facts = dict(here.facts)
    newer = from_facts({**facts, "torch.version": "99", "git.dirty": "x", "package.numpy": "9"})
    other = from_facts({**facts, "cpu.model": "another"})
    assert machine_id(newer) == machine_id(here)
    assert newer.env_id != here.env_id
    assert machine_id(other) != machine_id(here)


def test_the_scheduling_priority_does_not_identify_the_machine(here: Environment) -> None:
    assert "now.nice" in here.facts
    facts = dict(here.facts)
    nicer = from_facts({**facts, "now.nice": 5})
    assert (machine_id(nicer), nicer.env_id) == (machine_id(here), here.env_id)
    # As in stores of older versions.
    older = from_facts({**facts, "machine.nice": 0})
    assert machine_id(older) == machine_id(from_facts({**facts, "machine.nice": 5}))
    assert machine_id(older) == machine_id(here)


def test_a_temperature_is_named_by_its_sensor_or_its_position(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place, kind, temperature in (("0", "x86_pkg_temp\n", "41000\n"), ("1", "", "30000\n")):
        zone = tmp_path / f"thermal_zone{place}"
        zone.mkdir()
        (zone / "type").write_text(kind)
        (zone / "temp").write_text(temperature)
    monkeypatch.setattr(facts_machine, "_ZONES", tmp_path)
    found = facts_machine.facts()["now.temperature_millidegrees"]
    assert found == {"x86_pkg_temp": "41000", "thermal_zone1": "30000"}


def test_a_field_of_one_side_only_differs() -> None:
    assert differences(from_facts({"a.b": None}), from_facts({})) == ("a.b",)


def _nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """A fake: this machine need not have a GPU."""
    file = folder / "nvidia-smi"
    file.write_text(f"#!{sys.executable}\n" + textwrap.dedent(program))
    file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_gpus_are_distinguished_and_their_clocks_not_hashed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _nvidia_smi(
        tmp_path,
        monkeypatch,
        """
        import random, sys
        names = sys.argv[1].removeprefix("--query-gpu=").split(",")
        now = ("clocks.sm", "clocks.mem", "temperature.gpu", "pstate", "power.draw")
        for gpu in range(2):
            print(", ".join(str(random.random()) if n in now else f"{n} of {gpu}" for n in names))
        """,
    )
    a, b = capture(torch=False), capture(torch=False)
    assert a.facts["gpu.count"] == 2
    assert a.facts["gpu.1.name"] == "name of 1"
    assert a.facts["gpu.0.mig_mode_current"] == "mig.mode.current of 0"
    assert a.facts["now.gpu.0.clocks_sm"] != b.facts["now.gpu.0.clocks_sm"]
    assert a.env_id == b.env_id


@pytest.mark.parametrize("program", ["raise SystemExit(9)", "print('garbage')"])
def test_an_unresponsive_driver_is_unreadable_and_not_zero(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    _nvidia_smi(tmp_path, monkeypatch, program)
    assert capture(torch=False).facts["gpu.count"] == "unreadable"
