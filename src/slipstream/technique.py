"""The Technique protocol, the registry that finds techniques, and the one grammar for them.

A technique is a frozen dataclass of settings, written the same everywhere as
``name:key=value,key=value``; a bare first value is the main setting: ``amp:bf16``. ``only=GLOB``
and ``except=GLOB`` choose layers. A combination joins with ``+`` and is applied in stage order.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from importlib.metadata import EntryPoints, entry_points
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from slipstream.errors import InvalidArgumentError, SlipstreamError, UnknownNameError, UsageError

if TYPE_CHECKING:
    from slipstream.cluster import Cluster
    from slipstream.durations import Durations
    from slipstream.graph import Graph
    from slipstream.source import Places, Source
    from slipstream.workload import Built, Workload

GROUP = "slipstream.techniques"
# Origins of graphs that `slipstream import` makes; what was exported here keeps its calls.
_TRACES = frozenset({"kineto", "chakra"})


class Stage(IntEnum):
    """Where a technique belongs in a combination: earlier stages see the plainer model."""

    BATCH = -10
    MODEL = 0
    OPTIMIZER = 10
    PRECISION = 20
    COMPILE = 30
    DISTRIBUTION = 40


class QualityKind(StrEnum):
    """What a technique does to the numbers a model computes."""

    EXACT = "exact"
    ROUNDING = "rounding"
    SAME_DISTRIBUTION = "same-distribution"
    NEEDS_TRAINING = "needs-training"


@dataclass(frozen=True)
class Quality:
    """The kind of change, and what says so (a paper, a measurement).

    Attributes:
        advice: what of the training has to change with it; empty where nothing has to.
    """

    kind: QualityKind
    basis: str
    advice: str = ""


@dataclass(frozen=True)
class CodeChange:
    """The edit of the user's source that does the same: a unified diff, and what it needs.

    Attributes:
        diff: empty where there is nothing to edit, or no place for it with certainty.
        note: what the edit does not say; without a diff, why, and the lines to write by hand.
        edit: makes it in the places it is given, so that several can follow each other.
    """

    diff: str
    note: str = ""
    edit: Callable[[Places], Source] | None = dataclasses.field(
        default=None, repr=False, compare=False
    )

    @classmethod
    def of(
        cls,
        workload: Workload,
        edit: Callable[[Places], Source],
        *,
        by_hand: str,
        note: str = "",
    ) -> CodeChange | None:
        """The change `edit` makes in the workload's file; None for live objects, without a file.

        Args:
            edit: see `slipstream.source`.
            by_hand: the lines to write where the edit cannot be placed.
            note: what the reader of the diff should know.

        Raises:
            WorkloadError: the file cannot be read.
        """
        from slipstream.source import AlreadyThereError, NotPlacedError, Source, locate

        if workload.live is not None:
            return None
        source = Source.read(workload.path)
        try:
            return cls(edit(locate(source, workload.function)).diff(), note, edit)
        except AlreadyThereError as error:
            return cls("", f"already so: {error.what} ({error.where})", edit)
        except NotPlacedError as error:
            lines = "".join(f"\n    {line}" for line in by_hand.splitlines())
            why = f"no edit of your file: {error.what} ({error.where})"
            return cls("", f"{why}; by hand:{lines}", edit)


@dataclass(frozen=True)
class Context:
    """What `Technique.predict` may consult; nothing in it runs the user's code.

    Attributes:
        durations: answers from what was measured before, see `slipstream.durations`.
        cluster: where the step would run, or None for here.
    """

    durations: Durations
    cluster: Cluster | None = None


@runtime_checkable
class Technique(Protocol):
    """One way to make a workload cheaper; see the module's text.

    Attributes:
        name: the field's word for it; the registry's key.
        stage: its place in a combination.
        conflicts: names that cannot be combined with it.
        needs: statistics a profile must record for `predict`:
            {"ids", "spectra", "grads", "regions", "sparsity"}. `why_not` is asked without them,
            too, and may leave it to `refusal` to say what is missing.
    """

    name: ClassVar[str]
    stage: ClassVar[int]
    conflicts: ClassVar[frozenset[str]]
    needs: ClassVar[frozenset[str]]

    def why_not(self, graph: Graph, workload: Workload | None = None) -> str | None:
        """None when it applies, else the reason in words a user understands."""

    def questions(self, graph: Graph) -> Sequence[Any]:
        """Calls whose durations `predict` will ask for; they are measured before it runs."""

    def predict(self, graph: Graph, context: Context) -> Graph:
        """An edited copy of `graph`: the step as it would be."""

    def apply(self, built: Built) -> None:
        """Transform what `Workload.build` made, in the child that made it."""

    def quality(self, graph: Graph | None = None) -> Quality:
        """What it does to the model's numbers."""

    def code(self, workload: Workload) -> CodeChange | None:
        """The edit of the user's source that does the same, or None when there is no such edit."""


