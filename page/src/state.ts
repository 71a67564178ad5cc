// What the page shows now. Everything drawn follows from these signals.

import { batch, computed, signal } from "@preact/signals";
import type { Data } from "./data";
import { Step } from "./step";
import type { Prediction } from "./types";

export const VIEWS = [
  ["overview", "Overview"],
  ["timeline", "Timeline"],
  ["breakdown", "Breakdown"],
  ["memory", "Memory"],
  ["movement", "Movement"],
  ["whatifs", "What-ifs"],
  ["history", "History"],
  ["run", "Run"],
] as const;

export type View = "live" | (typeof VIEWS)[number][0];

/** Whether a server sends new documents; a report never changes. */
export const live = signal(false);
/** All views, with their names. */
export const views = computed<readonly (readonly [View, string])[]>(() =>
  live.value ? [["live", "Live"] as const, ...VIEWS] : VIEWS,
);

export function isView(name: string): name is View {
  return views.value.some(([known]) => known === name);
}

export interface Focus {
  task: number;
  /** A level above the task that is meant instead; 0 for the task itself. */
  path: number;
  start: number;
  end: number;
}

const source = signal<Data | null>(null);
let steps: Step[] = [];

/** Show `data` instead of the previous document. */
export function begin(data: Data): void {
  const before = source.value ? step.value.endNs : 0;
  batch(() => {
    steps = [];
    source.value = data;
    const at = chosen.value?.scene ?? 0;
    step.value = stepOf(at);
    focused.value = hovered.value = null;
    matchAt.value = -1;
    const [from, to] = shown.value;
    if (before && (from > 0 || to < before)) show(from, to);
    else shown.value = [0, step.value.endNs];
  });
}

export function doc(): Data["doc"] {
  if (!source.value) throw new Error("there is nothing to draw yet");
  return source.value.doc;
}

export function hasDoc(): boolean {
  return source.value !== null;
}

function stepOf(scene: number): Step {
  const data = source.value;
  if (!data) throw new Error("there is nothing to draw yet");
  steps[scene] ??= new Step(data, data.doc.scenes[scene]);
  return steps[scene];
}

export const view = signal<View>("overview");
export const dark = signal(false);
export const help = signal(false);

/** Techniques that are switched on. */
export const selection = signal<ReadonlySet<string>>(new Set());
/** The step that is drawn: as recorded, or with the selection applied if that was simulated. */
export const step = signal<Step>(undefined as unknown as Step);
/** The part of the step that the timeline shows, in nanoseconds. */
export const shown = signal<[number, number]>([0, 1]);
export const hovered = signal<Focus | null>(null);
export const focused = signal<Focus | null>(null);
export const query = signal("");
export const matches = computed(() => (query.value ? step.value.find(query.value) : null));
/** The last visited match. */
export const matchAt = signal(-1);

/** What a live page's server simulated on top of what the document knows, by sorted parts. */
export const extra = signal<ReadonlyMap<string, Prediction>>(new Map());

const byParts = computed(
  () =>
    new Map([
      ...extra.value,
      ...(source.value?.doc.what_ifs.predictions ?? []).map((p) => [keyOf(p.parts), p] as const),
    ]),
);

function keyOf(parts: Iterable<string>): string {
  return [...parts].sort().join("+");
}

/** The selection as a technique spec. */
export const selectionName = computed(() => [...selection.value].join("+"));

/** The prediction of the selection; null if nothing is on or it was not simulated. */
export const chosen = computed<Prediction | null>(() =>
  selection.value.size ? (byParts.value.get(keyOf(selection.value)) ?? null) : null,
);

export function predictionOf(parts: Iterable<string>): Prediction | null {
  return byParts.value.get(keyOf(parts)) ?? null;
}

/** Whether the drawn step is the recorded one. */
export const drawnAsRecorded = computed(() => chosen.value?.scene == null);

export function choose(parts: Iterable<string>): void {
  selection.value = new Set(parts);
  const scene = chosen.value?.scene ?? 0;
  const next = stepOf(scene);
  if (next === step.value) return;
  const whole = shown.value[0] === 0 && shown.value[1] === step.value.endNs;
  focused.value = hovered.value = null;
  matchAt.value = -1;
  const width = shown.value[1] - shown.value[0];
  step.value = next;
  if (whole) show(0, next.endNs);
  else show(shown.value[0], shown.value[0] + width);
}

export function nameOf(technique: string): string {
  return technique.split(":")[0];
}

/** Switch one technique; another setting of it, and what conflicts with it, is switched off. */
export function toggle(technique: string): void {
  const next = new Set(selection.value);
  if (next.has(technique)) {
    next.delete(technique);
  } else {
    const name = nameOf(technique);
    const conflicts = doc().what_ifs.conflicts;
    for (const other of [...next]) {
      const its = nameOf(other);
      if (its === name || conflicts[name]?.includes(its) || conflicts[its]?.includes(name)) {
        next.delete(other);
      }
    }
    next.add(technique);
  }
  choose(next);
}

const NARROWEST_NS = 50;

/** Show this part of the step, or as much of it as there is. */
export function show(from: number, to: number): void {
  const end = step.value.endNs;
  const width = Math.min(Math.max(to - from, Math.min(NARROWEST_NS, end)), end);
  const middle = (from + to) / 2;
  const left = Math.min(Math.max(middle - width / 2, 0), end - width);
  shown.value = [left, left + width];
}

/** Zoom by `factor` about the time at `share` of the width. */
export function zoom(factor: number, share = 0.5): void {
  const [from, to] = shown.value;
  const width = to - from;
  const at = from + share * width;
  const next = Math.min(Math.max(width * factor, NARROWEST_NS), step.value.endNs);
  show(at - share * next, at + (1 - share) * next);
}

export function pan(share: number): void {
  const [from, to] = shown.value;
  const by = share * (to - from);
  const end = step.value.endNs;
  const left = Math.min(Math.max(from + by, 0), end - (to - from));
  shown.value = [left, left + to - from];
}

export function focusOn(task: number, closer = false): void {
  const start = step.value.columns.start[task];
  const end = step.value.end(task);
  focused.value = { task, path: 0, start, end };
  const [from, to] = shown.value;
  const width = to - from;
  if (closer) {
    const wide = Math.max((end - start) * 4, NARROWEST_NS);
    show((start + end - wide) / 2, (start + end + wide) / 2);
  } else if (start < from || end > to) {
    show(start - width / 2, start + width / 2);
  }
}

/** Go to the next (or previous) task that matches the search. */
export function goToMatch(by: number): void {
  const found = matches.value;
  if (!found?.length) return;
  const from = matchAt.value < 0 && by < 0 ? 0 : matchAt.value;
  matchAt.value = (from + by + found.length) % found.length;
  const task = found[matchAt.value];
  const [left, right] = shown.value;
  focusOn(task, step.value.columns.duration[task] / (right - left) < 0.002);
}
