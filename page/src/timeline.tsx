// The timeline: what runs when, nested by phase and module, with memory on the same axis.

import { effect, useComputed } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import { colours } from "./colours";
import { FONT, drawAxis, drawMemory, drawRow, prepare, timeAt, xOf } from "./draw";
import type { Frame } from "./draw";
import { bytes, count, duration, percent, plainName, plural } from "./format";
import { Empty, Legend } from "./parts";
import {
  choose,
  chosen,
  dark,
  doc,
  focusOn,
  focused,
  goToMatch,
  hovered,
  matchAt,
  matches,
  pan,
  query,
  show,
  shown,
  step,
  zoom,
} from "./state";
import type { Focus } from "./state";
import { firstAfter } from "./step";
import type { Row, Step, Track } from "./step";

const AXIS = 22;
const LEAST_ROW = 17;
const MOST_ROW = 28;
const GAP = 1;
const HEAD = 18;
const STRIP = 2;
const MEMORY = 74;
const BELOW = 10;

interface Place {
  track: Track;
  row: Row;
  top: number;
}

interface Layout {
  places: Place[];
  heads: [Track, number][];
  height: number;
  /** Of a row, without the gap below it. */
  tall: number;
}

/** Where the rows of all tracks are, from the top of the first one; taller where there is room. */
function layout(tracks: Track[], room: number): Layout {
  const rows = tracks.reduce((sum, track) => sum + track.rows.length, 0);
  const fixed = AXIS + tracks.length * (HEAD + STRIP + GAP + BELOW);
  const fitting = Math.floor((room - fixed) / Math.max(rows, 1)) - GAP;
  const tall = Math.min(Math.max(fitting, LEAST_ROW), MOST_ROW);
  const places: Place[] = [];
  const heads: [Track, number][] = [];
  let y = 0;
  for (const track of tracks) {
    heads.push([track, y]);
    y += HEAD + STRIP + GAP;
    for (const row of track.rows) {
      places.push({ track, row, top: y });
      y += tall + GAP;
    }
    y += BELOW;
  }
  return { places, heads, height: y, tall };
}

export function Timeline() {
  if (!step.value.size) {
    return <Empty title="No tasks" text="Nothing ran in this step, or nothing was recorded." />;
  }
  return (
    <section class="timeline" aria-label="Timeline">
      <Tools />
      <Canvas />
      <Detail />
    </section>
  );
}

function Tools() {
  const found = matches.value;
  const total = useComputed(() => {
    const { duration: lengths } = step.value.columns;
    let sum = 0;
    for (const task of matches.value ?? []) sum += lengths[task];
    return sum;
  });
  return (
    <div class="tools">
      <input
        id="search"
        type="search"
        placeholder="Find operator, module, line  ( / )"
        aria-label="Find operator, module or source line"
        value={query.value}
        onInput={(event) => {
          query.value = event.currentTarget.value;
          matchAt.value = -1;
        }}
        onKeyDown={(event) => {
          if (event.key === "Enter") goToMatch(event.shiftKey ? -1 : 1);
          if (event.key === "Escape") {
            query.value = "";
            event.currentTarget.blur();
          }
          event.stopPropagation();
        }}
      />
      <span class="faint" aria-live="polite">
        {found
          ? found.length
            ? `${matchAt.value >= 0 ? `${count(matchAt.value + 1)} of ` : ""}${plural(found.length, "task")}, ${duration(total.value)}`
            : "nothing found"
          : ""}
      </span>
      {found && found.length > 0 ? (
        <>
          <button type="button" onClick={() => goToMatch(-1)} aria-label="Previous match">
            ‹
          </button>
          <button type="button" onClick={() => goToMatch(1)} aria-label="Next match">
            ›
          </button>
        </>
      ) : null}
      <span class="grow" />
      <span class="faint">
        {duration(shown.value[1] - shown.value[0])} of {duration(step.value.endNs)} shown
      </span>
      <button type="button" onClick={() => zoom(0.5)} aria-label="Zoom in">
        +
      </button>
      <button type="button" onClick={() => zoom(2)} aria-label="Zoom out">
        −
      </button>
      <button type="button" onClick={() => show(0, step.value.endNs)}>
        All
      </button>
    </div>
  );
}

