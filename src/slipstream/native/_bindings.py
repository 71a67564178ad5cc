"""ctypes over ``native/include/slipstream/engine.h``; nothing here decides anything."""

from __future__ import annotations

import ctypes
import weakref
from dataclasses import dataclass
from typing import Any

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
from slipstream.native.program import (
    CycleError,
    Float64s,
    Packets,
    Program,
    QueueCounts,
    RateChanges,
)

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


class _Error(ctypes.Structure):
    _fields_ = (
        ("struct_bytes", _u64),
        ("element", _i64),
        ("cycle", _ptr),
        ("cycle_capacity", _i64),
        ("cycle_length", _i64),
        ("message", ctypes.c_char * 256),
    )


class _ProgramInput(ctypes.Structure):
    _fields_ = (
        ("struct_bytes", _u64),
        ("tasks", _i64),
        ("lanes", _i64),
        ("steps", _i64),
        ("edges", _i64),
        ("resources", _i64),
        ("lane", _ptr),
        ("gap_ns", _ptr),
        ("priority", _ptr),
        ("policy", _ptr),
        ("quantum_ns", _ptr),
        ("edge_src", _ptr),
        ("edge_dst", _ptr),
        ("edge_delay_ns", _ptr),
        ("edge_lag", _ptr),
        ("capacity", _ptr),
        ("need_offset", _ptr),
        ("need_resource", _ptr),
        ("need_amount", _ptr),
        ("links", _i64),
        ("link_capacity", _ptr),
        ("flow_bytes", _ptr),
        ("flow_weight", _ptr),
        ("path_offset", _ptr),
        ("path_link", _ptr),
        ("link_latency_ns", _ptr),
        ("link_queue_bytes", _ptr),
        ("link_mark_bytes", _ptr),
        ("payload_bytes", _f64),
        ("header_bytes", _f64),
        ("first_window", _f64),
        ("max_window", _f64),
        ("timeout_ns", _f64),
    )


class _SimulateArgs(ctypes.Structure):
    _fields_ = (
        ("struct_bytes", _u64),
        ("duration_ns", _ptr),
        ("out_start_ns", _ptr),
        ("out_end_ns", _ptr),
        ("out_step_end_ns", _ptr),
        ("force_event_loop", _i32),
        ("reserved", _i32),
        ("changes_capacity", _i64),
        ("out_change_ns", _ptr),
        ("out_change_rate", _ptr),
        ("out_change_instance", _ptr),
        ("out_change_link", _ptr),
        ("out_changes", _i64),
        ("out_queue_peak", _ptr),
        ("out_dropped", _ptr),
        ("out_marked", _ptr),
        ("out_sent_again", _ptr),
    )


class _ResimulateArgs(ctypes.Structure):
    _fields_ = (
        ("struct_bytes", _u64),
        ("base_duration_ns", _ptr),
        ("base_start_ns", _ptr),
        ("base_end_ns", _ptr),
        ("base_block_end_ns", _ptr),
        ("edits", _i64),
        ("edit_task", _ptr),
        ("edit_duration_ns", _ptr),
        ("exact_shift", _i32),
        ("reserved", _i32),
        ("slots", _i64),
        ("out_slot", _ptr),
        ("out_delta_ns", _ptr),
        ("out_slot_start_ns", _ptr),
        ("out_slot_end_ns", _ptr),
        ("out_step_end_ns", _ptr),
        ("out_recomputed_tasks", _i64),
    )


def _packet_fields(packets: Packets | None) -> dict[str, Any]:
    if packets is None:
        return {}
    return {
        "link_latency_ns": array_pointer(packets.latency_ns),
        "link_queue_bytes": array_pointer(packets.queue_bytes),
        "link_mark_bytes": array_pointer(packets.mark_bytes),
        "payload_bytes": packets.payload_bytes,
        "header_bytes": packets.header_bytes,
        "first_window": packets.first_window,
        "max_window": packets.max_window,
        "timeout_ns": packets.timeout_ns,
    }


def _sized(struct: Any) -> Any:
    struct.struct_bytes = ctypes.sizeof(struct)
    return struct


