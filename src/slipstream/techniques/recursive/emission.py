"""C++ of the kernel of a recursive model: one call computes all levels of a request.

Groups of nodes are executed level by level. Within a stage, every worker owns a slice of the output
columns of all nodes, so that its packed weights stay in its cache from level to level; every other
level runs through the columns backwards, which finds the weights used last in the cache.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.codegen import PRELUDE
from slipstream.codegen.ops import OPS
from slipstream.codegen.program import Apply, Const, Expr, Load
from slipstream.codegen.team import TEAM
from slipstream.codegen.tile import TileShape, tile_shape, tile_source
from slipstream.techniques.recursive.lowering import MatrixProduct, Product, Target
from slipstream.techniques.recursive.stages import Staged, Unit


@dataclass(frozen=True)
class Panel:
    """A packed weight.

    Attributes:
        constant: its number; `columns_first` as of `Product`.
        first, depth: the range of k.
        offsets: first column of each gate.
        columns: of each gate.
        width: columns of a tile.
    """

    constant: int
    columns_first: bool
    first: int
    depth: int
    offsets: tuple[int, ...]
    columns: int
    width: int


@dataclass
class Kernel:
    """A generated source and the pointers that it is passed.

    Attributes:
        pointers: what each is: ("state", number), ("gradient", number), ("child", slot), ("word",),
            ("constant", number), ("table", kind), ("saved", kind, buffer), ("leaf", kind, buffer)
            or ("panel", `Panel`).
        scratch: elements per row of a level of all temporaries.
        private: those that each worker has.
        stages: number of stages by variant (kind and mask).
        weight_bytes: bytes of panels that a group of a variant reads.
        flops: per node of a variant.
    """

    source: str = ""
    pointers: list[tuple[Any, ...]] = field(default_factory=list)
    scratch: int = 0
    private: int = 0
    stages: dict[int, int] = field(default_factory=dict)
    weight_bytes: dict[int, int] = field(default_factory=dict)
    flops: dict[int, int] = field(default_factory=dict)

    def pointer(self, *name: object) -> int:
        if name not in self.pointers:
            self.pointers.append(name)
        return self.pointers.index(name)


def point(
    pointers: npt.NDArray[np.int64], kernel: Kernel, memory_of: Mapping[str, Callable[..., Any]]
) -> list[Any]:
    """Set pointers of a kernel, see `Kernel`.

    Args:
        memory_of: by the first part of a pointer's name, a function that returns a tensor, an array
            or None for the other parts; a pointer without memory remains.

    Returns:
        What must be kept alive.
    """
    used = []
    for place, (name, *rest) in enumerate(kernel.pointers):
        memory = memory_of[name](*rest) if name in memory_of else None
        if memory is not None:
            used.append(memory)
            is_tensor = hasattr(memory, "data_ptr")
            pointers[place] = memory.data_ptr() if is_tensor else memory.ctypes.data
    return used


_RUN = r"""
struct Run {
  const void* const* pointers;
  const int32_t* groups;  // level, kind, mask, first, count
  i64 group_count, rows, workers, private_width;
  real *scratch, *private_rows;
  i64 barriers;
  Team* team;
};

// The nodes of a group; `slot` counts rows of the level before it.
struct Group { i64 first, count, slot, level; };