function Canvas() {
  const canvas = useRef<HTMLCanvasElement>(null);
  const box = useRef<HTMLDivElement>(null);
  const memory = useRef<HTMLCanvasElement>(null);
  const room = useRef<HTMLDivElement>(null);

  useEffect(() => {
    const [lanes, holder, below, spacer] = [
      canvas.current,
      box.current,
      memory.current,
      room.current,
    ];
    if (!lanes || !holder || !below || !spacer) return undefined;
    let frameId = 0;
    const ask = (): void => {
      frameId ||= requestAnimationFrame(() => {
        frameId = 0;
        paint(lanes, holder, below, spacer);
      });
    };
    const stop = effect(() => {
      // Read here so that every change of them asks for a frame.
      void [step.value, shown.value, hovered.value, focused.value, matches.value, dark.value];
      ask();
    });
    const watch = new ResizeObserver(ask);
    watch.observe(holder);
    holder.addEventListener("scroll", ask);
    const forget = pointer(lanes, holder, below);
    return () => {
      stop();
      watch.disconnect();
      holder.removeEventListener("scroll", ask);
      forget();
      cancelAnimationFrame(frameId);
    };
  }, []);

  return (
    <>
      <div
        class="lanes"
        ref={box}
        tabIndex={0}
        role="application"
        aria-label="Timeline of the step. Arrow keys pan and zoom, N and P go from task to task, F fits the task, Home shows all."
        onKeyDown={keys}
      >
        <div ref={room}>
          <canvas ref={canvas} />
        </div>
      </div>
      <canvas class="memory" ref={memory} role="img" aria-label={memoryLabel(step.value)} />
      <Legend names={used(step.value)} kind="family" />
    </>
  );
}

function used(now: Step): string[] {
  const seen = new Set<number>();
  for (const family of now.columns.family) seen.add(family);
  return now.doc.families.filter((_, index) => seen.has(index));
}

function memoryLabel(now: Step): string {
  return now.memory
    ? `Memory over time; at most ${bytes(now.memory.peakBytes)}`
    : "Memory was not recorded";
}

function frameOf(context: CanvasRenderingContext2D, width: number): Frame {
  const [from, to] = shown.value;
  return { context, left: 0, width, from, to };
}

let drawn = false;

