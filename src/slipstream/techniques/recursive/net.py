"""`compile`: a recursive model as one kernel call per request."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from slipstream.codegen import load
from slipstream.codegen.tile import pack
from slipstream.errors import InvalidArgumentError
from slipstream.native.family import structure
from slipstream.techniques.recursive.emission import Kernel, Panel, emit, point
from slipstream.techniques.recursive.evaluation import (
    Weights,
    constant_value,
    vocabulary,
    word_table,
)
from slipstream.techniques.recursive.lowering import Constants, Lowered, cut, lower
from slipstream.techniques.recursive.native_reading import native_reader
from slipstream.techniques.recursive.reading import UnknownShapeError, one_word, reader
from slipstream.techniques.recursive.stages import (
    Staged,
    leaf_products,
    staged,
    with_leaf_children,
)
from slipstream.techniques.recursive.structures import (
    MASK_SLOTS,
    Int32s,
    Linearized,
    StructureError,
    Structures,
    linearize,
)
from slipstream.techniques.recursive.traced import (
    MAX_SHAPES,
    RecursiveModelError,
    Shape,
    Tracer,
)

if TYPE_CHECKING:
    from slipstream.techniques.recursive.explaining import Explanation
    from slipstream.techniques.recursive.training import Trainer

_MAX_TABLE_BYTES = 64 << 20
"""Size up to which tables of a whole vocabulary are computed, in bytes each."""
_Run = structure(
    "void* pointers, groups; int64_t group_count, rows, workers, private_width; "
    "void* scratch, private_rows; int64_t barriers; void* team;"
)


@dataclass(frozen=True)
class Passes:
    """Which optimisations are used; all by default.

    Attributes:
        specialize: nodes whose children are leaves have separate code, and groups of equal nodes
            are computed together.
        hoist: what depends on a word alone is computed once per word of the vocabulary.
        fuse: all equations of a stage are computed while its sums are in registers.
        persist: one call computes all levels.
        batch: nodes of a level are computed together.
    """

    specialize: bool = True
    hoist: bool = True
    fuse: bool = True
    persist: bool = True
    batch: bool = True


@dataclass(frozen=True, eq=False)
class RecursiveOutput:
    """States of all nodes.

    Attributes:
        states: of each state, [nodes, ...], in the order of the linearization.
        index: int32 [nodes], row of each node, by its number in the structures.
        linearized: the structures and their order.
    """

    states: tuple[torch.Tensor, ...]
    index: Int32s
    linearized: Linearized

    @cached_property
    def roots(self) -> tuple[torch.Tensor, ...]:
        """States of the roots, [trees, ...] each."""
        numbers = torch.from_numpy(self.linearized.roots)
        return tuple(state.index_select(0, numbers) for state in self.states)

    def of(self, node: int | Any) -> tuple[torch.Tensor, ...]:
        """Return the states of a node, given by number or, if objects were passed, by object.

        Raises:
            InvalidArgumentError: the node is not in the structures.
        """
        number = node if isinstance(node, int) else self.linearized.structures.number_of(node)
        if number is None or not 0 <= number < len(self.index):
            raise InvalidArgumentError("node", "it is not a node of these structures")
        return tuple(state[int(self.index[number])] for state in self.states)


def compile(
    model: nn.Module,
    example: Sequence[Any],
    *,
    method: str = "forward",
    weights: torch.dtype | None = None,
    workers: int | None = None,
    passes: Passes = Passes(),
) -> RecursiveNet:
    """Compile a model that recurses over trees or acyclic graphs.

    Args:
        model: its `method` is passed one node, calls itself for the node's children, and returns
            the node's states: a tensor, or a tuple of tensors, of the same shapes for all nodes.
            Control flow may depend on the structure, not on values of tensors.
        example: a few structures. Shapes of nodes that do not occur in them are compiled when
            they are first met.
        weights: ``torch.bfloat16`` stores the weights of products in 16 bits.
        workers: threads; torch's number of threads by default.

    Returns:
        A callable that is passed a list of structures, see `RecursiveNet`.

    Raises:
        RecursiveModelError: the model cannot be compiled; names the source line.
        CompileError: there is no C++ compiler.

    Source: Fegade et al., "Cortex: A Compiler for Recursive Deep Learning Models", MLSys 2021.
    """  # fmt: skip
    if weights not in (None, torch.bfloat16):
        raise InvalidArgumentError("weights", f"{weights}", remedy="torch.bfloat16 or None")
    if not isinstance(model, nn.Module) or not callable(getattr(model, method, None)):
        raise InvalidArgumentError(
            "model", f"a {type(model).__name__} is not a module with a method {method!r}",
            remedy="pass an nn.Module, and the name of the method that is passed a node",
        )  # fmt: skip
    if workers is not None and (not isinstance(workers, int) or workers < 1):
        raise InvalidArgumentError("workers", f"{workers!r}", remedy="a positive integer or None")
    net = RecursiveNet(model, method, weights is not None, workers, passes)
    net.linearize(example)
    return net


@dataclass(frozen=True)
class _Facts:
    """Properties of the kinds seen so far.

    Attributes:
        leaf: the only kind without children, if its states are looked up.
        sizes: of the vocabulary, by kind; None if the kind's input is not one word.
        looked_up: the same; None if the table would be too large.
        tabled: uint8 [kinds + 1], whether a kind's states depend on its word alone.
        mask_slots: number of children for which nodes with leaves there are separate.
        slots: maximum number of children.
    """

    leaf: int | None
    sizes: tuple[int | None, ...]
    looked_up: tuple[int | None, ...]
    tabled: npt.NDArray[np.uint8]
    mask_slots: int
    slots: int


@dataclass(frozen=True)
class Compiled:
    """A kernel and its function."""

    kernel: Kernel
    function: Any


@dataclass
class Packed:
    """Pointers for the current weights, and what keeps their memory alive."""

    version: tuple[Any, ...]
    pointers: npt.NDArray[np.int64]
    tables: dict[int, torch.Tensor]
    memory: list[Any] = field(default_factory=list)
    leaf_tables: list[torch.Tensor] = field(default_factory=list)


class RecursiveNet:
    """A compiled recursive model.

    ``net(trees)`` returns a `RecursiveOutput` for a list of structures: objects such as the model's
    `forward` reads, or `Structures`, or what `linearize` returned for them.
    """

    def __init__(
        self, model: nn.Module, method: str = "forward", half: bool = False,
        workers: int | None = None, passes: Passes = Passes(),
    ) -> None:  # fmt: skip
        self.model, self.passes = model, passes
        self._half, self.workers = half, workers
        self._tracer = Tracer(model, method)
        self.weights = Weights(model)
        self.constants = Constants()
        self._modes: tuple[bool, ...] = ()
        self._traced: Any = []
        self._shapes: list[Shape] = []
        self.kinds: list[Lowered] = []
        self._reader: Any = None
        self._generated: Compiled | None = None
        self._packed: Packed | None = None
        self._trainer: Trainer | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Type of the states."""
        return self._tracer.dtype

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shape of each state of a node."""
        return self._tracer.states

    @property
    def state_widths(self) -> list[int]:
        """Elements of each state of a node."""
        return [math.prod(shape) for shape in self.state_shapes]

    @property
    def state_tree(self) -> Any:
        """Nesting of the states in what the model returns, see `torch.utils._pytree`."""
        return self._tracer.state_tree

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RecursiveModelError(
            "a compiled recursive model cannot be copied or pickled: it holds generated code",
            remedy="copy or save its `model`, and compile the copy",
        )

    def explain(self, structures: Sequence[Any], *, gains: bool = False) -> Explanation:
        """Describe levels, launches, barriers, bytes and operations of a request.

        Args:
            gains: whether to measure what each optimisation gains; compiles a kernel for each.
        """
        from slipstream.techniques.recursive.explaining import explain

        with torch.no_grad():
            return explain(self, structures, gains=gains)

    def with_passes(self, **passes: bool) -> RecursiveNet:
        """Return a net of the same model with other optimisations."""
        return RecursiveNet(
            self.model, self._tracer.method, self._half, self.workers,
            replace(self.passes, **passes),
        )  # fmt: skip

    @property
    def mask_slots(self) -> int:
        """Number of children for which nodes with leaves there have separate code."""
        return self._facts.mask_slots

    def inference_kernel(self, tensors: dict[str, torch.Tensor]) -> tuple[Compiled, Packed]:
        """Return the kernel without gradients, and its memory for the weights `tensors`."""
        if self._generated is None:
            self._generated = self._generate()
        return self._generated, self._pack(self._generated.kernel, tensors)

    # Structures.

    def linearize(self, structures: Sequence[Any] | Structures | Linearized) -> Linearized:
        """Return structures in the order in which they are computed; ``net`` accepts the result.

        Raises:
            StructureError: a structure has a cycle, or cannot be read.
            RecursiveModelError: the model cannot be compiled for a new shape of node.
        """
        modes = tuple(module.training for module in self.model.modules())
        if modes != self._modes or self._signature() != self._traced:
            # Modules such as dropout, or with other parameters, compute something else.
            self._modes, self._shapes, self.kinds, self._traced = modes, [], [], []
            self._tracer = Tracer(self.model, self._tracer.method)
            self.weights, self.constants = Weights(self.model), Constants()
            self._forget()
        if isinstance(structures, Linearized):
            if structures.made_for is self._facts:
                return structures
            structures = structures.structures
        if isinstance(structures, Structures):
            structures = self._with_kinds(structures)
        else:
            try:
                roots = list(structures)
            except TypeError:
                raise InvalidArgumentError(
                    "structures", f"a {type(structures).__name__} is not a list of structures",
                    remedy="pass a list, also of a single one: [tree]",
                ) from None  # fmt: skip
            structures = self._read(roots)
        facts = self._facts
        return linearize(
            structures, facts.tabled, mask_slots=facts.mask_slots, slots=facts.slots, made_for=facts
        )

    def _read(self, roots: list[Any]) -> Structures:
        node: Any = self  # not a node
        attempts = 0
        while True:
            if self._reader is None:
                self._reader = native_reader(self._shapes) or reader(self._shapes)
            try:
                read: Structures = self._reader(roots)
                return read
            except UnknownShapeError as unknown:
                attempts = attempts + 1 if unknown.node is node else 0
                node = unknown.node
            if attempts == 0:
                self._add(node)
            elif attempts == 1:
                # Traced just now: compiled code is stricter, for example about subclasses of int.
                self._reader = reader(self._shapes)
            else:
                raise RecursiveModelError(
                    f"a {type(node).__name__} is not read in the same way twice",
                    remedy="its attributes must not change when they are read",
                )

    def _with_kinds(self, structures: Structures) -> Structures:
        """Return arrays with the kind of every node, which is checked if it is there."""
        if structures.kind is not None:
            arities = np.array([kind.arity for kind in self.kinds], np.int64)
            inside = (structures.kind >= 0) & (structures.kind < len(arities))
            fits = inside.copy()
            fits[inside] = arities[structures.kind[inside]] == structures.arity[inside]
            if not fits.all():
                node = int(np.flatnonzero(~fits)[0])
                raise StructureError(
                    f"node {node} of kind {structures.kind[node]} has "
                    f"{structures.arity[node]} children, which no shape of this model has", node,
                    remedy="pass structures that were read for this compiled model",
                )  # fmt: skip
            return structures
        arity = structures.arity
        most = max([*(kind.arity for kind in self.kinds), int(arity.max(initial=0))])
        by_arity = np.full(most + 1, -1, np.int32)
        for number, kind in enumerate(self.kinds):
            if by_arity[kind.arity] >= 0 or not one_word(kind.shape):
                raise InvalidArgumentError(
                    "structures", "arrays without kinds do not determine the shapes of their nodes",
                    remedy="set Structures.kind, or pass objects",
                )  # fmt: skip
            by_arity[kind.arity] = number
        unknown = np.flatnonzero(by_arity[arity] < 0)
        if len(unknown):
            node = int(unknown[0])
            raise StructureError(
                f"node {node} has {arity[node]} children, as no node of the examples", node,
                remedy="compile with an example that has such a node",
            )  # fmt: skip
        return replace(structures, kind=by_arity[arity])

    def _add(self, node: Any) -> None:
        """Trace a node of a new shape, and generate code again."""
        if len(self._shapes) >= MAX_SHAPES:
            raise RecursiveModelError(
                f"nodes have more than {MAX_SHAPES} shapes",
                remedy="read words as integers, and limit the number of children",
            )
        self._shapes.append(self._tracer.trace(node))
        self.weights.add(self._shapes[-1])
        self.kinds.append(lower(self._shapes[-1], self._tracer.states, self.constants))
        self._traced = self._signature()
        self._forget()

    def _signature(self) -> list[Any] | None:
        """Return types and shapes of the tensors that were traced; None if one is gone."""
        try:
            return [(tensor.dtype, tensor.shape) for tensor in self.weights.current().values()]
        except KeyError:
            return None

    def _forget(self) -> None:
        """Drop what was generated for other kinds."""
        self._reader = self._generated = self._packed = self._trainer = None
        vars(self).pop("_facts", None)

    @cached_property
    def _facts(self) -> _Facts:
        sizes = tuple(vocabulary(kind, self.weights) for kind in self.kinds)
        item = 8 if self.dtype == torch.float64 else 4

        def small(size: int | None, columns: int) -> bool:
            return size is not None and size * columns * item <= _MAX_TABLE_BYTES

        looked_up = tuple(
            size if self.passes.hoist and kind.inputs and small(size, kind.table_width) else None
            for size, kind in zip(sizes, self.kinds, strict=True)
        )
        leaves = [number for number, kind in enumerate(self.kinds) if kind.tabled]
        leaf = leaves[0] if len(leaves) == 1 and looked_up[leaves[0]] is not None else None
        tabled = np.array([*(kind.tabled for kind in self.kinds), 0], np.uint8)
        columns = sum(product.columns for k in self.kinds for _, product, *_ in leaf_products(k))
        masked = self.passes.specialize and leaf is not None and small(sizes[leaf], columns)
        slots = max((kind.arity for kind in self.kinds), default=0)
        return _Facts(leaf, sizes, looked_up, tabled, MASK_SLOTS if masked else 0, slots)

    # Code.

    def _generate(self) -> Compiled:
        masks = 1 << self._facts.mask_slots
        variants, leaf_widths = {}, {}
        for number, kind in enumerate(self.kinds):
            of_leaves = leaf_products(kind)
            children = {child for child, *_ in of_leaves}
            for child, product, _, first, _ in of_leaves:
                leaf_widths[number, f"{product.name}of{child}at{first}"] = product.columns
            count = masks if 0 < kind.arity <= self._facts.mask_slots else 1
            for mask in range(count):
                useful = sum(1 << c for c in range(kind.arity) if mask >> c & 1 and c in children)
                equations = with_leaf_children(kind, useful) if useful else kind
                variants[number * masks + mask] = staged(equations, fuse=self.passes.fuse)
        return self.compiled(variants, masks, leaf_widths)

    def compiled(
        self, variants: Mapping[int, Staged], masks: int = 1,
        leaf_widths: Mapping[tuple[int, str], int] | None = None,
    ) -> Compiled:  # fmt: skip
        """Generate and compile a kernel, see `emit`; by default, variants are kinds."""
        tables = [kind.table_width for kind in self.kinds]
        kernel = emit(
            variants, masks, self.state_widths, tables, leaf_widths or {},
            double=self.dtype == torch.float64, half=self._half,
            single_row=not (self.passes.specialize and self.passes.batch),
        )  # fmt: skip
        library = load(kernel.source, ("-pthread",))
        library.run_recursive.argtypes = [ctypes.c_void_p]
        library.run_recursive.restype = None
        return Compiled(kernel, library.run_recursive)

    # Weights.

    def _pack(self, kernel: Kernel, tensors: dict[str, torch.Tensor]) -> Packed:
        # Inference tensors have no version: they are packed for every call.
        version = tuple(
            (tensor.data_ptr(), object() if tensor.is_inference() else tensor._version)
            for tensor in tensors.values()
        )
        if self._packed is not None and self._packed.version == version:
            return self._packed
        with torch.no_grad():
            values = self.constant_values(tensors)
            tables: dict[int, torch.Tensor] = {}
            for number, kind in enumerate(self.kinds):
                size = self._facts.looked_up[number]
                if size is not None:
                    words = [torch.arange(size)]
                    table = word_table(kind, self.weights, tensors, words)
                    tables[number] = _not_nan(table.to(self.dtype))
            packed = Packed(version, np.zeros(len(kernel.pointers), np.int64), tables)

            def leaf(kind: int, name: str) -> torch.Tensor:
                packed.leaf_tables.append(self._leaf_table(kind, name, values, tables))
                return packed.leaf_tables[-1]

            packed.memory = point(packed.pointers, kernel, {
                "constant": lambda number: values[number].contiguous(),
                "panel": lambda panel: self.panel(panel, values),
                "table": tables.get, "leaf": leaf,
            })  # fmt: skip
        self._packed = packed
        return packed

    def constant_values(self, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Return the constants of all kinds, in the type of the states."""
        values = (constant_value(c, self.weights, tensors) for c in self.constants.items)
        return [value.to(self.dtype) for value in values]

    def panel(self, panel: Panel, values: Sequence[torch.Tensor]) -> Any:
        """Return a packed weight, from the values of all constants."""
        array = _matrix(values[panel.constant], panel.columns_first).detach().numpy()
        return pack(
            array[panel.first : panel.first + panel.depth], panel.offsets, panel.columns,
            panel.width, half=self._half,
        )  # fmt: skip

    def _leaf_table(
        self, kind: int, name: str, values: list[torch.Tensor], tables: dict[int, torch.Tensor]
    ) -> torch.Tensor:
        leaf = self._facts.leaf
        assert leaf is not None
        for child, product, load_, first, length in leaf_products(self.kinds[kind]):
            if name != f"{product.name}of{child}at{first}":
                continue
            weight = _matrix(values[product.weight], product.columns_first)[first : first + length]
            # States of leaves are ranges of the table's columns.
            state, column = self.kinds[leaf].states[int(load_.buffer[1:])], load_.index.offset
            parts = [
                tables[leaf][:, value.index.offset : value.index.offset + count]  # type: ignore[union-attr]
                for value, count in cut(state, column, column + length)
            ]
            return (torch.cat(parts, 1) @ weight).contiguous()
        raise AssertionError(name)

    # Calls.

    def __call__(self, structures: Sequence[Any] | Structures | Linearized) -> RecursiveOutput:
        """Return the states of all nodes of structures.

        Raises:
            StructureError: a structure has a cycle, or a word is out of range.
            RecursiveModelError: the model cannot be compiled for a new shape of node.
        """
        linearized = self.linearize(structures)
        tensors = self.weights.current()
        if any(t.device.type != "cpu" for t in tensors.values()):
            raise RecursiveModelError(
                "the model is not on the CPU", remedy="move it there: kernels are C++"
            )
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors.values()):
            states = self._train(linearized, tensors)
        else:
            states = self._infer(linearized, tensors)
        shaped = tuple(
            state.view(-1, *shape) for state, shape in zip(states, self.state_shapes, strict=True)
        )
        return RecursiveOutput(shaped, linearized.place, linearized)

    def _train(
        self, linearized: Linearized, tensors: dict[str, torch.Tensor]
    ) -> list[torch.Tensor]:
        from slipstream.techniques.recursive.training import Trainer

        if self._half:
            raise RecursiveModelError(
                "weights in 16 bits have no gradients",
                remedy="call it under torch.no_grad(), or compile with weights=None",
            )
        if self._trainer is None:
            self._trainer = Trainer.of(self)
        return self._trainer.states(self, linearized, tensors)

    def _infer(
        self, linearized: Linearized, tensors: dict[str, torch.Tensor]
    ) -> list[torch.Tensor]:
        generated, packed = self.inference_kernel(tensors)
        states = self.empty_states(linearized)
        if linearized.nodes == 0:
            return states
        word, tables = self.tables(linearized, tensors, packed.tables)
        pointers = packed.pointers.copy()
        point(pointers, generated.kernel, {
            "state": states.__getitem__, "child": linearized.child_of.__getitem__,
            "word": lambda: word, "table": tables.get,
        })  # fmt: skip
        self.barriers = self.launches = 0
        for groups in self.launch_groups(linearized):
            self.barriers += self.launch(generated, groups, pointers, self.workers)
            self.launches += 1
        return states

    def empty_states(self, linearized: Linearized) -> list[torch.Tensor]:
        """Return uninitialised states of all nodes, [nodes, width] each."""
        widths = self.state_widths
        return [torch.empty(linearized.nodes, width, dtype=self.dtype) for width in widths]

    def launch_groups(self, linearized: Linearized) -> list[Int32s]:
        """Return the groups of each call of the kernel."""
        groups = linearized.groups
        if not (self.passes.batch and self.passes.specialize):
            rows = np.repeat(groups, groups[:, 4], axis=0)
            first = np.concatenate([np.arange(f, f + n) for f, n in groups[:, 3:]])
            rows[:, 3], rows[:, 4] = first, 1
            if not self.passes.batch:
                rows[:, 0] = np.arange(len(rows))
            groups = np.ascontiguousarray(rows, np.int32)
        if self.passes.persist:
            return [groups]
        cuts = np.flatnonzero(np.diff(groups[:, 0])) + 1
        return [np.ascontiguousarray(part) for part in np.split(groups, cuts)]

    def launch(self, compiled: Compiled, groups: Int32s, pointers: Any, workers: int | None) -> int:
        """Call a kernel; return its number of barriers."""
        kernel, dtype = compiled.kernel, self.dtype
        workers = workers or torch.get_num_threads()
        rows = 1
        if kernel.scratch or kernel.private:
            rows = int(np.bincount(groups[:, 0], groups[:, 4]).max())
        scratch = torch.empty(kernel.scratch * rows, dtype=dtype)
        private = torch.empty(kernel.private * rows * workers, dtype=dtype)
        run = _Run(
            pointers=pointers.ctypes.data, groups=groups.ctypes.data, group_count=len(groups),
            rows=rows, workers=workers, private_width=kernel.private, scratch=scratch.data_ptr(),
            private_rows=private.data_ptr(), barriers=0,
        )  # fmt: skip
        compiled.function(ctypes.byref(run))
        return int(run.barriers)

    def tables(
        self, linearized: Linearized, tensors: Mapping[str, torch.Tensor],
        present: Collection[int],
    ) -> tuple[Int32s, dict[int, torch.Tensor]]:  # fmt: skip
        """Return the row of each node in its kind's table, and tables of kinds not in `present`."""
        word, tables = linearized.word, {}
        for kind in set(linearized.groups[:, 1].tolist()):
            lowered = self.kinds[kind]
            if not lowered.inputs:
                continue
            size = self._facts.sizes[kind]
            if size is not None:
                self._check_words(linearized, kind, size)
            if kind in present:
                continue
            if one_word(lowered.shape):
                rows = linearized.numbers(kind)
                words, inverse = np.unique(linearized.word[rows], return_inverse=True)
                word = word.copy() if word is linearized.word else word
                word[rows] = inverse
                columns = [torch.from_numpy(words.astype(np.int64))]
            else:
                inputs = linearized.structures.inputs.get(kind, [])
                columns = [
                    torch.stack([torch.as_tensor(row[at]) for row in inputs])
                    for at in range(len(lowered.shape.words) + len(lowered.shape.tensors))
                ]
            table = word_table(lowered, self.weights, tensors, columns)
            tables[kind] = _not_nan(table.to(self.dtype))
        return word, tables

    def _check_words(self, linearized: Linearized, kind: int, size: int) -> None:
        groups = linearized.groups
        for first, count in groups[groups[:, 1] == kind, 3:].tolist():
            # As unsigned numbers, negative ones are out of range too.
            words = linearized.word[first : first + count].view(np.uint32)
            if words.max() < size:
                continue
            at = first + int(np.flatnonzero(words >= size)[0])
            node = int(np.flatnonzero(linearized.place == at)[0])
            raise StructureError(
                f"word {linearized.word[at]} of node {node} is not in 0 to {size - 1}", node,
                remedy="pass numbers of rows of the embedding",
            )  # fmt: skip


def _not_nan(table: torch.Tensor) -> torch.Tensor:
    """Return a table of inputs, after checking its values."""
    rows = table.isnan().any(1).nonzero()
    if len(rows):
        raise RecursiveModelError(
            "what a node computes from its word alone, or from its tensors, is not a number",
            where=f"row {int(rows[0])} of {len(table)}",
            remedy="check the embedding and the inputs",
        )  # fmt: skip
    return table.contiguous()


def _matrix(weight: torch.Tensor, columns_first: bool) -> torch.Tensor:
    """Return a constant as [K, columns]."""
    weight = weight.reshape(weight.shape[-2:] if weight.dim() > 1 else (-1, 1))
    return weight.T if columns_first else weight