@dataclass(frozen=True)
class BlockTimeline:
    """A timeline as shifts of and replacements for blocks of a baseline.

    Attributes:
        slot: int32 [steps * blocks]; where a recomputed block lies, or -1.
        delta_ns: float64 [steps * blocks]; how far a block that was not recomputed moved.
        slot_start_ns, slot_end_ns: float64 [slots * tasks of a block].
        step_end_ns: float64 [steps].
        recomputed_tasks: how many task instances were recomputed.
    """

    slot: npt.NDArray[np.int32]
    delta_ns: Float64s
    slot_start_ns: Float64s
    slot_end_ns: Float64s
    step_end_ns: Float64s
    recomputed_tasks: int


class NativeProgram:
    """A program compiled by the native engine. Immutable, hence safe to share by threads.

    Raises:
        GraphError: dependencies form a cycle.
    """

    def __init__(self, library: ctypes.CDLL, program: Program) -> None:
        self._library = library
        self._program = program
        needs = program.needs
        resources = program.resources
        flows = program.flows
        given = _sized(
            _ProgramInput(
                tasks=program.tasks,
                lanes=program.lanes,
                steps=program.steps,
                edges=program.edges.src.size,
                resources=0 if resources is None else resources.capacity.size,
                lane=array_pointer(program.lane),
                gap_ns=array_pointer(program.gap_ns),
                priority=array_pointer(program.priority),
                policy=array_pointer(program.policies),
                quantum_ns=array_pointer(program.quantum_ns),
                edge_src=array_pointer(program.edges.src),
                edge_dst=array_pointer(program.edges.dst),
                edge_delay_ns=array_pointer(program.edges.delay_ns),
                edge_lag=array_pointer(program.edges.lag),
                capacity=None if resources is None else array_pointer(resources.capacity),
                need_offset=None if needs is None else array_pointer(needs[0]),
                need_resource=None if needs is None else array_pointer(needs[1]),
                need_amount=None if needs is None else array_pointer(needs[2]),
                links=0 if flows is None else flows.capacity.size,
                link_capacity=None if flows is None else array_pointer(flows.capacity),
                flow_bytes=None if flows is None else array_pointer(flows.nbytes),
                flow_weight=None if flows is None else array_pointer(flows.weight),
                path_offset=None if flows is None else array_pointer(flows.path_offset),
                path_link=None if flows is None else array_pointer(flows.path_link),
                **_packet_fields(None if flows is None else flows.packets),
            )
        )
        handle = _ptr()
        cycle = np.empty(program.tasks, np.int32)
        error = _sized(_Error(cycle=array_pointer(cycle), cycle_capacity=cycle.size))
        status = self._library.slipstream_program_compile(
            ctypes.byref(given), ctypes.byref(handle), ctypes.byref(error)
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
        self, duration_ns: Float64s, force_event_loop: bool
    ) -> tuple[Float64s, Float64s, Float64s]:
        """Start and end, float64 [steps, tasks], and latest end of each step, float64 [steps]."""
        return self._simulate(duration_ns, force_event_loop, RateChanges.room_for(0))[:3]

    def simulate_with_queues(
        self, duration_ns: Float64s
    ) -> tuple[Float64s, Float64s, Float64s, QueueCounts]:
        """As `simulate`, of transfers as packets, with what became of these."""
        flows = self._program.flows
        counts = QueueCounts.zeros(
            0 if flows is None else flows.capacity.size, self._program.steps * self._program.tasks
        )
        nothing = RateChanges.room_for(0)
        return *self._simulate(duration_ns, True, nothing, counts)[:3], counts

    def simulate_with_rates(
        self, duration_ns: Float64s
    ) -> tuple[Float64s, Float64s, Float64s, RateChanges]:
        """As `simulate`, with every change of a transfer's rate."""
        room = 64 + 8 * self._program.steps * self._program.tasks
        while True:
            changes = RateChanges.room_for(room)
            *timeline, count = self._simulate(duration_ns, True, changes)
            if count <= room:
                start, end, step_end = timeline
                return start, end, step_end, changes.first(count)
            # It runs the same again, so this is exactly what it takes.
            room = count

    def _simulate(
        self,
        duration_ns: Float64s,
        force_event_loop: bool,
        changes: RateChanges,
        counts: QueueCounts | None = None,
    ) -> tuple[Float64s, Float64s, Float64s, int]:
        steps, tasks = self._program.steps, self._program.tasks
        start, end = np.empty((2, steps, tasks))
        step_end = np.empty(steps)
        args = _sized(
            _SimulateArgs(
                duration_ns=array_pointer(duration_ns),
                out_start_ns=array_pointer(start),
                out_end_ns=array_pointer(end),
                out_step_end_ns=array_pointer(step_end),
                force_event_loop=force_event_loop,
                changes_capacity=changes.time_ns.size,
                out_change_ns=array_pointer(changes.time_ns),
                out_change_rate=array_pointer(changes.rate),
                out_change_instance=array_pointer(changes.instance),
                out_change_link=array_pointer(changes.link),
                out_queue_peak=array_pointer(None if counts is None else counts.peak_bytes),
                out_dropped=array_pointer(None if counts is None else counts.dropped),
                out_marked=array_pointer(None if counts is None else counts.marked),
                out_sent_again=array_pointer(None if counts is None else counts.sent_again),
            )
        )
        error = _sized(_Error())
        status = self._library.slipstream_simulate(
            self._handle, ctypes.byref(args), ctypes.byref(error)
        )
        _raise(status, error)
        return start, end, step_end, int(args.out_changes)


