"""Generate C++ for nests: per row and stage, a loop over the columns.

Threads share the rows. Each has separate sums over rows, which are added in a fixed order, so that
results only depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.codegen.prelude import PRELUDE, threshold_and_scale
from slipstream.codegen.rows import Nest, RowStatement, Store

_TYPES = {
    "float32": "float", "float64": "double", "bfloat16": "bf16", "bool": "uint8_t",
    "uint8": "uint8_t",
}  # fmt: skip
# Rows after which partial sums over rows are added to the totals, for accurate long sums.
_FLUSH = 128
# Columns between two prefetches.
_STRIP = 256
# Minimum number of columns for prefetching: the hardware fetches shorter rows in time.
_MIN_PREFETCH_COLUMNS = 256


def source(nests: Sequence[Nest]) -> str:
    """Return the source of a library with a function per nest.

    Function k is ``region_k(void** tensors, int threads)``; its tensors are inputs, then outputs.
    """
    head = "#ifdef _OPENMP\n#include <omp.h>\n#endif\n"
    return head + PRELUDE + "\n".join(_Function(nest, n).text for n, nest in enumerate(nests))


class _Function:
    """The function of a nest."""

    def __init__(self, nest: Nest, number: int) -> None:
        self._nest = nest
        self._lines: list[str] = []
        self._needed = nest.needed()
        self.text = self._write(number)

    def _write(self, number: int) -> str:
        nest = self._nest
        columns = [store for store in nest.stores if store.column]
        draws = [n for n in sorted(self._needed) if nest.statements[n].code.startswith("draw")]
        self._buffered = self._crossing()
        put = self._lines.append
        put(f'\nextern "C" void region_{number}(void** tensors, int threads) {{')
        put(f"  using real = {nest.real};")
        put(f"  constexpr i64 R = {nest.rows}, N = {nest.columns};")
        for k, spec in enumerate(nest.inputs):
            kind = _TYPES.get(spec.dtype, "u64")
            put(f"  const {kind}* __restrict i{k} = static_cast<const {kind}*>(tensors[{k}]);")
        for k, spec in enumerate(nest.outputs):
            kind = _TYPES[spec.dtype]
            place = len(nest.inputs) + k
            put(f"  {kind}* __restrict o{k} = static_cast<{kind}*>(tensors[{place}]);")
        if columns:
            put(f"  real* totals = new real[static_cast<i64>(threads) * {len(columns)} * N]();")
        put("#ifdef _OPENMP\n#pragma omp parallel num_threads(threads) if (threads > 1)\n#endif")
        put("  {")
        put("#ifdef _OPENMP")
        put("    const i64 T = omp_get_num_threads(), t = omp_get_thread_num();")
        put("#else\n    const i64 T = 1, t = 0;\n#endif")
        put("    const i64 begin = R * t / T, end = R * (t + 1) / T;")
        buffers = len(self._buffered) + len(columns)
        room = f"{buffers} * (N + 16) + {len(draws)} * (N + 192)"
        put(f"    real* const scratch = new real[{room} + 16]();")
        for place, n in enumerate(sorted(self._buffered)):
            put(f"    real* __restrict b{n} = scratch + {place} * (N + 16);")
        for place, _ in enumerate(columns):
            offset = len(self._buffered) + place
            put(f"    real* __restrict c{place} = scratch + {offset} * (N + 16);")
        for place, n in enumerate(draws):
            put(f"    real* const w{n} = scratch + {buffers} * (N + 16) + {place} * (N + 192);")
        put("    for (i64 r = begin; r < end; ++r) {")
        self._offsets()
        for n in draws:
            p = float(nest.statements[n].code.split()[1])
            threshold, scale = threshold_and_scale(p)
            factor = repr(1.0 / (1.0 - p)) if nest.real == "double" else repr(float(scale))
            put(
                f"      const real* __restrict d{n} = draw<real>(i{nest.statements[n].tensor}, "
                f"{threshold}u, (real){factor}, r * N, N, w{n});"
            )
        last = max((nest.statements[n].stage for n in self._needed), default=0)
        for stage in range(last + 1):
            self._stage(stage)
        if columns:
            put(f"      if ((r - begin) % {_FLUSH} == {_FLUSH - 1} || r == end - 1)")
            put("        for (i64 n = 0; n < N; ++n) {")
            for place, _ in enumerate(columns):
                slot = f"totals[(t * {len(columns)} + {place}) * N + n]"
                put(f"          {slot} += c{place}[n]; c{place}[n] = 0;")
            put("        }")
        put("    }")
        put("    delete[] scratch;")
        put("  }")
        for place, store in enumerate(columns):
            put("  for (i64 n = 0; n < N; ++n) {")
            put("    real sum = 0;")
            put("    for (i64 t = 0; t < threads; ++t) "
                f"sum += totals[(t * {len(columns)} + {place}) * N + n];")  # fmt: skip
            put(f"    put(o{store.output}, n, sum);")
            put("  }")
        if columns:
            put("  delete[] totals;")
        put("}")
        return "\n".join(self._lines)

    def _crossing(self) -> set[int]:
        """Return the computed values of full extent that a later stage needs."""
        nest = self._nest
        crossing = set()
        for n in self._needed:
            statement = nest.statements[n]
            if statement.extent != "full":
                continue
            for a in statement.arguments:
                before = nest.statements[a]
                earlier = before.extent == "full" and before.stage < statement.stage
                if earlier and _computed(before):
                    crossing.add(a)
        return crossing

    def _offsets(self) -> None:
        nest = self._nest
        for letter, accesses in (("i", nest.reads), ("o", nest.writes)):
            for k, place in enumerate(accesses):
                self._lines.append(f"      const i64 r{letter}{k} = {place.row('/')};")

    def _stage(self, stage: int) -> None:
        nest, put = self._nest, self._lines.append
        for n in sorted(self._needed):
            statement = nest.statements[n]
            if (
                statement.extent == "full"
                or statement.stage != stage
                or statement.code in ("sum", "max")
            ):
                continue
            put(f"      const real v{n} = {self._expression(n, statement)};")
        for store in nest.stores:
            statement = nest.statements[store.value]
            if statement.extent != "full" and not store.column and statement.stage == stage:
                self._store_row(store)
        self._loop(stage)

    def _store_row(self, store: Store) -> None:
        place, output = self._nest.writes[store.output], store.output
        at = f"ro{output} + {store.start}"
        if place.column:
            self._lines.append(
                f"      for (i64 n = 0; n < N; ++n) put(o{output}, {at} + n * "
                f"{place.column}, v{store.value});"
            )
        else:
            self._lines.append(f"      put(o{output}, {at}, v{store.value});")

    def _loop(self, stage: int) -> None:
        """Write the loop over the columns of a stage: reductions, buffers and stores."""
        nest, put = self._nest, self._lines.append
        sums = [
            n for n in sorted(self._needed)
            if nest.statements[n].code in ("sum", "max") and nest.statements[n].stage == stage + 1
        ]  # fmt: skip
        stores = [
            store for store in nest.stores
            if nest.statements[store.value].extent == "full" or store.column
            if nest.statements[store.value].stage == stage
        ]  # fmt: skip
        buffered = [n for n in sorted(self._buffered) if nest.statements[n].stage == stage]
        roots = [nest.statements[n].arguments[0] for n in sums] + buffered
        roots += [store.value for store in stores]
        if not roots:
            return
        for n in sums:
            put(f"      real v{n} = {'-INFINITY' if nest.statements[n].code == 'max' else '0'};")
        reductions = "".join(
            f" reduction({'max' if nest.statements[n].code == 'max' else '+'}:v{n})" for n in sums
        )
        put(f"      for (i64 strip = 0; strip < N; strip += {_STRIP}) {{")
        put(f"      const i64 until = strip + {_STRIP} < N ? strip + {_STRIP} : N;")
        if stage == 0 and nest.columns >= _MIN_PREFETCH_COLUMNS:
            self._prefetch()
        put(f"#pragma omp simd{reductions}")
        put("      for (i64 n = strip; n < until; ++n) {")
        done: set[int] = set()
        for root in roots:
            self._compute(root, stage, done)
        for n in sums:
            source_value = self._name(nest.statements[n].arguments[0], stage)
            if nest.statements[n].code == "max":
                put(f"        v{n} = {source_value} > v{n} ? {source_value} : v{n};")
            else:
                put(f"        v{n} += {source_value};")
        for n in buffered:
            put(f"        b{n}[n] = v{n};")
        columns = [store for store in nest.stores if store.column]
        for store in stores:
            name = self._name(store.value, stage)
            if store.column:
                put(f"        c{columns.index(store)}[n] += {name};")
            else:
                stride = nest.writes[store.output].column
                at = f"ro{store.output} + {store.start} + n * {stride}"
                put(f"        put(o{store.output}, {at}, {name});")
        put("      }")
        put("      }")

    def _prefetch(self) -> None:
        """Prefetch every tensor that is contiguous along the columns."""
        nest = self._nest
        for letter, accesses in (("i", nest.reads), ("o", nest.writes)):
            for k, place in enumerate(accesses):
                if place.column == 1 and any(stride for _, stride in place.rows):
                    self._lines.append(
                        f"      ahead({letter}{k} + r{letter}{k} + strip, until - strip);"
                    )

    def _compute(self, n: int, stage: int, done: set[int]) -> None:
        """Write the statements of full extent that `n` needs, each once."""
        statement = self._nest.statements[n]
        if n in done or statement.extent != "full":
            return
        done.add(n)
        if statement.stage < stage and _computed(statement):
            return
        for a in statement.arguments:
            self._compute(a, stage, done)
        self._lines.append(f"        const real v{n} = {self._expression(n, statement, stage)};")

    def _name(self, n: int, stage: int) -> str:
        statement = self._nest.statements[n]
        if statement.extent == "full" and statement.stage < stage and _computed(statement):
            return f"b{n}[n]"
        return f"v{n}"

    def _expression(self, n: int, statement: RowStatement, stage: int = -1) -> str:
        if statement.code == "load":
            place = self._nest.reads[statement.tensor]
            column = f" + n * {place.column}" if statement.extent == "full" else ""
            return f"static_cast<real>(get(i{statement.tensor}, ri{statement.tensor}{column}))"
        if statement.code.startswith("draw"):
            return f"d{n}[n]"
        return statement.code.format(*(self._name(a, stage) for a in statement.arguments))


def _computed(statement: RowStatement) -> bool:
    """Whether a later stage needs a buffer; loaded and drawn values already have statement."""
    return statement.code != "load" and not statement.code.startswith("draw")
