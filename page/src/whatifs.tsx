// Every technique that applies, ranked, with its interval and what it rests on; then the others.

import { bytes, change, duration, plural, times } from "./format";
import { Empty, Intervals, Keys, Reasons, RestsOn, ScaleHead, scaleOf, tone } from "./parts";
import type { Reach } from "./parts";
import { choose, doc, selection } from "./state";
import type { Measured, Prediction, WhatIfs } from "./types";

export function WhatIfView() {
  const found = doc().what_ifs;
  if (found.state !== "ready") {
    return (
      <Empty
        title={found.state === "failed" ? "The what-ifs failed" : "No what-ifs"}
        text={`${found.state === "failed" ? "The simulation stopped" : "Nothing was simulated"}: ${found.reason}.`}
      >
        <Failures found={found} />
      </Empty>
    );
  }
  const [done, all] = found.combinations;
  return (
    <section aria-label="What-ifs">
      <h2>What would make a sample cheaper</h2>
      {found.ranked.length ? (
        <Ranking names={found.ranked} />
      ) : (
        <p>No installed technique applies to this step.</p>
      )}
      <p class="faint">
        Speed-up is the ratio of the time per sample before the change to that after it, with a 90 %
        interval; 1x is no change.
        {found.pareto_front.length
          ? " A star marks what is Pareto-optimal in time, memory and numerics."
          : ""}
        {all ? ` The switchboard has ${done} of ${plural(all, "combination")} of up to four.` : ""}
      </p>
      {found.ranked.length ? <MeasuredNote found={found} /> : null}
      <Failures found={found} />
      <Reasons title="What does not apply here" found={found.not_applicable} />
    </section>
  );
}

function Failures({ found }: { found: WhatIfs }) {
  return <Reasons title="What could not be simulated" found={found.failed} />;
}

/** How to read the measured column, or how to fill it if nothing was measured. */
function MeasuredNote({ found }: { found: WhatIfs }) {
  const shown = found.predictions.filter((p) => found.ranked.includes(p.technique));
  const known = shown.filter((p) => p.measured);
  const judged = known.filter((p) => p.measured?.inside != null);
  const held = judged.filter((p) => p.measured?.inside).length;
  const next =
    shown.find((p) => !p.measured && p.technique === found.best) ?? shown.find((p) => !p.measured);
  return (
    <p class="faint">
      {known.length ? (
        <>
          <Keys /> in pairs on this machine, with its interval
          {judged.length
            ? `: ${held} of ${judged.length} are inside the predicted interval. `
            : ". "}
        </>
      ) : (
        "Nothing of this was measured on this machine yet. "
      )}
      {next ? (
        <>
          To measure one: <code>slipstream prove WORKLOAD --technique {next.technique}</code>
        </>
      ) : null}
    </p>
  );
}

/** A table of predictions; `brief` leaves out what only the full view has room for. */
export function Ranking({ names, brief = false }: { names: string[]; brief?: boolean }) {
  const found = doc().what_ifs;
  const known = new Map(found.predictions.map((p) => [p.technique, p]));
  const rows = names.map((name) => known.get(name)).filter((p): p is Prediction => !!p);
  const scale = scaleOf(rows.flatMap(reachesOf).flatMap((reach) => [reach.low, reach.high]));
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label="Ranked what-ifs">
      <table class={brief ? "ranking brief" : "ranking"}>
        <thead>
          <tr>
            <th scope="col" class="what">
              technique
            </th>
            <th scope="col" class="right figure">
              speed-up
            </th>
            {brief ? null : (
              <th scope="col" class="right figure">
                measured
              </th>
            )}
            <th scope="col" class="reach">
              <ScaleHead scale={scale} />
            </th>
            <th scope="col" class="right figure">
              memory
            </th>
            {brief ? null : (
              <>
                <th scope="col" class="right figure">
                  step
                </th>
                <th scope="col" class="numerics">
                  numerics
                </th>
                <th scope="col" class="rests-on">
                  rests on
                </th>
              </>
            )}
          </tr>
        </thead>
        <tbody>
          {rows.map((p) => (
            <Line key={p.technique} p={p} scale={scale} brief={brief} />
          ))}
        </tbody>
      </table>
      {brief && rows.some((p) => p.measured) ? (
        <p class="faint small">
          <Keys />
        </p>
      ) : null}
    </div>
  );
}

