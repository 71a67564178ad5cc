// Drawing on canvases: rows of spans at any zoom, axes, areas. Cost depends on pixels, not tasks.

import type { Colours } from "./colours";
import { roleColour } from "./colours";
import { bytes, duration } from "./format";
import { firstAfter, longestOf } from "./step";
import type { Memory, Row } from "./step";

export const FONT = "11px system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif";
// Narrower spans share a pixel column, which shows the longest of them.
const NARROW = 1.5;
const LABEL_FROM = 26;

export interface Frame {
  context: CanvasRenderingContext2D;
  left: number;
  width: number;
  from: number;
  to: number;
}

/** Prepare a canvas for drawing in CSS pixels. */
export function prepare(
  canvas: HTMLCanvasElement,
  width: number,
  height: number,
): CanvasRenderingContext2D | null {
  const ratio = window.devicePixelRatio || 1;
  const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== w) canvas.width = w;
  if (canvas.height !== h) canvas.height = h;
  const context = canvas.getContext("2d", { alpha: false });
  context?.setTransform(ratio, 0, 0, ratio, 0, 0);
  return context;
}

export function xOf(frame: Frame, time: number): number {
  return frame.left + ((time - frame.from) / (frame.to - frame.from)) * frame.width;
}

export function timeAt(frame: Frame, x: number): number {
  return frame.from + ((x - frame.left) / frame.width) * (frame.to - frame.from);
}

/** The spans of `row` that are visible; those too narrow to see are drawn as their longest. */
export function drawRow(
  frame: Frame,
  row: Row,
  top: number,
  height: number,
  fill: (ref: number) => string,
  label: ((ref: number) => string) | null,
  ink: string,
): void {
  const { context, left, width, from, to } = frame;
  const scale = width / (to - from);
  const right = left + width;
  const total = row.end.length;
  let index = firstAfter(row, from);
  let pending = "";
  let pendingFrom = 0;
  let pendingTo = 0;
  const flush = (): void => {
    if (!pending) return;
    context.fillStyle = pending;
    context.fillRect(pendingFrom, top, pendingTo - pendingFrom, height);
    pending = "";
  };
  while (index < total && row.start[index] < to) {
    const x0 = left + (row.start[index] - from) * scale;
    const x1 = left + (row.end[index] - from) * scale;
    if (x1 - x0 >= NARROW) {
      flush();
      const a = Math.max(x0, left);
      const b = Math.min(x1, right);
      context.fillStyle = fill(row.ref[index]);
      // A hair of paper between neighbours, as soon as there is room for it.
      context.fillRect(a, top, Math.max(b - a - (x1 - x0 > 4 ? 0.75 : 0), 0.5), height);
      if (label && b - a >= LABEL_FROM) {
        drawLabel(context, label(row.ref[index]), a, b, top, height, ink);
      }
      index += 1;
      continue;
    }
    const column = Math.floor(x0);
    const next = Math.max(firstAfter(row, from + (column + 1 - left) / scale, index), index + 1);
    const colour = fill(row.ref[longestOf(row, index, next)]);
    const x = Math.max(column, left);
    if (colour === pending && x <= pendingTo + 0.01) {
      pendingTo = x + 1;
    } else {
      flush();
      pending = colour;
      pendingFrom = x;
      pendingTo = x + 1;
    }
    index = next;
  }
  flush();
}

const widths = new Map<string, number>();

function textWidth(context: CanvasRenderingContext2D, text: string): number {
  let found = widths.get(text);
  if (found === undefined) {
    if (widths.size > 20000) widths.clear();
    found = context.measureText(text).width;
    widths.set(text, found);
  }
  return found;
}

function drawLabel(
  context: CanvasRenderingContext2D,
  text: string,
  from: number,
  to: number,
  top: number,
  height: number,
  ink: string,
): void {
  const room = to - from - 7;
  const full = textWidth(context, text);
  let shown = text;
  if (full > room) {
    const letters = Math.floor((text.length * room) / full) - 1;
    if (letters < 2) return;
    shown = `${text.slice(0, letters)}…`;
  }
  context.fillStyle = ink;
  context.fillText(shown, from + 3, top + height / 2 + 0.5);
}

const STEPS = [1, 2, 5];

/** Round distances between ticks, as many as there is room for. */
export function ticks(from: number, to: number, most: number): number[] {
  const rough = (to - from) / Math.max(most, 1);
  const base = 10 ** Math.floor(Math.log10(rough));
  const by = (STEPS.find((step) => step * base >= rough) ?? 10) * base;
  const found: number[] = [];
  for (let at = Math.ceil(from / by) * by; at <= to; at += by) found.push(at);
  return found;
}

