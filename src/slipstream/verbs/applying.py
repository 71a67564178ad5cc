"""apply: make the real transformation, then build and run it once as a check."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from slipstream import technique
from slipstream.measure.checks import QualityCheck, QualityStatus, Trial, format_share, judge
from slipstream.source import (
    AlreadyAppliedError,
    EditLocationError,
    Places,
    Source,
    WriteResult,
    locate,
)
from slipstream.tables import Field, Table
from slipstream.technique import CodeChange, Technique
from slipstream.verbs.children import DEFAULT_TIMEOUT_S, call_in_child, run_program
from slipstream.verbs.first_steps import first_steps, losses, trial_of
from slipstream.workload import BuiltWorkload, Workload, run_steps

_TRIAL_STEPS = 5


@dataclass(frozen=True)
class ApplyResult:
    """A workload with techniques applied, which was built and run.

    Attributes:
        workload: the workload with the techniques; ``ss.profile`` and ``ss.prove`` take it.
        before, after: the loss of each of the first steps, unmodified and transformed, from the
            same seed; None if the step returns no number.
        code: equivalent edits of the user's source, for techniques that have one.
        source: the user's file with all of these edits; None unless every technique has one, so
            that it is never half of what ran.
        not_run: why the transformed workload was not run (no place in the script, or already
            in use); `after` then has no losses.
        outputs: comparison of the transformed output with the original's, for an inference whose
            steps return no number; else None.
        technique: the technique spec.
        written: the user's file, if it was edited.
    """

    workload: Workload
    before: tuple[float | None, ...]
    after: tuple[float | None, ...]
    code: tuple[CodeChange, ...]
    source: Source | None = None
    not_run: str | None = None
    outputs: QualityCheck | None = None
    technique: str = ""
    written: WriteResult | None = None

    @property
    def diff(self) -> str:
        """All edits as one unified diff; without `source`, those that exist."""
        if self.source is not None:
            return self.source.diff()
        return "".join(change.diff for change in self.code)

    @property
    def difference(self) -> float | None:
        """Relative difference of the last loss, or None without one."""
        if not self.before or not self.after:
            return None
        old, new = self.before[-1], self.after[-1]
        if old is None or new is None or not old:
            return None
        return (new - old) / abs(old)

    @property
    def finite(self) -> bool:
        """Whether every loss and output is finite that was finite before."""
        if self.outputs is not None and self.outputs.status is QualityStatus.FAILED:
            return False
        return all(value is None or math.isfinite(value) for value in self.after)

    def to_json(self) -> dict[str, Any]:
        return {
            "workload": self.workload.name,
            "technique": self.technique,
            "losses_before": list(self.before),
            "losses_after": list(self.after),
            "finite": self.finite,
            "not_run": self.not_run,
            "relative_difference": self.difference,
            "output_difference": self.outputs.difference if self.outputs else None,
            "diffs": [change.diff for change in self.code],
            "diff": self.diff,
            "code_notes": [change.note for change in self.code if change.note],
            "written": str(self.written.path) if self.written else None,
            "backup": str(self.written.backup) if self.written else None,
        }

    def table(self, *, files_unchanged: bool = True) -> Table:
        """Return a table of the losses by step, with findings as notes.

        Args:
            files_unchanged: whether a note says that the user's files were not changed.
        """
        fields: tuple[Field[tuple[int, float | None, float | None]], ...] = (
            Field.number("step", lambda row: row[0]),
            Field.number("baseline loss", lambda row: _loss(row[1])),
            Field.number(f"with {self.technique}", lambda row: _loss(row[2])),
            Field.number("difference", lambda row: _change(row[1], row[2])),
        )
        steps = enumerate(zip(self.before, self.after, strict=True), start=1)
        rows = [(step, *both) for step, both in steps if both != (None, None)]
        title = f"{self.workload.name} with {self.technique}"
        return Table.of(rows, fields, title, self._findings(files_unchanged))

    def _findings(self, files_unchanged: bool) -> list[str]:
        unchanged = "; your files were not changed" if files_unchanged else ""
        if self.not_run is not None:
            return [f"not run with it: {self.not_run}{unchanged}"]
        return ["the transformed workload runs" + unchanged, self._compared()]

    def _compared(self) -> str:
        outputs = self.outputs
        if not self.finite:
            what = "a loss" if outputs is None else "an output"
            return f"{what} is not finite: do not use this technique here"
        if self.difference is not None:
            size = f"{100 * abs(self.difference):.3f} %"
            return f"after {len(self.after)} steps the losses differ by {size}"
        if outputs is None:
            return "its steps return no number, so losses cannot be compared"
        if outputs.difference is None:
            return f"its outputs cannot be compared: {outputs.reason}"
        if outputs.difference == 0:
            return "its output is bit-identical"
        share = format_share(outputs.difference)
        return f"its output differs by at most {share} of the largest value"


def _loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.5f}"


def _change(before: float | None, after: float | None) -> str:
    if before is None or after is None or not before:
        return "-"
    percent = round(100 * (after - before) / abs(before), 3)
    return f"{percent:+.3f} %" if percent else "0 %"


def apply(
    workload: Workload | str,
    techniques: str | Technique,
    *,
    steps: int = _TRIAL_STEPS,
    threads: int = 0,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    report: Callable[[str], None] = lambda line: None,
) -> ApplyResult:
    """Apply `techniques` to `workload`, and run both for a few steps to check the result.

    Leaves the user's files unchanged; the result is a workload.

    Raises:
        WorkloadError: the workload fails, with or without the technique; the message names it.
        UsageError: an invalid technique spec.
    """
    if not isinstance(workload, Workload):
        workload = Workload.parse(workload)
    chosen = technique.parse(techniques) if isinstance(techniques, str) else (techniques,)
    name = techniques if isinstance(techniques, str) else technique.combination_name(chosen)
    transformed = workload.with_technique(*chosen)
    # Read before anything runs, so that a file edited meanwhile is not overwritten.
    edits = [requested.code(workload) for requested in chosen]
    content = Source.read(workload.path) if workload.live is None else None
    not_run = technique.not_in_script(chosen, workload)
    report(f"running {steps} unmodified steps")
    before, original, already = _first_steps(
        workload, steps, chosen, threads=threads, timeout_s=timeout_s
    )
    reasons = [change.already if change is not None else "" for change in edits]
    for number, reason in enumerate(already):
        if reason is not None and not reasons[number]:
            reasons[number] = reason
            if edits[number] is not None:
                note = f"already so: {reason}"
                edits[number] = CodeChange("", note, lambda where: where.source, reason)
    code = tuple(change for change in edits if change is not None)
    source = None
    if content is not None and len(code) == len(chosen):
        source = _edited(locate(content, workload.function, workload.lines), code)
    if all(reasons):
        not_run = " and ".join(reasons)
    if not_run is not None:
        no_losses = (None,) * len(before)
        return ApplyResult(transformed, before, no_losses, code, source, not_run, technique=name)
    report(f"running {steps} transformed steps")
    after, changed, _ = _first_steps(transformed, steps, (), threads=threads, timeout_s=timeout_s)
    outputs = _output_check(chosen, original, changed)
    return ApplyResult(transformed, before, after, code, source, outputs=outputs, technique=name)


def _edited(where: Places, code: Sequence[CodeChange]) -> Source | None:
    """Return the source with every change applied in order; None if one cannot be placed."""
    for change in code:
        if change.edit is None:
            return None
        try:
            where = where.on(change.edit(where))
        except AlreadyAppliedError:
            continue
        except EditLocationError:
            return None
    return where.source


def _first_steps(
    workload: Workload,
    steps: int,
    techniques: Sequence[Technique],
    *,
    threads: int,
    timeout_s: float,
) -> tuple[tuple[float | None, ...], Trial, Sequence[str | None]]:
    """Run the first steps from seed 0 in a child, or those of live objects in this process.

    Returns:
        the losses; the trial to judge; the reason why each of `techniques` would change nothing.
    """
    if workload.live is not None:
        program = partial(_steps_and_reasons, steps=steps, techniques=techniques)
        answer = run_steps(workload.build(), program)
    else:
        answer = call_in_child(
            workload,
            "slipstream.verbs.applying:steps_in_child",
            threads=threads,
            timeout_s=timeout_s,
            steps=steps,
            techniques=technique.combination_name(techniques) if techniques else None,
        )
    return losses(answer), trial_of(0, answer), answer["already"]


def steps_in_child(
    workload: dict[str, Any], keep_in: str, steps: int, techniques: str | None
) -> Any:
    chosen = technique.parse(techniques) if techniques else ()
    program = partial(_steps_and_reasons, steps=steps, techniques=chosen)
    return run_program(workload, keep_in, program)


def _steps_and_reasons(
    built: BuiltWorkload, steps: int, techniques: Sequence[Technique]
) -> Generator[None, Any, dict[str, Any]]:
    """Run `first_steps`; ``already`` holds the reason why each technique would change nothing."""
    already = [requested.already(built) for requested in techniques]
    return {**(yield from first_steps(built, steps)), "already": already}


def _output_check(chosen: Sequence[Technique], before: Trial, after: Trial) -> QualityCheck | None:
    """Judge the difference between the outputs of two inferences as `prove` does."""
    if before.output is None or after.output is None:
        return None
    quality = technique.quality_of(chosen)
    name = technique.combination_name(chosen)
    return judge(name, str(quality.kind), quality.basis, [before], [after])
