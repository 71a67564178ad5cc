"""The Technique protocol, the registry of installed techniques, and the grammar of their specs.

A technique is a frozen dataclass of settings, written as ``name:key=value,key=value`` in every
interface; a first value without a key is the main setting: ``amp:bf16``. ``only=GLOB`` and
``except=GLOB`` select layers. ``+`` joins a combination, which is applied in stage order.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
import types
import typing
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Literal,
    Protocol,
    TypeGuard,
    TypeVar,
    runtime_checkable,
)

from slipstream.errors import (
    InvalidArgumentError,
    SlipstreamError,
    SlipstreamWarning,
    UnknownNameError,
    UsageError,
)
from slipstream.source import (
    AlreadyAppliedError,
    EditLocationError,
    Places,
    Source,
    find_switch,
    locate,
)
from slipstream.workload import BuiltWorkload, Workload, sort_by_stage

if TYPE_CHECKING:
    from slipstream.cluster import Cluster
    from slipstream.durations import Durations
    from slipstream.graph import Graph
    from slipstream.graph.flow import Match
    from slipstream.surgery.selection import ModuleSelection

GROUP = "slipstream.techniques"
# Settings that select modules: never a technique's main setting.
_SELECTORS = frozenset({"only", "except_"})
# Origins of graphs that `slipstream import` makes.
_TRACES = frozenset({"kineto", "chakra"})


class Stage(IntEnum):
    """Position of a technique in a combination: earlier stages see the plainer model."""

    BATCH = -10
    MODEL = 0
    OPTIMIZER = 10
    PRECISION = 20
    COMPILE = 30
    DISTRIBUTION = 40


class QualityKind(StrEnum):
    """Effect of a technique on a model's numerics."""

    EXACT = "exact"
    ROUNDING = "rounding"
    SAME_DISTRIBUTION = "same-distribution"
    NEEDS_TRAINING = "needs-training"


@dataclass(frozen=True)
class Quality:
    """The kind of change, and the paper or measurement that shows it.

    Attributes:
        advice: what has to change in the training with it; empty if nothing has to.
    """

    kind: QualityKind
    basis: str
    advice: str = ""


@dataclass(frozen=True)
class CodeChange:
    """The edit of the user's source that has the same effect: a unified diff, and a note.

    Attributes:
        diff: empty if there is nothing to edit, or if its place cannot be determined.
        note: what the diff does not show; without one, the reason and the lines to write by hand.
        edit: applies the edit at the given places, so that several edits can follow each other.
        already: why nothing has to be edited, if the file or the step has the effect already.
    """

    diff: str
    note: str = ""
    edit: Callable[[Places], Source] | None = dataclasses.field(
        default=None, repr=False, compare=False
    )
    already: str = ""

    @classmethod
    def of(
        cls,
        workload: Workload,
        edit: Callable[[Places], Source],
        *,
        by_hand: str | Callable[[Places], str],
        note: str | Callable[[Places], str] = "",
        technique: Technique | None = None,
    ) -> CodeChange | None:
        """Return the change that `edit` makes in the workload's file; None for live objects.

        Args:
            edit: see `slipstream.source`.
            by_hand: the lines to write if the edit cannot be placed.
            note: what the reader of the diff should know. Like `by_hand`, a text or a function
                that returns it for the places in the file.
            technique: a technique that training frameworks may have a switch for; in a script that
                trains through one, the switch is set instead.

        Raises:
            WorkloadError: the file cannot be read.
        """
        if workload.live is not None:
            return None
        where = locate(Source.read(workload.path), workload.function, workload.lines)
        if technique is not None:
            switch = find_switch(where, str(technique), vars(technique))
            if switch is not None:
                edit, by_hand, note = switch, switch.by_hand(where), switch.note(where)
        try:
            diff = edit(where).diff()
            return cls(diff, note if isinstance(note, str) else note(where), edit)
        except AlreadyAppliedError as error:
            reason = f"{error.what} ({error.where})"
            return cls("", f"already so: {reason}", edit, reason)
        except EditLocationError as error:
            text = by_hand if isinstance(by_hand, str) else by_hand(where)
            lines = "".join(f"\n    {line}" for line in text.splitlines())
            why = f"no edit of your file: {error.what} ({error.where})"
            return cls("", f"{why}; by hand:{lines}", edit)


