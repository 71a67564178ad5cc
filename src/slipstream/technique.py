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
    AlreadyThereError,
    NotPlacedError,
    Places,
    Source,
    find_switch,
    locate,
)
from slipstream.workload import BuiltWorkload, Workload, in_order

if TYPE_CHECKING:
    from slipstream.cluster import Cluster
    from slipstream.durations import Durations
    from slipstream.graph import Graph
    from slipstream.graph.flow import Match
    from slipstream.surgery.selection import ModuleSelection

GROUP = "slipstream.techniques"
# Settings that choose modules: never a technique's main one.
_CHOOSING = frozenset({"only", "except_"})
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
        already: why nothing has to be edited, if the file or the step does the same already.
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
        """The change `edit` makes in the workload's file; None for live objects, without a file.

        Args:
            edit: see `slipstream.source`.
            by_hand: the lines to write where the edit cannot be placed.
            note: what the reader of the diff should know. Like `by_hand`, a text or a function
                that writes it for the places in the file.
            technique: a technique that training frameworks have a switch for; in a script that
                trains through one, the switch is set instead.

        Raises:
            WorkloadError: the file cannot be read.
        """
        if workload.live is not None:
            return None
        where = locate(Source.read(workload.path), workload.function)
        if technique is not None:
            switch = find_switch(where, str(technique), vars(technique))
            if switch is not None:
                edit, by_hand, note = switch, switch.by_hand(where), switch.note(where)
        try:
            diff = edit(where).diff()
            return cls(diff, note if isinstance(note, str) else note(where), edit)
        except AlreadyThereError as error:
            reason = f"{error.what} ({error.where})"
            return cls("", f"already so: {reason}", edit, reason)
        except NotPlacedError as error:
            text = by_hand if isinstance(by_hand, str) else by_hand(where)
            lines = "".join(f"\n    {line}" for line in text.splitlines())
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


Clock = Literal["cpu", "wall"]
Replicas = Literal["none", "makes", "uses"]
Hook = Literal["none", "provides", "occupies"]


@dataclass(frozen=True)
class Traits:
    """What verbs ask about a technique before, and besides, predicting and applying it.

    Attributes:
        stage: its place in a combination.
        conflicts: names that cannot be combined with it, besides what follows from `replicas`
            and `hook`, see `clash`.
        needs: statistics a profile must record for `predict`:
            {"ids", "spectra", "grads", "regions", "sparsity"}. `why_not` is asked without them,
            too, and may leave it to `refusal` to say what is missing.
        variants: settings worth trying on paper, in the grammar; the default ones when empty.
        clock: ``wall`` for what moves work to other cores or processes, whose CPU time does not
            fall; else ``cpu``, which a busy machine does not disturb.
        kernels_only: whether it reads only a step's kernels, not operators' arguments, which are
            not recorded for a step on a device or on several threads.
        replicas: ``makes`` for what runs the step in processes of its own, whose number is its
            setting `workers`; ``uses`` for what changes what such processes exchange.
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
    compresses: bool = False
    edits_script: bool = False

    def __post_init__(self) -> None:
        for name, value, kind in (
            ("clock", self.clock, Clock),
            ("replicas", self.replicas, Replicas),
            ("hook", self.hook, Hook),
        ):
            if value not in typing.get_args(kind):
                raise InvalidArgumentError(
                    name, f"'{value}' is not possible", remedy=f"one of {typing.get_args(kind)}"
                )

    @property
    def is_distributed(self) -> bool:
        """Whether the step must run on several devices, of a cluster, for it to mean anything."""
        return self.replicas != "none"


@runtime_checkable
class Technique(Protocol):
    """One way to make a workload cheaper; see the module's text.

    `TechniqueSettings`, the base of techniques, implements the last five methods with defaults, and
    `quality` and `required_timings` for techniques with one `effect` and no timings.

    Attributes:
        name: the field's word for it; the registry's key.
        traits: what verbs ask about it; they look for nothing else on it.
    """

    name: ClassVar[str]
    traits: ClassVar[Traits]

    def why_not(self, graph: Graph, workload: Workload | None = None) -> str | None:
        """None when it applies, else the reason in words a user understands."""

    def required_timings(self, graph: Graph) -> Sequence[Any]:
        """Calls whose durations `predict` will ask for; they are measured before it runs."""

    def predict(self, graph: Graph, context: Context) -> Graph:
        """An edited copy of `graph`: the step as it would be."""

    def apply(self, built: BuiltWorkload) -> None:
        """Transform what `Workload.build` made, in the child that made it."""

    def quality(self, graph: Graph | None = None) -> Quality:
        """What it does to the model's numbers."""

    def code(self, workload: Workload) -> CodeChange | None:
        """The edit of the user's source that does the same, or None when there is no such edit."""

    def already(self, built: BuiltWorkload) -> str | None:
        """Return why `apply` would change nothing in `built`; None if it would, or unknown."""

    def minimum_share(self, graph: Graph) -> float:
        """The smallest share of its time that a changed operator can take; 0 if unknown."""

    def warmup_steps(self) -> int:
        """Steps at the beginning that are taken otherwise than all later ones."""

    def prepare(self) -> None:
        """Change what the user's code is about to call. Only ever runs in a child process."""

    def edit_script(self, script: Path, content: bytes) -> bytes:
        """A plain script with the change of its loop, which nobody but the script runs.

        Raises:
            SlipstreamError: there is no place for it.
        """