function paint(
  canvas: HTMLCanvasElement,
  holder: HTMLElement,
  below: HTMLCanvasElement,
  spacer: HTMLElement,
): void {
  const now = step.value;
  const palette = colours(dark.value);
  const [width, room] = [holder.clientWidth, holder.clientHeight];
  if (!width || !room) return;
  const { places, heads, height: whole, tall: rowTall } = layout(now.tracks, room);
  // No larger than what is drawn: a frame costs what its canvas covers.
  const height = Math.min(room, whole + AXIS);
  spacer.style.height = `${whole + AXIS}px`;
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = prepare(canvas, width, height);
  if (!context) return;
  const scrolled = holder.scrollTop;
  const frame = frameOf(context, width);
  context.font = FONT;
  context.fillStyle = palette.paper;
  context.fillRect(0, 0, width, height);
  drawAxis(frame, 0, height, palette);

  const { family } = now.columns;
  const hits = matches.value ? new Uint8Array(now.size) : null;
  if (hits) for (const task of matches.value ?? []) hits[task] = 1;
  const depthOf = now.doc.paths;
  const fill = (ref: number): string => {
    if (ref < 0) {
      const kind = depthOf[-1 - ref - 1]?.[1];
      return palette.level[kind === "phase" ? 0 : kind === "module" ? 1 : 2];
    }
    if (hits && !hits[ref]) return palette.level[3];
    return palette.families[family[ref]];
  };
  const label = (ref: number): string =>
    ref < 0 ? (depthOf[-1 - ref - 1]?.[2] ?? "") : now.name(ref);
  const at = (top: number): number => top + AXIS - scrolled;
  const visible = (top: number, tall: number): boolean => at(top) + tall > AXIS && at(top) < height;

  context.save();
  context.beginPath();
  context.rect(0, AXIS - 2, width, height - AXIS + 2);
  context.clip();
  context.textBaseline = "middle";
  for (const { row, top } of places) {
    if (visible(top, rowTall)) drawRow(frame, row, at(top), rowTall, fill, label, palette.ink);
  }
  for (const [track, top] of heads) {
    if (!visible(top, HEAD + STRIP)) continue;
    drawRow(frame, track.critical, at(top) + HEAD, STRIP, () => palette.critical, null, "");
    const text = `${track.name} · ${plural(track.tasks, "task")}`;
    context.fillStyle = palette.paper;
    context.fillRect(0, at(top) + 1, context.measureText(text).width + 10, HEAD - 2);
    context.fillStyle = palette.faint;
    context.fillText(text, 4, at(top) + HEAD / 2);
  }
  for (const [focus, weight] of [
    [hovered.value, 1],
    [focused.value, 2],
  ] as const) {
    if (!focus) continue;
    const place = placeOf(places, focus, now);
    if (!place) continue;
    const x0 = Math.max(xOf(frame, focus.start), -4);
    const x1 = Math.min(xOf(frame, focus.end), width + 4);
    context.strokeStyle = weight > 1 ? palette.accent : palette.ink;
    context.lineWidth = weight;
    context.strokeRect(x0, at(place.top) + 0.5, Math.max(x1 - x0, 2), rowTall - 1);
  }
  context.restore();

  const tall = now.memory ? MEMORY : 22;
  below.style.height = `${tall}px`;
  below.style.width = `${width}px`;
  const under = prepare(below, width, tall);
  if (under) {
    under.font = FONT;
    under.fillStyle = palette.raised;
    under.fillRect(0, 0, width, tall);
    under.textBaseline = "middle";
    if (now.memory) drawMemory(frameOf(under, width), now.memory, 4, tall - 4, palette);
    under.fillStyle = palette.ink;
    under.fillText(
      now.memory ? `memory, at most ${bytes(now.memory.peakBytes)}` : "memory was not recorded",
      4,
      now.memory ? 12 : 11,
    );
  }
  if (!drawn) {
    drawn = true;
    performance.mark("slipstream-drawn");
  }
}

function placeOf(places: Place[], focus: Focus, now: Step): Place | undefined {
  const { lane, rank } = now.columns;
  const wanted = focus.path ? -1 - focus.path : focus.task;
  return places.find(({ track, row }) => {
    if (track.lane !== lane[focus.task] || track.rank !== rank[focus.task]) return false;
    const index = firstAfter(row, focus.start);
    for (let i = Math.max(index - 1, 0); i <= index + 1 && i < row.ref.length; i++) {
      if (row.ref[i] === wanted && row.first[i] === focus.task) return true;
    }
    return false;
  });
}

/** The span under the pointer. */
function hit(canvas: HTMLCanvasElement, holder: HTMLElement, event: MouseEvent): Focus | null {
  const area = canvas.getBoundingClientRect();
  const [x, y] = [event.clientX - area.left, event.clientY - area.top];
  if (y < AXIS) return null;
  const now = step.value;
  const { places, tall } = layout(now.tracks, holder.clientHeight);
  const from = y - AXIS + holder.scrollTop;
  const place = places.find(({ top }) => from >= top && from < top + tall + GAP);
  if (!place) return null;
  const [begin, end] = shown.value;
  const frame = { left: 0, width: area.width, from: begin, to: end } as Frame;
  const time = timeAt(frame, x);
  const near = (2 * (end - begin)) / area.width;
  const { row } = place;
  let index = firstAfter(row, time);
  if (index >= row.ref.length || row.start[index] > time) {
    // Nothing right there: the nearest within two pixels.
    const before = index - 1;
    const after = index < row.ref.length ? row.start[index] - time : Infinity;
    const back = before >= 0 ? time - row.end[before] : Infinity;
    if (Math.min(after, back) > near) return null;
    index = after <= back ? index : before;
  }
  const ref = row.ref[index];
  return {
    task: row.first[index],
    path: ref < 0 ? -1 - ref : 0,
    start: row.start[index],
    end: row.end[index],
  };
}

