// Memory over the step by role, and the tensors alive at the time under the cursor.

import { effect, signal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import { colours, roleColour } from "./colours";
import { FONT, drawAxis, drawMemory, drawPeak, prepare, timeAt, xOf } from "./draw";
import type { Frame } from "./draw";
import { bytes, count, duration, percent } from "./format";
import { Bar, Empty, Legend, Name } from "./parts";
import { dark, drawnAsRecorded, focusOn, selectionName, step, view } from "./state";
import type { Memory, Step } from "./step";

const TOP = 20;
const MOST_ROWS = 60;

/** The moment the table shows; null for the peak. */
const pinned = signal<number | null>(null);
const pointed = signal<number | null>(null);

export function MemoryView() {
  const now = step.value;
  if (!now.memory) {
    return (
      <Empty
        title="Memory was not recorded"
        text="This graph comes from a trace without allocations. A step that slipstream records itself has them:"
      >
        <code>slipstream profile WORKLOAD -o run.slipgraph</code>
      </Empty>
    );
  }
  const memory = now.memory;
  const at = momentOf(now, memory);
  return (
    <section aria-label="Memory">
      <div class="tools">
        <span>
          At most <b>{bytes(memory.peakBytes)}</b>, reached after {duration(memory.peakNs)} of{" "}
          {duration(now.endNs)}
        </span>
        <span class="grow" />
        <span class="faint">
          {drawnAsRecorded.value ? "the step as recorded" : `the step with ${selectionName.value}`}
        </span>
        <button
          type="button"
          disabled={pinned.value === null}
          onClick={() => (pinned.value = null)}
        >
          Back to the peak
        </button>
      </div>
      <Chart />
      <Legend names={memory.roles} kind="role" />
      <Roles memory={memory} at={at} />
      <Alive memory={memory} at={at} now={now} />
    </section>
  );
}

function momentOf(now: Step, memory: Memory): number {
  const at = pinned.value ?? memory.peakNs;
  return Math.min(at, now.endNs);
}

function Chart() {
  const canvas = useRef<HTMLCanvasElement>(null);
  const box = useRef<HTMLDivElement>(null);
  useEffect(() => {
    const [target, holder] = [canvas.current, box.current];
    if (!target || !holder) return undefined;
    let frame = 0;
    const ask = (): void => {
      frame ||= requestAnimationFrame(() => {
        frame = 0;
        paint(target, holder);
      });
    };
    const stop = effect(() => {
      void [step.value, dark.value, pinned.value, pointed.value];
      ask();
    });
    const watch = new ResizeObserver(ask);
    watch.observe(holder);
    return () => {
      stop();
      watch.disconnect();
      cancelAnimationFrame(frame);
    };
  }, []);
  const moment = (event: MouseEvent): number => {
    const area = (event.currentTarget as HTMLElement).getBoundingClientRect();
    const frame = { left: 0, width: area.width, from: 0, to: step.value.endNs } as Frame;
    return Math.min(Math.max(timeAt(frame, event.clientX - area.left), 0), step.value.endNs);
  };
  return (
    <div
      class="chart"
      ref={box}
      tabIndex={0}
      role="slider"
      aria-label="Moment of the step whose tensors are listed"
      aria-valuemin={0}
      aria-valuemax={Math.round(step.value.endNs)}
      aria-valuenow={Math.round(pinned.value ?? step.value.memory?.peakNs ?? 0)}
      aria-valuetext={duration(pinned.value ?? step.value.memory?.peakNs ?? 0)}
      onPointerMove={(event) => (pointed.value = moment(event))}
      onPointerLeave={() => (pointed.value = null)}
      onClick={(event) => (pinned.value = moment(event))}
      onKeyDown={(event) => {
        const by = event.key === "ArrowRight" ? 1 : event.key === "ArrowLeft" ? -1 : 0;
        if (event.key === "Home" || event.key === "Escape") pinned.value = null;
        else if (by) {
          const end = step.value.endNs;
          const from = pinned.value ?? step.value.memory?.peakNs ?? 0;
          const next = from + (by * end) / (event.shiftKey ? 20 : 200);
          pinned.value = Math.min(Math.max(next, 0), end);
        } else return;
        event.preventDefault();
        event.stopPropagation();
      }}
    >
      <canvas ref={canvas} />
    </div>
  );
}

function paint(canvas: HTMLCanvasElement, holder: HTMLElement): void {
  const now = step.value;
  const [width, height] = [holder.clientWidth, holder.clientHeight];
  if (!now.memory || !width) return;
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = prepare(canvas, width, height);
  if (!context) return;
  const palette = colours(dark.value);
  const frame: Frame = { context, left: 0, width, from: 0, to: now.endNs };
  context.font = FONT;
  context.fillStyle = palette.paper;
  context.fillRect(0, 0, width, height);
  drawAxis(frame, 0, height, palette);
  drawMemory(frame, now.memory, TOP, height - TOP, palette);
  drawPeak(frame, now.memory, TOP, height - TOP, palette);
  const cursor = pointed.value;
  for (const [at, colour] of [
    [cursor, palette.faint],
    [pinned.value, palette.accent],
  ] as const) {
    if (at === null) continue;
    const x = Math.round(xOf(frame, Math.min(at, now.endNs)));
    context.fillStyle = colour;
    context.fillRect(x, TOP, 1, height - TOP);
  }
  if (cursor !== null) {
    const text = `${bytes(totalAt(now.memory, cursor))} at ${duration(cursor)}`;
    const wide = context.measureText(text).width + 10;
    const x = Math.min(xOf(frame, cursor) + 6, width - wide);
    context.fillStyle = palette.paper;
    context.fillRect(x, height - 22, wide, 18);
    context.fillStyle = palette.ink;
    context.textBaseline = "middle";
    context.fillText(text, x + 5, height - 12.5);
  }
}

/** The point of the curve that holds at `time`. */
function pointAt(memory: Memory, time: number): number {
  const { times } = memory;
  let low = 0;
  let high = times.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (times[middle] <= time) low = middle + 1;
    else high = middle;
  }
  return Math.max(low - 1, 0);
}