_MEMBERS = (*Technique.__annotations__, *(name for name in vars(Technique) if name[0] != "_"))


class Replicating(Technique, Protocol):
    """A technique that makes replicas: ``traits.replicas == "makes"``.

    Attributes:
        workers: processes that take a step together, each with a batch of its own.
    """

    workers: int


class TechniqueSettings:
    """Base of technique dataclasses: writes them back in the grammar they are read from.

    Attributes:
        effect: what `quality` answers, where that does not depend on the step.
    """

    name: ClassVar[str]
    traits: ClassVar[Traits] = Traits()
    effect: ClassVar[Quality]

    def required_timings(self, graph: Graph) -> Sequence[Any]:
        """None: what `predict` needs is in the graph, or cannot be timed here."""
        return ()

    def quality(self, graph: Graph | None = None) -> Quality:
        """Its `effect`."""
        return self.effect

    def already(self, built: BuiltWorkload) -> str | None:
        """Return None: unknown."""
        return None

    def minimum_share(self, graph: Graph) -> float:
        """None that is known."""
        return 0.0

    def warmup_steps(self) -> int:
        """None: the first step is as all others."""
        return 0

    def prepare(self) -> None:
        """Nothing: what was built is changed."""

    def edit_script(self, script: Path, content: bytes) -> bytes:
        """As it was."""
        return content

    def __str__(self) -> str:
        parts: list[str] = []
        for number, field in enumerate(dataclasses.fields(self)):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            # One that chooses modules is the main setting only where nothing else is chosen by.
            if number == 0 and (field.name not in _CHOOSING or field.default is None):
                parts.append(_write(value))
            elif value != field.default:
                parts.append(f"{field.name.rstrip('_')}={_write(value)}")
        return self.name + (":" + ",".join(parts) if parts else "")


_Found = TypeVar("_Found", bound="Match")


class Choosing(TechniqueSettings):
    """Base of techniques that change some of the model's modules.

    Attributes:
        only, except_: patterns of modules' qualified names; None for no pattern.
    """

    only: str | None
    except_: str | None

    @property
    def selection(self) -> ModuleSelection:
        """The modules that are chosen."""
        from slipstream.surgery.selection import EVERYTHING, ModuleSelection

        return ModuleSelection(EVERYTHING if self.only is None else self.only, self.except_ or "")

    def why_none_of(self, found: Sequence[Match], none: str) -> str | None:
        """Return why nothing in `found` is chosen; None if something is.

        Args:
            none: the reason if `found` is empty.
        """
        possible = [match for match in found if match.refusal is None]
        if not possible:
            return found[0].refusal if found else none
        return self.selection.why_none(match.module for match in possible)

    def need_some(self, names: Iterable[str]) -> None:
        """Check that the patterns choose one of the modules `names`.

        Raises:
            WorkloadError: they choose none.
        """
        self.selection.need_some(self.name, names)

    def chosen(self, found: Iterable[_Found]) -> list[_Found]:
        """Return what can be exchanged in modules that are chosen."""
        selection = self.selection
        return [match for match in found if match.refusal is None and match.module in selection]