/** Wheel, drag, click and hover. */
function pointer(
  canvas: HTMLCanvasElement,
  holder: HTMLElement,
  below: HTMLCanvasElement,
): () => void {
  let held: { x: number; y: number; shown: [number, number]; top: number } | null = null;
  let moved = false;
  const wheel = (event: WheelEvent): void => {
    event.preventDefault();
    const area = canvas.getBoundingClientRect();
    const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY);
    if (sideways || event.shiftKey) {
      pan((sideways ? event.deltaX : event.deltaY) / area.width);
    } else {
      zoom(Math.exp(event.deltaY * 0.0022), (event.clientX - area.left) / area.width);
    }
  };
  const down = (event: PointerEvent): void => {
    if (event.button !== 0) return;
    held = { x: event.clientX, y: event.clientY, shown: shown.value, top: holder.scrollTop };
    moved = false;
    canvas.setPointerCapture(event.pointerId);
  };
  const move = (event: PointerEvent): void => {
    if (!held) {
      const found = hit(canvas, holder, event);
      const last = hovered.value;
      if (
        found?.task !== last?.task ||
        found?.path !== last?.path ||
        found?.start !== last?.start
      ) {
        hovered.value = found;
      }
      return;
    }
    const by = event.clientX - held.x;
    if (!moved && Math.abs(by) + Math.abs(event.clientY - held.y) < 4) return;
    moved = true;
    const [from, to] = held.shown;
    const time = (by / canvas.clientWidth) * (to - from);
    const left = Math.min(Math.max(from - time, 0), step.value.endNs - (to - from));
    shown.value = [left, left + to - from];
    holder.scrollTop = held.top - (event.clientY - held.y);
  };
  const up = (event: PointerEvent): void => {
    if (held && !moved) focused.value = hit(canvas, holder, event);
    held = null;
  };
  const twice = (event: MouseEvent): void => {
    const found = hit(canvas, holder, event);
    if (found) fit(found);
  };
  const leave = (): void => {
    hovered.value = null;
  };
  canvas.addEventListener("wheel", wheel, { passive: false });
  below.addEventListener("wheel", wheel, { passive: false });
  canvas.addEventListener("pointerdown", down);
  canvas.addEventListener("pointermove", move);
  canvas.addEventListener("pointerup", up);
  canvas.addEventListener("pointerleave", leave);
  canvas.addEventListener("dblclick", twice);
  return () => {
    canvas.removeEventListener("wheel", wheel);
    below.removeEventListener("wheel", wheel);
    canvas.removeEventListener("pointerdown", down);
    canvas.removeEventListener("pointermove", move);
    canvas.removeEventListener("pointerup", up);
    canvas.removeEventListener("pointerleave", leave);
    canvas.removeEventListener("dblclick", twice);
  };
}

function fit(focus: Focus): void {
  const margin = 0.04 * (focus.end - focus.start);
  show(focus.start - margin, focus.end + margin);
}

function keys(event: KeyboardEvent): void {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const holder = event.currentTarget as HTMLElement;
  const actions: Record<string, () => void> = {
    ArrowLeft: () => pan(event.shiftKey ? -0.5 : -0.1),
    ArrowRight: () => pan(event.shiftKey ? 0.5 : 0.1),
    ArrowUp: () => zoom(1 / 1.5),
    ArrowDown: () => zoom(1.5),
    "+": () => zoom(1 / 1.5),
    "=": () => zoom(1 / 1.5),
    "-": () => zoom(1.5),
    Home: () => show(0, step.value.endNs),
    PageUp: () => holder.scrollBy(0, -200),
    PageDown: () => holder.scrollBy(0, 200),
    n: () => neighbour(1),
    p: () => neighbour(-1),
    f: () => focused.value && fit(focused.value),
    Escape: () => {
      focused.value = null;
    },
  };
  const action = actions[event.key];
  if (!action) return;
  action();
  event.preventDefault();
  event.stopPropagation();
}