function reachesOf(p: Prediction): Reach[] {
  const reach = (found: Prediction | Measured, kind: Reach["kind"]): Reach => ({
    low: found.speedup_interval[0],
    middle: found.speedup,
    high: found.speedup_interval[1],
    kind,
  });
  return p.measured
    ? [reach(p, "predicted"), reach(p.measured, "measured")]
    : [reach(p, "predicted")];
}

function MeasuredCell({ measured }: { measured: Measured | null }) {
  if (!measured) {
    return (
      <td class="right faint">
        <span aria-label="not measured">–</span>
      </td>
    );
  }
  const [low, high] = measured.speedup_interval;
  const title =
    `${measured.metric}, ${plural(measured.blocks, "block")}, ${measured.created.slice(0, 10)}; ` +
    `interval at ${(100 * measured.level).toFixed(0)} %; ${measured.verdict}`;
  return (
    <td class="right" title={title}>
      <b>{times(measured.speedup)}</b>
      <span class="under faint">
        [{low.toFixed(2)}, {high.toFixed(2)}]
      </span>
      {measured.inside === null ? (
        <span class="under verdict poor">{measured.verdict}</span>
      ) : (
        <span class={`under verdict ${measured.inside ? "good" : "open"}`}>
          {measured.inside ? "inside" : "outside"}
        </span>
      )}
    </td>
  );
}

function Line(props: { p: Prediction; scale: { low: number; high: number }; brief: boolean }) {
  const { p, scale, brief } = props;
  const { run, what_ifs: found } = doc();
  const on =
    p.parts.length === selection.value.size && p.parts.every((part) => selection.value.has(part));
  const [low, high] = p.speedup_interval;
  return (
    <tr class={on ? "on" : ""}>
      <td>
        <button
          type="button"
          class="link mono"
          aria-pressed={on}
          title={on ? "Switch it off" : "Switch it on"}
          onClick={() => choose(on ? [] : p.parts)}
        >
          {p.parts.map((part, index) => (
            <span key={part}>
              {index ? " + " : ""}
              <span class="nobreak">{part}</span>
            </span>
          ))}
          {found.pareto_front.includes(p.technique) ? (
            <span class="star" title="Pareto-optimal in time, memory and numerics">
              {" "}
              ★
            </span>
          ) : null}
        </button>
        {p.technique === found.best ? <span class="tag">try first</span> : null}
        {brief ? null : (
          <span class="edits" title={p.edits.join("; ")}>
            <span class={`verdict ${tone(p.verdict)}`}>{p.verdict_text}</span>
            <span class="faint"> · {p.edits.join("; ")}</span>
          </span>
        )}
      </td>
      <td class="right">
        <b class={`verdict ${tone(p.verdict)}`} title={p.verdict_text}>
          {times(p.speedup)}
        </b>
        <span class="under faint">
          [{low.toFixed(2)}, {high.toFixed(2)}]
        </span>
      </td>
      {brief ? null : <MeasuredCell measured={p.measured} />}
      <td class="reach">
        <Intervals scale={scale} reaches={reachesOf(p)} />
      </td>
      <td class="right">
        {run.peak_bytes && p.peak_bytes ? (
          <>
            {bytes(p.peak_bytes)}
            <span class="under faint">{change(p.peak_bytes / run.peak_bytes)}</span>
          </>
        ) : (
          "–"
        )}
      </td>
      {brief ? null : (
        <>
          <td class="right">
            {duration(p.step_ns)}
            {p.samples && p.samples !== run.samples ? (
              <span class="under faint">{plural(p.samples, "sample")}</span>
            ) : null}
          </td>
          <td title={p.basis}>
            {p.numerics ?? "unknown"}
            {p.basis ? <span class="under faint basis">{p.basis}</span> : null}
          </td>
          <td>
            <RestsOn shares={p.shares} />
          </td>
        </>
      )}
    </tr>
  );
}