def registry() -> dict[str, type[Technique]]:
    """Every installed technique by name, ours and others', from the entry points `GROUP`.

    One that cannot be loaded is left out, with a `SlipstreamWarning` that names its package.
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
            f"the technique '{name}' of the package {package} declares no traits: it is taken for "
            "one of the stage MODEL that needs no statistic and conflicts with none; in its class, "
            "declare traits: ClassVar[Traits] = Traits(stage=..., ...) of slipstream.technique",
            SlipstreamWarning,
            stacklevel=3,
        )


def need_known(techniques: Iterable[str]) -> None:
    """See that techniques of these names are installed, without importing any.

    Raises:
        UnknownNameError: there is none of a name; the nearest is suggested.
    """
    for text in techniques:
        for part in text.split("+"):
            _point(part.strip().partition(":")[0])


def _point(name: str) -> EntryPoint:
    """The entry point of a technique, which is not imported yet.

    Raises:
        UnknownNameError: no technique of this name is installed; the nearest is suggested.
    """
    points = {point.name: point for point in _points(entry_points, tuple(sys.path))}
    if name not in points:
        raise UnknownNameError("technique", name, points)
    return points[name]


@functools.lru_cache(maxsize=4)
def _points(find: Callable[..., EntryPoints], path: tuple[str, ...]) -> EntryPoints:
    """Looked for once for each search path: every installed package's description is read."""
    return find(group=GROUP)


def parse(text: str) -> tuple[Technique, ...]:
    """The techniques ``a:1+b:key=2`` names, in their order (see `slipstream.workload.in_order`).

    Only the modules of these techniques are imported.

    Raises:
        UnknownNameError: no such technique or setting; the nearest is suggested.
        InvalidArgumentError: a value of the wrong kind.
        UsageError: an empty name, a technique twice, or two that conflict.
        SlipstreamError: one of them cannot be loaded.
    """
    return combination(_parse_one(part.strip()) for part in text.split("+"))


def combination(techniques: Iterable[Technique]) -> tuple[Technique, ...]:
    """The techniques in their order, whichever order they are given in.

    Raises:
        UsageError: a technique twice, or two that cannot be combined.
    """
    techniques = in_order(techniques)
    names = [technique.name for technique in techniques]
    for technique in techniques:
        if names.count(technique.name) > 1:
            raise UsageError(f"'{technique.name}' stands twice in '{combination_name(techniques)}'")
        against = [other.name for other in techniques if clash(type(technique), type(other))]
        if against:
            raise UsageError(
                f"'{technique.name}' cannot be combined with '{min(against)}'",
                remedy="give them as two alternatives: --technique A --technique B",
            )
    return techniques


def clash(one: type[Technique], other: type[Technique]) -> bool:
    """Whether the two cannot stand in one combination.

    Because one of them says so, or because of what both do to replicas: a step is spread in one
    way, and the hook of DistributedDataParallel is taken once, of replicas that have it.
    """
    if one is other:
        return False
    a, b = one.traits, other.traits
    if other.name in a.conflicts or one.name in b.conflicts:
        return True
    if "makes" == a.replicas == b.replicas or "occupies" == a.hook == b.hook:
        return True
    return any(
        taker.hook == "occupies" and maker.replicas == "makes" and maker.hook != "provides"
        for taker, maker in ((a, b), (b, a))
    )


def variants(kind: type[Technique]) -> list[Technique]:
    """Its settings that are worth trying on paper: what it declares, else the default ones.

    None where it declares nothing and a setting has no default.

    Raises:
        UsageError: it declares what its grammar does not have.
    """
    if kind.traits.variants:
        return [_parse_one(text, kind) for text in kind.traits.variants]
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    if any(one.default is dataclasses.MISSING is one.default_factory for one in fields):
        return []
    default: Callable[[], Technique] = kind
    return [default()]


def makes_replicas(technique: Technique) -> TypeGuard[Replicating]:
    """Whether it runs the step in processes of its own."""
    return technique.traits.replicas == "makes"


