// Step time, throughput, memory and batch size as bars: drag one, and the others follow.

import { computed, signal } from "@preact/signals";
import { bytes, count, duration, significant } from "./format";
import { forgetProposal, propose } from "./edit";
import { batch, costs, now } from "./live";
import type { Batch, Stop } from "./live";

/** Index of the stop that bars were dragged to; -1 if they are as measured. */
const at = signal(-1);
/** Digest of the file when the drag began, since a changed file is not edited. */
let digest: string | null = null;

const stops = computed<Stop[]>(() => batch.value?.stops ?? []);
const home = computed(() => {
  const samples = costs.value?.samples ?? 0;
  return stops.value.findIndex((stop) => stop.samples === samples);
});
const stop = computed<Stop | null>(() => stops.value[at.value] ?? stops.value[home.value] ?? null);

interface Metric {
  id: string;
  name: string;
  of: (stop: Stop) => number;
  reach?: (stop: Stop) => [number, number];
  measured: (step: number, samples: number, peak: number) => number;
  text: (value: number) => string;
}

const rate = (samples: number, ns: number) => (samples / ns) * 1e9;
const METRICS: Metric[] = [
  {
    id: "step",
    name: "step time",
    of: (one) => one.step_ns[0],
    reach: (one) => [one.step_ns[1], one.step_ns[2]],
    measured: (step) => step,
    text: duration,
  },
  {
    id: "rate",
    name: "throughput",
    of: (one) => rate(one.samples, one.step_ns[0]),
    reach: (one) => [rate(one.samples, one.step_ns[2]), rate(one.samples, one.step_ns[1])],
    measured: (step, samples) => rate(samples, step),
    text: (value) => `${value < 100 ? significant(value) : count(Math.round(value))} /s`,
  },
  {
    id: "memory",
    name: "memory peak",
    of: (one) => one.peak_bytes,
    measured: (_step, _samples, peak) => peak,
    text: bytes,
  },
  {
    id: "batch",
    name: "batch size",
    of: (one) => one.samples,
    measured: (_step, samples) => samples,
    text: (value) => count(Math.round(value)),
  },
];

function nearest(metric: Metric, value: number): number {
  let best = 0;
  stops.value.forEach((one, index) => {
    const better =
      Math.abs(metric.of(one) - value) < Math.abs(metric.of(stops.value[best]) - value);
    if (better) best = index;
  });
  return best;
}

function move(to: number): void {
  if (at.value < 0) digest = batch.value?.place.digest ?? null;
  at.value = Math.min(Math.max(to, 0), stops.value.length - 1);
}

/** Show the dragged batch size as an edit; the file is unchanged. */
function release(): void {
  const found = batch.value;
  if (at.value < 0 || !found) return;
  if (at.value === home.value) {
    reset();
    return;
  }
  const size = Math.round(stops.value[at.value].samples / found.per_batch);
  void propose(`batch_size ${found.place.value} → ${size}`, { batch: size }, digest);
}

export function reset(): void {
  at.value = -1;
  forgetProposal();
}

/** Reset the bars when a new analysis begins, since a drag applies to the previous text. */
export function settle(): void {
  at.value = -1;
}

export function Bars() {
  const found = batch.value;
  const known = costs.value;
  if (!found || !known) return null;
  const can = !found.read_only && stops.value.length > 1;
  return (
    <div class="bars" role="group" aria-label="Step time, throughput, memory and batch size">
      {METRICS.map((metric) => (
        <BarRow key={metric.id} metric={metric} can={can} />
      ))}
      <p class="faint small" id="bars-note">
        {note(found, can)}
      </p>
    </div>
  );
}

function note(found: Batch, can: boolean): string {
  if (found.read_only) return `Read-only: ${found.read_only}.`;
  if (found.measuring) return "Other batch sizes are being measured; then the bars can be dragged.";
  if (!can) return `Other batch sizes are unknown: ${found.reason || "none was measured"}.`;
  const sure = found.reason ? ` Only measured sizes, because ${found.reason}.` : "";
  const knee = found.knee ? ` The time per sample changes from ${count(found.knee)} on.` : "";
  const most = found.max_batch ? ` At most ${count(found.max_batch)} fit.` : "";
  return `Drag a bar, or use the arrow keys; ${found.file} changes when you save it.${knee}${most}${sure}`;
}

function BarRow({ metric, can }: { metric: Metric; can: boolean }) {
  const known = costs.value!;
  const here = metric.measured(known.step_ns, known.samples, known.peak_bytes);
  const moved = at.value >= 0 && at.value !== home.value;
  const one = stop.value;
  const value = moved && one ? metric.of(one) : here;
  const reach = one && moved && metric.reach ? metric.reach(one) : null;
  const expected = now.value?.expected;
  const promised =
    expected && !moved
      ? metric.of({
          samples: expected.samples,
          step_ns: expected.step_ns,
          peak_bytes: expected.peak_bytes,
          measured: false,
        })
      : null;
  const most = Math.max(here, promised ?? 0, ...stops.value.map(metric.of)) * 1.02 || 1;
  const drag = (event: PointerEvent) => {
    const box = (event.currentTarget as HTMLElement).getBoundingClientRect();
    const share = Math.min(Math.max((event.clientX - box.left) / box.width, 0), 1);
    move(nearest(metric, share * most));
  };
  const keys: Record<string, number> = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1 };
  const percent = (part: number) => `${Math.min(Math.max((100 * part) / most, 0), 100)}%`;
  return (
    <div class="row">
      <span class="label" id={`label-${metric.id}`}>
        {metric.name}
      </span>
      <div
        class={can ? "track" : "track fixed"}
        id={`bar-${metric.id}`}
        role="slider"
        tabIndex={0}
        aria-labelledby={`label-${metric.id}`}
        aria-describedby="bars-note"
        aria-valuemin={0}
        aria-valuemax={Math.round(most)}
        aria-valuenow={Math.round(value)}
        aria-valuetext={metric.text(value)}
        aria-readonly={!can}
        onPointerDown={(event) => {
          if (!can || event.button !== 0) return;
          (event.currentTarget as HTMLElement).setPointerCapture(event.pointerId);
          forgetProposal();
          drag(event);
        }}
        onPointerMove={(event) => {
          if (can && (event.currentTarget as HTMLElement).hasPointerCapture(event.pointerId)) {
            drag(event);
          }
        }}
        onPointerUp={() => can && release()}
        onPointerCancel={reset}
        onKeyDown={(event) => {
          if (!can) return;
          const by = keys[event.key];
          if (by) {
            forgetProposal();
            move((at.value < 0 ? home.value : at.value) + by);
          } else if (event.key === "Enter") release();
          else if (event.key === "Escape") reset();
          else return;
          event.preventDefault();
        }}
      >
        <i class={moved ? "fill moved" : "fill"} style={{ width: percent(value) }} />
        {reach ? (
          <i
            class="reach"
            style={{ left: percent(reach[0]), width: percent(reach[1] - reach[0]) }}
          />
        ) : null}
        {moved ? <i class="tick" style={{ left: percent(here) }} /> : null}
        {promised !== null ? <i class="tick promised" style={{ left: percent(promised) }} /> : null}
      </div>
      <span class="value">
        <b>{metric.text(value)}</b>
        {moved ? (
          <span class="faint"> was {metric.text(here)}</span>
        ) : promised !== null ? (
          <span class="predicted"> predicted {metric.text(promised)}</span>
        ) : null}
      </span>
    </div>
  );
}
