"""`Workload`: the recipe that builds the user's model and step in any process."""

from __future__ import annotations

import ast
import contextlib
import copy
import difflib
import json
import shlex
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from slipstream.errors import InvalidArgumentError, UnknownNameError, WorkloadError
from slipstream.units import with_article
from slipstream.workload.built import FIELDS, Applicable, BuiltWorkload, build_from
from slipstream.workload.loops import lines_around
from slipstream.workload.providers import provider_in

_MAX_DIGITS = 9


@dataclass(frozen=True)
class Workload:
    """A recipe: the user's function or script, its arguments, and techniques on top.

    It is immutable: `with_technique` returns a new one. Other processes get its `target`,
    `arguments` and the techniques' specs; the live model is built by `slipstream.workload.drive`,
    in a child process.

    Attributes:
        target: ``file.py:function``, or ``script.py`` for a whole script; ``script.py:34`` for the
            steps of the statement or loop on line 34.
        arguments: keyword arguments of the function, JSON values only.
        script_arguments: ``sys.argv[1:]`` of a plain script.
        techniques: applied in stage order when the workload is built.
        live: set by `Workload.of` only: objects that exist only in this process.
    """

    target: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    script_arguments: tuple[str, ...] = ()
    techniques: tuple[Applicable, ...] = ()
    live: Mapping[str, Any] | None = field(default=None, repr=False, compare=False)

    @classmethod
    def parse(cls, target: str | Path, *script_arguments: str, **arguments: Any) -> Workload:
        """Return a workload from ``file.py:function``, ``script.py`` or ``script.py:LINE``.

        The file is checked.

        A file with ``skyline_model_provider`` or ``deepview_model_provider`` is treated as one with
        providers, not as a script; see `slipstream.workload.providers`.

        Raises:
            InvalidArgumentError: `target` does not have this form, or is a live object.
            WorkloadError: the file does not exist, does not parse or has no statement on the line.
            UnknownNameError: the file defines no such function; the nearest is suggested.
        """
        if not isinstance(target, (str, Path)):
            raise InvalidArgumentError(
                "workload",
                f"expected the name of a file, but got {with_article(type(target).__name__)}",
                remedy='for example "train.py:make_workload"; for objects of this process, as in a '
                "notebook: ss.Workload.of(model, batch, loss, optimizer)",
            )
        text = str(target)
        try:
            json.dumps(arguments)
        except (TypeError, ValueError) as error:
            raise InvalidArgumentError(
                "arguments",
                f"they must be JSON, to be sent to another process: {error}",
                remedy="pass numbers, strings or lists; live objects with Workload.of(model, ...)",
            ) from error
        path, colon, function = text.rpartition(":") if ".py:" in text else (text, "", "")
        file = Path(path)
        if file.suffix != ".py":
            raise InvalidArgumentError(
                "WORKLOAD",
                f"'{text}' is neither file.py:function nor a script.py",
                remedy=_guess(text) or "for example train.py:make_workload, or train.py",
            )
        tree = _parse_source(file)
        if function.isdecimal():
            if len(function) > _MAX_DIGITS or not lines_around(tree, int(function)):
                raise WorkloadError(
                    "there is no statement on this line",
                    where=text,
                    remedy="pass a line where an optimizer steps or a model is called, or a line "
                    "of its loop",
                )
        elif colon:
            functions, others = _names(tree)
            # After `from x import *` the names are unknown.
            if function not in functions | others and "*" not in others:
                raise UnknownNameError("function", function, functions, where=str(file))
        elif (provider := provider_in(tree)) is not None:
            text = f"{text}:{provider}"
        if arguments and not names_function(text):
            raise InvalidArgumentError(
                "--set",
                "a plain script takes no keyword arguments",
                remedy="pass its own arguments after --, or name a function: "
                f"{path}:{(workload_functions(file) or ['FUNCTION'])[0]}",
            )
        return cls(text, dict(arguments), tuple(script_arguments))

    @classmethod
    def of(
        cls,
        model: Any,
        batch: Any = None,
        loss: Any = None,
        optimizer: Any = None,
        *,
        step: Any = None,
        metric: Any = None,
        samples: int = 0,
    ) -> Workload:
        """Return a workload from live objects: copied now, and confined to this process.

        Args:
            model: an ``nn.Module``, or a zero-argument callable that runs one step.
            batch: input of one step; see `BuiltWorkload`.
            loss: ``loss(output, targets)``, or None for inference and for models that return one.
            optimizer: steps `model`'s parameters; None for inference.
            step: runs one step, instead of the step built from the other objects.
            metric: returns the quality after the steps so far; lower is better.
            samples: samples per step; 0 to use the batch's first dimension.

        Raises:
            InvalidArgumentError: the objects cannot be copied together, or samples are negative.
        """
        import torch

        if samples < 0:
            raise InvalidArgumentError("samples", f"{samples} is negative")
        if step is None and callable(model) and not isinstance(model, torch.nn.Module):
            model, step = None, model
        live = dict(
            zip(FIELDS, (model, batch, loss, optimizer, step, metric, samples), strict=True)
        )
        try:
            # A single deepcopy, so that the optimizer's copy steps the model's copy.
            copied = copy.deepcopy(live)
        except Exception as error:
            raise InvalidArgumentError(
                "model",
                f"these objects cannot be copied: {error}",
                remedy="pass a file.py:function instead; it is built from scratch each time",
            ) from error
        return cls("live objects", live=copied)

    @property
    def path(self) -> Path:
        """The target's file."""
        return Path(self.target.rpartition(":")[0] if ".py:" in self.target else self.target)

    @property
    def function(self) -> str | None:
        """The function's name, or None for a plain script."""
        return self._place if names_function(self.target) else None

    @property
    def line(self) -> int | None:
        """A line of a plain script whose steps are meant; None for those that come first."""
        return int(self._place) if self._place.isdecimal() else None

    @property
    def lines(self) -> range:
        """The loop or statement around `line`; empty without one, or if the file is unreadable."""
        if self.line is None:
            return range(0)
        try:
            return lines_around(_parse_source(self.path), self.line)
        except WorkloadError:
            return range(0)

    @property
    def file_and_place(self) -> str:
        """The absolute path with the function or line, from which `parse` gets this workload."""
        return str(self.path.resolve()) + f":{self._place}" * bool(self._place)

    @property
    def _place(self) -> str:
        return self.target.rpartition(":")[2] if ".py:" in self.target else ""

    @property
    def name(self) -> str:
        """Short name without folders: ``train.py:make_workload(batch_size=64)``."""
        if self.live is not None:
            return self.target
        shown = self.path.name + f":{self._place}" * bool(self._place)
        if self.arguments:
            inside = ", ".join(f"{key}={value}" for key, value in self.arguments.items())
            shown += f"({inside})"
        # A file name may hold bytes that are not valid text; stores and pages accept only text.
        return shown.encode(errors="backslashreplace").decode()

    def with_technique(self, *techniques: Applicable) -> Workload:
        """Return this workload with `techniques` added; they are applied in stage order."""
        return replace(self, techniques=self.techniques + techniques)

    def build(self, seed: int = 0) -> BuiltWorkload:
        """Build the live model in *this* process from `Workload.of`'s objects.

        Raises:
            WorkloadError: the workload is a file, which `drive` builds in a child.
        """
        if self.live is None:
            raise WorkloadError(
                f"{self.name} is built in a child process",
                remedy="use ss.profile, ss.prove or ss.apply",
            )
        return build_from(copy.deepcopy(dict(self.live)), self.techniques, seed, self.name)

    def to_json(self) -> dict[str, Any]:
        """Return what another process needs to build this workload, with techniques as specs.

        Raises:
            WorkloadError: live objects cannot be sent to another process.
        """
        if self.live is not None:
            raise WorkloadError(
                "a workload of live objects cannot leave this process",
                remedy="pass a file.py:function instead",
            )
        return {
            "target": self.file_and_place,
            "arguments": dict(self.arguments),
            "script_arguments": list(self.script_arguments),
            "techniques": [str(technique) for technique in self.techniques],
        }


