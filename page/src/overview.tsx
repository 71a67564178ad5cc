// The overview on one screen: where time and memory go, and what would help.

import { sorted, treeOf } from "./breakdown";
import { colours, roleColour } from "./colours";
import { bytes, duration, percent } from "./format";
import { Bar, Empty, Name, Notes } from "./parts";
import { dark, doc, drawnAsRecorded, query, selectionName, step, view } from "./state";
import type { View } from "./state";
import { Ranking } from "./whatifs";

/** The number of rows of this height that fit below the content above them. */
function room(above: number, row: number, least: number, most: number): number {
  return Math.min(Math.max(Math.floor((window.innerHeight - above) / row), least), most);
}

// Operators below this share of the step are grouped as others.
const SEEN = 0.001;
const PHASE_NAMES = ["other", "forward", "backward", "optimizer"];

export function Overview() {
  const now = step.value;
  const { run, what_ifs: found } = doc();
  if (!now.size) {
    return (
      <Empty
        title="This step has no tasks"
        text="Nothing ran in it, or nothing was recorded. Record it again with:"
      >
        <code>slipstream profile WORKLOAD -o run.slipgraph</code>
      </Empty>
    );
  }
  const most = room(360, 28, 8, 22);
  const ranked = room(400, 52, 5, 12);
  const { root, waited } = treeOf(now, "operator", "path");
  const operators = sorted(root);
  const large = operators.filter((one) => one.total >= SEEN * now.stepNs).slice(0, most);
  const phases = [1, 2, 3, 0]
    .map((phase) => ({ phase, time: root.phases[phase] }))
    .filter((one) => one.time > 0);
  const palette = colours(dark.value);
  const small = operators.length - large.length;
  const rest = operators.slice(large.length).reduce((sum, one) => sum + one.total, 0);
  return (
    <section class="overview" aria-label="Overview">
      <Notes lines={run.notes} />
      <div class="halves">
        <div>
          <Heading view="breakdown" text="Where the time goes">
            {drawnAsRecorded.value ? "" : `with ${selectionName.value}`}
          </Heading>
          <Stack
            label="Time by phase"
            unit={duration}
            parts={[
              ...phases.map(({ phase, time }) => ({
                name: PHASE_NAMES[phase],
                share: time / now.stepNs,
                value: time,
                colour: palette.phases[phase],
              })),
              {
                name: "Python, dispatch, waiting",
                share: waited / now.stepNs,
                value: waited,
                colour: palette.level[0],
              },
            ]}
          />
          <table class="top">
            <tbody>
              {large.map((one) => (
                <tr key={one.key}>
                  <td>
                    <span class="named">
                      <i class="dot" style={{ background: palette.families[one.family] }} />
                      <button
                        type="button"
                        class="link mono named"
                        aria-label={`${one.label}: find it on the timeline`}
                        onClick={() => {
                          query.value = one.label;
                          view.value = "timeline";
                        }}
                      >
                        <Name text={one.label} />
                      </button>
                    </span>
                  </td>
                  <td class="right time">{duration(one.total)}</td>
                  <td class="wide">
                    <Bar share={one.total / now.stepNs} />
                    <span class="share">{percent(one.total / now.stepNs)}</span>
                  </td>
                </tr>
              ))}
              {small > 0 ? (
                <tr class="faint">
                  <td>{small === 1 ? "1 other" : `${small} others`}</td>
                  <td class="right">{duration(rest)}</td>
                  <td class="wide">
                    <Bar share={rest / now.stepNs} colour="var(--faint)" />
                    <span class="share">{percent(rest / now.stepNs)}</span>
                  </td>
                </tr>
              ) : null}
            </tbody>
          </table>
        </div>
        <div>
          <Heading view="memory" text="Where the memory goes">
            {now.memory ? `${bytes(now.memory.peakBytes)} at the peak` : ""}
          </Heading>
          <MemoryStack />
          <Heading view="whatifs" text="What would help">
            {found.state === "ready" ? "speed-up of the time per sample" : ""}
          </Heading>
          {found.state === "ready" && found.ranked.length ? (
            <Ranking names={found.ranked.slice(0, ranked)} brief />
          ) : (
            <p class="faint">
              {found.state === "ready"
                ? "No technique that is installed applies to this step."
                : `Not simulated: ${found.reason}.`}
            </p>
          )}
          {found.state === "ready" && found.ranked.length > ranked ? (
            <button type="button" class="link" onClick={() => (view.value = "whatifs")}>
              {found.ranked.length - ranked} more, and {found.not_applicable.length} that do not
              apply
            </button>
          ) : null}
        </div>
      </div>
    </section>
  );
}

function Heading(props: { view: View; text: string; children: string }) {
  return (
    <h2>
      <button type="button" class="link" onClick={() => (view.value = props.view)}>
        {props.text}
      </button>{" "}
      <span class="faint">{props.children}</span>
    </h2>
  );
}

interface Part {
  name: string;
  share: number;
  value: number;
  colour: string;
}

// Parts below this share are merged.
const SMALL = 0.005;

function Stack(props: { label: string; parts: Part[]; unit: (value: number) => string }) {
  const { label } = props;
  const small = props.parts.filter((part) => part.share < SMALL);
  const parts = props.parts.filter((part) => part.share >= SMALL);
  if (small.length > 1) {
    const sum = (of: "share" | "value") => small.reduce((total, part) => total + part[of], 0);
    parts.push({
      name: `${small.length} others`,
      share: sum("share"),
      value: sum("value"),
      colour: small[0].colour,
    });
  } else {
    parts.push(...small);
  }
  return (
    <>
      <div class="stack tall" aria-hidden="true">
        {parts.map((part) => (
          <i key={part.name} style={{ width: `${100 * part.share}%`, background: part.colour }} />
        ))}
      </div>
      <ul class="legend figures" aria-label={label}>
        {parts.map((part) => (
          <li key={part.name}>
            <i style={{ background: part.colour }} />
            {part.name} <b>{props.unit(part.value)}</b>{" "}
            <span class="faint">{percent(part.share)}</span>
          </li>
        ))}
      </ul>
    </>
  );
}

function MemoryStack() {
  const now = step.value;
  const memory = now.memory;
  if (!memory) return <p class="faint">Memory was not recorded.</p>;
  const palette = colours(dark.value);
  let point = 0;
  let most = -1;
  for (let at = 0; at < memory.times.length; at++) {
    const total = memory.levels.reduce((sum, level) => sum + level[at], 0);
    if (total > most) [point, most] = [at, total];
  }
  const parts = memory.roles
    .map((role, index) => ({
      name: role,
      share: memory.levels[index][point] / most,
      value: memory.levels[index][point],
      colour: roleColour(palette, role),
    }))
    .filter((part) => part.share > 0)
    .sort((a, b) => b.share - a.share);
  return <Stack label="Memory by role at the peak" unit={bytes} parts={parts} />;
}