def on_workers(techniques: Sequence[Technique], workers: int) -> tuple[Technique, ...]:
    """The combination, with that many processes where it makes replicas.

    Raises:
        UsageError: no part of it makes any.
        InvalidArgumentError: there cannot be so many.
    """
    if not any(map(makes_replicas, techniques)):
        raise UsageError(
            f"'{combination_name(techniques)}' spreads nothing over workers",
            remedy="as ddp or ddp+powersgd",
        )
    return tuple(
        dataclasses.replace(one, workers=workers) if makes_replicas(one) else one  # type: ignore[type-var]
        for one in techniques
    )


def need_devices(techniques: Iterable[Technique], cluster: Cluster) -> None:
    """See that a cluster has as many devices as `techniques` make replicas.

    Raises:
        InvalidArgumentError: it has fewer.
    """
    for one in techniques:
        if makes_replicas(one) and one.workers > cluster.devices:
            raise InvalidArgumentError(
                f"{one.name}:workers",
                f"{one.workers} is more than the {cluster.devices} devices of {cluster.name}",
                remedy="a larger cluster: workers=N in short, else --cluster-set devices=N or "
                "hosts=N",
            )


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
    for technique in in_order(techniques):
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
    basis, advice = (
        "; ".join(dict.fromkeys(filter(None, words)))
        for words in ((part.basis for part in alike), (part.advice for part in alike))
    )
    return Quality(worst, basis if parts else "nothing is changed", advice)


def refusal(technique: Technique, graph: Graph) -> str | None:
    """None when `technique` applies and the graph has the statistics it needs, else the reason.

    For a statistic that was not recorded the reason names the command that records it.
    """
    return (
        _unreadable(technique, graph) or technique.why_not(graph) or _unrecorded(technique, graph)
    )


def _unreadable(technique: Technique, graph: Graph) -> str | None:
    """Why a technique that asks for operators' arguments cannot judge a step without them."""
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
        "timings on a processor"
    )


def not_in_script(techniques: Sequence[Technique], workload: Workload) -> str | None:
    """Why one of `techniques` cannot be put on a plain script; None if all can.

    Raises:
        WorkloadError: the script is no Python.
    """
    from slipstream.workload.script import edit_script

    if workload.live is not None or workload.function is not None:
        return None
    try:
        edit_script(workload.path, techniques)
    except (AlreadyThereError, NotPlacedError) as error:
        names = " and ".join(one.name for one in techniques if one.traits.edits_script)
        return f"{names} edits the loop, which has no place for it: {error.what} ({error.where})"
    return None


def _unrecorded(technique: Technique, graph: Graph) -> str | None:
    statistics = graph.statistics
    for need in sorted(technique.traits.needs):
        if need == "regions" and "regions" in graph.meta:
            continue
        if need not in statistics.recorded:
            wanted = ",".join(sorted(technique.traits.needs))
            return (
                f"it needs the statistic '{need}', which was not recorded; "
                f"slipstream advise WORKLOAD --record {wanted}"
            )
        if need in statistics.reasons:
            return statistics.reasons[need]
    return None


def clock(techniques: Sequence[Technique]) -> str:
    """Which clock shows what the combination does: ``wall`` where work moves to other cores."""
    return "wall" if any(one.traits.clock == "wall" for one in techniques) else "cpu"


def _parse_one(text: str, kind: Any = None) -> Technique:
    """The technique that `text` describes, of the class `kind` or of the one its name finds."""
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
            raise UsageError(f"'{key}' stands twice in '{text}'")
        values[field.name] = _read(value, hints[field.name], f"{name}:{key}")
    try:
        technique: Technique = kind(**values)
    except TypeError as error:
        usage = ",".join(f"{key}=..." for key in fields)
        raise UsageError(f"'{text}': {error}", remedy=f"for example {name}:{usage}") from error
    return technique


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
                argument,
                f"'{text}' is neither true nor false",
                remedy=f"for example {argument}=true",
            )
        return text.lower() in ("true", "yes", "on", "1")
    if hint in (int, float):
        kind = "integer" if hint is int else "number"
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