/** The next task on the lane of the chosen one; without one, the first that is shown. */
function neighbour(by: number): void {
  const now = step.value;
  const { lane, rank, start } = now.columns;
  const from = focused.value;
  if (!from) {
    let best = -1;
    for (let task = 0; task < now.size; task++) {
      if (start[task] >= shown.value[0] && (best < 0 || start[task] < start[best])) best = task;
    }
    if (best >= 0) focusOn(best);
    return;
  }
  for (let task = from.task + by; task >= 0 && task < now.size; task += by) {
    if (lane[task] === lane[from.task] && rank[task] === rank[from.task]) {
      focusOn(task);
      return;
    }
  }
}

/** Details of the span under the pointer, or of the chosen one. */
function Detail() {
  const now = step.value;
  const focus = hovered.value ?? focused.value;
  if (!focus) {
    const name = chosen.value?.scene != null ? chosen.value.technique : "";
    return (
      <div class="detail faint">
        <p>
          {name ? (
            <>
              The step as <b>{name}</b> would make it.{" "}
              <button type="button" class="link" onClick={() => choose([])}>
                Show it as recorded
              </button>
            </>
          ) : (
            "Point at a task, or press N, for its details."
          )}
        </p>
        <p>
          Wheel or ↑ ↓ zoom, drag or ← → pan, double click or F fits, Home shows all. The thin line
          above each lane is the critical path: only what is on it makes the step shorter.
        </p>
      </div>
    );
  }
  return focus.path ? <Span focus={focus} now={now} /> : <Task task={focus.task} now={now} />;
}

function Span({ focus, now }: { focus: Focus; now: Step }) {
  const [, kind, label] = now.doc.paths[focus.path - 1];
  const { start, lane, rank } = now.columns;
  let tasks = 0;
  let busy = 0;
  for (let task = 0; task < now.size; task++) {
    if (start[task] < focus.start || start[task] >= focus.end) continue;
    if (lane[task] !== lane[focus.task] || rank[task] !== rank[focus.task]) continue;
    tasks += 1;
    busy += now.columns.duration[task];
  }
  const length = focus.end - focus.start;
  return (
    <div class="detail">
      <h3>
        {label} <span class="faint">{kind}</span>
      </h3>
      <dl>
        <dt>lasts</dt>
        <dd>
          {duration(length)}, {percent(length / now.stepNs)} of the step
        </dd>
        <dt>runs</dt>
        <dd>
          {plural(tasks, "task")} for {duration(busy)}; {duration(Math.max(length - busy, 0))}{" "}
          Python, dispatch and waiting
        </dd>
        <dt>starts</dt>
        <dd>{duration(focus.start)}</dd>
      </dl>
    </div>
  );
}

function Task({ task, now }: { task: number; now: Step }) {
  const { columns } = now;
  const d = doc();
  const call = d.calls[columns.call[task]];
  const spread = columns.spread[task];
  const length = columns.duration[task];
  return (
    <div class="detail">
      <h3>
        {plainName(now.name(task))} <span class="faint">{d.families[columns.family[task]]}</span>
      </h3>
      <dl>
        <dt>runs</dt>
        <dd>
          {duration(length)}, {percent(length / now.stepNs)} of the step;{" "}
          {d.run.provenances[columns.provenance[task]]}
          {spread > 0 ? `, ± ${percent(Math.min(spread, 9.99))} between steps` : ""}
        </dd>
        <dt>starts</dt>
        <dd>
          {duration(columns.start[task])}, in {d.phases[columns.phase[task]]} on{" "}
          {now.data.lanes[columns.lane[task]]}
        </dd>
        <dt>then</dt>
        <dd>{duration(columns.gap[task])} of Python and dispatch until the next on its lane</dd>
        <dt>path</dt>
        <dd>
          {columns.critical[task]
            ? "on the critical path"
            : `${duration(columns.slack[task])} of slack`}
        </dd>
        <dt>module</dt>
        <dd>{now.module(task) || "none"}</dd>
        <dt>line</dt>
        <dd>{now.source(task) || "not recorded"}</dd>
        <dt>tensors</dt>
        <dd class="mono">{call || "not recorded"}</dd>
      </dl>
    </div>
  );
}
