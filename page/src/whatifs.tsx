// Every technique that applies, ranked, with its interval and what it rests on; then the others.

import { bytes, change, duration, plural, times } from "./format";
import { Empty, Intervals, RestsOn, ScaleHead, scaleOf, tone } from "./parts";
import { choose, doc, selection } from "./state";
import type { Prediction, WhatIfs } from "./types";

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
        <p>No technique that is installed applies to this step.</p>
      )}
      <p class="faint">
        Speed-up is the time of a sample before over after, with its 90 % interval; 1x is no change.
        {found.front.length
          ? " A star marks what nothing else beats in time, memory and numbers at once."
          : ""}
        {all
          ? ` The switchboard knows ${done} of ${plural(all, "combination")} of up to four.`
          : ""}
      </p>
      <Failures found={found} />
      {found.refused.length ? (
        <>
          <h2>What does not apply here</h2>
          <dl class="reasons">
            {found.refused.map((one) => (
              <div key={one.technique}>
                <dt class="mono">{one.technique}</dt>
                <dd>{one.reason}</dd>
              </div>
            ))}
          </dl>
        </>
      ) : null}
    </section>
  );
}

function Failures({ found }: { found: WhatIfs }) {
  if (!found.failed.length) return null;
  return (
    <>
      <h2>What could not be simulated</h2>
      <dl class="reasons">
        {found.failed.map((one) => (
          <div key={one.technique}>
            <dt class="mono">{one.technique}</dt>
            <dd>{one.reason}</dd>
          </div>
        ))}
      </dl>
    </>
  );
}

// Percent of the width between ticks where the column is narrow.
const FAR_APART = 38;

/** A table of predictions; `brief` leaves out what only the full view has room for. */
export function Ranking({ names, brief = false }: { names: string[]; brief?: boolean }) {
  const found = doc().what_ifs;
  const known = new Map(found.predictions.map((p) => [p.technique, p]));
  const rows = names.map((name) => known.get(name)).filter((p): p is Prediction => !!p);
  const scale = scaleOf(rows.flatMap((p) => [1 / p.interval[0], 1 / p.interval[1]]));
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
            <th scope="col" class="reach">
              <ScaleHead scale={scale} apart={brief ? FAR_APART : undefined} />
            </th>
            <th scope="col" class="right figure">
              memory
            </th>
            {brief ? null : (
              <>
                <th scope="col" class="right figure">
                  step
                </th>
                <th scope="col" class="numbers">
                  numbers
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
    </div>
  );
}

function Line(props: { p: Prediction; scale: { low: number; high: number }; brief: boolean }) {
  const { p, scale, brief } = props;
  const { run, what_ifs: found } = doc();
  const on =
    p.parts.length === selection.value.size && p.parts.every((part) => selection.value.has(part));
  const [low, high] = [1 / p.interval[1], 1 / p.interval[0]];
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
          {found.front.includes(p.technique) ? (
            <span class="star" title="nothing else beats it in time, memory and numbers at once">
              {" "}
              ★
            </span>
          ) : null}
        </button>
        {p.technique === found.best ? <span class="tag">try first</span> : null}
        {brief ? null : (
          <span class="edits" title={p.edits.join("; ")}>
            <span class={`verdict ${tone(p.verdict)}`}>{p.verdict}</span>
            <span class="faint"> · {p.edits.join("; ")}</span>
          </span>
        )}
      </td>
      <td class="right">
        <b class={`verdict ${tone(p.verdict)}`} title={p.verdict}>
          {times(1 / p.ratio)}
        </b>
        <span class="under faint">
          [{low.toFixed(2)}, {high.toFixed(2)}]
        </span>
      </td>
      <td class="reach">
        <Intervals
          scale={scale}
          apart={brief ? FAR_APART : undefined}
          reaches={[{ low, middle: 1 / p.ratio, high, kind: "predicted" }]}
        />
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
            {p.quality ?? "unknown"}
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