INLINE void slice(i64 count, int worker, i64 workers, i64* first, i64* end) {
  *first = count * worker / workers;
  *end = count * (worker + 1) / workers;
}
"""
_EACH_ROW = """\
(const Run& run, const Group& group, int worker) {
  i64 first, end;
  slice(group.count, worker, run.team->size, &first, &end);
  for (i64 row = first; row < end; ++row) {
"""
_MATRIX = r"""
struct Rows { const real* data; i64 count; };

// out[M, N] = left[M, K] right[K, N], where `right` consists of several ranges of rows.
template <i64 M, i64 N, i64 K, i64 kRow, i64 kDepth, int P>
void matrix(real* out, const real* left, const Rows (&right)[P]) {
  if (N == 1 && P == 1 && kDepth == 1) {
    for (i64 i = 0; i < M; ++i) {
      vec total = {};
      i64 k = 0;
      for (; k + kLanes <= K; k += kLanes) {
        vec u, v;
        __builtin_memcpy(&u, left + i * kRow + k, sizeof u);
        __builtin_memcpy(&v, right[0].data + k, sizeof v);
        total += u * v;
      }
      real sum = 0;
      for (int lane = 0; lane < kLanes; ++lane) sum += total[lane];
      for (; k < K; ++k) sum += left[i * kRow + k] * right[0].data[k];
      out[i] = sum;
    }
  } else if (N == 1) {
    for (i64 i = 0; i < M; ++i) out[i] = 0;
    for (const Rows& b : right) {
      for (i64 k = 0; k < b.count; ++k, left += kDepth)
        for (i64 i = 0; i < M; ++i) out[i] += left[i * kRow] * b.data[k];
    }
  } else {
    constexpr int kRows = 4, kVectors = 4;
    constexpr i64 kColumns = kLanes * kVectors;
    for (i64 j = 0; j < N; j += kColumns) {
      for (i64 i = 0; i < M; i += kRows) {
        const real* a = left + i * kRow;
        if (j + kColumns <= N && i + kRows <= M) {
          vec sum[kRows][kVectors] = {};
          for (const Rows& part : right) {
            for (i64 k = 0; k < part.count; ++k, a += kDepth) {
              vec b[kVectors];
              __builtin_memcpy(b, part.data + k * N + j, sizeof b);
#pragma GCC unroll 4
              for (int r = 0; r < kRows; ++r) {
                const vec value = a[r * kRow] - vec{};
#pragma GCC unroll 4
                for (int v = 0; v < kVectors; ++v) sum[r][v] += value * b[v];
              }
            }
          }
          for (int r = 0; r < kRows; ++r)
            __builtin_memcpy(out + (i + r) * N + j, sum[r], sizeof sum[r]);
          continue;
        }
        for (i64 r = i; r < M && r < i + kRows; ++r)
          for (i64 l = j; l < N && l < j + kColumns; ++l) {
            const real* a = left + r * kRow;
            real sum = 0;
            for (const Rows& part : right)
              for (i64 k = 0; k < part.count; ++k, a += kDepth) sum += *a * part.data[k * N + l];
            out[r * N + l] = sum;
          }
      }
    }
  }
}
"""
_BODY = r"""
void body(void* argument, int worker) {
  Run& run = *static_cast<Run*>(argument);
  const int32_t* end = run.groups + 5 * run.group_count;
  for (const int32_t* level = run.groups; level < end;) {
    const int32_t* next = level;
    int stages = 0;
    for (; next < end && next[0] == level[0]; next += 5) {
      const int own = stages_of(next[1] * kMasks + next[2]);
      stages = own > stages ? own : stages;
    }
    for (int stage = 1; stage <= stages; ++stage) {
      i64 slot = 0;
      for (const int32_t* group = level; group < next; group += 5) {
        execute(run, group[1] * kMasks + group[2], stage,
                Group{group[3], group[4], slot, group[0]}, worker);
        slot += group[4];
      }
      if (stage == stages && next == end) break;
      if (worker == 0) ++run.barriers;
      meet(run.team);
    }
    level = next;
  }
}

}  // namespace

extern "C" void run_recursive(Run* run) {
  run->barriers = 0;
  run_team(static_cast<int>(run->workers), body, run, &run->team);
}
"""


def emit(
    variants: Mapping[int, Staged],
    masks: int,
    state_widths: Sequence[int],
    table_widths: Sequence[int],
    leaf_widths: Mapping[tuple[int, str], int],
    *,
    double: bool = False,
    half: bool = False,
    single_row: bool = False,
) -> Kernel:
    """Return the kernel of a model.

    Args:
        variants: stages by number: kind * masks + mask.
        masks: number of masks of leaf children.
        state_widths: elements of each state.
        table_widths: columns of each kind's table.
        leaf_widths: columns of each table of leaf children's shares of products.
        double: whether values are float64.
        half: whether weights are bfloat16.
        single_row: whether nodes are computed one by one.
    """  # fmt: skip
    kernel = Kernel()
    item = 8 if double else 4
    lanes = tile_shape([], 1, item).lanes
    parts = [
        PRELUDE, f"using real = {'double' if double else 'float'};\n",
        "namespace {\n", tile_source(lanes) if not double else _double(tile_source(lanes)),
        "}  // namespace\n", TEAM, "namespace {\n", f"constexpr int kMasks = {masks};\n", _RUN,
        _MATRIX if any(stage.matrices for v in variants.values() for stage in v.stages) else "",
    ]  # fmt: skip
    for number, staged in variants.items():
        writer = _Writer(
            kernel, number, number // masks, staged, state_widths, table_widths, leaf_widths, item,
            half, single_row,
        )  # fmt: skip
        parts += writer.functions()
        kernel.stages[number] = len(staged.stages)
    parts.append("int stages_of(int variant) {\n  switch (variant) {\n")
    parts += [f"    case {n}: return {count};\n" for n, count in kernel.stages.items()]
    parts.append("  }\n  return 0;\n}\n")
    parts.append(
        "void execute(const Run& run, int variant, int stage, const Group& group, int worker) {\n"
        "  switch (variant * 256 + stage) {\n"
    )
    for number, count in kernel.stages.items():
        for stage in range(1, count + 1):
            call = f"v{number}_stage{stage}(run, group, worker)"
            parts.append(f"    case {number * 256 + stage}: {call}; return;\n")
    parts.append("  }\n}\n")
    parts.append(_BODY)
    kernel.source = "".join(parts)
    return kernel


def _double(tile: str) -> str:
    """Return the tile without weights of 16 bits."""
    first = tile.index("// Weights of two consecutive k")
    end = tile.index("// sum[r][g] +=")
    again = tile.index("template <int R, int G>", tile.index("template <int R, int G>", end) + 1)
    return tile[:first] + tile[end:again]


class _Writer:
    def __init__(
        self, kernel: Kernel, number: int, kind: int, staged: Staged, state_widths: Sequence[int],
        table_widths: Sequence[int], leaf_widths: Mapping[tuple[int, str], int], item: int,
        half: bool, single_row: bool,
    ) -> None:  # fmt: skip
        self._kernel, self._number, self._kind, self._staged = kernel, number, kind, staged
        self._states, self._tables, self._leaves = state_widths, table_widths, leaf_widths
        self._item, self._half, self._single = item, half, single_row
        self._bytes = self._flops = 0
        private = {t.name: t.width for t in staged.private if t.name not in staged.saved}
        scratch = {n: w for n, w in staged.widths.items() if n not in {*private, *staged.saved}}
        self._private = dict(zip(private, accumulate(private.values(), initial=0), strict=False))
        self._scratch = dict(zip(scratch, accumulate(scratch.values(), initial=0), strict=False))
        kernel.private = max(kernel.private, sum(private.values()))
        kernel.scratch = max(kernel.scratch, sum(scratch.values()))

    def functions(self) -> Iterator[str]:
        """Yield the functions of all stages."""
        for number, stage in enumerate(self._staged.stages, 1):
            calls = []
            if number == 1 and self._staged.private:
                yield from self._prologue()
                calls.append(f"v{self._number}_private(run, group, worker);")
            for place, unit in enumerate(stage.units):
                name = f"v{self._number}_s{number}_u{place}"
                yield from self._unit(name, unit)
                calls.append(f"{name}(run, group, worker);")
            for product in stage.matrices:
                name = f"v{self._number}_{product.name}"
                yield from self._matrix(name, product)
                calls.append(f"{name}(run, group, worker);")
            body = "".join(f"  {call}\n" for call in calls)
            yield (
                f"void v{self._number}_stage{number}(const Run& run, const Group& group, "
                f"int worker) {{\n{body}}}\n"
            )
        self._kernel.weight_bytes[self._number] = self._bytes
        self._kernel.flops[self._number] = self._flops

    # Pointers.

    def _pointer(self, kind: str, *name: object) -> str:
        number = self._kernel.pointer(*name)
        return f"static_cast<const {kind}*>(run.pointers[{number}])"

    def _base(self, load: Load, row: str) -> str:
        """Return the row that a load reads, for row number `row` of the group."""
        name, through = load.buffer, load.index.through
        node = f"group.first + {row}"
        if through is not None:
            index = through[0]
            if index.startswith("child"):
                child = self._pointer("int32_t", "child", int(index[5:]))
                width = self._states[int(name[1:])]
                state = self._pointer("real", "state", int(name[1:]))
                return f"{state} + i64({child}[{node}]) * {width}"
            word = self._pointer("int32_t", "word")
            if index == "word":
                table = self._pointer("real", "table", self._kind)
                return f"{table} + i64({word}[{node}]) * {self._tables[self._kind]}"
            child = self._pointer("int32_t", "child", int(index[4:]))
            columns = self._leaves[self._kind, name]
            leaf = self._pointer("real", "leaf", self._kind, name)
            return f"{leaf} + i64({word}[{child}[{node}]]) * {columns}"
        if name[0] == "c":
            return self._pointer("real", "constant", int(name[1:]))
        return self._temporary(name, row)

    def _temporary(self, name: str, row: str) -> str:
        """Return the row of a temporary, matrix product, or buffer with rows of all nodes."""
        saved = self._staged.saved
        if name in saved or name[0] in "sg":
            if name in saved:
                pointer, width = self._pointer("real", "saved", self._kind, name), saved[name]
            else:
                kind, number = "state" if name[0] == "s" else "gradient", int(name[1:])
                pointer, width = self._pointer("real", kind, number), self._states[number]
            return f"const_cast<real*>({pointer}) + (group.first + {row}) * {width}"
        width = self._staged.widths[name]
        if name in self._private:
            return (
                f"run.private_rows + (worker * run.private_width + "
                f"{self._private[name]}) * run.rows + (group.slot + {row}) * {width}"
            )
        return f"run.scratch + {self._scratch[name]} * run.rows + (group.slot + {row}) * {width}"

    def _target(self, target: Target, row: str) -> str:
        if target.child is not None:
            child = self._pointer("int32_t", "child", target.child)
            gradient = self._pointer("real", "gradient", int(target.buffer[1:]))
            number = f"i64({child}[group.first + {row}]) * {target.width}"
            return f"const_cast<real*>({gradient}) + {number} + {target.offset}"
        return f"{self._temporary(target.buffer, row)} + {target.offset}"

    # Elementwise values.

    def _values(
        self, outputs: Sequence[tuple[Target, Expr]], row: str, position: str, count: str,
        sums: Mapping[tuple[str, int], str], indent: str,
    ) -> Iterator[str]:  # fmt: skip
        """Yield the loop over positions that computes `outputs` of one row.

        Args:
            position: position of the loop's first iteration.
            sums: text of the array of each (product, gate) in registers.
        """
        bases: dict[tuple[str, object], str] = {}
        lines: list[str] = []
        names: dict[Expr, str] = {}

        def text(value: Expr) -> str:
            if value in names:
                return names[value]
            match value:
                case Const(number):
                    return f"real({_literal(number)})"
                case Load(buffer, index):
                    if (buffer, index.offset) in sums:
                        code = f"{sums[buffer, index.offset]}[l]"
                    else:
                        key = (buffer, index.through)
                        if key not in bases:
                            bases[key] = f"b{len(bases)}"
                            base = self._base(value, row)
                            yield_lines.append(
                                f"{indent}const real* const {bases[key]} = {base};\n"
                            )
                        place = f"{index.offset}"
                        if index.factor("j"):
                            place = f"{position} + l + {index.offset}"
                        code = f"{bases[key]}[{place}]"
                case Apply(op, args):
                    code = OPS[op].c.format(*(text(arg) for arg in args))
                case _:
                    raise AssertionError(value)
            names[value] = f"x{len(names)}"
            lines.append(f"{indent}  const real {names[value]} = {code};\n")
            return names[value]

        yield_lines: list[str] = []
        stores = []
        for number, (target, value) in enumerate(outputs):
            result = text(value)
            assign = "=" if target.child is None else "+="
            stores.append(f"{indent}  o{number}[{position} + l] {assign} {result};\n")
            out = self._target(target, row)
            yield_lines.append(f"{indent}real* const o{number} = {out};\n")
        yield from yield_lines
        yield f"#pragma GCC ivdep\n{indent}for (i64 l = 0; l < {count}; ++l) {{\n"
        yield from lines
        yield from stores
        yield f"{indent}}}\n"

    def _prologue(self) -> Iterator[str]:
        yield (
            f"void v{self._number}_private(const Run& run, const Group& group, int worker) {{\n"
            "  for (i64 row = 0; row < group.count; ++row) {\n"
        )
        for temporary in self._staged.private:
            target = Target(temporary.name, temporary.offset, temporary.width)
            yield "  {\n"
            yield from self._values(
                [(target, temporary.value)], "row", "0", str(temporary.length), {}, "    "
            )
            yield "  }\n"
        yield "  }\n}\n"

    # Units of a stage.

    def _unit(self, name: str, unit: Unit) -> Iterator[str]:
        if not unit.products:
            yield f"void {name}{_EACH_ROW}"
            yield from self._values(unit.outputs, "row", "0", str(unit.length), {}, "    ")
            yield "  }\n}\n"
            return
        groups = _joined(unit)
        shape = tile_shape(
            [(len(offsets), len(products)) for products, offsets in groups], unit.length, self._item
        )
        yield from self._tile(name, unit, groups, shape)
        rows = 1 if self._single else shape.rows
        blocks = -(-unit.length // shape.width)
        cases = "".join(
            f"        case {r}: {name}_tile<{r}>(run, group, row, block, worker); break;\n"
            for r in range(1, rows + 1)
        )
        yield (
            f"void {name}(const Run& run, const Group& group, int worker) {{\n"
            "  i64 first, end;\n"
            f"  slice({blocks}, worker, run.team->size, &first, &end);\n"
            f"  const i64 tiles = (group.count + {rows - 1}) / {rows};\n"
            "  const bool back = group.level & 1;\n"
            "  for (i64 at = first; at < end; ++at) {\n"
            "    const i64 block = back ? end - 1 - (at - first) : at;\n"
            "    i64 row = 0;\n"
            "    for (i64 t = 0; t < tiles; ++t) {\n"
            "      const i64 until = group.count * (t + 1) / tiles;\n"
            f"      switch (until - row) {{\n{cases}      }}\n"
            "      row = until;\n    }\n  }\n}\n"
        )

    def _tile(
        self, name: str, unit: Unit,
        groups: list[tuple[list[Product], tuple[int, ...]]], shape: TileShape,
    ) -> Iterator[str]:  # fmt: skip
        width = shape.width
        yield (
            f"template <int R>\nvoid {name}_tile(const Run& run, const Group& group, i64 row, "
            "i64 block, int worker) {\n"
        )
        sums: dict[tuple[str, int], str] = {}
        for at, (products, offsets) in enumerate(groups):
            per, gates = len(products), len(offsets)
            vectors = gates * shape.blocks
            ranges = [(first, length) for _, first, length in products[0].inputs]
            kind = "pair16" if self._half else "real"
            yield f"  alignas(64) real a{at}[R * {per * gates * width}];\n  {{\n"
            yield f"    vec sum[R * {per}][{vectors}] = {{}};\n"
            for number, (first, length) in enumerate(ranges):
                yield f"    {{\n      const real* x[R * {per}];\n"
                offset = []
                yield "      for (int r = 0; r < R; ++r) {\n"
                for place, product in enumerate(products):
                    load = product.inputs[number][0]
                    base = self._base(load, "(row + r)")
                    yield f"        x[r * {per} + {place}] = {base} + {load.index.offset};\n"
                    offset.append(load.index.offset)
                panel = Panel(
                    products[0].weight, products[0].columns_first, first, length, offsets,
                    unit.length, width,
                )  # fmt: skip
                stride = (length + length % 2 * self._half) * gates * width
                self._bytes += -(-unit.length // width) * stride * (2 if self._half else self._item)
                self._flops += 2 * per * length * gates * unit.length
                stride //= 2 if self._half else 1
                pointer = self._pointer(kind, "panel", panel)
                yield (
                    "      }\n"
                    f"      multiply<R * {per}, {vectors}>(\n"
                    f"          sum, x, {pointer} + block * {stride}, {length});\n    }}\n"
                )
            yield (f"    __builtin_memcpy(a{at}, sum, sizeof a{at});\n  }}\n")
            for place, product in enumerate(products):
                for gate, gate_offset in enumerate(offsets):
                    sums[product.name, gate_offset] = (
                        f"(a{at} + (r * {per} + {place}) * {gates * width} + {gate * width})"
                    )
        count = str(width)
        if unit.length % width:
            yield (
                f"  const i64 left = {unit.length} - block * {width};\n"
                f"  const i64 count = left < {width} ? left : {width};\n"
            )
            count = "count"
        yield "  for (int r = 0; r < R; ++r) {\n"
        yield from self._values(unit.outputs, "(row + r)", f"block * {width}", count, sums, "    ")
        yield "  }\n}\n"

    # Products of a node's matrices.

    def _matrix(self, name: str, product: MatrixProduct) -> Iterator[str]:
        load, by_row, by_depth = product.left
        m, n, k = product.rows, product.columns, product.depth
        self._flops += 2 * m * n * k
        right = ", ".join(
            f"{{{self._base(part, 'row')} + {part.index.offset}, {count}}}"
            for part, count in product.right
        )
        yield (
            f"void {name}{_EACH_ROW}"
            f"    const Rows right[] = {{{right}}};\n"
            f"    matrix<{m}, {n}, {k}, {by_row}, {by_depth}>(\n"
            f"        {self._temporary(product.name, 'row')},\n"
            f"        {self._base(load, 'row')} + {load.index.offset}, right);\n  }}\n}}\n"
        )


def _joined(unit: Unit) -> list[tuple[list[Product], tuple[int, ...]]]:
    """Return products that read the same panel together, with their gates."""
    joined: dict[tuple[Any, ...], list[Product]] = defaultdict(list)
    for product, offsets in unit.products:
        ranges = tuple((first, length) for _, first, length in product.inputs)
        joined[product.weight, product.columns_first, ranges, offsets].append(product)
    return [(products, key[3]) for key, products in joined.items()]


def _literal(number: float) -> str:
    text = repr(float(number))
    return {"nan": "NAN", "inf": "INFINITY", "-inf": "-INFINITY"}.get(text, text)
