"""ctypes bindings of ``native/include/slipstream/engine.h``."""

from __future__ import annotations

import ctypes
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from slipstream.errors import SlipstreamError
from slipstream.native.family import (
    DOUBLE,
    INT32,
    INT64,
    POINTER,
    UINT64,
    Family,
    array_pointer,
)
from slipstream.native.inputs import Float64s
from slipstream.native.results import CycleError, QueueCounts, RateChanges, Simulation

if TYPE_CHECKING:
    from slipstream.native.program import Program

_OK = 0
_CYCLE = 2
_NO_MEMORY = 3
_TOO_MUCH = 4

_i32, _i64, _u64, _ptr, _f64 = INT32, INT64, UINT64, POINTER, DOUBLE

ENGINE = Family("engine", {
    "program_compile": [_ptr, _ptr, _ptr],
    "program_free": [_ptr],
    "program_is_fixed_order": [_ptr],
    "simulate": [_ptr, _ptr, _ptr],
    "plan_create": [_ptr, _ptr, _ptr],
    "plan_free": [_ptr],
    "plan_blocks": [_ptr],
    "plan_block_tasks": [_ptr],
    "plan_block_ends": [_ptr, _ptr, _ptr],
    "resimulate": [_ptr, _ptr, _ptr],
    "materialise": [_ptr, _ptr, _ptr, _ptr, _ptr, _ptr],
}, {
    "program_free": None, "plan_free": None, "plan_blocks": _i64, "plan_block_tasks": _i64,
    "plan_block_ends": None, "materialise": None,
})  # fmt: skip


class _Arguments(ctypes.Structure):
    """A structure of engine.h: its size, then its fields; an array is passed as its address.

    The address of a missing array is null.
    """

    _fields_: ClassVar[Any] = (("struct_bytes", _u64),)

    def __init__(self, **values: Any) -> None:
        for name, value in values.items():
            if isinstance(value, np.ndarray):
                values[name] = value.ctypes.data
        super().__init__(ctypes.sizeof(self), **values)


def _of(kind: Any, names: str) -> list[tuple[str, Any]]:
    """Return fields of one type."""
    return [(name, kind) for name in names.split()]


class _Error(_Arguments):
    _fields_ = (
        ("element", _i64),
        ("cycle", _ptr),
        *_of(_i64, "cycle_capacity cycle_length"),
        ("message", ctypes.c_char * 256),
    )


class _ProgramInput(_Arguments):
    _fields_ = (
        *_of(_i64, "tasks lanes steps edges resources"),
        *_of(_ptr, "lane gap_ns priority policy quantum_ns"),
        *_of(_ptr, "edge_src edge_dst edge_delay_ns edge_lag"),
        *_of(_ptr, "capacity need_offset need_resource need_amount"),
        ("links", _i64),
        *_of(_ptr, "link_capacity flow_bytes flow_weight path_offset path_link"),
        # Fields of packets, named as in `Packets`.
        *_of(_ptr, "latency_ns queue_bytes mark_bytes"),
        *_of(_f64, "payload_bytes header_bytes first_window max_window timeout_ns"),
        ("tree_parent", _ptr),
    )


class _SimulateArgs(_Arguments):
    _fields_ = (
        *_of(_ptr, "duration_ns out_start_ns out_end_ns out_step_end_ns"),
        *_of(_i32, "force_event_loop reserved"),
        ("changes_capacity", _i64),
        *_of(_ptr, "out_change_ns out_change_rate out_change_instance out_change_link"),
        ("out_changes", _i64),
        *_of(_ptr, "out_queue_peak out_dropped out_marked out_sent_again"),
    )


class _ResimulateArgs(_Arguments):
    _fields_ = (
        *_of(_ptr, "base_duration_ns base_start_ns base_end_ns base_block_end_ns"),
        ("edits", _i64),
        *_of(_ptr, "edit_task edit_duration_ns"),
        *_of(_i32, "exact_shift reserved"),
        ("slots", _i64),
        *_of(_ptr, "out_slot out_delta_ns out_slot_start_ns out_slot_end_ns out_step_end_ns"),
        ("out_recomputed_tasks", _i64),
    )


