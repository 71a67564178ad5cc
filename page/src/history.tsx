// Predictions made on this machine, and the later measurements.

import { Empty, Intervals, Keys, ScaleHead, scaleOf } from "./parts";
import { times } from "./format";
import { doc } from "./state";
import type { Score } from "./types";

export function HistoryView() {
  const { history, run } = doc();
  if (history.state !== "ready") {
    return (
      <Empty
        title={history.state === "failed" ? "The history cannot be read" : "No history yet"}
        text={
          history.state === "failed"
            ? history.note
            : "No prediction was measured on this machine yet. Measure one to see its error here; later intervals adapt to it:"
        }
      >
        <code>slipstream prove WORKLOAD --technique {doc().what_ifs.best ?? "amp:bf16"}</code>
      </Empty>
    );
  }
  const scores = [...history.scores].reverse();
  const held = scores.filter((score) => score.inside).length;
  const scale = scaleOf(
    scores.flatMap((s) => [s.predicted[1], s.predicted[2], s.measured[1], s.measured[2]]),
  );
  return (
    <section aria-label="History">
      <h2>Predicted, then measured</h2>
      <p>
        {held} of {scores.length} measured speed-ups are inside their predicted 90 % interval.
        {history.total > scores.length ? ` The latest of ${history.total} are shown.` : ""}{" "}
        <span class="faint">{history.note}.</span>
      </p>
      <div class="scroll" tabIndex={0} role="region" aria-label="Past predictions">
        <table class="history">
          <thead>
            <tr>
              <th scope="col">technique</th>
              <th scope="col">workload</th>
              <th scope="col" class="right">
                predicted
              </th>
              <th scope="col" class="right">
                measured
              </th>
              <th scope="col" class="reach">
                <ScaleHead scale={scale} />
              </th>
              <th scope="col">held</th>
              <th scope="col">predicted on</th>
            </tr>
          </thead>
          <tbody>
            {scores.map((score) => (
              <Line
                key={`${score.experiment} ${score.technique} ${score.created} ${score.metric}`}
                score={score}
                scale={scale}
                here={score.workload === run.workload}
              />
            ))}
          </tbody>
        </table>
      </div>
      <p class="faint">
        <Keys /> in pairs, each with its interval. A bold workload is the one of this report.
      </p>
    </section>
  );
}

function Line(props: { score: Score; scale: { low: number; high: number }; here: boolean }) {
  const { score, scale, here } = props;
  const [p, m] = [score.predicted, score.measured].map(([middle, low, high]) => ({
    middle,
    low,
    high,
  }));
  return (
    <tr>
      <td class="mono">{score.technique}</td>
      <td>{here ? <b>{score.workload}</b> : score.workload}</td>
      <td class="right">{times(p.middle)}</td>
      <td class="right">{times(m.middle)}</td>
      <td class="reach">
        <Intervals
          scale={scale}
          reaches={[
            { ...p, kind: "predicted" },
            { ...m, kind: "measured" },
          ]}
        />
      </td>
      <td class={`verdict ${score.inside ? "good" : "poor"}`}>
        {score.inside ? "inside" : "outside"}
      </td>
      <td class="faint">{score.created.slice(0, 10)}</td>
    </tr>
  );
}
