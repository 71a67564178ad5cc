// One simulated step, decoded: its tasks, the nested rows they are drawn in, and sums over them.

import type { Data } from "./data";
import { plainName } from "./format";
import { COLUMNS } from "./types";
import type { Column, ColumnName, Doc, SceneData } from "./types";

/** Spans of one level of nesting in one lane, by start; they do not overlap. */
export interface Row {
  start: Float64Array;
  end: Float64Array;
  /** A task, or minus one less a path for a span that encloses tasks. */
  ref: Int32Array;
  /** First task of the span. */
  first: Int32Array;
  /** By stretch of 2, 4, 8, ... spans the longest of them, to find what a pixel should show. */
  longest: Int32Array[];
}

export interface Track {
  name: string;
  lane: number;
  rank: number;
  rows: Row[];
  critical: Row;
  tasks: number;
}

export interface Tensors {
  bytes: Column;
  birth: Column;
  death: Column;
  role: Column;
  producer: Column;
  release: Column;
  user: Column;
}

export interface Memory {
  peakBytes: number;
  peakNs: number;
  points: number;
  roles: string[];
  times: Column;
  levels: Column[];
  allocations: number;
  tensors: Tensors;
}

export class Step {
  readonly doc: Doc;
  readonly data: SceneData;
  readonly columns: Record<ColumnName, Column>;
  readonly memory: Memory | null;
  readonly size: number;
  private madeTracks: Track[] | null = null;

  constructor(source: Data, data: SceneData) {
    this.doc = source.doc;
    this.data = data;
    const found = {} as Record<ColumnName, Column>;
    for (const name of COLUMNS) found[name] = source.column(data.columns[name]);
    this.columns = found;
    this.size = found.start.length;
    const memory = data.memory;
    const tensors = memory?.tensors;
    this.memory =
      memory && tensors
        ? {
            peakBytes: memory.peak_bytes,
            peakNs: memory.peak_ns,
            points: memory.points,
            roles: memory.roles,
            times: source.column(memory.times),
            levels: memory.levels.map((ref) => source.column(ref)),
            allocations: memory.allocations,
            tensors: {
              bytes: source.column(tensors.bytes),
              birth: source.column(tensors.birth),
              death: source.column(tensors.death),
              role: source.column(tensors.role),
              producer: source.column(tensors.producer),
              release: source.column(tensors.release),
              user: source.column(tensors.user),
            },
          }
        : null;
  }

  get stepNs(): number {
    return this.data.step_ns;
  }

  get endNs(): number {
    return Math.max(this.data.end_ns, this.data.step_ns, 1);
  }

  name(task: number): string {
    return plainName(this.doc.strings[this.columns.name[task]]);
  }

  module(task: number): string {
    return this.doc.strings[this.columns.module[task]];
  }

  source(task: number): string {
    return this.doc.strings[this.columns.source[task]];
  }

  /** When the task ends. */
  end(task: number): number {
    return this.columns.start[task] + this.columns.duration[task];
  }

  get tracks(): Track[] {
    this.madeTracks ??= makeTracks(this);
    return this.madeTracks;
  }

  /** Tasks whose operator, module or source line contains `query`, in order of start. */
  find(query: string): Int32Array {
    const wanted = query.trim().toLowerCase();
    if (!wanted) return new Int32Array(0);
    const hit = this.doc.strings.map((text) => text.toLowerCase().includes(wanted));
    const { name, module, source, start } = this.columns;
    const found: number[] = [];
    for (let task = 0; task < this.size; task++) {
      if (hit[name[task]] || hit[module[task]] || hit[source[task]]) found.push(task);
    }
    return Int32Array.from(found.sort((a, b) => start[a] - start[b]));
  }
}

/** Levels above a task, outermost first; paths are counted from 1, 0 is none. */
export function chains(doc: Doc): number[][] {
  const found: number[][] = [[]];
  doc.paths.forEach(([parent], index) => found.push([...found[parent], index + 1]));
  return found;
}