@dataclass(frozen=True)
class Context:
    """Measurements that `Technique.predict` may consult; nothing in it runs the user's code.

    Attributes:
        durations: answers from earlier measurements, see `slipstream.durations`.
        cluster: where the step would run, or None for this machine.
    """

    durations: Durations
    cluster: Cluster | None = None


Clock = Literal["cpu", "wall"]
Replicas = Literal["none", "makes", "uses"]
Hook = Literal["none", "provides", "occupies"]
Axis = Literal["data", "stage", "layer", "tile"]


@dataclass(frozen=True)
class Traits:
    """Properties of a technique that commands read before and after they predict and apply it.

    Attributes:
        stage: its position in a combination.
        conflicts: names of techniques it cannot be combined with, in addition to those that
            `replicas` and `hook` imply, see `clash`.
        needs: statistics a profile must record for `predict`:
            {"ids", "spectra", "grads", "regions", "sparsity"}. `why_not` is called without them
            too, and may leave it to `refusal` to report what is missing.
        variants: settings worth predicting, as technique specs; if empty, the default ones.
        clock: ``wall`` for what moves work to other cores or processes, whose CPU time does not
            fall; else ``cpu``, which a busy machine does not disturb.
        kernels_only: whether it reads only a step's kernels, not operators' arguments, which are
            not recorded for a step on a device or on several threads.
        replicas: ``makes`` for a technique that runs the step in several processes, as many as its
            setting `workers`; ``uses`` for one that changes what such processes exchange.
        axis: what the processes of a technique that makes replicas divide: ``data``, so that each
            has the whole model, ``stage``, so that each has some of its layers, ``layer``, so that
            each layer runs on some of them, or ``tile``, so that each has the whole model and a
            part of every sample.
        hook: the communication hook of DistributedDataParallel: ``provides`` if the technique wraps
            the model in it, ``occupies`` if it registers the hook.
        compresses: whether it sends gradients of replicas in fewer bytes.
        edits_script: whether it changes the loop of a plain script, see `Technique.edit_script`.
    """

    stage: int = Stage.MODEL
    conflicts: frozenset[str] = frozenset()
    needs: frozenset[str] = frozenset()
    variants: tuple[str, ...] = ()
    clock: Clock = "cpu"
    kernels_only: bool = False
    replicas: Replicas = "none"
    hook: Hook = "none"
    axis: Axis = "data"
    compresses: bool = False
    edits_script: bool = False

    def __post_init__(self) -> None:
        for name, value, kind in (
            ("clock", self.clock, Clock),
            ("replicas", self.replicas, Replicas),
            ("hook", self.hook, Hook),
            ("axis", self.axis, Axis),
        ):
            if value not in typing.get_args(kind):
                raise InvalidArgumentError(
                    name,
                    f"'{value}' is not possible",
                    remedy=f"pass one of {typing.get_args(kind)}",
                )

    @property
    def is_distributed(self) -> bool:
        """Whether the step must run on several devices of a cluster."""
        return self.replicas != "none"


@runtime_checkable
class Technique(Protocol):
    """One way to make a workload cheaper; see the module's docstring.

    `TechniqueSettings`, the base of techniques, implements the last five methods with defaults, and
    `quality` and `required_timings` for techniques with one `effect` and no timings.

    Attributes:
        name: the field's term for it, and its key in the registry.
        traits: its declared properties; commands read no other attribute.
    """

    name: ClassVar[str]
    traits: ClassVar[Traits]

    def why_not(self, graph: Graph, workload: Workload | None = None) -> str | None:
        """Return None if it applies, else the reason in words that a user understands."""

    def required_timings(self, graph: Graph) -> Sequence[Any]:
        """Return the calls whose durations `predict` requires; they are measured before it runs."""

    def predict(self, graph: Graph, context: Context) -> Graph:
        """Return an edited copy of `graph`: the predicted step."""

    def apply(self, built: BuiltWorkload) -> None:
        """Transform what `Workload.build` built, in the child process that built it."""

    def quality(self, graph: Graph | None = None) -> Quality:
        """Return its effect on the model's numerics."""

    def code(self, workload: Workload) -> CodeChange | None:
        """Return the edit of the user's source with the same effect; None if there is no edit."""

    def already(self, built: BuiltWorkload) -> str | None:
        """Return why `apply` would change nothing in `built`; None if it would, or unknown."""

    def minimum_share(self, graph: Graph) -> float:
        """Return the smallest share of its time that a changed operator can take; 0 if unknown."""

    def warmup_steps(self) -> int:
        """Return the number of first steps that run differently from all later ones."""

    def prepare(self) -> None:
        """Change what the user's code is about to call. Runs only in a child process."""

    def edit_script(self, script: Path, content: bytes, lines: range) -> bytes:
        """Return a plain script with its loop changed, for code that only the script runs.

        Args:
            lines: see `slipstream.source.locate`.

        Raises:
            SlipstreamError: the loop has no place for the change.
        """


