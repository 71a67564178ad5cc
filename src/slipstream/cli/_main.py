"""Assemble the commands, run one, and turn its errors into words and exit codes."""

from __future__ import annotations

import codecs
import contextlib
import errno
import gc
import importlib
import io
import keyword
import os
import signal
import sys
import time
import warnings
from typing import TYPE_CHECKING, Any

from slipstream.errors import SlipstreamError, SlipstreamWarning
from slipstream.tables import printable

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

    import typer

# In the order of the flow, then engines, then tools. Each module holds `command` (a function)
# or `app` (a noun with verbs of its own); the first line of its docstring is the help.
_FLOW = (
    "profile", "explain", "predict", "apply", "prove", "advise", "batch", "devices", "report",
    "live", "lsp", "export", "import", "diff",
)  # fmt: skip
_ENGINES = ("cluster", "scale", "netlab", "search")
_TOOLS = (
    "ship", "xray", "stability", "hfuse", "serve", "mlperf", "measure", "results", "data", "dedup",
    "bench", "doctor", "demo",
)  # fmt: skip
_INTERRUPTED = 130
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)
# Ending children and putting files back takes this long at most; further Ctrl-C wait for it.
_CLEANING_UP_S = 10.0
# Graphs and torch are many objects that stay: with Python's own thresholds (700, 10, 10) a sixth of
# what `advise` itself computes was the search for garbage among them.
_GARBAGE = 50_000, 20, 100
# For terminals that show ASCII only.
_PLAIN = {
    **dict(zip("▁▂▃▄▅▆▇█", "__--==##", strict=True)),
    "µ": "u", "μ": "u", "…": "...", "–": "-", "─": "-", "→": "->", "±": "+-", "·": ".",
    "×": "x", "∞": "inf", "▶": ">", "◀": "<",
}  # fmt: skip


def _assemble() -> typer.Typer:
    import inspect

    import typer
    from typer.core import TyperCommand, TyperGroup

    class Whole(TyperGroup):
        """Lists its commands with their whole first sentences; typer would cut them with dots."""

        def sections(self) -> dict[str, Sequence[str]]:
            return {"Commands": list(self.commands)}

        def format_commands(self, ctx: Any, formatter: Any) -> None:
            for title, names in self.sections().items():
                with formatter.section(title):
                    formatter.write_dl(
                        [(name, self.commands[name].get_short_help_str(1000)) for name in names]
                    )

    class InOrder(Whole):
        """Lists its commands as the user meets them: the flow, then clusters, then tools."""

        def list_commands(self, ctx: Any) -> list[str]:
            return [name for name in (*_FLOW, *_ENGINES, *_TOOLS) if name in self.commands]

        def sections(self) -> dict[str, Sequence[str]]:
            return {"The flow": _FLOW, "Clusters": _ENGINES, "Tools": _TOOLS}

    def with_more(listed: Any) -> type[TyperCommand]:
        """A command whose help ends with a list that is made only when it is asked for."""

        class WithMore(TyperCommand):
            def format_epilog(self, ctx: Any, formatter: Any) -> None:
                title, rows = listed()
                with formatter.section(title):
                    formatter.write_dl(rows)

        return WithMore

    def show_version(wanted: bool) -> None:
        if wanted:
            from importlib.metadata import version

            print("slipstream", version("slipstream"))
            raise typer.Exit

    app = typer.Typer(
        name="slipstream",
        cls=InOrder,
        # Plain help: importing rich and its Markdown parser takes longer than all else together.
        rich_markup_mode=None,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        help="What would make this PyTorch model cheaper, by how much, and is that true?",
        epilog="Start with: slipstream demo. Every command that prints a table takes --json.",
    )

    @app.callback()
    def everything(
        debug: bool = typer.Option(False, "--debug", help="Show tracebacks of errors."),
        version: bool = typer.Option(
            False, "--version", help="Print the version and leave.",
            callback=show_version, is_eager=True,
        ),
    ) -> None:  # fmt: skip
        if debug:
            os.environ["SLIPSTREAM_DEBUG"] = "1"

    for name in (*_FLOW, *_ENGINES, *_TOOLS):
        # A word that Python keeps for itself names its module with an underscore: import_.
        keyword_mark = "_" if keyword.iskeyword(name) else ""
        module = importlib.import_module(f"slipstream.cli.{name}{keyword_mark}")
        if hasattr(module, "app"):
            app.add_typer(module.app, name=name, cls=Whole)
        else:
            kind = with_more(module.more_help) if hasattr(module, "more_help") else TyperCommand
            app.command(name, cls=kind, help=inspect.getdoc(module.command))(module.command)
    return app


def main() -> None:
    """Run the command line and leave with its exit code: 0, 1 failure, 2 usage, 130 interrupted."""
    sys.exit(_run())