class NativePlan:
    """Tables for re-simulating a fixed-order program; keeps the program alive."""

    def __init__(self, native: NativeProgram, program: Program) -> None:
        self._native = native
        self._library = native._library
        self._program = program
        handle = _ptr()
        error = _sized(_Error())
        status = self._library.slipstream_plan_create(
            native._handle, ctypes.byref(handle), ctypes.byref(error)
        )
        _raise(status, error)
        self._handle = handle
        weakref.finalize(self, self._library.slipstream_plan_free, handle)
        self.blocks = int(self._library.slipstream_plan_blocks(handle))
        self.block_tasks = int(self._library.slipstream_plan_block_tasks(handle))

    def block_ends(self, end_ns: Float64s) -> Float64s:
        """Latest end in each block, float64 [steps * blocks]."""
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
        """The edited timeline; None when more than `slots` blocks would be recomputed.

        `base` is start, end (float64 [steps, tasks]) and `block_ends` of the baseline.
        """
        cells = self._program.steps * self.blocks
        slot, delta = np.empty(cells, np.int32), np.empty(cells)
        slot_start, slot_end = (
            np.empty(slots * self.block_tasks),
            np.empty(slots * self.block_tasks),
        )
        step_end = np.empty(self._program.steps)
        args = _sized(
            _ResimulateArgs(
                base_duration_ns=array_pointer(base_duration_ns),
                base_start_ns=array_pointer(base[0]),
                base_end_ns=array_pointer(base[1]),
                base_block_end_ns=array_pointer(base[2]),
                edits=task_ids.size,
                edit_task=array_pointer(task_ids),
                edit_duration_ns=array_pointer(duration_ns),
                exact_shift=exact_shift,
                slots=slots,
                out_slot=array_pointer(slot),
                out_delta_ns=array_pointer(delta),
                out_slot_start_ns=array_pointer(slot_start),
                out_slot_end_ns=array_pointer(slot_end),
                out_step_end_ns=array_pointer(step_end),
            )
        )
        error = _sized(_Error())
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
        """All starts and all ends, float64 [steps, tasks]."""
        start, end = np.empty((2, *base_start_ns.shape))
        columns = (
            (base_start_ns, timeline.slot_start_ns, start),
            (base_end_ns, timeline.slot_end_ns, end),
        )
        for base, slots, out in columns:
            self._library.slipstream_materialise(
                self._handle,
                array_pointer(base),
                array_pointer(timeline.slot),
                array_pointer(timeline.delta_ns),
                array_pointer(slots),
                array_pointer(out),
            )
        return start, end


def _raise(status: int, error: Any) -> None:
    if status == _OK:
        return
    if status == _NO_MEMORY:
        raise MemoryError("the event engine could not allocate its tables")
    # The arrays were checked before the call, so this is a defect of ours.
    message = error.message.decode(errors="replace")
    raise SlipstreamError(
        f"the event engine refused its input: {message} (element {error.element})",
        remedy="report this as a defect of slipstream",
    )
