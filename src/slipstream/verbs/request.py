"""What a person asked of a step: which one, and how it is to run."""

from __future__ import annotations

import hashlib
import json
import math
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipstream.errors import InvalidArgumentError, UsageError
from slipstream.graph import Graph, load
from slipstream.graph.origin import describe_source, has_changed
from slipstream.measure.gate import busy_in_words
from slipstream.units import parse_duration_ns
from slipstream.verbs.children import DEFAULT_TIMEOUT_S
from slipstream.workload import Workload

RECORDING = ".slipgraph"
# What steps, and afterwards launches, may take where somebody waits for a first answer.
_BRIEFLY_S = 4.0
_BUSY = (
    "this machine is busy: {0}. A step on one thread is timed by its own processor time, and can "
    "be told with wider intervals; of several threads (--threads, threads:N) hardly anything can, "
    "and prove takes half as long again"
)


@dataclass(frozen=True)
class Request:
    """A workload, or a recording of one, and how it is to run.

    Attributes:
        target: file.py:function, a plain script, or a recorded .slipgraph.
        arguments: of the function.
        script_arguments: of the script.
        threads: intra-op threads, 0 for what the workload sets.
        steps: to record.
        timeout_s: the workload is stopped when it is silent for this long.
    """

    target: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    script_arguments: tuple[str, ...] = ()
    threads: int = 0
    steps: int = 24
    timeout_s: float = DEFAULT_TIMEOUT_S

    @classmethod
    def parse(
        cls,
        target: str,
        script_arguments: Sequence[str] = (),
        settings: Sequence[str] = (),
        *,
        threads: int = 0,
        steps: int = 24,
        timeout: str = "5min",
    ) -> Request:
        """The request that a command line writes.

        Args:
            settings: arguments of the function as ``KEY=VALUE``, the value as JSON or text.

        Raises:
            UsageError: arguments that `target` cannot take.
            InvalidArgumentError: a setting or time that is none.
        """
        given = [*script_arguments, *(f"--set {text}" for text in settings)]
        if target.endswith(RECORDING) and given:
            raise UsageError(
                f"a recorded graph takes no arguments, such as '{given[0]}'",
                remedy="name the workload itself to record it anew with other arguments",
            )
        arguments = dict(map(_setting, settings))
        if script_arguments and ".py:" in target:
            raise UsageError(
                f"'{script_arguments[0]}' is one argument too many",
                remedy="give a function's arguments with --set KEY=VALUE",
            )
        timeout_s = parse_duration_ns(timeout, "--timeout") / 1e9
        return cls(target, arguments, tuple(script_arguments), threads, steps, timeout_s)

    @property
    def recorded(self) -> bool:
        """Whether it names a recording, which nothing can run."""
        return self.target.endswith(RECORDING)

    def need_runnable(self) -> None:
        """Nothing, unless it is a recording.

        Raises:
            UsageError: it is.
        """
        if self.recorded:
            raise UsageError(
                f"'{self.target}' is a recording, which cannot be run",
                remedy="name the workload itself, file.py:function or script.py; "
                "predict and advise take recordings",
            )

    def workload(self) -> Workload:
        """The workload.

        Raises:
            UsageError: it is a recording; WorkloadError: no such file; UnknownNameError: no such
                function.
        """
        self.need_runnable()
        return Workload.parse(self.target, *self.script_arguments, **self.arguments)

    def graph(
        self,
        say: Callable[[str], None] = lambda line: None,
        needs: Collection[str] = (),
        warn: Callable[[str], None] = lambda line: None,
        *,
        briefly: bool = False,
    ) -> Graph:
        """The recorded graph, or one recorded now.

        Args:
            say: called with a short line whenever there is progress.
            needs: statistics to record besides.
            warn: called with what is doubtful about a recording, see `load_recording`; or, before
                one is made now, with how busy the machine is.
            briefly: whether somebody waits for it: of a slow step fewer are recorded, and other
                launches are not watched; `settled` does that later.

        Raises:
            SlipstreamError: as `load_recording`, or `slipstream.verbs.profiling.profile`.
        """
        from slipstream.verbs.profiling import profile

        if self.recorded:
            return load_recording(Path(self.target), warn)
        if busy := busy_in_words():
            warn(_BUSY.format(busy))
        brief: dict[str, Any] = {"launches": False, "longest_s": _BRIEFLY_S} if briefly else {}
        return profile(
            self.workload(), steps=self.steps, threads=self.threads, timeout_s=self.timeout_s,
            needs=needs, say=say, **brief,
        )  # fmt: skip

    def settled(
        self,
        graph: Graph,
        say: Callable[[str], None] = lambda line: None,
        *,
        launch_s: float = 0.0,
        until: float = math.inf,
    ) -> Graph:
        """Add page faults of other launches to `graph`, which was recorded now.

        Args:
            launch_s, until: as `slipstream.verbs.page_faults.watch_launches` takes them.
        """
        from slipstream.verbs.page_faults import watch_launches

        if self.recorded:
            return graph
        return watch_launches(
            graph, self.workload(), threads=self.threads, timeout_s=self.timeout_s,
            longest_s=_BRIEFLY_S, launch_s=launch_s, until=until, say=say,
        )  # fmt: skip

    def fingerprint(self) -> dict[str, Any]:
        """Return what identifies this request in the ledger; compare `recorded_request`."""
        return _fingerprint(
            self.threads, self.script_arguments, describe_source(self.workload().path)
        )

    def command(self, verb: str, technique: str) -> str:
        """The command line that does `verb` with `technique` to the workload."""
        words = ["slipstream", verb, self.target]
        for key, value in self.arguments.items():
            words += ["--set", f"{key}={value if isinstance(value, str) else json.dumps(value)}"]
        words += ["--technique", technique]
        if self.threads:
            words += ["--threads", str(self.threads)]
        if self.script_arguments:
            words += ["--", *self.script_arguments]
        return shlex.join(words)