function totalAt(memory: Memory, time: number): number {
  const point = pointAt(memory, time);
  return memory.levels.reduce((sum, level) => sum + level[point], 0);
}

function Roles({ memory, at }: { memory: Memory; at: number }) {
  const point = pointAt(memory, at);
  const palette = colours(dark.value);
  const total = totalAt(memory, at);
  const rows = memory.roles
    .map((role, index) => ({ role, size: memory.levels[index][point] }))
    .filter((row) => row.size > 0)
    .sort((a, b) => b.size - a.size);
  return (
    <>
      <h2>
        {bytes(total)} live at {duration(at)}
        <span class="faint">
          {pinned.value === null ? ", the peak" : ""}
          {memory.points > memory.times.length
            ? `; the curve shows ${count(memory.times.length)} of ${count(memory.points)} moments, the maximum of each interval`
            : ""}
        </span>
      </h2>
      <div class="roles">
        {rows.map(({ role, size }) => (
          <div key={role}>
            <i class="dot" style={{ background: roleColour(palette, role) }} />
            {role} <b>{bytes(size)}</b> <span class="faint">{percent(size / total)}</span>
          </div>
        ))}
      </div>
    </>
  );
}

function Alive({ memory, at, now }: { memory: Memory; at: number; now: Step }) {
  const { tensors } = memory;
  const alive: number[] = [];
  for (let index = 0; index < tensors.bytes.length; index++) {
    const lasts = tensors.producer[index] < 0 && tensors.release[index] < 0;
    if (lasts || (tensors.birth[index] <= at && at < tensors.death[index])) alive.push(index);
  }
  const total = totalAt(memory, at);
  const palette = colours(dark.value);
  const end = now.endNs;
  const shown = alive.slice(0, MOST_ROWS);
  const listed = alive.reduce((sum, index) => sum + tensors.bytes[index], 0);
  return (
    <>
      <div class="scroll" tabIndex={0} role="region" aria-label="Largest tensors alive">
        <table class="alive">
          <thead>
            <tr>
              <th scope="col" class="right size">
                size
              </th>
              <th scope="col" class="part">
                share
              </th>
              <th scope="col" class="role">
                role
              </th>
              <th scope="col" class="made">
                made by
              </th>
              <th scope="col">module</th>
              <th scope="col">line</th>
              <th scope="col" class="life">
                lives, over the step
              </th>
            </tr>
          </thead>
          <tbody>
            {shown.map((index) => {
              const made = tensors.producer[index];
              const task = made >= 0 ? made : tensors.user[index];
              const role = memory.roles[tensors.role[index]];
              const [from, to] = [tensors.birth[index] / end, tensors.death[index] / end];
              return (
                <tr key={index}>
                  <td class="right">{bytes(tensors.bytes[index])}</td>
                  <td>
                    <Bar share={tensors.bytes[index] / total} />
                    <span class="share">{percent(tensors.bytes[index] / total)}</span>
                  </td>
                  <td>{role}</td>
                  <td>
                    {made >= 0 ? (
                      <button
                        type="button"
                        class="link mono named"
                        aria-label={`${now.name(made)}: show it on the timeline`}
                        onClick={() => {
                          focusOn(made, true);
                          view.value = "timeline";
                        }}
                      >
                        <Name text={now.name(made)} />
                      </button>
                    ) : (
                      <span class="faint">before the step</span>
                    )}
                  </td>
                  <td>{task >= 0 ? <Name text={now.module(task)} /> : ""}</td>
                  <td>{task >= 0 ? <Name text={now.source(task)} /> : ""}</td>
                  <td class="life">
                    <svg
                      width="100%"
                      height="12"
                      role="img"
                      aria-label={`from ${duration(tensors.birth[index])} to ${duration(tensors.death[index])}`}
                    >
                      <rect
                        x={`${100 * from}%`}
                        width={`${Math.max(100 * (to - from), 0.5)}%`}
                        y="2"
                        height="8"
                        style={{ fill: roleColour(palette, role) }}
                      />
                      <rect
                        x={`${(100 * at) / end}%`}
                        width="1"
                        y="0"
                        height="12"
                        style={{ fill: palette.faint }}
                      />
                    </svg>
                  </td>
                </tr>
              );
            })}
          </tbody>
        </table>
      </div>
      <p class="faint">
        {alive.length > shown.length
          ? `${count(alive.length - shown.length)} smaller ones are left out. `
          : ""}
        {memory.allocations > tensors.bytes.length
          ? `Listed are the ${count(tensors.bytes.length)} largest of ${count(memory.allocations)} allocations; they hold ${percent(listed / total)} of this moment. `
          : ""}
        Click the curve, or use ← →, for another moment.
      </p>
    </>
  );
}
