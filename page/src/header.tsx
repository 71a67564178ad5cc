// What ran and what it costs, the views, and light or dark.

import { Badge } from "./liveview";
import { bytes, count, duration, percent, significant } from "./format";
import { now } from "./live";
import { chosen, dark, doc, hasDoc, help, live, selection, view, views } from "./state";

// From this ratio on, the recorded steps' time is shown next to the step's own time.
const DIFFERS = 1.15;

export function Header() {
  const run = hasDoc() ? doc().run : null;
  return (
    <header>
      <div class="title">
        <h1>{run?.workload ?? now.value?.workload ?? "slipstream live"}</h1>
        {run ? (
          <span class="faint">
            {run.training ? "training step" : "step"}
            {run.created ? `, recorded ${run.created.slice(0, 16).replace("T", " ")} UTC` : ""}
          </span>
        ) : null}
        {live.value ? <Badge /> : null}
        <span class="grow" />
        <button type="button" onClick={() => (help.value = true)} aria-keyshortcuts="?">
          Keys
        </button>
        <button
          type="button"
          onClick={() => (dark.value = !dark.value)}
          aria-pressed={dark.value}
          aria-keyshortcuts="t"
        >
          {dark.value ? "Light" : "Dark"}
        </button>
      </div>
      {run && view.value !== "live" ? <Figures /> : null}
      <nav role="tablist" aria-label="Views" onKeyDown={arrows}>
        {views.value.map(([name, label], index) => (
          <button
            key={name}
            type="button"
            role="tab"
            id={`tab-${name}`}
            aria-selected={view.value === name}
            aria-controls="view"
            aria-keyshortcuts={`${index + 1}`}
            tabIndex={view.value === name ? 0 : -1}
            onClick={() => (view.value = name)}
          >
            {label}
          </button>
        ))}
        <span class="grow" />
        {selection.value.size ? (
          <span class={chosen.value ? "now" : "now open"}>
            {chosen.value?.scene != null ? "drawn with " : "numbers with "}
            {[...selection.value].join(" + ")}
          </span>
        ) : null}
      </nav>
    </header>
  );
}

function Figures() {
  const { run } = doc();
  const interval = run.interval_ns;
  const seen = medianSeen();
  const idle = run.recorded_ns.wall_median && onOneCore() ? " on an idle core" : "";
  return (
    <dl class="figures">
      <div>
        <dt>step time</dt>
        <dd>
          <b>{run.tasks ? duration(run.step_ns) : "–"}</b>
          {interval ? (
            <div class="faint">
              {duration(interval[0])} – {duration(interval[1])} when recorded again{idle}
            </div>
          ) : null}
          {seen ? <div>measured median: {duration(seen)}</div> : null}
        </dd>
      </div>
      <div>
        <dt>memory peak</dt>
        <dd>
          <b>{run.peak_bytes ? bytes(run.peak_bytes) : "not recorded"}</b>
        </dd>
      </div>
      {run.samples && run.step_ns ? (
        <div>
          <dt>samples per second</dt>
          <dd>
            <b>{rate((run.samples / run.step_ns) * 1e9)}</b>
            <div class="faint">{count(run.samples)} per step</div>
            {seen ? <div>measured median: {rate((run.samples / seen) * 1e9)}</div> : null}
          </dd>
        </div>
      ) : null}
      <div>
        <dt>tasks</dt>
        <dd>
          <b>{count(run.tasks)}</b>
          <div class="faint">
            {Object.entries(run.shares)
              .map(([name, share]) => (share > 0.9995 ? name : `${percent(share)} ${name}`))
              .join(", ")}
          </div>
        </dd>
      </div>
      <div class="where">
        <dt>ran on</dt>
        <dd>{where()}</dd>
      </div>
    </dl>
  );
}

/** The recorded steps' median in ns, where the machine made it another than the step's own time. */
function medianSeen(): number | null {
  const { step_ns: step, recorded_ns: recorded } = doc().run;
  const median = recorded.wall_median;
  return median && step && (median > step * DIFFERS || step > median * DIFFERS) ? median : null;
}

/** Whether waiting for a core is not in the step's time: one thread is timed by its CPU time. */
function onOneCore(): boolean {
  return onProcessor() && new Map(doc().run.settings).get("threads") === "1";
}

function onProcessor(): boolean {
  const device = new Map(doc().run.settings).get("device");
  return device === undefined || device === "cpu";
}

function rate(perSecond: number): string {
  return perSecond < 100 ? significant(perSecond) : count(Math.round(perSecond));
}

function where(): string {
  const settings = new Map(doc().run.settings);
  const machine = new Map(doc().run.machine);
  const threads = settings.get("threads");
  const parts = [
    onProcessor() ? (machine.get("processor") ?? settings.get("device")) : settings.get("device"),
    threads ? `${threads} thread${threads === "1" ? "" : "s"}` : undefined,
    settings.get("torch") ? `torch ${settings.get("torch")}` : undefined,
  ];
  return parts.filter(Boolean).join(", ") || "not recorded";
}

function arrows(event: KeyboardEvent): void {
  const by = event.key === "ArrowRight" ? 1 : event.key === "ArrowLeft" ? -1 : 0;
  if (!by) return;
  const names = views.value.map(([name]) => name);
  const next = names[(names.indexOf(view.value) + by + names.length) % names.length];
  view.value = next;
  document.getElementById(`tab-${next}`)?.focus();
  event.preventDefault();
}