_MEMBERS = (*Technique.__annotations__, *(name for name in vars(Technique) if name[0] != "_"))


class ReplicatingTechnique(Technique, Protocol):
    """A technique that makes replicas: ``traits.replicas == "makes"``.

    Attributes:
        workers: processes that run a step together, each with its own batch.
    """

    workers: int


class TechniqueSettings:
    """Base of technique dataclasses; its string form is the spec that `parse` reads.

    Attributes:
        effect: what `quality` returns, if that does not depend on the step.
    """

    name: ClassVar[str]
    traits: ClassVar[Traits] = Traits()
    effect: ClassVar[Quality]

    def required_timings(self, graph: Graph) -> Sequence[Any]:
        """Return no calls: what `predict` needs is in the graph, or cannot be timed here."""
        return ()

    def quality(self, graph: Graph | None = None) -> Quality:
        """Return `effect`."""
        return self.effect

    def already(self, built: BuiltWorkload) -> str | None:
        """Return None: unknown."""
        return None

    def minimum_share(self, graph: Graph) -> float:
        """Return 0: unknown."""
        return 0.0

    def warmup_steps(self) -> int:
        """Return 0: the first step runs like all others."""
        return 0

    def prepare(self) -> None:
        """Do nothing: `apply` changes what was built."""

    def edit_script(self, script: Path, content: bytes, lines: range) -> bytes:
        """Return `content` unchanged."""
        return content

    def __str__(self) -> str:
        parts: list[str] = []
        for number, field in enumerate(dataclasses.fields(self)):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            # A selector is the main setting only if it is the technique's only way to select.
            if number == 0 and (field.name not in _SELECTORS or field.default is None):
                parts += [_write(value)] if value != "" else []
            elif value != field.default:
                parts.append(f"{field.name.rstrip('_')}={_write(value)}")
        return self.name + (":" + ",".join(parts) if parts else "")


_Found = TypeVar("_Found", bound="Match")


class ModuleTechnique(TechniqueSettings):
    """Base of techniques that change selected modules of the model.

    Attributes:
        only, except_: patterns of modules' qualified names; None without one.
    """

    only: str | None
    except_: str | None

    @property
    def selection(self) -> ModuleSelection:
        """The selected modules."""
        from slipstream.surgery.selection import EVERYTHING, ModuleSelection

        return ModuleSelection(EVERYTHING if self.only is None else self.only, self.except_ or "")

    def no_match_reason(self, found: Sequence[Match], none: str) -> str | None:
        """Return why nothing in `found` is selected; None if something is.

        Args:
            none: the reason if `found` is empty.
        """
        possible = [match for match in found if match.refusal is None]
        if not possible:
            return found[0].refusal if found else none
        return self.selection.no_match_reason(match.module for match in possible)

    def require_match(self, names: Iterable[str]) -> None:
        """Check that the patterns select one of the modules `names`.

        Raises:
            WorkloadError: they select none.
        """
        self.selection.require_match(self.name, names)

    def chosen(self, found: Iterable[_Found]) -> list[_Found]:
        """Return the matches that can be exchanged, in selected modules."""
        selection = self.selection
        return [match for match in found if match.refusal is None and match.module in selection]


def registry() -> dict[str, type[Technique]]:
    """Return every installed technique by name, from the entry points `GROUP`.

    A technique that cannot be loaded is skipped, with a `SlipstreamWarning` that names its package.
    """
    kinds: dict[str, type[Technique]] = {}
    for point in _points(entry_points, tuple(sys.path)):
        try:
            kinds[point.name] = _load(point)
        except SlipstreamError as error:
            _warn_skipped(error.what, error.remedy)
    return dict(sorted(kinds.items()))