def request_of(graph: Graph) -> Request | None:
    """What was asked for when `graph` was recorded; None where the recording cannot tell."""
    recipe = graph.meta.get("recipe")
    if not isinstance(recipe, Mapping):
        return None
    return Request(
        str(recipe["target"]), recipe["arguments"], tuple(recipe["script_arguments"]),
        int(recipe["threads"] or 0),
    )  # fmt: skip


def recorded_request(graph: Graph) -> dict[str, Any] | None:
    """Return the `Request.fingerprint` that `graph` was recorded with; None if unknown."""
    request, source = request_of(graph), graph.meta.get("source")
    if request is None:
        return None
    return _fingerprint(request.threads, request.script_arguments, source)


def _fingerprint(
    threads: int, script_arguments: Sequence[str], source: Mapping[str, str] | None
) -> dict[str, Any]:
    """Return the requested threads and a digest of the file and the script's arguments."""
    text = json.dumps([source and source["sha256"], list(script_arguments)])
    return {"threads": threads, "digest": hashlib.sha256(text.encode()).hexdigest()}


def command_for(verb: str, graph: Graph, technique: str) -> str:
    """The command line that does `verb` with `technique` to the workload as it was recorded."""
    request = request_of(graph)
    if request is None:
        return f"slipstream {verb} WORKLOAD --technique {technique}"
    return request.command(verb, technique)


def load_recording(path: Path, warn: Callable[[str], None] = lambda line: None) -> Graph:
    """The graph in `path`; warns when the code it was recorded of is another by now.

    Raises:
        GraphError: as `slipstream.graph.load`.
    """
    graph = load(path)
    if file := has_changed(graph):
        when = str(graph.meta.get("created", ""))[:16].replace("T", " ")
        warn(f"{file} has changed since this recording ({when} UTC): profile it again")
    return graph


def _setting(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key.isidentifier():
        raise InvalidArgumentError(
            "--set", f"'{text}' is not KEY=VALUE", remedy="as --set batch_size=64"
        )
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value