def _run() -> int:
    try:
        gc.set_threshold(*_GARBAGE)
        _interrupt_once()
        _warn_in_a_line()
        _replace_what_cannot_be_shown()
        return _command(_without_debug(sys.argv[1:]))
    except SlipstreamError as error:
        return _report(error)
    except KeyboardInterrupt:
        for number in _ending_signals():
            # While Python itself shuts down, another one would kill it with another exit code.
            signal.signal(number, signal.SIG_IGN)
        print("interrupted; nothing of yours was changed", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:
        # `slipstream ... | head`: the reader has what it wanted.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        return _report_disk(error) if error.errno in _NO_ROOM else _report_defect(error)
    except Exception as error:
        return _report_defect(error)


def _warn_in_a_line() -> None:
    """Warnings of ours are for the person who runs us: without the line of our code."""
    shown = warnings.showwarning

    def show(message: Any, category: type[Warning], *rest: Any, **named: Any) -> None:
        if issubclass(category, SlipstreamWarning):
            print(printable(f"warning: {message}"), file=sys.stderr, flush=True)
        else:
            shown(message, category, *rest, **named)

    warnings.showwarning = show


def _replace_what_cannot_be_shown() -> None:
    """Print on a terminal that shows ASCII, or names that are no text, instead of failing."""
    noted: list[bool] = []

    def replaced(error: UnicodeError) -> tuple[str, int]:
        assert isinstance(error, UnicodeEncodeError)
        text = error.object[error.start : error.end]
        if not noted and error.encoding not in ("utf-8", "utf8"):
            noted.append(True)
            print(
                f"this terminal shows {error.encoding} only; PYTHONUTF8=1 shows every character",
                file=sys.stderr,
            )
        return "".join(_PLAIN.get(c) or f"\\u{ord(c):04x}" for c in text), error.end

    codecs.register_error("slipstream", replaced)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="slipstream")


def _command(arguments: list[str]) -> int:
    """Run one command; typer is imported here so that Ctrl-C finds us from the first moment."""
    import typer

    try:
        code = _assemble()(arguments, prog_name="slipstream", standalone_mode=False)
        sys.stdout.flush()
        if code == _INTERRUPTED:
            # What typer makes of Ctrl-C.
            raise KeyboardInterrupt
        return code if isinstance(code, int) else 0
    except typer.Exit as leave:
        return leave.exit_code
    except typer.Abort:
        raise KeyboardInterrupt from None
    except typer.TyperException as error:
        return _report_usage(error, arguments)


def _without_debug(arguments: list[str]) -> list[str]:
    """Take ``--debug`` where people write it, which is after the command as often as before."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    if "--debug" in arguments[:end]:
        os.environ["SLIPSTREAM_DEBUG"] = "1"
    return [a for n, a in enumerate(arguments) if n >= end or a != "--debug"]


def _interrupt_once() -> None:
    """Ctrl-C, a closed terminal and a polite kill all end us by the same clean way out.

    The impatient second Ctrl-C would cut short the ending of children and the putting back of
    files, so for a while it is not heard.
    """
    first: list[float] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        if first and time.monotonic() - first[0] < _CLEANING_UP_S:
            return
        first[:] = [time.monotonic()]
        raise KeyboardInterrupt

    for number in _ending_signals():
        # What is ignored (nohup, a background job) stays so.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, interrupt)


def _ending_signals() -> list[signal.Signals]:
    names = ("SIGINT", "SIGTERM", "SIGHUP")
    return [getattr(signal, name) for name in names if hasattr(signal, name)]


def _report_disk(error: OSError) -> int:
    """Nothing more can be written, to a file, the folder for temporary ones, or our output."""
    with contextlib.suppress(OSError):
        # What is left in its buffer would fail once more when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    told = SlipstreamError(
        f"it cannot be written: {error.strerror}",
        where=None if error.filename is None else os.fsdecode(error.filename),
        remedy="free some disk space; TMPDIR says where temporary files go",
    )
    return _report(told, error)


def _report_defect(error: Exception) -> int:
    """A mistake of ours: say so, and keep the traceback for those who ask."""
    told = SlipstreamError(
        f"slipstream itself failed: {type(error).__name__}: {error}",
        remedy="the same with --debug first, and report what it prints",
    )
    return _report(told, error)


def _report_usage(error: typer.TyperException, arguments: list[str]) -> int:
    """A malformed command line: what is wrong, and where the help is."""
    if type(error).__name__ == "NoArgsIsHelpError":
        print(error.format_message())
        return 0
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "slipstream"
    message, remedy = error.format_message(), f"{command} --help"
    first = next((one for one in arguments if not one.startswith("-")), "")
    script = next((one for one in arguments if one.endswith(".py")), None)
    if message.startswith("No such command") and (verb := _verb_for(first)):
        message = f"'{first}' is no command; one comes before it"
        remedy = f"{command} {verb} {first}"
    elif type(error).__name__ == "NoSuchOption" and script:
        option = getattr(error, "option_name", "OPTION")
        remedy += f"; or, where {option} is the script's own: {command} {script} -- {option} ..."
    print(printable(f"error: {SlipstreamError(message, remedy=remedy)}"), file=sys.stderr)
    return error.exit_code


def _verb_for(workload: str) -> str | None:
    """The command to begin with where a workload was given in the place of one."""
    if workload.endswith(".slipgraph"):
        return "advise"
    return "profile" if workload.partition(":")[0].endswith(".py") else None


def _report(error: SlipstreamError, cause: Exception | None = None) -> int:
    print(printable(f"error: {error}"), file=sys.stderr)
    # The notes of an error hold the traceback in the child.
    if os.environ.get("SLIPSTREAM_DEBUG"):
        import traceback

        traceback.print_exception(cause or error)
    return error.exit_code
