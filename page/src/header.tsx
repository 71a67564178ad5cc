// What ran and what it costs, the views, and light or dark.

import { bytes, count, duration, percent, significant } from "./format";
import { VIEWS, chosen, dark, doc, help, selection, view } from "./state";
import type { View } from "./state";

export function Header() {
  const d = doc();
  const { run } = d;
  const interval = run.interval_ns;
  return (
    <header>
      <div class="title">
        <h1>{run.workload}</h1>
        <span class="faint">
          {run.training ? "training step" : "step"}
          {run.created ? `, recorded ${run.created.slice(0, 16).replace("T", " ")} UTC` : ""}
        </span>
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
      <dl class="figures">
        <div>
          <dt>step time</dt>
          <dd>
            <b>{run.tasks ? duration(run.step_ns) : "–"}</b>
            {interval ? (
              <span class="faint">
                {" "}
                90 % in {duration(interval[0])} – {duration(interval[1])}
              </span>
            ) : null}
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
              <span class="faint"> {count(run.samples)} a step</span>
            </dd>
          </div>
        ) : null}
        <div>
          <dt>tasks</dt>
          <dd>
            <b>{count(run.tasks)}</b>
            <span class="faint">
              {" "}
              {Object.entries(run.shares)
                .map(([name, share]) => (share > 0.9995 ? name : `${percent(share)} ${name}`))
                .join(", ")}
            </span>
          </dd>
        </div>
        <div class="where">
          <dt>ran on</dt>
          <dd>{where()}</dd>
        </div>
      </dl>
      <nav role="tablist" aria-label="Views" onKeyDown={arrows}>
        {VIEWS.map(([name, label], index) => (
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

function rate(perSecond: number): string {
  return perSecond < 100 ? significant(perSecond) : count(Math.round(perSecond));
}

function where(): string {
  const settings = new Map(doc().run.settings);
  const machine = new Map(doc().run.machine);
  const threads = settings.get("threads");
  const parts = [
    settings.get("device") === "cpu" || !settings.has("device")
      ? (machine.get("processor") ?? settings.get("device"))
      : settings.get("device"),
    threads ? `${threads} thread${threads === "1" ? "" : "s"}` : undefined,
    settings.get("torch") ? `torch ${settings.get("torch")}` : undefined,
  ];
  return parts.filter(Boolean).join(", ") || "not recorded";
}

function arrows(event: KeyboardEvent): void {
  const by = event.key === "ArrowRight" ? 1 : event.key === "ArrowLeft" ? -1 : 0;
  if (!by) return;
  const names = VIEWS.map(([name]) => name);
  const next = names[(names.indexOf(view.value) + by + names.length) % names.length] as View;
  view.value = next;
  document.getElementById(`tab-${next}`)?.focus();
  event.preventDefault();
}
