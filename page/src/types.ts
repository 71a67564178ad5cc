// The document as `slipstream.report` writes it. Times in nanoseconds, sizes in bytes.

export interface Ref {
  type: "u8" | "u16" | "i32" | "f32" | "f64";
  at: number;
  length: number;
}

export type Column = Uint8Array | Uint16Array | Int32Array | Float32Array | Float64Array;

export type Shares = Record<string, number>;

export interface Lane {
  name: string;
  tasks: number;
  busy_ns: number;
  gap_ns: number;
  idle_ns: number;
}

export interface Run {
  workload: string;
  created: string;
  training: boolean;
  samples: number;
  tasks: number;
  step_ns: number;
  interval_ns: [number, number] | null;
  peak_bytes: number;
  recorded_ns: Record<string, number>;
  shares: Shares;
  provenances: string[];
  settings: [string, string][];
  machine: [string, string][];
  notes: string[];
  lanes: Lane[];
  edits: string[];
}

/** What a paired measurement found. */
export interface Measured {
  speedup: number;
  speedup_interval: [number, number];
  level: number;
  metric: string;
  blocks: number;
  verdict: string;
  created: string;
  /** Whether it is inside the predicted interval; null where it cannot be trusted. */
  inside: boolean | null;
}

/** Of a technique that applies; others are not predicted. */
export type Verdict = "worth-it" | "not-worth-it" | "slower" | "inconclusive";

export interface Prediction {
  technique: string;
  parts: string[];
  step_ns: number;
  speedup: number;
  speedup_interval: [number, number];
  samples: number;
  peak_bytes: number;
  shares: Shares;
  numerics: string | null;
  basis: string;
  verdict: Verdict;
  verdict_text: string;
  edits: string[];
  metric: string;
  scene: number | null;
  measured: Measured | null;
}

export interface Refusal {
  technique: string;
  reason: string;
}

export interface WhatIfs {
  state: "ready" | "skipped" | "failed";
  reason: string;
  predictions: Prediction[];
  ranked: string[];
  pareto_front: string[];
  best: string | null;
  not_applicable: Refusal[];
  failed: Refusal[];
  combinations: [number, number];
  conflicts: Record<string, string[]>;
  /** Of a live page: names that may be requested, and those that spread over workers. */
  offered?: string[];
  spreading?: string[];
  devices?: string[];
}

export interface Score {
  workload: string;
  technique: string;
  metric: string;
  created: string;
  /** Speed-ups, each with its interval. */
  predicted: [number, number, number];
  measured: [number, number, number];
  level: number;
  blocks: number;
  inside: boolean;
  experiment: string;
}

export interface History {
  state: "ready" | "none" | "failed";
  note: string;
  scores: Score[];
  total: number;
}

export interface MovedRow {
  name: string;
  time_ns: number;
  tasks: number;
  moved_bytes: number;
  needed_bytes: number;
  operations: number;
  intensity: number;
  /** How many times as long as the machine's limits leave; null where they are not known. */
  gap: number | null;
}

export interface Movement {
  sentence: string;
  notes: string[];
  step_ns: number;
  groups: Record<string, MovedRow[]>;
}

export interface MemoryData {
  peak_bytes: number;
  peak_ns: number;
  points: number;
  roles: string[];
  times: Ref;
  levels: Ref[];
  allocations: number;
  tensors: Record<"bytes" | "birth" | "death" | "role" | "producer" | "release" | "user", Ref>;
}

export const COLUMNS = [
  "start",
  "duration",
  "gap",
  "name",
  "module",
  "source",
  "call",
  "path",
  "family",
  "kind",
  "phase",
  "lane",
  "rank",
  "provenance",
  "critical",
  "busy",
  "waited",
  "slack",
  "spread",
] as const;

export type ColumnName = (typeof COLUMNS)[number];

export interface SceneData {
  step_ns: number;
  end_ns: number;
  samples: number;
  lanes: string[];
  columns: Record<ColumnName, Ref>;
  memory: MemoryData | null;
}

export interface Doc {
  schema: number;
  title: string;
  run: Run;
  families: string[];
  kinds: string[];
  phases: string[];
  what_ifs: WhatIfs;
  history: History;
  movement: Movement | null;
  scenes: SceneData[];
  strings: string[];
  calls: string[];
  paths: [number, string, string][];
}
