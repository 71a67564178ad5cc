"""Assemble the commands, run one, and turn its errors into messages and exit codes."""

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
from slipstream.tables import escape_control

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

    import typer

# Each module defines `command` (a function) or `app` (a group of subcommands). The first line of
# its docstring is the help.
_FLOW = (
    "profile", "explain", "predict", "apply", "prove", "advise", "batch", "devices", "report",
    "live", "lsp", "export", "import", "diff",
)  # fmt: skip
_ENGINES = ("cluster", "scale", "netlab", "plan", "pretrain", "control", "search", "storage")
_TOOLS = (
    "ship", "hw", "xray", "loops", "synth", "nas", "stability", "hfuse", "serve", "mlperf",
    "measure", "results", "data", "dedup", "bench", "doctor", "demo",
)  # fmt: skip
_INTERRUPTED = 130
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)
# Further Ctrl-C are ignored for this long, while child processes end and files are restored.
_CLEANUP_S = 10.0
# Graphs and torch hold many long-lived objects: with Python's default thresholds (700, 10, 10),
# `advise` spent a sixth of its own time in garbage collection.
_GC_THRESHOLDS = 50_000, 20, 100
# Replacements on terminals that can only show ASCII.
_ASCII = {
    **dict(zip("▁▂▃▄▅▆▇█", "__--==##", strict=True)),
    "µ": "u", "μ": "u", "…": "...", "–": "-", "─": "-", "→": "->", "±": "+-", "·": ".",
    "×": "x", "∞": "inf", "▶": ">", "◀": "<",
}  # fmt: skip


def _assemble() -> typer.Typer:
    import inspect

    import typer
    from typer.core import TyperCommand, TyperGroup

    class FullHelpGroup(TyperGroup):
        """Group whose help shows each command's whole first sentence; typer would truncate it."""

        def sections(self) -> dict[str, Sequence[str]]:
            return {"Commands": list(self.commands)}

        def format_commands(self, ctx: Any, formatter: Any) -> None:
            for title, names in self.sections().items():
                with formatter.section(title):
                    formatter.write_dl(
                        [(name, self.commands[name].get_short_help_str(1000)) for name in names]
                    )

        def resolve_command(self, ctx: Any, args: list[str]) -> Any:
            if "examples" in self.commands and args[0].endswith(".jsonl"):
                args = ["examples", *args]  # slipstream synth examples.jsonl
            return super().resolve_command(ctx, args)

    class OrderedGroup(FullHelpGroup):
        """Group whose help lists the flow first, then clusters, then tools."""

        def list_commands(self, ctx: Any) -> list[str]:
            return [name for name in (*_FLOW, *_ENGINES, *_TOOLS) if name in self.commands]

        def sections(self) -> dict[str, Sequence[str]]:
            return {"The flow": _FLOW, "Clusters": _ENGINES, "Tools": _TOOLS}

    def with_epilog(section: Any) -> type[TyperCommand]:
        """Return a command class whose help ends with the list that `section` builds on demand."""

        class CommandWithEpilog(TyperCommand):
            def format_epilog(self, ctx: Any, formatter: Any) -> None:
                title, rows = section()
                with formatter.section(title):
                    formatter.write_dl(rows)

        return CommandWithEpilog

    def show_version(requested: bool) -> None:
        if requested:
            from importlib.metadata import version

            print("slipstream", version("slipstream"))
            raise typer.Exit

    app = typer.Typer(
        name="slipstream",
        cls=OrderedGroup,
        # Importing rich and its Markdown parser takes longer than everything else together.
        rich_markup_mode=None,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        help="What would make this PyTorch model cheaper, by how much, and is that true?",
        epilog="Start with: slipstream demo. Every command that prints a table accepts --json.",
    )

    @app.callback()
    def everything(
        debug: bool = typer.Option(False, "--debug", help="Show the tracebacks of errors."),
        version: bool = typer.Option(
            False, "--version", help="Print the version and exit.",
            callback=show_version, is_eager=True,
        ),
    ) -> None:  # fmt: skip
        if debug:
            os.environ["SLIPSTREAM_DEBUG"] = "1"

    for name in (*_FLOW, *_ENGINES, *_TOOLS):
        # A Python keyword cannot name a module: the command `import` is in import_.py.
        suffix = "_" if keyword.iskeyword(name) else ""
        module = importlib.import_module(f"slipstream.cli.{name}{suffix}")
        if hasattr(module, "app"):
            app.add_typer(module.app, name=name, cls=FullHelpGroup)
        else:
            kind = with_epilog(module.more_help) if hasattr(module, "more_help") else TyperCommand
            app.command(name, cls=kind, help=inspect.getdoc(module.command))(module.command)
    return app


def main() -> None:
    """Run the command line and exit: 0 success, 1 failure, 2 usage error, 130 interrupted."""
    sys.exit(_run())