@dataclass(frozen=True)
class BlockTimeline:
    """A timeline as shifts of and replacements for blocks of a baseline.

    Attributes:
        slot: int32 [steps * blocks]; index of a recomputed block, or -1.
        delta_ns: float64 [steps * blocks]; shift of a block that was not recomputed.
        slot_start_ns, slot_end_ns: float64 [slots * tasks of a block].
        step_end_ns: float64 [steps].
        recomputed_tasks: number of recomputed task instances.
    """

    slot: npt.NDArray[np.int32]
    delta_ns: Float64s
    slot_start_ns: Float64s
    slot_end_ns: Float64s
    step_end_ns: Float64s
    recomputed_tasks: int


class NativeProgram:
    """A program compiled by the native engine. Immutable, hence safe to share between threads.

    Raises:
        GraphError: dependencies form a cycle.
    """

    def __init__(self, library: ctypes.CDLL, program: Program) -> None:
        self._library = library
        self._program = program
        optional: dict[str, Any] = {}
        if program.resources is not None:
            capacity = program.resources.capacity
            optional |= {"resources": capacity.size, "capacity": capacity}
        if program.needs is not None:
            names = ("need_offset", "need_resource", "need_amount")
            optional |= zip(names, program.needs, strict=True)
        if (flows := program.flows) is not None:
            optional |= {
                "links": flows.capacity.size, "link_capacity": flows.capacity,
                "flow_bytes": flows.nbytes, "flow_weight": flows.weight,
                "path_offset": flows.path_offset, "path_link": flows.path_link,
                "tree_parent": flows.tree_parent,
            }  # fmt: skip
            optional |= vars(flows.packets) if flows.packets is not None else {}
        edges = program.edges
        arguments = _ProgramInput(
            tasks=program.tasks, lanes=program.lanes, steps=program.steps, edges=edges.src.size,
            lane=program.lane, gap_ns=program.gap_ns, priority=program.priority,
            policy=program.policies, quantum_ns=program.quantum_ns,
            edge_src=edges.src, edge_dst=edges.dst, edge_delay_ns=edges.delay_ns,
            edge_lag=edges.lag, **optional,
        )  # fmt: skip
        handle = _ptr()
        cycle = np.empty(program.tasks, np.int32)
        error = _Error(cycle=cycle, cycle_capacity=cycle.size)
        status = self._library.slipstream_program_compile(
            ctypes.byref(arguments), ctypes.byref(handle), ctypes.byref(error)
        )
        if status == _CYCLE:
            raise CycleError(program, cycle[: int(error.cycle_length)].tolist())
        _raise(status, error)
        self._handle = handle
        weakref.finalize(self, self._library.slipstream_program_free, handle)

    @property
    def fixed_order(self) -> bool:
        return bool(self._library.slipstream_program_is_fixed_order(self._handle))

    def simulate(
        self, duration_ns: Float64s, *, rate_changes: bool = False, force_event_loop: bool = False
    ) -> Simulation:
        """Run one simulation; see `Compiled.simulate`."""
        steps, tasks, flows = self._program.steps, self._program.tasks, self._program.flows
        start, end = np.empty((2, steps, tasks))
        step_end = np.empty(steps)
        queues: QueueCounts | None = None
        outcome: dict[str, Any] = {}
        if flows is not None and flows.packets is not None:
            queues = QueueCounts.zeros(flows.capacity.size, steps * tasks)
            outcome = {
                "out_queue_peak": queues.peak_bytes, "out_dropped": queues.dropped,
                "out_marked": queues.marked, "out_sent_again": queues.sent_again,
            }  # fmt: skip
        room = 64 + 8 * steps * tasks if rate_changes else 0
        while True:
            changes = RateChanges.room_for(room)
            arguments = _SimulateArgs(
                duration_ns=duration_ns, out_start_ns=start, out_end_ns=end,
                out_step_end_ns=step_end, changes_capacity=room,
                force_event_loop=force_event_loop or rate_changes or queues is not None,
                out_change_ns=changes.time_ns,
                out_change_rate=changes.rate, out_change_instance=changes.instance,
                out_change_link=changes.link, **outcome,
            )  # fmt: skip
            error = _Error()
            status = self._library.slipstream_simulate(
                self._handle, ctypes.byref(arguments), ctypes.byref(error)
            )
            _raise(status, error)
            count = int(arguments.out_changes)
            if not rate_changes:
                return Simulation(start, end, step_end, queues=queues)
            if count <= room:
                return Simulation(start, end, step_end, changes.first(count))
            # The next run is identical, so this is exactly the required number.
            room = count


