"""``slipstream bench scripts``: training scripts in many styles, through every command.

Each script of `slipstream_bench.scripts` is copied into an empty folder and profiled, predicted,
advised, applied, proved and reported there, with nothing cached.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from slipstream_bench.advice import SLIPSTREAM, children_s
from slipstream_bench.rows import Bar, BenchOptions, at_most, not_judged
from slipstream_bench.scripts import SCRIPTS, Script

_QUICK = ("ten_steps", "plain_closure", "bare_loop", "manual_sgd")
_TECHNIQUES = ("fused_optimizer:fused", "amp:bf16", "allocator:keep")
_PROVED = {"fused_optimizer:fused", "amp:bf16"}
_VERBS = ("profile", "predict", "prove", "apply", "report", "advise")
_TIMEOUT_S = 600.0
_ADVISE_S = 60.0
_GRAPH = "run.slipgraph"


@dataclass
class Passage:
    """Results of the commands on one script.

    Attributes:
        name: name of the script.
        errors: what a failed command wrote, by verb.
        succeeded: verbs that ended well; for a script without steps ``profile`` succeeds when its
            error has the expected sentence.
        predicted: speed-up by technique, of those that apply.
        inside: whether the measurement agrees with the prediction, by technique; without those
            whose measurement is not judged.
        advise_s: CPU time of ``advise`` and all that it started, in seconds.
        best: technique to try first according to ``advise``; empty if it names none.
        checked: whether ``advise`` has measured it.
    """

    name: str
    errors: dict[str, str] = field(default_factory=dict)
    succeeded: list[str] = field(default_factory=list)
    predicted: dict[str, float] = field(default_factory=dict)
    inside: dict[str, bool] = field(default_factory=dict)
    advise_s: float = 0.0
    best: str = ""
    checked: bool = False


def bars(options: BenchOptions) -> Iterator[Bar]:
    """Yield a row per script, then the summary rows."""
    passages = []
    for script in SCRIPTS:
        row = options.done.get(_row_name(script))
        if row is None and (options.full or script.name in _QUICK):
            row = _row(script, options)
            if row is not None:
                yield row
        if row is not None and row.data:
            passages.append(Passage(**row.data))
    if not options.only:
        yield from overall(passages, advised=options.full)


def overall(passages: Sequence[Passage], *, advised: bool) -> Iterator[Bar]:
    """Yield the summary rows.

    Args:
        advised: whether ``advise`` was run.
    """
    kinds = {script.name: script.kind for script in SCRIPTS}
    for verb in _VERBS if advised else _VERBS[:3]:
        tried = [p for p in passages if verb == "profile" or kinds[p.name] != "none"]
        yield _all_of(f"{verb} succeeds", tried, [p for p in tried if verb in p.succeeded])
    proved = {f"{p.name} {t}": inside for p in passages for t, inside in p.inside.items()}
    outside = [name for name, inside in proved.items() if not inside]
    # For intervals of 90 %.
    yield Bar(
        "predictions inside", len(proved) - len(outside), f"of {len(proved)}", ">= 85 %",
        len(outside) <= 0.15 * len(proved) if proved else None, len(proved),
        f"outside: {', '.join(outside) or 'none'}",
    )  # fmt: skip
    yield from _closures({p.name: p for p in passages})
    if advised:
        tried = [p for p in passages if kinds[p.name] != "none"]
        quick = [
            p for p in tried if 0 < p.advise_s <= _ADVISE_S and (p.checked or not p.best)
        ]  # fmt: skip
        yield _all_of(f"advise: first choice measured within {_ADVISE_S:g} s of a core",
                      tried, quick)  # fmt: skip


def _all_of(bar: str, tried: Sequence[Passage], passed: Sequence[Passage]) -> Bar:
    failed = [p.name for p in tried if p not in passed]
    return Bar(bar, len(passed), f"of {len(tried)}", f"= {len(tried)}", not failed, len(tried),
               f"not: {', '.join(failed) or 'none'}")  # fmt: skip


def _closures(passages: Mapping[str, Passage]) -> Iterator[Bar]:
    """Compare predictions for steps with a closure with those for the same steps without."""
    for script in SCRIPTS:
        if not {script.name, script.same_step} <= passages.keys():
            continue
        # The heap, and so whether `allocator` applies, differs from launch to launch.
        closure, plain = (
            {t: x for t, x in passages[name].predicted.items() if not t.startswith("allocator")}
            for name in (script.name, script.same_step)
        )
        bar = f"{script.name} and {script.same_step}: largest difference of predictions"
        if closure.keys() != plain.keys() or not closure:
            different = ", ".join(sorted(closure.keys() ^ plain.keys())) or "nothing was predicted"
            detail = f"applies to one of them only: {different}"
            yield Bar(bar, None, "%", "<= 5", False, 0, detail)
            continue
        worst = max(100 * abs(closure[t] / plain[t] - 1) for t in closure)
        detail = ", ".join(f"{t} {closure[t]:.3f}x and {plain[t]:.3f}x" for t in closure)
        yield at_most(bar, worst, 5, "%", n=len(closure), detail=detail)


def _row_name(script: Script) -> str:
    return f"script {script.name}"


def _row(script: Script, options: BenchOptions) -> Bar | None:
    name = _row_name(script)
    if not options.wants(name, 0.0 if script.kind == "none" else 40.0):
        return None
    missing = [package for package in script.packages if find_spec(package) is None]
    if missing:
        return not_judged(name, "commands", "all", f"not installed: {', '.join(missing)}")
    options.progress(name)
    passage, tried = _pass_through(script, options)
    detail = "; ".join(f"{verb}: {error}" for verb, error in passage.errors.items())
    if not detail:
        detail = ", ".join(f"{t} {speedup:.2f}x" for t, speedup in passage.predicted.items())
    return Bar(name, len(passage.succeeded), f"of {tried} commands", f"= {tried}",
               len(passage.succeeded) == tried, 1, detail, data=asdict(passage))  # fmt: skip


def _pass_through(script: Script, options: BenchOptions) -> tuple[Passage, int]:
    """Run the commands, each as a separate process.

    Returns:
        Its results, and the number of commands.
    """
    passage = Passage(script.name)
    with tempfile.TemporaryDirectory(prefix="slipstream-bench-") as folder:
        shutil.copy(script.path, folder)
        user = _User(script, passage, Path(folder), options)
        if script.kind == "none":
            user.expect_sentence()
            return passage, 1
        user("profile", "-o", _GRAPH)
        predictions = user.of_graph("predict", *_named(_TECHNIQUES))
        passage.predicted = {
            p["technique"]: p["speedup"] for p in predictions or () if p["reason"] is None
        }
        proved = sorted({script.technique, *passage.predicted.keys() & _PROVED})
        _note_proof(passage, user("prove", *_named(proved), *user.budget))
        verbs = _VERBS if options.full else _VERBS[:3]
        if options.full:
            user("apply", *_named([script.technique]))
            user.of_graph("report", "-o", "run.html", json_too=False)
            _note_advice(passage, user("advise", "--time-limit", f"{_ADVISE_S:g}s"))
            passage.advise_s = user.cpu_s
    return passage, len(verbs)


def _named(techniques: Sequence[str]) -> list[str]:
    return [word for name in techniques for word in ("-t", name)]


def _note_proof(passage: Passage, proof: Mapping[str, Any] | None) -> None:
    for row in (proof or {}).get("rows", ()):
        predicted = row["predicted"]
        if predicted is not None and row["inside"] is not None:
            passage.inside[predicted["technique"]] = row["inside"]


def _note_advice(passage: Passage, advice: Mapping[str, Any] | None) -> None:
    if advice is not None:
        passage.best = advice["best"] or ""
        check = advice["check"]
        passage.checked = check is not None and check["speedup"] is not None


class _User:
    """A user who runs commands on one script in a folder with a separate cache.

    Attributes:
        cpu_s: CPU time of the last command and all that it started, in seconds.
    """

    def __init__(
        self, script: Script, passage: Passage, folder: Path, options: BenchOptions
    ) -> None:
        self._script, self._passage, self._folder = script, passage, folder
        self._options = options
        self.cpu_s = 0.0
        self.budget = (
            ["--budget", "30s"] if options.full else ["--budget", "10s", "--launches", "1"]
        )

    def __call__(self, verb: str, *options: str) -> Any:
        """Run a command on the script; returns its JSON, or None if it failed."""
        arguments = ("--", *self._script.arguments) if self._script.arguments else ()
        command = (verb, self._script.path.name, "--threads", "1", *options, "--json", *arguments)
        return self._json_of(verb, command)

    def of_graph(self, verb: str, *options: str, json_too: bool = True) -> Any:
        """Run a command on the recorded step."""
        return self._json_of(verb, (verb, _GRAPH, *options, *(["--json"] if json_too else [])))

    def expect_sentence(self) -> None:
        """Profile a script without steps."""
        done = self._run(("profile", self._script.path.name, "--threads", "1"))
        if done.returncode == 1 and self._script.sentence in done.stderr:
            self._passage.succeeded.append("profile")
        else:
            self._passage.errors["profile"] = done.stderr.strip() or "no error"

    def _json_of(self, verb: str, command: tuple[str, ...]) -> Any:
        done = self._run(command)
        if done.returncode or "Traceback" in done.stderr:
            _, _, error = done.stderr.rpartition("error: ")
            self._passage.errors[verb] = " ".join(error.split())
            return None
        self._passage.succeeded.append(verb)
        return json.loads(done.stdout) if "--json" in command else None

    def _run(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        self._options.progress(f"{self._script.name}: {command[0]}")
        before = children_s()
        # The time limit of `advise` includes timing operators that other commands have timed.
        cache = self._folder / ("advise" if command[0] == "advise" else "cache")
        try:
            done = subprocess.run(
                [*SLIPSTREAM, *command], cwd=self._folder, capture_output=True, text=True,
                stdin=subprocess.DEVNULL, timeout=_TIMEOUT_S,
                env={**os.environ, "XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            done = subprocess.CompletedProcess(command, 1, "", f"error: over {_TIMEOUT_S:g} s")
        self.cpu_s = children_s() - before
        return done