def _run() -> int:
    try:
        gc.set_threshold(*_GC_THRESHOLDS)
        _handle_signals()
        _shorten_warnings()
        _replace_unprintable_characters()
        return _command(_without_debug(sys.argv[1:]))
    except SlipstreamError as error:
        return _report(error)
    except KeyboardInterrupt:
        for number in _termination_signals():
            # A second signal while Python shuts down would change the exit code.
            signal.signal(number, signal.SIG_IGN)
        # Python ends itself by SIGINT if a KeyboardInterrupt passed through code of a string, as in
        # imports that define named tuples; running other such code clears that.
        exec("")
        print("interrupted; your files were not changed", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:
        # `slipstream ... | head`: the reader has closed the pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        return _report_disk(error) if error.errno in _DISK_ERRORS else _report_defect(error)
    except Exception as error:
        return _report_defect(error)


def _shorten_warnings() -> None:
    """Print slipstream's own warnings for users, without the line of code that issued them."""
    default = warnings.showwarning

    def show(message: Any, category: type[Warning], *args: Any, **kwargs: Any) -> None:
        if issubclass(category, SlipstreamWarning):
            print(escape_control(f"warning: {message}"), file=sys.stderr, flush=True)
        else:
            default(message, category, *args, **kwargs)

    warnings.showwarning = show


def _replace_unprintable_characters() -> None:
    """Replace characters that the terminal cannot show and file names that are not valid text."""
    warned = False

    def replace(error: UnicodeError) -> tuple[str, int]:
        nonlocal warned
        assert isinstance(error, UnicodeEncodeError)
        text = error.object[error.start : error.end]
        if not warned and error.encoding not in ("utf-8", "utf8"):
            warned = True
            print(
                f"this terminal shows {error.encoding} only; set PYTHONUTF8=1 to show the rest",
                file=sys.stderr,
            )
        return "".join(_ASCII.get(c) or f"\\u{ord(c):04x}" for c in text), error.end

    codecs.register_error("slipstream", replace)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="slipstream")


def _command(arguments: list[str]) -> int:
    """Run one command; typer is imported here, when Ctrl-C is already handled."""
    import typer

    try:
        code = _assemble()(arguments, prog_name="slipstream", standalone_mode=False)
        sys.stdout.flush()
        if code == _INTERRUPTED:
            # typer's exit code for Ctrl-C.
            raise KeyboardInterrupt
        return code if isinstance(code, int) else 0
    except typer.Exit as status:
        return status.exit_code
    except typer.Abort:
        raise KeyboardInterrupt from None
    except typer.TyperException as error:
        return _report_usage(error, arguments)


def _without_debug(arguments: list[str]) -> list[str]:
    """Accept ``--debug`` after the command as well as before it."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    if "--debug" in arguments[:end]:
        os.environ["SLIPSTREAM_DEBUG"] = "1"
    return [a for n, a in enumerate(arguments) if n >= end or a != "--debug"]


def _handle_signals() -> None:
    """Turn Ctrl-C, a closed terminal and SIGTERM into a KeyboardInterrupt.

    Later signals are ignored for `_CLEANUP_S`: they would interrupt ending the child processes and
    restoring the files.
    """
    first: list[float] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        if first and time.monotonic() - first[0] < _CLEANUP_S:
            return
        first[:] = [time.monotonic()]
        raise KeyboardInterrupt

    for number in _termination_signals():
        # Signals that are already ignored (nohup, a background job) stay ignored.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, interrupt)


def _termination_signals() -> list[signal.Signals]:
    names = ("SIGINT", "SIGTERM", "SIGHUP")
    return [getattr(signal, name) for name in names if hasattr(signal, name)]


def _report_disk(error: OSError) -> int:
    """Report that a file, a temporary file or stdout cannot be written."""
    with contextlib.suppress(OSError):
        # Flushing the remaining buffer when Python exits would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    failure = SlipstreamError(
        f"writing failed: {error.strerror}",
        where=None if error.filename is None else os.fsdecode(error.filename),
        remedy="free some disk space; TMPDIR sets the folder for temporary files",
    )
    return _report(failure, error)


def _report_defect(error: Exception) -> int:
    """Report a defect of slipstream; the traceback is shown with ``--debug``."""
    failure = SlipstreamError(
        f"slipstream itself failed: {type(error).__name__}: {error}",
        remedy="run it again with --debug as the first option, and report the output",
    )
    return _report(failure, error)


def _report_usage(error: typer.TyperException, arguments: list[str]) -> int:
    """Report a malformed command line, with the command that shows the help."""
    if type(error).__name__ == "NoArgsIsHelpError":
        print(error.format_message())
        return 0
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "slipstream"
    message, remedy = error.format_message(), f"{command} --help"
    first = next((word for word in arguments if not word.startswith("-")), "")
    script = next((word for word in arguments if word.endswith(".py")), None)
    if message.startswith("No such command") and (verb := _verb_for(first)):
        message = f"'{first}' is not a command; a command comes before the workload"
        remedy = f"{command} {verb} {first}"
    elif type(error).__name__ == "NoSuchOption" and script:
        option = getattr(error, "option_name", "OPTION")
        remedy += f"; or, for the script's own {option}: {command} {script} -- {option} ..."
    print(escape_control(f"error: {SlipstreamError(message, remedy=remedy)}"), file=sys.stderr)
    return error.exit_code


def _verb_for(workload: str) -> str | None:
    """Return the command to suggest for a workload without one."""
    if workload.endswith(".slipgraph"):
        return "advise"
    return "profile" if workload.partition(":")[0].endswith(".py") else None


def _report(error: SlipstreamError, cause: Exception | None = None) -> int:
    print(escape_control(f"error: {error}"), file=sys.stderr)
    # An error's notes include the traceback of the child process.
    if os.environ.get("SLIPSTREAM_DEBUG"):
        import traceback

        traceback.print_exception(cause or error)
    return error.exit_code
