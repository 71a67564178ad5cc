// What operators move, what of it had to move, and how far that is from the machine's limits.

import { signal } from "@preact/signals";
import { Choice } from "./breakdown";
import { bytes, count, duration, percent, plainName, scaled, significant, times } from "./format";
import { Bar, Empty, Name, Notes } from "./parts";
import { doc } from "./state";
import type { MovedRow } from "./types";

const group = signal("operator");

export function MovementView() {
  const { movement } = doc();
  if (!movement) {
    return (
      <Empty
        title="What moves is not known"
        text="The arguments of its operators, which tell their bytes, were not recorded. Record the step on one thread:"
      >
        <code>slipstream profile WORKLOAD --threads 1 -o run.slipgraph</code>
      </Empty>
    );
  }
  const rows = movement.groups[group.value];
  const most = Math.max(...rows.map((row) => row.moved_bytes), 1);
  const known = rows.some((row) => row.gap !== null);
  return (
    <section aria-label="Movement">
      <p>
        <b>{movement.sentence}</b>
      </p>
      <div class="tools">
        <Choice
          label="Group by"
          options={Object.keys(movement.groups)}
          value={group.value}
          onChange={(next) => (group.value = next)}
        />
      </div>
      <div class="scroll" tabIndex={0} role="region" aria-label="Movement table">
        <table class="movement">
          <thead>
            <tr>
              <th scope="col">{group.value}</th>
              <th scope="col" class="right">
                time
              </th>
              <th scope="col" class="right">
                share
              </th>
              <th scope="col" class="right">
                moved
              </th>
              <th scope="col" class="right">
                had to move
              </th>
              <th scope="col">compared</th>
              <th scope="col" class="right">
                operations
              </th>
              <th scope="col" class="right">
                per byte
              </th>
              {known ? (
                <th scope="col" class="right">
                  over the limit
                </th>
              ) : null}
              <th scope="col" class="right">
                calls
              </th>
            </tr>
          </thead>
          <tbody>
            {rows.map((row) => (
              <Line key={row.name} row={row} most={most} step={movement.step_ns} known={known} />
            ))}
          </tbody>
        </table>
      </div>
      <Notes lines={movement.notes} />
    </section>
  );
}

function Line(props: { row: MovedRow; most: number; step: number; known: boolean }) {
  const { row, most } = props;
  return (
    <tr>
      <td class="mono">
        <Name text={plainName(row.name)} />
      </td>
      <td class="right">{duration(row.time_ns)}</td>
      <td class="right">{percent(row.time_ns / props.step)}</td>
      <td class="right">{bytes(row.moved_bytes)}</td>
      <td class="right">{bytes(row.needed_bytes)}</td>
      <td>
        <Bar share={row.moved_bytes / most} colour="var(--faint)" />
        <Bar share={row.needed_bytes / most} />
      </td>
      <td class="right">{scaled(row.operations)}</td>
      <td class="right">
        {row.intensity > 0 && row.intensity < 0.01 ? "< 0.01" : significant(row.intensity)}
      </td>
      {props.known ? <td class="right">{row.gap === null ? "–" : times(row.gap)}</td> : null}
      <td class="right">{count(row.tasks)}</td>
    </tr>
  );
}
