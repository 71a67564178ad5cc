// The first view of a live page: state of the analysis, bars to drag, costs next to source lines.

import { effect, signal } from "@preact/signals";
import type { Signal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import { Bars, settle } from "./bars";
import { Confirm, FaultBox, Undo, forgetProposal } from "./edit";
import { bytes, count, duration, percent, times } from "./format";
import { ask, batch, clusters, connection, costs, faultOf, files, now } from "./live";
import type { Expected, LineCost } from "./live";
import { Empty } from "./parts";
import { doc, hasDoc, query, view } from "./state";

const SAID: Record<string, string> = {
  recording: "analysing",
  first: "first numbers",
  recorded: "recorded",
  ready: "ready",
  failed: "failed",
};

/** State of the numbers, next to the title. */
export function Badge() {
  const state = now.value;
  const lost = connection.value !== "open";
  const word = lost
    ? connection.value === "connecting"
      ? "connecting"
      : connection.value === "ended"
        ? "session ended"
        : "connection lost"
    : (SAID[state?.state ?? ""] ?? "connecting");
  const kind = lost ? "lost" : (state?.state ?? "recording");
  return (
    <span class={`badge ${kind}`} role="status" id="state">
      <i />
      {word}
      {!lost && state?.said ? <span class="faint"> {state.said}</span> : null}
    </span>
  );
}

/** Replaces a view that has nothing to draw yet. */
export function Waiting() {
  if (connection.value === "open" && now.value?.state === "failed") {
    return (
      <section>
        <ProblemBox />
      </section>
    );
  }
  return <Trouble drawn={false} />;
}

function Trouble({ drawn }: { drawn: boolean }) {
  const state = now.value;
  if (connection.value === "ended") {
    return (
      <Empty
        title="This session has ended"
        text="slipstream live was restarted after this page was opened. Open the address that it printed."
      />
    );
  }
  if (connection.value === "lost" && !state) {
    return <Empty title="The server does not answer" text="This page retries automatically." />;
  }
  if (drawn || state?.state === "failed") return null;
  return (
    <Empty
      title={state ? `Analysing ${state.workload}` : "Connecting"}
      text="The step runs a few times; first numbers appear within seconds."
    />
  );
}

export function LiveView() {
  const state = now.value;
  return (
    <section class="live" aria-label="Live">
      {connection.value === "lost" && state ? (
        <div class="fault" role="alert">
          <p>
            <b>The connection is lost.</b> What is shown may be old; this page tries again by
            itself. Is slipstream live still running?
          </p>
        </div>
      ) : null}
      <ProblemBox />
      <FaultBox />
      <Trouble drawn={costs.value !== null} />
      {costs.value && connection.value !== "ended" ? (
        <>
          <div class="halves">
            <div>
              <h2>
                This step{" "}
                <span class="faint">{state?.stale ? "from before the last save" : ""}</span>
              </h2>
              <Bars />
            </div>
            <div>
              <Confirm />
              {state?.expected && !state.stale ? <Held expected={state.expected} /> : null}
              <Elsewhere />
              <OtherDevice />
              <p>
                <Undo />{" "}
                <button type="button" id="again" onClick={() => void ask({ do: "again" })}>
                  Measure again
                </button>
              </p>
              <Past />
            </div>
          </div>
          <SourceLines />
        </>
      ) : null}
    </section>
  );
}

function ProblemBox() {
  const problem = now.value?.problem;
  if (!problem) return null;
  const file = problem.path.split("/").pop();
  return (
    <div class="fault" role="alert" id="problem">
      <p>
        <b>
          {file}
          {problem.line ? `:${problem.line}` : ""}
        </b>{" "}
        cannot be analysed; save it again after fixing it.
      </p>
      <pre>{problem.what}</pre>
      {problem.remedy ? <p>{problem.remedy}</p> : null}
    </div>
  );
}

/** The prediction before an edit, and the step measured after it. */
function Held({ expected }: { expected: Expected }) {
  const known = costs.value!;
  const [predicted, low, high] = expected.step_ns;
  const inside = known.step_ns >= low && known.step_ns <= high;
  const firm = now.value?.state === "recorded" || now.value?.state === "ready";
  return (
    <div class="held" id="held">
      <h2>
        Predicted and measured <span class="faint">{expected.change}</span>
      </h2>
      <table class="pairs">
        <thead>
          <tr>
            <th />
            <th class="right">before</th>
            <th class="right">predicted</th>
            <th class="right">measured</th>
          </tr>
        </thead>
        <tbody>
          <tr>
            <th>step</th>
            <td class="right">{duration(expected.before.step_ns)}</td>
            <td class="right predicted">
              {duration(predicted)}
              <br />
              <span class="faint small">
                {duration(low)} – {duration(high)}
              </span>
            </td>
            <td class="right measured">{duration(known.step_ns)}</td>
          </tr>
          <tr>
            <th>memory</th>
            <td class="right">{bytes(expected.before.peak_bytes)}</td>
            <td class="right predicted">{bytes(expected.peak_bytes)}</td>
            <td class="right measured">{bytes(known.peak_bytes)}</td>
          </tr>
        </tbody>
      </table>
      <p class="faint small">
        {firm
          ? inside
            ? "The measured step is inside the predicted interval."
            : "The measured step is outside the predicted interval."
          : "One step was measured so far."}
      </p>
    </div>
  );
}

interface Answer {
  text: string;
  reason: boolean;
}

/** Ask the server, and show its answer in one line. */
async function answered<T extends { reason?: string | null }>(
  line: Signal<Answer | null>,
  meanwhile: string,
  request: Record<string, unknown>,
  say: (found: T) => string,
): Promise<void> {
  line.value = { text: meanwhile, reason: false };
  try {
    const found = await ask<T>(request);
    line.value = found.reason
      ? { text: found.reason, reason: true }
      : { text: say(found), reason: false };
  } catch (error) {
    line.value = { text: faultOf(error).what, reason: true };
  }
}

function Choice(props: {
  id: string;
  label: string;
  names: string[];
  value: string;
  choose: (name: string) => void;
}) {
  return (
    <label>
      {props.label}{" "}
      <select
        id={props.id}
        value={props.value}
        onChange={(event) => props.choose(event.currentTarget.value)}
      >
        {props.names.map((name) => (
          <option key={name} value={name}>
            {name}
          </option>
        ))}
      </select>
    </label>
  );
}

const cluster = signal("");
const spread = signal("");
const workers = signal(8);
const there = signal<Answer | null>(null);

interface Elsewhere {
  reason?: string;
  step_ns: number;
  speedup: number;
  samples: number;
}

/** 2, 4, 8 and so on, and `most`. */
function doubles(most: number): string[] {
  const found = [];
  for (let one = 2; one < most; one *= 2) found.push(`${one}`);
  return [...found, `${most}`];
}

/** The step on several devices. */
function Elsewhere() {
  const ways = hasDoc() ? (doc().what_ifs.spreading ?? []) : [];
  if (!ways.length || !clusters.value.length) return null;
  const where = clusters.value.find((one) => one.name === cluster.value) ?? clusters.value[0];
  const how = spread.value || (ways.includes("ddp") ? "ddp" : ways[0]);
  const many = Math.min(workers.value, where.devices);
  const simulate = (name: string, how: string, wanted: number) => {
    const most = clusters.value.find((one) => one.name === name)?.devices ?? wanted;
    const many = Math.min(wanted, most);
    void answered<Elsewhere>(
      there,
      "simulating",
      { do: "simulate", technique: how, cluster: name, workers: many },
      (found) =>
        `${times(found.speedup)} the samples per second with ${many} workers: ${duration(found.step_ns)} per step of ${count(found.samples)} samples`,
    );
  };
  return (
    <div class="elsewhere">
      <h2>On a cluster</h2>
      <Choice
        id="cluster"
        label="where"
        names={clusters.value.map((one) => one.name)}
        value={where.name}
        choose={(name) => {
          cluster.value = name;
          simulate(name, how, workers.value);
        }}
      />{" "}
      <Choice
        id="spread"
        label="how"
        names={ways}
        value={how}
        choose={(name) => {
          spread.value = name;
          simulate(where.name, name, many);
        }}
      />{" "}
      <Choice
        id="workers"
        label="workers"
        names={doubles(where.devices)}
        value={`${many}`}
        choose={(text) => {
          workers.value = Number(text);
          simulate(where.name, how, workers.value);
        }}
      />{" "}
      <button type="button" id="elsewhere" onClick={() => simulate(where.name, how, many)}>
        Simulate
      </button>
      <p class={there.value?.reason ? "faint small" : "small"} aria-live="polite" id="there">
        {there.value?.text ?? "Its devices are assumed to compute like this one."}
      </p>
    </div>
  );
}

const device = signal("");
const onDevice = signal<Answer | null>(null);

interface DevicePrediction {
  reason?: string | null;
  about: string;
  known: string;
  step_ns: number;
  speedup: number;
  speedup_interval: [number, number];
}

/** The step on one other device. */
function OtherDevice() {
  const names = hasDoc() ? (doc().what_ifs.devices ?? []) : [];
  if (!names.length) return null;
  const chosen = device.value || names[0];
  const predict = (name: string) =>
    void answered<DevicePrediction>(
      onDevice,
      "predicting; operators without timings are timed first, which may take a minute",
      { do: "device", device: name },
      (found) =>
        `${duration(found.step_ns)} per step, ${times(found.speedup)} [${times(found.speedup_interval[0])}, ${times(found.speedup_interval[1])}]: ${found.about} (${found.known})`,
    );
  return (
    <div class="elsewhere">
      <h2>On another device</h2>
      <Choice
        id="device"
        label="which"
        names={names}
        value={chosen}
        choose={(name) => {
          device.value = name;
          predict(name);
        }}
      />{" "}
      <button type="button" id="predict-device" onClick={() => predict(chosen)}>
        Predict
      </button>
      <p class={onDevice.value?.reason ? "faint small" : "small"} aria-live="polite" id="on-device">
        {onDevice.value?.text ?? "Measured here, or from a data sheet."}
      </p>
    </div>
  );
}

/** Analyses of this session, as a small curve. */
function Past() {
  const past = now.value?.history ?? [];
  if (past.length < 2) return null;
  const most = Math.max(...past.map((one) => one.step_ns));
  const width = 240;
  const points = past
    .map((one, index) => {
      const x = (index / (past.length - 1)) * width;
      return `${x.toFixed(1)},${(34 - (one.step_ns / most) * 30).toFixed(1)}`;
    })
    .join(" ");
  const text = `Step time of the last ${past.length} analyses, from ${duration(past[0].step_ns)} to ${duration(past[past.length - 1].step_ns)}`;
  return (
    <figure class="past">
      <svg viewBox={`-2 0 ${width + 4} 36`} width={width} height="36" role="img" aria-label={text}>
        <polyline points={points} />
      </svg>
      <figcaption class="faint small">{text}</figcaption>
    </figure>
  );
}

// Drags, proposals and requests belong to the previous text.
let number = 0;
effect(() => {
  const next = now.value?.number ?? 0;
  if (next !== number) {
    number = next;
    settle();
    forgetProposal();
    there.value = onDevice.value = null;
  }
});

/** Bring the most expensive line into sight, once for a file. */
function reveal(box: HTMLElement | null, line: number): void {
  if (!box) return;
  const row = box.querySelector<HTMLElement>(`[data-line="${line}"]`);
  if (row) box.scrollTop = row.offsetTop - box.clientHeight / 2;
}

const open = signal("");
const pointed = signal<LineCost | null>(null);

function SourceLines() {
  const known = costs.value!;
  const texts = files.value;
  if (!texts.length) return null;
  const shown = texts.find((one) => one.path === open.value) ?? texts[0];
  const byLine = new Map(
    known.lines.filter((one) => one.path === shown.path).map((one) => [one.line, one]),
  );
  const most = Math.max(...known.lines.map(total), 1);
  const name = shown.path.split("/").pop() ?? "";
  const set = batch.value?.place.line;
  const one = pointed.value;
  const box = useRef<HTMLDivElement>(null);
  const first = known.lines.find((line) => line.path === shown.path)?.line ?? 1;
  useEffect(() => reveal(box.current, first), [shown.path]);
  return (
    <div class="source">
      <h2>
        Costs by source line{" "}
        {texts.map((file) => (
          <button
            key={file.path}
            type="button"
            class={file === shown ? "link on" : "link"}
            onClick={() => (open.value = file.path)}
          >
            {file.path.split("/").pop()}
          </button>
        ))}{" "}
        <span class="faint">
          {duration(total(known.untracked))} ({percent(total(known.untracked) / known.step_ns)}) and{" "}
          {bytes(known.untracked.peak_bytes)} belong to no line
        </span>
      </h2>
      <p class="small line-detail" id="line-detail" aria-live="polite">
        {one
          ? describe(one)
          : "Point at a line for its parts; choose it to find it on the timeline."}
      </p>
      <div class="lines" ref={box} tabIndex={0} role="region" aria-label={`Source of ${name}`}>
        <table>
          <tbody>
            {shown.text.split("\n").map((text, index) => {
              const cost = byLine.get(index + 1);
              const classes = [cost ? "costs" : "", set === index + 1 ? "set" : ""].join(" ");
              return (
                <tr
                  key={index}
                  class={classes}
                  data-line={index + 1}
                  onPointerEnter={() => cost && (pointed.value = cost)}
                  onPointerLeave={() => (pointed.value = null)}
                >
                  <td class="number">{index + 1}</td>
                  <td class="time">
                    {cost && total(cost) > 0 ? (
                      <button
                        type="button"
                        class="link"
                        aria-label={`Line ${index + 1}: ${duration(total(cost))}, ${percent(total(cost) / known.step_ns)}; find it on the timeline`}
                        onFocus={() => (pointed.value = cost)}
                        onClick={() => {
                          query.value = `${name}:${index + 1}`;
                          view.value = "timeline";
                        }}
                      >
                        {duration(total(cost))}
                      </button>
                    ) : null}
                  </td>
                  <td class="share">
                    {cost ? (
                      <span class="split">
                        {PARTS.map(([part]) => (
                          <i
                            key={part}
                            class={part}
                            style={{ width: `${(100 * cost[`${part}_ns`]) / most}%` }}
                          />
                        ))}
                      </span>
                    ) : null}
                  </td>
                  <td class="memory">
                    {cost && cost.peak_bytes > 0 ? bytes(cost.peak_bytes) : ""}
                  </td>
                  <td class="code mono">{text || " "}</td>
                </tr>
              );
            })}
          </tbody>
        </table>
      </div>
      <ul class="legend">
        {PARTS.map(([part, label]) => (
          <li key={part}>
            <i class={part} /> {label}
          </li>
        ))}
      </ul>
    </div>
  );
}

const PARTS = [
  ["forward", "forward"],
  ["backward", "backward"],
  ["update", "update"],
  ["other", "other"],
] as const;

function total(one: LineCost): number {
  return one.forward_ns + one.backward_ns + one.update_ns + one.other_ns;
}

function describe(one: LineCost): string {
  const parts = PARTS.filter(([part]) => one[`${part}_ns`] > 0).map(
    ([part, label]) => `${label} ${duration(one[`${part}_ns`])}`,
  );
  const share = percent(total(one) / (costs.value?.step_ns ?? 1));
  const memory = one.peak_bytes ? `, ${bytes(one.peak_bytes)} at the peak` : "";
  const modules = one.modules.length ? `; ${one.modules.slice(0, 3).join(", ")}` : "";
  return `Line ${one.line}: ${share} of the step (${parts.join(", ")})${memory}${modules}`;
}