class Settings:
    """Base of technique dataclasses: writes them back in the grammar they are read from.

    Attributes:
        conflicts, needs: as in the protocol; nothing unless a technique says so.
        variants: settings worth trying on paper, in the grammar; the default one when empty.
        clock: ``wall`` for what moves work to other cores or processes, whose CPU time does not
            fall; else ``cpu``, which a busy machine does not disturb.
        needs_cluster: whether it spreads the step over a cluster, without which it cannot be told;
            then ``place(cluster)`` raises where it does not fit there.
        compresses: whether it sends gradients of replicas in fewer bytes.
        reads_lanes: whether it judges a step by its kernels alone, without operators' arguments,
            which are not recorded of a step on a device or on several threads.
    """

    name: ClassVar[str]
    conflicts: ClassVar[frozenset[str]] = frozenset()
    needs: ClassVar[frozenset[str]] = frozenset()
    variants: ClassVar[tuple[str, ...]] = ()
    clock: ClassVar[str] = "cpu"
    needs_cluster: ClassVar[bool] = False
    compresses: ClassVar[bool] = False
    reads_lanes: ClassVar[bool] = False

    def least(self, graph: Graph) -> float:
        """The least share of its time that a changed operator of `graph` can take; 0 if unknown."""
        return 0.0

    def __str__(self) -> str:
        parts: list[str] = []
        for number, field in enumerate(dataclasses.fields(self)):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if number == 0:
                parts.append(_write(value))
            elif value != field.default:
                parts.append(f"{field.name.rstrip('_')}={_write(value)}")
        return self.name + (":" + ",".join(parts) if parts else "")


def registry() -> dict[str, type[Technique]]:
    """Every installed technique by name, ours and others', from the entry points `GROUP`.

    Raises:
        SlipstreamError: an installed technique cannot be imported.
    """
    found: dict[str, type[Technique]] = {}
    for point in _points(entry_points, tuple(sys.path)):
        try:
            found[point.name] = point.load()
        except Exception as error:
            package = point.dist.name if point.dist else "?"
            raise SlipstreamError(
                f"the technique '{point.name}' of the package {package} cannot be loaded: {error}",
                where=point.value,
                remedy=f"mend or uninstall {package}",
            ) from error
    return dict(sorted(found.items()))


def need_known(techniques: Iterable[str]) -> None:
    """See that techniques of these names are installed, without importing any.

    Raises:
        UnknownNameError: there is none of a name; the nearest is suggested.
    """
    known = {point.name for point in _points(entry_points, tuple(sys.path))}
    for text in techniques:
        for part in text.split("+"):
            name = part.strip().partition(":")[0]
            if name not in known:
                raise UnknownNameError("technique", name, known)


@functools.lru_cache(maxsize=4)
def _points(find: Callable[..., EntryPoints], path: tuple[str, ...]) -> EntryPoints:
    """Looked for once for each search path: every installed package's description is read."""
    return find(group=GROUP)


