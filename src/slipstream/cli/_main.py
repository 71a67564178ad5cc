"""Assemble the commands, run one, and turn its errors into words and exit codes."""

from __future__ import annotations

import importlib
import os
import sys
import traceback

import typer

from slipstream.errors import SlipstreamError

# In the order of the flow, then engines, then tools. Each module holds `command` (a function)
# or `app` (a noun with verbs of its own); the first line of its docstring is the help.
_FLOW = ("profile", "predict", "apply", "prove", "advise")
_TOOLS = ("measure", "results", "data", "bench", "doctor", "demo")
_INTERRUPTED = 130


def _assemble() -> typer.Typer:
    app = typer.Typer(
        name="slipstream",
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
        version: bool = typer.Option(False, "--version", help="Print the version and leave."),
    ) -> None:
        if version:
            from importlib.metadata import version as installed

            print("slipstream", installed("slipstream"))
            raise typer.Exit
        if debug:
            os.environ["SLIPSTREAM_DEBUG"] = "1"

    for panel, names in (("The flow", _FLOW), ("Tools", _TOOLS)):
        for name in names:
            module = importlib.import_module(f"slipstream.cli.{name}")
            if hasattr(module, "app"):
                app.add_typer(module.app, name=name, rich_help_panel=panel)
            else:
                app.command(name, rich_help_panel=panel)(module.command)
    return app


def main() -> None:
    """Run the command line and leave with its exit code: 0, 1 failure, 2 usage, 130 interrupted."""
    sys.exit(_run())


def _run() -> int:
    try:
        code = _assemble()(standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except SlipstreamError as error:
        return _report(error)
    except typer.Exit as leave:
        return leave.exit_code
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted; nothing of yours was changed", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:
        # `slipstream ... | head`: the reader has what it wanted.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except typer.TyperException as error:
        return _report_usage(error)


def _report_usage(error: typer.TyperException) -> int:
    """A malformed command line: what is wrong, and where the help is."""
    if type(error).__name__ == "NoArgsIsHelpError":
        print(error.format_message())
        return 0
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "slipstream"
    print(f"error: {error.format_message()}", file=sys.stderr)
    print(f"  try: {command} --help", file=sys.stderr)
    return error.exit_code


def _report(error: SlipstreamError) -> int:
    print(f"error: {error}", file=sys.stderr)
    if os.environ.get("SLIPSTREAM_DEBUG"):
        traceback.print_exception(error)
        for text in getattr(error, "__notes__", []):
            print(text, file=sys.stderr)
    return error.exit_code
