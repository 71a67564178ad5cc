"""A user's request: a workload or recording, and how to run it."""

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
from slipstream.workload.recipe import names_function

RECORDING = ".slipgraph"
# Time limit of the steps, and then of the launches, if the user waits for a first answer.
_BRIEF_S = 4.0
_BUSY = (
    "this machine is busy: {0}. A step on one thread is timed by its own CPU time and can still "
    "be predicted, with wider intervals; a step on several threads (--threads, threads:N) mostly "
    "cannot, and prove takes half as long again"
)


@dataclass(frozen=True)
class Request:
    """A workload, or a recording of one, and how to run it.

    Attributes:
        target: file.py:function, a plain script, or a recorded .slipgraph.
        arguments: for the function.
        script_arguments: for the script.
        threads: intra-op threads, 0 for the workload's setting.
        steps: number of steps to record.
        timeout_s: the workload is stopped after this many seconds of silence.
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
        """Parse a command line.

        Args:
            settings: the function's arguments as ``KEY=VALUE``, the value as JSON or text.

        Raises:
            UsageError: arguments that `target` cannot take.
            InvalidArgumentError: an invalid setting or time.
        """
        extra = [*script_arguments, *(f"--set {text}" for text in settings)]
        if target.endswith(RECORDING) and extra:
            raise UsageError(
                f"a recorded graph takes no arguments, but got '{extra[0]}'",
                remedy="pass the workload itself to record it again with other arguments",
            )
        arguments = dict(map(_setting, settings))
        if script_arguments and names_function(target):
            raise UsageError(
                f"unexpected argument '{script_arguments[0]}': a function takes no positional ones",
                remedy="pass a function's arguments with --set KEY=VALUE",
            )
        timeout_s = parse_duration_ns(timeout, "--timeout") / 1e9
        return cls(target, arguments, tuple(script_arguments), threads, steps, timeout_s)

    @property
    def recorded(self) -> bool:
        return self.target.endswith(RECORDING)

    def need_runnable(self) -> None:
        """Raise a `UsageError` for a recording."""
        if self.recorded:
            raise UsageError(
                f"'{self.target}' is a recording, which cannot be run",
                remedy="pass the workload itself, file.py:function or script.py; "
                "predict and advise take recordings",
            )

    def workload(self) -> Workload:
        """Return the workload.

        Raises:
            UsageError: the target is a recording; WorkloadError: no such file;
                UnknownNameError: no such function.
        """
        self.need_runnable()
        return Workload.parse(self.target, *self.script_arguments, **self.arguments)

    def graph(
        self,
        report: Callable[[str], None] = lambda line: None,
        needs: Collection[str] = (),
        warn: Callable[[str], None] = lambda line: None,
        *,
        briefly: bool = False,
    ) -> Graph:
        """Load the recorded graph, or record one now.

        Args:
            report: called with a short line of progress.
            needs: additional statistics to record.
            warn: called with doubts about a recording, see `load_recording`; before a new
                recording, with how busy the machine is.
            briefly: whether the user waits: fewer steps of a slow workload are recorded, and
                other launches are not watched until `with_page_faults`.
        """
        from slipstream.verbs.profiling import profile

        if self.recorded:
            return load_recording(Path(self.target), warn)
        if busy := busy_in_words():
            warn(_BUSY.format(busy))
        brief: dict[str, Any] = {"launches": False, "time_limit_s": _BRIEF_S} if briefly else {}
        return profile(
            self.workload(), steps=self.steps, threads=self.threads, timeout_s=self.timeout_s,
            needs=needs, report=report, **brief,
        )  # fmt: skip

    def with_page_faults(
        self,
        graph: Graph,
        report: Callable[[str], None] = lambda line: None,
        *,
        launch_s: float = 0.0,
        until: float = math.inf,
    ) -> Graph:
        """Add page faults of other launches to `graph`, if it was recorded now."""
        from slipstream.verbs.page_faults import watch_launches

        if self.recorded:
            return graph
        return watch_launches(
            graph, self.workload(), threads=self.threads, timeout_s=self.timeout_s,
            time_limit_s=_BRIEF_S, launch_s=launch_s, until=until, report=report,
        )  # fmt: skip

    def fingerprint(self) -> dict[str, Any]:
        """Return what identifies this request in the ledger; compare `recorded_request`."""
        return _fingerprint(
            self.threads, self.script_arguments, describe_source(self.workload().path)
        )

    def command(self, verb: str, technique: str) -> str:
        """Return the command line that runs `verb` with `technique` on the workload."""
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
    """Return the request that recorded `graph`; None if the recording does not hold it."""
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
    text = json.dumps([source and source["sha256"], list(script_arguments)])
    return {"threads": threads, "digest": hashlib.sha256(text.encode()).hexdigest()}


def command_for(verb: str, graph: Graph, technique: str) -> str:
    """Return the command line that runs `verb` with `technique` on the recorded workload."""
    request = request_of(graph)
    if request is None:
        return f"slipstream {verb} WORKLOAD --technique {technique}"
    return request.command(verb, technique)


def load_recording(path: Path, warn: Callable[[str], None] = lambda line: None) -> Graph:
    """Load the graph in `path`; warns if its source file has changed since the recording."""
    graph = load(path)
    if file := has_changed(graph):
        when = str(graph.meta.get("created", ""))[:16].replace("T", " ")
        warn(f"{file} has changed since this recording ({when} UTC): profile it again")
    return graph


def _setting(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key.isidentifier():
        raise InvalidArgumentError(
            "--set", f"'{text}' is not KEY=VALUE", remedy="for example --set batch_size=64"
        )
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value