/** A time axis with lines down to `bottom`. */
export function drawAxis(frame: Frame, top: number, bottom: number, palette: Colours): void {
  const { context, left, width, from, to } = frame;
  const found = ticks(from, to, width / 110);
  const by = found.length > 1 ? found[1] - found[0] : to - from;
  context.textBaseline = "middle";
  for (const at of found) {
    const x = Math.round(xOf(frame, at)) + 0.5;
    context.fillStyle = palette.line;
    context.fillRect(x, top + 18, 1, bottom - top - 18);
    const text = tickText(at, by);
    if (x + 40 < left + width) {
      context.fillStyle = palette.faint;
      context.fillText(text, x + 3, top + 9);
    }
  }
}

/** Enough digits to tell ticks `by` apart. */
function tickText(at: number, by: number): string {
  if (at === 0) return "0";
  const [unit, scale]: [string, number] =
    at >= 1e9 ? ["s", 1e9] : at >= 1e6 ? ["ms", 1e6] : at >= 1e3 ? ["µs", 1e3] : ["ns", 1];
  const digits = Math.max(0, Math.ceil(-Math.log10(by / scale) - 1e-9));
  return `${(at / scale).toFixed(digits)} ${unit}`;
}

/** Memory by role, stacked; each pixel column shows its highest moment. */
export function drawMemory(
  frame: Frame,
  memory: Memory,
  top: number,
  height: number,
  palette: Colours,
): void {
  const { context, left, width, from, to } = frame;
  const { times, levels, roles } = memory;
  const highest = memory.peakBytes * 1.06 || 1;
  const columns = Math.max(1, Math.round(width));
  const stacks = levels.map(() => new Float64Array(columns));
  let index = 0;
  for (let column = 0; column < columns; column++) {
    const end = from + ((column + 1) / columns) * (to - from);
    const begin = from + (column / columns) * (to - from);
    while (index + 1 < times.length && times[index + 1] <= begin) index += 1;
    let best = index;
    let most = -1;
    for (let at = index; at < times.length && (at === index || times[at] < end); at++) {
      let total = 0;
      for (const level of levels) total += level[at];
      if (total > most) [best, most] = [at, total];
    }
    levels.forEach((level, role) => {
      stacks[role][column] = times[0] <= end ? level[best] : 0;
    });
  }
  // From the topmost role down: each covers what lies under it.
  for (let role = 1; role < stacks.length; role++) {
    for (let column = 0; column < columns; column++) {
      stacks[role][column] += stacks[role - 1][column];
    }
  }
  const bottom = top + height;
  for (let role = stacks.length - 1; role >= 0; role--) {
    const [stack, under] = [stacks[role], stacks[role - 1]];
    context.fillStyle = roleColour(palette, roles[role]);
    let since = 0;
    let level = -1;
    for (let column = 0; column <= columns; column++) {
      const empty = column < columns && stack[column] === (under ? under[column] : 0);
      const pixels =
        column === columns || empty ? 0 : Math.round((2 * height * stack[column]) / highest) / 2;
      if (pixels === level) continue;
      if (level > 0) context.fillRect(left + since, bottom - level, column - since, level);
      since = column;
      level = column < columns ? pixels : -1;
    }
  }
}

/** A dashed line at the peak with its size. */
export function drawPeak(
  frame: Frame,
  memory: Memory,
  top: number,
  height: number,
  palette: Colours,
): void {
  const { context, left, width } = frame;
  const y = Math.round(top + height - height / 1.06) + 0.5;
  context.save();
  context.strokeStyle = palette.faint;
  context.setLineDash([3, 3]);
  context.beginPath();
  context.moveTo(left, y);
  context.lineTo(left + width, y);
  context.stroke();
  context.restore();
  const text = `peak ${bytes(memory.peakBytes)} at ${duration(memory.peakNs)}`;
  context.fillStyle = palette.ink;
  context.textBaseline = "middle";
  const room = textWidth(context, text) + 8;
  // On the side where it hides nothing of the peak.
  const x = xOf(frame, memory.peakNs) > left + width / 2 ? left + 6 : left + width - room - 2;
  context.fillStyle = palette.paper;
  context.fillRect(x - 3, y - 7, room, 14);
  context.fillStyle = palette.ink;
  context.fillText(text, x, y + 0.5);
}