def names_function(target: str) -> bool:
    """Whether `target` is ``file.py:function``, neither a plain script nor a line of one."""
    return ".py:" in target and not target.rpartition(":")[2].isdecimal()


def _names(tree: ast.Module) -> tuple[set[str], set[str]]:
    """Return the functions that a module defines, and all other names that it binds."""
    functions: set[str] = set()
    others: set[str] = set()
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            (others if isinstance(node, ast.ClassDef) else functions).add(node.name)
            continue  # names inside it are not the module's
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            others.add(node.id)
        elif isinstance(node, ast.alias):
            others.add(node.asname or node.name)
        pending += ast.iter_child_nodes(node)
    return functions, others


def workload_functions(path: Path) -> list[str]:
    """Return the functions of a file that may be workloads: they return the parts of a step.

    Functions with required arguments are left out. Empty if the file cannot be read.
    """
    try:
        tree = _parse_source(path)
    except WorkloadError:
        return []
    return [node.name for node in workloads_in(tree)]


def workloads_in(tree: ast.Module) -> list[ast.FunctionDef]:
    """Return what `workload_functions` does, for a syntax tree."""
    return [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and len(node.args.posonlyargs + node.args.args) == len(node.args.defaults)
        and None not in node.args.kw_defaults
        and _returns_parts(node)
    ]