def _load(point: EntryPoint) -> type[Technique]:
    """Import one technique.

    Raises:
        SlipstreamError: the import fails, or the object is not a technique's class.
    """
    package = point.dist.name if point.dist else "?"
    try:
        kind: type[Technique] = point.load()
        if not isinstance(kind, type) or not hasattr(kind, "__dataclass_fields__"):
            raise TypeError(f"{point.value} is not a dataclass")
        missing = [name for name in _MEMBERS if not hasattr(kind, name)]
        if missing:
            raise TypeError(f"{kind.__name__} does not define {', '.join(missing)}")
    except (Exception, SystemExit) as error:
        reason = f"{error}" or type(error).__name__
        raise SlipstreamError(
            f"the technique '{point.name}' of the package {package} cannot be loaded: {reason}",
            where=point.value,
            remedy=f"fix or uninstall {package}",
        ) from error
    _warn_undeclared(kind, point.name, package)
    return kind


@functools.cache
def _warn_skipped(what: str, remedy: str | None) -> None:
    """Warn once per process about a technique that `registry` leaves out."""
    warnings.warn(f"{what}; it is skipped ({remedy})", SlipstreamWarning, stacklevel=3)


@functools.cache
def _warn_undeclared(kind: type[Technique], name: str, package: str) -> None:
    """Warn once about a technique that declares no traits."""
    if getattr(kind, "traits", TechniqueSettings.traits) is TechniqueSettings.traits:
        warnings.warn(
            f"the technique '{name}' of the package {package} declares no traits: it is treated as "
            "one of stage MODEL that needs no statistic and conflicts with none; in its class, "
            "declare traits: ClassVar[Traits] = Traits(stage=..., ...) of slipstream.technique",
            SlipstreamWarning,
            stacklevel=3,
        )


def need_installed(techniques: Iterable[str]) -> None:
    """Check that techniques of these names are installed, without importing any.

    Raises:
        UnknownNameError: one is not; the nearest name is suggested.
    """
    for text in techniques:
        for part in text.split("+"):
            _point(part.strip().partition(":")[0])


def _point(name: str) -> EntryPoint:
    """Return the entry point of a technique, which is not imported yet."""
    points = {point.name: point for point in _points(entry_points, tuple(sys.path))}
    if name not in points:
        raise UnknownNameError("technique", name, points)
    return points[name]


@functools.lru_cache(maxsize=4)
def _points(find: Callable[..., EntryPoints], path: tuple[str, ...]) -> EntryPoints:
    """Return the entry points; cached, since finding them reads every package's metadata."""
    return find(group=GROUP)


def parse(text: str) -> tuple[Technique, ...]:
    """Return the techniques of ``a:1+b:key=2`` in order (see `slipstream.workload.sort_by_stage`).

    Only the modules of these techniques are imported.

    Raises:
        UnknownNameError: no such technique or setting; the nearest is suggested.
        InvalidArgumentError: a value of the wrong kind.
        UsageError: an empty name, a technique twice, or two that conflict.
        SlipstreamError: one of them cannot be loaded.
    """
    return combination(_parse_one(part.strip()) for part in text.split("+"))


def combination(techniques: Iterable[Technique]) -> tuple[Technique, ...]:
    """Return the techniques in their order, whichever order they are passed in.

    Raises:
        UsageError: a technique twice, or two that cannot be combined.
    """
    techniques = sort_by_stage(techniques)
    names = [technique.name for technique in techniques]
    for technique in techniques:
        if names.count(technique.name) > 1:
            raise UsageError(
                f"'{technique.name}' appears twice in '{combination_name(techniques)}'"
            )
        against = [other.name for other in techniques if clash(type(technique), type(other))]
        if against:
            raise UsageError(
                f"'{technique.name}' cannot be combined with '{min(against)}'",
                remedy="pass them as two alternatives: --technique A --technique B",
            )
    return techniques