class NativePlan:
    """Tables for re-simulating a fixed-order program, which they keep alive."""

    def __init__(self, native: NativeProgram, program: Program) -> None:
        self._native = native
        self._library = native._library
        self._program = program
        handle = _ptr()
        error = _Error()
        status = self._library.slipstream_plan_create(
            native._handle, ctypes.byref(handle), ctypes.byref(error)
        )
        _raise(status, error)
        self._handle = handle
        weakref.finalize(self, self._library.slipstream_plan_free, handle)
        self.blocks = int(self._library.slipstream_plan_blocks(handle))
        self.block_tasks = int(self._library.slipstream_plan_block_tasks(handle))

    def block_ends(self, end_ns: Float64s) -> Float64s:
        """Return the latest end in each block, float64 [steps * blocks]."""
        out = np.empty(self._program.steps * self.blocks)
        self._library.slipstream_plan_block_ends(
            self._handle, array_pointer(end_ns), array_pointer(out)
        )
        return out

    def resimulate(
        self,
        base_duration_ns: Float64s,
        base: tuple[Float64s, Float64s, Float64s],
        task_ids: npt.NDArray[np.int32],
        duration_ns: Float64s,
        exact_shift: bool,
        slots: int,
    ) -> BlockTimeline | None:
        """Return the edited timeline; None if more than `slots` blocks would be recomputed.

        `base` is start, end (float64 [steps, tasks]) and `block_ends` of the baseline.
        """
        cells = self._program.steps * self.blocks
        slot, delta = np.empty(cells, np.int32), np.empty(cells)
        slot_start, slot_end = np.empty((2, slots * self.block_tasks))
        step_end = np.empty(self._program.steps)
        args = _ResimulateArgs(
            base_duration_ns=base_duration_ns, base_start_ns=base[0], base_end_ns=base[1],
            base_block_end_ns=base[2], edits=task_ids.size, edit_task=task_ids,
            edit_duration_ns=duration_ns, exact_shift=exact_shift, slots=slots, out_slot=slot,
            out_delta_ns=delta, out_slot_start_ns=slot_start, out_slot_end_ns=slot_end,
            out_step_end_ns=step_end,
        )  # fmt: skip
        error = _Error()
        status = self._library.slipstream_resimulate(
            self._handle, ctypes.byref(args), ctypes.byref(error)
        )
        if status == _TOO_MUCH:
            return None
        _raise(status, error)
        return BlockTimeline(
            slot, delta, slot_start, slot_end, step_end, int(args.out_recomputed_tasks)
        )

    def materialise(
        self, base_start_ns: Float64s, base_end_ns: Float64s, timeline: BlockTimeline
    ) -> tuple[Float64s, Float64s]:
        """Return all starts and all ends, float64 [steps, tasks]."""
        start, end = np.empty((2, *base_start_ns.shape))
        for base, slots, out in (
            (base_start_ns, timeline.slot_start_ns, start),
            (base_end_ns, timeline.slot_end_ns, end),
        ):
            columns = map(array_pointer, (base, timeline.slot, timeline.delta_ns, slots, out))
            self._library.slipstream_materialise(self._handle, *columns)
        return start, end


def _raise(status: int, error: Any) -> None:
    if status == _OK:
        return
    if status == _NO_MEMORY:
        raise MemoryError("the event engine could not allocate its tables")
    # The arrays were checked before the call, so this is a defect here.
    message = error.message.decode(errors="replace")
    raise SlipstreamError(
        f"the event engine refused its input: {message} (element {error.element})",
        remedy="report this as a defect of slipstream",
    )