def _returns_parts(function: ast.FunctionDef) -> bool:
    """Whether it returns (model, batch, ...), a mapping of them, or a ``BuiltWorkload``."""
    for node in ast.walk(function):
        value = node.value if isinstance(node, ast.Return) else None
        if isinstance(value, ast.Call):
            called = value.func.attr if isinstance(value.func, ast.Attribute) else None
            called = value.func.id if isinstance(value.func, ast.Name) else called
            if called == "BuiltWorkload":
                return True
        if isinstance(value, ast.Tuple) and 2 <= len(value.elts) <= 4:
            return True
        keys = value.keys if isinstance(value, ast.Dict) else []
        if any(isinstance(key, ast.Constant) and key.value in ("model", "step") for key in keys):
            return True
    return False


def _guess(text: str) -> str | None:
    """Suggest the target that ``train``, ``package.train:make`` or a notebook was meant as."""
    path, colon, function = text.partition(":")
    for file in (Path(f"{path}.py"), Path(path.replace(".", "/") + ".py")):
        if file.is_file():
            return f"did you mean {file}{colon}{function}?"
    module, _, name = path.rpartition(".")
    file = Path(module.replace(".", "/") + ".py")
    if not colon and module and file.is_file():
        return f"did you mean {file}:{name}?"
    if text.endswith(".slipgraph"):
        return "a recording cannot be run; pass it to predict or advise: ss.load(...)"
    if path.endswith(".ipynb"):
        export = f"jupyter nbconvert --to script {shlex.quote(path)}"
        return f"call slipstream.Workload.of(model, batch, ...) in it, or make a script: {export}"
    near = difflib.get_close_matches(Path(path).name, _neighbours(path))
    return f"did you mean {Path(path).with_name(near[0])}{colon}{function}?" if near else None


def _neighbours(path: str) -> list[str]:
    """Return the names of scripts and recordings in the folder of `path`; empty on errors."""
    with contextlib.suppress(OSError):
        return [
            file.name
            for file in Path(path).parent.iterdir()
            if file.suffix in (".py", ".slipgraph")
        ]
    return []


def _parse_source(file: Path) -> ast.Module:
    try:
        source = file.read_bytes()
    except FileNotFoundError:
        # Empty if the folder does not exist.
        names = sorted(path.name for path in file.parent.glob("*.py"))
        # Without the suffix, which all of them share.
        similar = difflib.get_close_matches(file.stem, [Path(name).stem for name in names], n=1)
        if not file.parent.is_dir():
            remedy = f"the folder '{file.parent}' does not exist either; check the path"
        elif similar:
            remedy = f"did you mean {file.parent / similar[0]}.py?"
        else:
            remedy = f"Python files there: {', '.join(names[:8])}" if names else "check the path"
        raise WorkloadError(f"there is no file '{file}'", remedy=remedy) from None
    except OSError as error:
        raise WorkloadError(
            f"'{file}' cannot be read: {error.strerror}", remedy="check its permissions"
        ) from error
    try:
        with warnings.catch_warnings():
            # Python will warn of dubious escapes when it runs the file.
            warnings.simplefilter("ignore")
            return ast.parse(source, filename=str(file))
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        text = (getattr(error, "text", None) or "").strip()
        raise WorkloadError(
            f"Python cannot parse the file: {getattr(error, 'msg', error)}"
            + (f"\n    {text}" if text else ""),
            where=f"{file}:{line}" if line else str(file),
            remedy="fix the file; Python cannot run it either",
        ) from error