def parse(text: str) -> tuple[Technique, ...]:
    """The techniques ``a:1+b:key=2`` names, in stage order.

    Raises:
        UnknownNameError: no such technique or setting; the nearest is suggested.
        InvalidArgumentError: a value of the wrong kind.
        UsageError: an empty name, a technique twice, or two that conflict.
    """
    known = registry()
    techniques = [_parse_one(part.strip(), known) for part in text.split("+")]
    names = [technique.name for technique in techniques]
    for technique in techniques:
        if names.count(technique.name) > 1:
            raise UsageError(f"'{technique.name}' stands twice in '{text}'")
        clash = technique.conflicts.intersection(names)
        if clash:
            raise UsageError(
                f"'{technique.name}' cannot be combined with '{min(clash)}'",
                remedy="give them as two alternatives: --technique A --technique B",
            )
    return tuple(sorted(techniques, key=lambda technique: technique.stage))


def need_alternatives(techniques: object) -> None:
    """See that alternatives are in a list: a text by itself would be read letter by letter.

    Raises:
        InvalidArgumentError: `techniques` is one text.
    """
    if isinstance(techniques, str):
        raise InvalidArgumentError(
            "techniques",
            f"'{techniques}' is one text, and a list of alternatives is meant",
            remedy=f'["{techniques}"]',
        )


def combination_name(techniques: Sequence[Technique]) -> str:
    """The grammar's name of a combination."""
    return "+".join(str(technique) for technique in techniques) or "as it is"


def combine(graph: Graph, techniques: Sequence[Technique], context: Context) -> Graph:
    """Fold the techniques' predictions over `graph` in stage order."""
    for technique in sorted(techniques, key=lambda technique: technique.stage):
        graph = technique.predict(graph, context)
    return graph


def quality_of(techniques: Sequence[Technique], graph: Graph | None = None) -> Quality:
    """What the combination does to the numbers: the most consequential of its parts.

    Parts of that kind each have their say.
    """
    order = list(QualityKind)
    parts = [technique.quality(graph) for technique in techniques]
    worst = max((part.kind for part in parts), key=order.index, default=QualityKind.EXACT)
    alike = [part for part in parts if part.kind is worst]
    said, advice = (
        "; ".join(dict.fromkeys(filter(None, words)))
        for words in ((part.basis for part in alike), (part.advice for part in alike))
    )
    return Quality(worst, said if parts else "nothing is changed", advice)


def refusal(technique: Technique, graph: Graph) -> str | None:
    """None when `technique` applies and the graph has the statistics it needs, else the reason.

    For a statistic that was not recorded the reason names the command that records it.
    """
    return (
        _unreadable(technique, graph) or technique.why_not(graph) or _unrecorded(technique, graph)
    )


def _unreadable(technique: Technique, graph: Graph) -> str | None:
    """Why a technique that asks for operators' arguments cannot judge a step without them."""
    if getattr(technique, "reads_lanes", False):
        return None
    if "lanes_of" not in graph.meta:
        if graph.meta.get("origin") in _TRACES and not graph.calls:
            return "the imported trace has no operators' arguments; slipstream profile records them"
        return None
    if graph.meta["lanes_of"] == "cpu":
        return (
            f"the step ran on several threads; {technique.name} is predicted only for steps "
            "whose operators run on one"
        )
    return (
        f"the step ran on a CUDA device; {technique.name} is predicted from operators and their "
        "timings on a processor"
    )


def not_in_script(techniques: Sequence[Technique], workload: Workload) -> str | None:
    """Why one of `techniques` cannot be put on a plain script; None if all can.

    Raises:
        WorkloadError: the script is no Python.
    """
    from slipstream.source import AlreadyThereError, NotPlacedError
    from slipstream.workload.prepare import Editing, edited

    if workload.live is not None or workload.function is not None:
        return None
    try:
        edited(workload.path, techniques)
    except (AlreadyThereError, NotPlacedError) as error:
        names = " and ".join(one.name for one in techniques if isinstance(one, Editing))
        return f"{names} edits the loop, which has no place for it: {error.what} ({error.where})"
    return None


