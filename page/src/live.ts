// The page without a file: analyses and answers to requests come over a WebSocket.

import { effect, signal } from "@preact/signals";
import { fetchData } from "./data";
import { begin, chosen, extra, live, selection, selectionName } from "./state";
import type { Prediction } from "./types";

export interface Problem {
  path: string;
  line: number;
  what: string;
  remedy: string;
}

export interface Figures {
  samples: number;
  step_ns: number | [number, number, number];
  peak_bytes: number;
}

export interface Expected {
  change: string;
  before: { samples: number; step_ns: number; peak_bytes: number };
  samples: number;
  step_ns: [number, number, number];
  peak_bytes: number;
}

export interface LiveState {
  workload: string;
  number: number;
  state: "recording" | "first" | "recorded" | "ready" | "failed";
  said: string;
  stale: boolean;
  problem: Problem | null;
  document: string | null;
  expected: Expected | null;
  after_s: Record<string, number>;
  history: { at: number; step_ns: number; peak_bytes: number; samples: number }[];
  undo: number;
}

export interface LineCost {
  path: string;
  line: number;
  forward_ns: number;
  backward_ns: number;
  update_ns: number;
  other_ns: number;
  peak_bytes: number;
  calls: number;
  modules: string[];
}

export interface Costs {
  step_ns: number;
  peak_bytes: number;
  samples: number;
  lines: LineCost[];
  untracked: LineCost;
}

export interface Stop {
  samples: number;
  step_ns: [number, number, number];
  peak_bytes: number;
  measured: boolean;
}

export interface Batch {
  place: { value: number | null; line: number | null; digest: string | null };
  file: string;
  read_only: string;
  reason: string;
  measuring: boolean;
  per_batch: number;
  stops: Stop[];
  max_batch: number | null;
  limit_bytes: number | null;
  knee: number | null;
  best: number | null;
}

export interface Fault {
  what: string;
  where: string | null;
  remedy: string | null;
}

/** connecting; open; lost: trying again; ended: another server has replaced it. */
export const connection = signal<"connecting" | "open" | "lost" | "ended">("connecting");
export const now = signal<LiveState | null>(null);
export const costs = signal<Costs | null>(null);
export const files = signal<{ path: string; text: string }[]>([]);
export const batch = signal<Batch | null>(null);
export const clusters = signal<{ name: string; devices: number }[]>([]);
/** Names of combinations that are being simulated. */
export const pending = signal<ReadonlySet<string>>(new Set());
/** Why a combination was not simulated. */
export const refused = signal<ReadonlyMap<string, string>>(new Map());

// A page inside an editor's is sent no cookie; it keeps the key of its address.
const key = new URLSearchParams(location.search).get("key");
const keyed = (path: string) => (key ? `${path}?key=${encodeURIComponent(key)}` : path);
const AGAIN_MS = [200, 500, 1000, 2000];

let socket: WebSocket | null = null;
let lastId = 0;
let failures = 0;
let drawn = "";
const waiting = new Map<number, (answer: { result?: unknown; error?: Fault }) => void>();

export class Refused extends Error {
  constructor(readonly fault: Fault) {
    super(fault.what);
  }
}

/** Send a request and return the server's answer; rejects with `Refused` if the server refuses. */
export function ask<T>(request: Record<string, unknown>): Promise<T> {
  return new Promise((resolve, reject) => {
    if (!socket || socket.readyState !== WebSocket.OPEN) {
      reject(new Refused({ what: "there is no connection", where: null, remedy: null }));
      return;
    }
    const id = ++lastId;
    waiting.set(id, (answer) => {
      if (answer.error) reject(new Refused(answer.error));
      else resolve(answer.result as T);
    });
    socket.send(JSON.stringify({ ...request, id }));
  });
}

export function faultOf(error: unknown): Fault {
  return error instanceof Refused
    ? error.fault
    : { what: String(error), where: null, remedy: null };
}

export function connect(): void {
  live.value = true;
  const address = new URL(keyed("live"), location.href);
  address.protocol = "ws:";
  address.hash = "";
  socket = new WebSocket(address);
  socket.onopen = () => {
    failures = 0;
    connection.value = "open";
  };
  socket.onmessage = (event) => hear(JSON.parse(String(event.data)));
  socket.onclose = () => {
    for (const answer of waiting.values()) {
      answer({ error: { what: "the connection was lost", where: null, remedy: null } });
    }
    waiting.clear();
    connection.value = "lost";
    setTimeout(reconnect, AGAIN_MS[Math.min(failures++, AGAIN_MS.length - 1)]);
  };
}

async function reconnect(): Promise<void> {
  try {
    const answer = await fetch(keyed("alive"));
    if (answer.status === 403) {
      // Another server listens there by now; it has another key.
      connection.value = "ended";
      return;
    }
  } catch {
    // No server listens; one may start again.
  }
  connect();
}

// Messages in the server's format.
// eslint-disable-next-line @typescript-eslint/no-explicit-any
function hear(message: any): void {
  switch (message.type) {
    case "about":
      clusters.value = message.clusters;
      break;
    case "state":
      if (now.value && message.number !== now.value.number) forget();
      now.value = message;
      if (message.document && message.document !== drawn) void draw(message.document);
      break;
    case "costs":
      costs.value = message.costs;
      files.value = message.files;
      break;
    case "batch":
      batch.value = message;
      break;
    case "answer": {
      const done = waiting.get(message.id);
      waiting.delete(message.id);
      done?.(message);
    }
  }
}

/** Discard simulations of an earlier text of the file. */
function forget(): void {
  extra.value = new Map();
  refused.value = new Map();
  pending.value = new Set();
}

async function draw(document: string): Promise<void> {
  drawn = document;
  try {
    const data = await fetchData(
      keyed(`${document}/document.json`),
      keyed(`${document}/columns.deflate`),
    );
    if (drawn === document) begin(data);
  } catch (error) {
    // A newer document follows; keep the drawn one.
    if (drawn === document) drawn = "";
    console.debug(error);
  }
}

/** Simulate a selection immediately if the document does not contain it. */
effect(() => {
  const name = selectionName.value;
  if (!live.value || !selection.value.size || chosen.value) return;
  if (pending.value.has(name) || refused.value.has(name) || connection.value !== "open") return;
  if (!now.value?.document) return;
  const number = now.value.number;
  pending.value = new Set([...pending.value, name]);
  ask<Prediction & { reason?: string }>({ do: "simulate", technique: name })
    .then((found) => {
      if (now.value?.number !== number) return;
      if (found.reason) refused.value = new Map([...refused.value, [name, found.reason]]);
      else extra.value = new Map([...extra.value, [keyFor(name), found]]);
    })
    .catch((error) => {
      refused.value = new Map([...refused.value, [name, faultOf(error).what]]);
    })
    .finally(() => {
      const left = new Set(pending.value);
      left.delete(name);
      pending.value = left;
    });
});

function keyFor(name: string): string {
  return name.split("+").sort().join("+");
}
