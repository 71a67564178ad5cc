// Switches for techniques, and the predicted step with the chosen ones.

import { bytes, change, duration, times } from "./format";
import { Apply } from "./edit";
import { refused } from "./live";
import { RestsOn, tone } from "./parts";
import {
  choose,
  chosen,
  doc,
  live,
  nameOf,
  predictionOf,
  selection,
  selectionName,
  toggle,
} from "./state";

export function Switchboard() {
  const { what_ifs: found } = doc();
  const singles = found.predictions.filter((p) => p.parts.length === 1).map((p) => p.technique);
  // A live page simulates further techniques when they are switched on.
  const without = [...found.not_applicable, ...found.failed].map((one) => one.technique);
  const known = new Set([...singles, ...without]);
  const more = live.value ? (found.offered ?? []).filter((name) => !known.has(name)) : [];
  const offered = [...singles, ...more];
  return (
    <aside aria-label="Switchboard">
      <h2>Switchboard</h2>
      <Outcome />
      {live.value ? <Apply /> : null}
      {offered.length ? (
        <Switches singles={offered} />
      ) : (
        <p class="faint">
          {found.state === "ready"
            ? "No technique applies to this step; What-ifs lists the reasons."
            : `There are no switches: ${found.reason}.`}
        </p>
      )}
    </aside>
  );
}

function Outcome() {
  const { run } = doc();
  const now = chosen.value;
  const on = selection.value.size > 0;
  if (on && !now && live.value) return <Asked name={selectionName.value} />;
  if (on && !now) {
    return (
      <div class="outcome unknown" aria-live="polite">
        <p class="big">not simulated</p>
        <p>
          This combination was not simulated when the report was written, or a part of it does not
          apply on top of the others. Ask for it:
        </p>
        <code>slipstream predict RUN --technique {selectionName.value}</code>
      </div>
    );
  }
  const perSample = now?.samples && run.samples && now.samples !== run.samples;
  return (
    <div class="outcome" aria-live="polite">
      <p class="big">
        {now ? times(now.speedup) : run.tasks ? duration(run.step_ns) : "–"}
        {now ? (
          <span class="faint">
            {" "}
            [{now.speedup_interval[0].toFixed(2)}, {now.speedup_interval[1].toFixed(2)}]
          </span>
        ) : (
          <span class="faint"> baseline</span>
        )}
      </p>
      <dl>
        <dt>step</dt>
        <dd>
          {now ? `${duration(run.step_ns)} → ${duration(now.step_ns)}` : duration(run.step_ns)}
        </dd>
        {perSample ? (
          <>
            <dt>per sample</dt>
            <dd>
              {duration(run.step_ns / run.samples)} → {duration(now.step_ns / now.samples)}
            </dd>
          </>
        ) : null}
        <dt>memory</dt>
        <dd>
          {!run.peak_bytes
            ? "not recorded"
            : now
              ? `${bytes(run.peak_bytes)} → ${bytes(now.peak_bytes)}, ${change(now.peak_bytes / run.peak_bytes)}`
              : bytes(run.peak_bytes)}
        </dd>
        {now ? (
          <>
            <dt>numerics</dt>
            <dd>{now.numerics ?? "unknown"}</dd>
            <dt>rests on</dt>
            <dd>
              <RestsOn shares={now.shares} />
            </dd>
          </>
        ) : null}
      </dl>
      {now ? <p class={`verdict ${tone(now.verdict)}`}>{now.verdict_text}</p> : null}
    </div>
  );
}

/** A combination requested from the server. */
function Asked({ name }: { name: string }) {
  const reason = refused.value.get(name);
  return (
    <div class="outcome unknown" aria-live="polite">
      <p class="big">{reason ? "does not apply" : "simulating"}</p>
      <p>{reason ?? "Operators that are new to this machine are timed first."}</p>
    </div>
  );
}

/** One group per technique, with its settings next to each other. */
function Switches({ singles }: { singles: string[] }) {
  const groups = new Map<string, string[]>();
  for (const single of singles) {
    const name = nameOf(single);
    groups.set(name, [...(groups.get(name) ?? []), single]);
  }
  return (
    <>
      <div class="switches" role="group" aria-label="Techniques">
        {[...groups.values()].flat().map((single) => (
          <Switch key={single} name={single} />
        ))}
      </div>
      <button type="button" disabled={!selection.value.size} onClick={() => choose([])}>
        All off
      </button>
      <p class="faint small">
        The figure next to a switch is its factor of the speed-up, together with those that are on.
      </p>
    </>
  );
}

function Switch({ name }: { name: string }) {
  const on = selection.value.has(name);
  return (
    <label class={on ? "switch on" : "switch"}>
      <input type="checkbox" role="switch" checked={on} onChange={() => toggle(name)} />
      <span class="mono">{name}</span>
      <Effect name={name} on={on} />
    </label>
  );
}

/** The effect of switching it now: the speed-up after it over the speed-up before it. */
function Effect({ name, on }: { name: string; on: boolean }) {
  const others = [...selection.value].filter(
    (part) => part !== name && nameOf(part) !== nameOf(name),
  );
  const before = others.length ? predictionOf(others) : null;
  const after = predictionOf([...others, name]);
  if (!after || (others.length > 0 && !before)) {
    return (
      <span class="faint" title="not simulated together with the selected ones">
        ?
      </span>
    );
  }
  const factor = after.speedup / (before?.speedup ?? 1);
  const kind = factor > 1.005 ? "good" : factor < 0.995 ? "poor" : "faint";
  return <span class={on ? kind : `${kind} off`}>{times(factor)}</span>;
}