def clash(first: type[Technique], other: type[Technique]) -> bool:
    """Whether the two cannot be in one combination.

    They cannot if either declares it, if both make replicas, or if both occupy the communication
    hook of DistributedDataParallel. A hook can also be registered only on replicas that have one.
    """
    if first is other:
        return False
    a, b = first.traits, other.traits
    if other.name in a.conflicts or first.name in b.conflicts:
        return True
    if "makes" == a.replicas == b.replicas or "occupies" == a.hook == b.hook:
        return True
    return any(
        taker.hook == "occupies" and maker.replicas == "makes" and maker.hook != "provides"
        for taker, maker in ((a, b), (b, a))
    )


def variants(kind: type[Technique]) -> list[Technique]:
    """Return the settings worth predicting: its declared variants, or else its defaults.

    Empty if it declares no variants and a setting has no default.

    Raises:
        UsageError: a declared variant does not match the technique's settings.
    """
    if kind.traits.variants:
        return [_parse_one(text, kind) for text in kind.traits.variants]
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    if any(field.default is dataclasses.MISSING is field.default_factory for field in fields):
        return []
    default: Callable[[], Technique] = kind
    return [default()]


def makes_replicas(technique: Technique) -> TypeGuard[ReplicatingTechnique]:
    """Whether it runs the step in several processes."""
    return technique.traits.replicas == "makes"


def on_workers(techniques: Sequence[Technique], workers: int) -> tuple[Technique, ...]:
    """Return the combination with this many processes for the technique that makes replicas.

    Raises:
        UsageError: no technique in it makes replicas.
        InvalidArgumentError: the technique does not accept this number.
    """
    if not any(map(makes_replicas, techniques)):
        raise UsageError(
            f"'{combination_name(techniques)}' does not distribute the step over workers",
            remedy="for example ddp or ddp+powersgd",
        )
    return tuple(
        dataclasses.replace(technique, workers=workers)  # type: ignore[type-var]
        if makes_replicas(technique)
        else technique
        for technique in techniques
    )


def need_devices(techniques: Iterable[Technique], cluster: Cluster) -> None:
    """Check that a cluster has as many devices as `techniques` make replicas.

    Raises:
        InvalidArgumentError: it has fewer.
    """
    for technique in techniques:
        if makes_replicas(technique) and technique.workers > cluster.devices:
            raise InvalidArgumentError(
                f"{technique.name}:workers",
                f"{technique.workers} exceeds the {cluster.devices} devices of {cluster.name}",
                remedy="pass a larger cluster: workers=N for short, or --cluster-set devices=N or "
                "hosts=N",
            )


def need_alternatives(techniques: object) -> None:
    """Check that alternatives are in a list: a string would be read character by character.

    Raises:
        InvalidArgumentError: `techniques` is a string.
    """
    if isinstance(techniques, str):
        raise InvalidArgumentError(
            "techniques",
            f"'{techniques}' is a string, not a list of alternatives",
            remedy=f'pass ["{techniques}"]',
        )


def combination_name(techniques: Sequence[Technique]) -> str:
    """Return the spec of a combination; ``as it is`` for an empty one."""
    return "+".join(str(technique) for technique in techniques) or "as it is"


def combine(graph: Graph, techniques: Sequence[Technique], context: Context) -> Graph:
    """Fold the techniques' predictions over `graph` in stage order."""
    for technique in sort_by_stage(techniques):
        graph = technique.predict(graph, context)
    return graph


def quality_of(techniques: Sequence[Technique], graph: Graph | None = None) -> Quality:
    """Return the combination's effect on numerics: the most consequential of its techniques.

    If several techniques have that kind of effect, basis and advice list them all.
    """
    order = list(QualityKind)
    parts = [technique.quality(graph) for technique in techniques]
    worst = max((part.kind for part in parts), key=order.index, default=QualityKind.EXACT)
    decisive = [part for part in parts if part.kind is worst]
    basis, advice = (
        "; ".join(dict.fromkeys(filter(None, texts)))
        for texts in ((part.basis for part in decisive), (part.advice for part in decisive))
    )
    return Quality(worst, basis if parts else "nothing is changed", advice)


def refusal(technique: Technique, graph: Graph) -> str | None:
    """Return why `technique` does not apply or lacks statistics in the graph; None if it applies.

    For a statistic that was not recorded the reason names the command that records it.
    """
    return (
        _unreadable(technique, graph) or technique.why_not(graph) or _unrecorded(technique, graph)
    )