class RowMaker {
  private readonly start: number[] = [];
  private readonly end: number[] = [];
  private readonly ref: number[] = [];
  private readonly first: number[] = [];

  add(start: number, end: number, ref: number, first: number): void {
    this.start.push(start);
    this.end.push(end);
    this.ref.push(ref);
    this.first.push(first);
  }

  extend(end: number): void {
    this.end[this.end.length - 1] = end;
  }

  row(): Row {
    const start = Float64Array.from(this.start);
    const end = Float64Array.from(this.end);
    const longest: Int32Array[] = [];
    let below: Int32Array | null = null;
    for (let size = start.length; size > 1; size = (size + 1) >> 1) {
      const above = new Int32Array((size + 1) >> 1);
      for (let i = 0; i < above.length; i++) {
        const first = 2 * i;
        const second = Math.min(first + 1, size - 1);
        const a: number = below ? below[first] : first;
        const b: number = below ? below[second] : second;
        above[i] = end[b] - start[b] > end[a] - start[a] ? b : a;
      }
      longest.push(above);
      below = above;
    }
    return {
      start,
      end,
      longest,
      ref: Int32Array.from(this.ref),
      first: Int32Array.from(this.first),
    };
  }
}

function makeTracks(step: Step): Track[] {
  const { lane, rank, start, path, critical } = step.columns;
  const above = chains(step.doc);
  const byPlace = new Map<number, number[]>();
  const lanes = Math.max(step.data.lanes.length, 1);
  for (let task = 0; task < step.size; task++) {
    const place = rank[task] * lanes + lane[task];
    const tasks = byPlace.get(place);
    if (tasks) tasks.push(task);
    else byPlace.set(place, [task]);
  }
  const ranks = new Set([...byPlace.keys()].map((place) => Math.floor(place / lanes)));
  return [...byPlace.entries()]
    .sort(([a], [b]) => a - b)
    .map(([place, tasks]) => {
      tasks.sort((a, b) => start[a] - start[b] || a - b);
      const makers: RowMaker[] = [];
      const onPath = new RowMaker();
      let open: number[] = [];
      let wasCritical = false;
      for (const task of tasks) {
        const chain = above[path[task]];
        const end = step.end(task);
        let same = true;
        for (let depth = 0; depth < chain.length; depth++) {
          makers[depth] ??= new RowMaker();
          same &&= open[depth] === chain[depth];
          if (same) makers[depth].extend(end);
          else makers[depth].add(start[task], end, -1 - chain[depth], task);
        }
        makers[chain.length] ??= new RowMaker();
        makers[chain.length].add(start[task], end, task, task);
        // Below an operator nothing is open.
        open = chain;
        if (critical[task] && wasCritical) onPath.extend(end);
        else if (critical[task]) onPath.add(start[task], end, task, task);
        wasCritical = critical[task] > 0;
      }
      const number = Math.floor(place / lanes);
      const name = step.data.lanes[place % lanes] ?? "lane";
      return {
        name: ranks.size > 1 ? `rank ${number}: ${name}` : name,
        lane: place % lanes,
        rank: number,
        rows: makers.map((maker) => maker.row()),
        critical: onPath.row(),
        tasks: tasks.length,
      };
    });
}

/** The first span of `row` that ends after `time`. */
export function firstAfter(row: Row, time: number, from = 0): number {
  let low = from;
  let high = row.end.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (row.end[middle] > time) high = middle;
    else low = middle + 1;
  }
  return low;
}

/** The longest of the spans `from` up to, not including, `to`. */
export function longestOf(row: Row, from: number, to: number): number {
  let best = from;
  const better = (index: number): void => {
    if (row.end[index] - row.start[index] > row.end[best] - row.start[best]) best = index;
  };
  let low = from;
  let high = to;
  for (let level = -1; low < high; level++) {
    const at = (index: number): number => (level < 0 ? index : row.longest[level][index]);
    if (low & 1) better(at(low++));
    if (high & 1) better(at(--high));
    low >>= 1;
    high >>= 1;
  }
  return best;
}