def _unrecorded(technique: Technique, graph: Graph) -> str | None:
    statistics = graph.statistics
    for need in sorted(technique.needs):
        if need == "regions" and "regions" in graph.meta:
            continue
        if need not in statistics.recorded:
            wanted = ",".join(sorted(technique.needs))
            return (
                f"it needs the statistic '{need}', which was not recorded; "
                f"slipstream advise WORKLOAD --record {wanted}"
            )
        if need in statistics.reasons:
            return statistics.reasons[need]
    return None


def clock(techniques: Sequence[Technique]) -> str:
    """Which clock shows what the combination does: ``wall`` where work moves to other cores."""
    clocks = {getattr(technique, "clock", "cpu") for technique in techniques}
    return "wall" if "wall" in clocks else "cpu"


def _parse_one(text: str, known: dict[str, type[Technique]]) -> Technique:
    name, _, rest = text.partition(":")
    if not name:
        raise UsageError("an empty technique name", remedy="as amp:bf16 or amp:bf16+other")
    if name not in known:
        raise UnknownNameError("technique", name, known)
    kind: Any = known[name]
    fields = {field.name.rstrip("_"): field for field in dataclasses.fields(kind)}
    hints = typing.get_type_hints(kind)
    values: dict[str, Any] = {}
    for number, part in enumerate(filter(None, rest.split(","))):
        key, equals, value = part.partition("=")
        if not equals:
            if number:
                raise UsageError(
                    f"'{part}' in '{text}' has no key", remedy=f"as {name}:key=value,key=value"
                )
            key, value = next(iter(fields), ""), part
        if key not in fields:
            raise UnknownNameError("setting", key, fields, where=f"technique '{name}'")
        field = fields[key]
        if field.name in values:
            raise UsageError(f"'{key}' stands twice in '{text}'")
        values[field.name] = _read(value, hints[field.name], f"{name}:{key}")
    try:
        technique: Technique = kind(**values)
    except TypeError as error:
        raise UsageError(f"'{text}': {error}", remedy=_usage(name, kind)) from error
    return technique


def _usage(name: str, kind: Any) -> str:
    keys = ",".join(f"{field.name.rstrip('_')}=..." for field in dataclasses.fields(kind))
    return f"as {name}:{keys}"


def _read(text: str, hint: Any, argument: str) -> Any:
    """`text` as a value of the type `hint`."""
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        if text not in map(str, options):
            raise InvalidArgumentError(
                argument,
                f"'{text}' is not possible",
                remedy="one of " + ", ".join(map(str, options)),
            )
        return next(option for option in options if str(option) == text)
    if origin in (typing.Union, types.UnionType):
        if type(None) in options and text in ("none", ""):
            return None
        return _read(text, next(o for o in options if o is not type(None)), argument)
    if hint is bool:
        if text.lower() not in ("true", "false", "yes", "no", "on", "off", "1", "0"):
            raise InvalidArgumentError(
                argument, f"'{text}' is neither true nor false", remedy=f"as {argument}=true"
            )
        return text.lower() in ("true", "yes", "on", "1")
    if hint in (int, float):
        kind = "whole number" if hint is int else "number"
        try:
            number = hint(text)
        except ValueError:
            number = math.nan
        if number != number:
            example = f"as {argument}={2 if hint is int else 0.5}"
            raise InvalidArgumentError(argument, f"'{text}' is not a {kind}", remedy=example)
        return number
    return text


def _write(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        # A plus sign would join two techniques: 1e+16.
        return repr(value).replace("+", "")
    return "none" if value is None else str(value)