def _unreadable(technique: Technique, graph: Graph) -> str | None:
    """Return why a technique that reads operators' arguments cannot judge the step, or None."""
    if technique.traits.kernels_only:
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
        "timings on a CPU"
    )


def not_in_script(techniques: Sequence[Technique], workload: Workload) -> str | None:
    """Return why one of `techniques` cannot be applied to a plain script; None if all can.

    Raises:
        WorkloadError: the script is not valid Python.
    """
    from slipstream.workload.script import edit_script

    if workload.live is not None or workload.function is not None:
        return None
    try:
        edit_script(workload, techniques)
    except (AlreadyAppliedError, EditLocationError) as error:
        names = " and ".join(
            technique.name for technique in techniques if technique.traits.edits_script
        )
        return f"{names} edits the loop, which has no place for it: {error.what} ({error.where})"
    return None


def _unrecorded(technique: Technique, graph: Graph) -> str | None:
    statistics = graph.statistics
    for need in sorted(technique.traits.needs):
        if need == "regions" and "regions" in graph.meta:
            continue
        if need not in statistics.recorded:
            requested = ",".join(sorted(technique.traits.needs))
            return (
                f"it needs the statistic '{need}', which was not recorded; "
                f"slipstream advise WORKLOAD --record {requested}"
            )
        if need in statistics.reasons:
            return statistics.reasons[need]
    return None


def clock(techniques: Sequence[Technique]) -> str:
    """Return the clock that shows the effect: ``wall`` if work moves to other cores, or ``cpu``."""
    return "wall" if any(part.traits.clock == "wall" for part in techniques) else "cpu"


def _parse_one(text: str, kind: Any = None) -> Technique:
    """Return the technique that `text` describes, of the class `kind` or else that of its name."""
    name, _, rest = text.partition(":")
    if not name:
        raise UsageError("an empty technique name", remedy="for example amp:bf16 or amp:bf16+other")
    if kind is None:
        kind = _load(_point(name))
    fields = {field.name.rstrip("_"): field for field in dataclasses.fields(kind)}
    hints = typing.get_type_hints(kind)
    values: dict[str, Any] = {}
    for number, part in enumerate(filter(None, rest.split(","))):
        key, equals, value = part.partition("=")
        if not equals:
            if number:
                raise UsageError(
                    f"'{part}' in '{text}' has no key",
                    remedy=f"for example {name}:key=value,key=value",
                )
            key, value = next(iter(fields), part), part
        if key not in fields:
            raise UnknownNameError("setting", key, fields, where=f"technique '{name}'")
        field = fields[key]
        if field.name in values:
            raise UsageError(f"'{key}' appears twice in '{text}'")
        values[field.name] = _read(value, hints[field.name], f"{name}:{key}")
    try:
        technique: Technique = kind(**values)
    except TypeError as error:
        usage = ",".join(f"{key}=..." for key in fields)
        raise UsageError(f"'{text}': {error}", remedy=f"for example {name}:{usage}") from error
    return technique


def _read(text: str, hint: Any, argument: str) -> Any:
    """Convert `text` to the type `hint`."""
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        if text not in map(str, options):
            raise InvalidArgumentError(
                argument,
                f"'{text}' is not possible",
                remedy="pass one of " + ", ".join(map(str, options)),
            )
        return next(option for option in options if str(option) == text)
    if origin in (typing.Union, types.UnionType):
        if type(None) in options and text in ("none", ""):
            return None
        return _read(text, next(o for o in options if o is not type(None)), argument)
    if hint is bool:
        if text.lower() not in ("true", "false", "yes", "no", "on", "off", "1", "0"):
            raise InvalidArgumentError(
                argument,
                f"'{text}' is neither true nor false",
                remedy=f"for example {argument}=true",
            )
        return text.lower() in ("true", "yes", "on", "1")
    if hint in (int, float):
        kind = "an integer" if hint is int else "a number"
        try:
            number = hint(text)
        except ValueError:
            number = math.nan
        if number != number:
            example = f"for example {argument}={2 if hint is int else 0.5}"
            raise InvalidArgumentError(argument, f"'{text}' is not {kind}", remedy=example)
        return number
    return text


def _write(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        # A plus sign would join two techniques: 1e+16.
        return repr(value).replace("+", "")
    return "none" if value is None else str(value)
