// How and on which machine the step was recorded, and where its numbers come from.

import { count, duration, percent } from "./format";
import { Notes } from "./parts";
import { doc } from "./state";

const MEANINGS: [string, string][] = [
  ["measured", "timed in the step itself"],
  ["microbenchmark", "the same call, timed alone on this machine"],
  ["fitted", "from a curve through measurements"],
  ["roofline", "from arithmetic and bytes, and the machine's measured limits"],
  ["simulated", "from the event engine"],
  ["datasheet", "from the hardware's data sheet"],
  ["assumed", "an assumption, not measured"],
  ["user", "given by you"],
];

export function RunView() {
  const { run } = doc();
  const times = run.recorded_ns;
  const clocks: [string, string][] = [
    ["wall_median", "wall clock, median step"],
    ["wall_minimum", "wall clock, minimum step"],
    ["cpu_median", "CPU time, median step"],
    ["cpu_minimum", "CPU time, minimum step"],
  ];
  return (
    <section class="run" aria-label="Run">
      <Notes lines={run.notes} />
      <div class="columns">
        <div>
          <div class="halves">
            <div>
              <h2>Settings of the step</h2>
              <Pairs rows={run.settings} />
              {run.edits.length ? (
                <>
                  <h2>Edits of the graph</h2>
                  <ul>
                    {run.edits.map((edit) => (
                      <li key={edit}>{edit}</li>
                    ))}
                  </ul>
                </>
              ) : null}
            </div>
            <div>
              <h2>Step time</h2>
              <Pairs
                rows={[
                  ["simulated from the recorded tasks", duration(run.step_ns)],
                  ...clocks
                    .filter(([key]) => times[key] > 0)
                    .map(([key, label]): [string, string] => [label, duration(times[key])]),
                  ...(times.relative_spread > 0
                    ? ([["spread of the recorded steps", percent(times.relative_spread)]] as [
                        string,
                        string,
                      ][])
                    : []),
                ]}
              />
            </div>
          </div>
          <h2>Lanes</h2>
          <div class="scroll" tabIndex={0} role="region" aria-label="Lanes">
            <table>
              <thead>
                <tr>
                  <th scope="col">lane</th>
                  <th scope="col" class="right">
                    busy
                  </th>
                  <th scope="col" class="right">
                    runs
                  </th>
                  <th scope="col" class="right">
                    Python
                  </th>
                  <th scope="col" class="right">
                    waits
                  </th>
                  <th scope="col" class="right">
                    tasks
                  </th>
                </tr>
              </thead>
              <tbody>
                {run.lanes.map((lane) => {
                  const whole = lane.busy_ns + lane.gap_ns + lane.idle_ns || 1;
                  return (
                    <tr key={lane.name}>
                      <td>{lane.name}</td>
                      <td class="right">{percent(lane.busy_ns / whole)}</td>
                      <td class="right">{duration(lane.busy_ns)}</td>
                      <td class="right">{duration(lane.gap_ns)}</td>
                      <td class="right">{duration(lane.idle_ns < 1 ? 0 : lane.idle_ns)}</td>
                      <td class="right">{count(lane.tasks)}</td>
                    </tr>
                  );
                })}
              </tbody>
            </table>
          </div>
        </div>
        <div>
          <h2>Machine</h2>
          <Pairs rows={run.machine} />
          <h2>Where numbers come from</h2>
          <dl class="pairs">
            {MEANINGS.map(([name, meaning]) => (
              <div key={name}>
                <dt>{name}</dt>
                <dd>
                  {meaning}
                  {run.shares[name] ? (
                    <span class="faint">; {percent(run.shares[name])} of this step</span>
                  ) : null}
                </dd>
              </div>
            ))}
          </dl>
        </div>
      </div>
    </section>
  );
}

function Pairs({ rows }: { rows: [string, string][] }) {
  if (!rows.length) return <p class="faint">Nothing was recorded.</p>;
  return (
    <dl class="pairs">
      {rows.map(([name, value]) => (
        <div key={name}>
          <dt>{name}</dt>
          <dd>{value}</dd>
        </div>
      ))}
    </dl>
  );
}
