// Where the step's time goes: by module, source line, operator or kind of work.

import { computed, signal } from "@preact/signals";
import { colours } from "./colours";
import { count, duration, percent, plainName } from "./format";
import { Bar, Empty, Name } from "./parts";
import { dark, doc, drawnAsRecorded, query, selectionName, step, view } from "./state";
import { chains } from "./step";
import type { Step } from "./step";

const GROUPS = ["module", "source line", "operator", "kind of work"] as const;
type Group = (typeof GROUPS)[number];

export interface Node {
  key: string;
  label: string;
  detail: string;
  total: number;
  phases: number[];
  calls: number;
  children: Map<string, Node>;
  family: number;
}

const group = signal<Group>("module");
const measure = signal<"path" | "work">("path");
const closed = signal<ReadonlySet<string>>(new Set());
const opened = signal<ReadonlySet<string>>(new Set());

function node(key: string, label: string, detail: string): Node {
  return {
    key,
    label,
    detail,
    total: 0,
    phases: [0, 0, 0, 0],
    calls: 0,
    children: new Map(),
    family: -1,
  };
}

/** The tree of `by`, with what the critical path spends in it, or all work on all lanes. */
export function treeOf(
  now: Step,
  by: Group,
  what: "path" | "work",
): { root: Node; waited: number } {
  const { doc: d, columns } = now;
  const root = node("", "the step", "");
  const above = chains(d);
  const modulesAbove = above.map((chain) =>
    chain.filter((path) => d.paths[path - 1][1] === "module").map((path) => d.paths[path - 1][2]),
  );
  const sums = new Map<
    string,
    { levels: string[]; task: number; phases: number[]; calls: number }
  >();
  const time = what === "path" ? columns.busy : columns.duration;
  let waited = 0;
  for (let task = 0; task < now.size; task++) {
    waited += what === "path" ? columns.waited[task] : columns.gap[task];
    const name = columns.name[task];
    const outer =
      by === "module"
        ? columns.path[task]
        : by === "source line"
          ? columns.source[task]
          : by === "operator"
            ? columns.phase[task]
            : columns.family[task];
    const key = `${outer}.${name}`;
    let sum = sums.get(key);
    if (!sum) {
      const operator = plainName(d.strings[name]);
      const levels =
        by === "module"
          ? [...(modulesAbove[columns.path[task]] ?? []), operator]
          : by === "source line"
            ? [d.strings[columns.source[task]] || "(no source line)", operator]
            : by === "operator"
              ? [operator]
              : [d.families[columns.family[task]], operator];
      if (by === "module" && levels.length === 1) levels.unshift("(outside modules)");
      sum = { levels, task, phases: [0, 0, 0, 0], calls: 0 };
      sums.set(key, sum);
    }
    sum.phases[columns.phase[task]] += time[task];
    // A remainder, such as the start of a step, is not a call.
    if (columns.duration[task] > 0 || columns.kind[task] > 0) sum.calls += 1;
  }
  for (const { levels, task, phases, calls } of sums.values()) {
    let at = root;
    const add = (one: Node): void => {
      phases.forEach((value, phase) => {
        one.phases[phase] += value;
        one.total += value;
      });
      one.calls += calls;
    };
    add(at);
    levels.forEach((level, depth) => {
      const last = depth === levels.length - 1;
      // An operator differs from a module of the same name.
      const key = `${at.key}/${last ? "·" : ""}${level}`;
      let child = at.children.get(key);
      if (!child) {
        const [label, ...rest] =
          !last && by === "module" && !level.startsWith("(") ? level.split(" ") : [level];
        child = node(key, label, rest.join(" "));
        if (last || by === "kind of work") child.family = columns.family[task];
        at.children.set(key, child);
      }
      add(child);
      at = child;
    });
  }
  return { root, waited };
}

export function sorted(of: Node): Node[] {
  return [...of.children.values()]
    .filter((child) => child.total > 0 || child.calls > 0)
    .sort((a, b) => b.total - a.total);
}

const tree = computed(() => treeOf(step.value, group.value, measure.value));

export function Breakdown() {
  const now = step.value;
  if (!now.size) {
    return <Empty title="No tasks" text="The graph is empty, so there is no breakdown." />;
  }
  const { root, waited } = tree.value;
  const lanes = now.tracks.length;
  const step_ns = measure.value === "path" ? now.stepNs : root.total + waited;
  const rows = flatten(root, step_ns);
  const phases = [1, 2, 3, 0].filter((phase) => root.phases[phase] > 0);
  return (
    <section aria-label="Breakdown">
      <div class="tools">
        <Choice
          label="Group by"
          options={GROUPS}
          value={group.value}
          onChange={(next) => {
            group.value = next;
          }}
        />
        {lanes > 1 ? (
          <Choice
            label="Count"
            options={["path", "work"] as const}
            names={{ path: "critical path", work: "all work" }}
            value={measure.value}
            onChange={(next) => {
              measure.value = next;
            }}
          />
        ) : null}
        <span class="grow" />
        <span class="faint">
          {drawnAsRecorded.value ? "the step as recorded" : `the step with ${selectionName.value}`}
        </span>
      </div>
      <div class="scroll" tabIndex={0} role="region" aria-label="Breakdown table">
        <table class="breakdown">
          <thead>
            <tr>
              <th scope="col">{group.value}</th>
              <th scope="col" class="right">
                time
              </th>
              <th scope="col">share of the step</th>
              {phases.map((phase) => (
                <th scope="col" class="right" key={phase}>
                  {doc().phases[phase]}
                </th>
              ))}
              <th scope="col" class="right">
                calls
              </th>
            </tr>
          </thead>
          <tbody>
            {rows.map(({ one, depth }) => (
              <Line key={one.key} one={one} depth={depth} step={step_ns} phases={phases} />
            ))}
            <tr class="rest">
              <td>untracked: Python, dispatch, waiting</td>
              <td class="right">{duration(waited)}</td>
              <td>
                <Bar share={waited / step_ns} colour="var(--faint)" />
                <span class="share">{percent(waited / step_ns)}</span>
              </td>
              {phases.map((phase) => (
                <td key={phase} />
              ))}
              <td />
            </tr>
          </tbody>
          <tfoot>
            <tr>
              <td>{measure.value === "path" ? "the step" : "all lanes together"}</td>
              <td class="right">{duration(root.total + waited)}</td>
              <td>
                <span class="share">{percent((root.total + waited) / step_ns)}</span>
              </td>
              {phases.map((phase) => (
                <td key={phase} class="right">
                  {duration(root.phases[phase])}
                </td>
              ))}
              <td class="right">{count(root.calls)}</td>
            </tr>
          </tfoot>
        </table>
      </div>
      <p class="faint">
        {measure.value === "path"
          ? "Times on the critical path: with the untracked time they sum to the step, to the nanosecond."
          : "All work on all lanes; lanes run in parallel, so this exceeds the step."}
        {group.value === "source line"
          ? " A line is the first one of yours that calls the module; its backward pass counts to it."
          : ""}
      </p>
    </section>
  );
}

// Levels that contain most of the step are open initially.
const OPEN_SHARE = 0.12;
const OPEN_DEPTH = 1;
const MOST_ROWS = 2000;

function isOpen(one: Node, depth: number, step_ns: number): boolean {
  if (opened.value.has(one.key)) return true;
  if (closed.value.has(one.key)) return false;
  return depth < OPEN_DEPTH && group.value === "module" && one.total > OPEN_SHARE * step_ns;
}

function flatten(root: Node, step_ns: number): { one: Node; depth: number }[] {
  const rows: { one: Node; depth: number }[] = [];
  const visit = (of: Node, depth: number): void => {
    for (const one of sorted(of)) {
      if (rows.length >= MOST_ROWS) return;
      rows.push({ one, depth });
      if (one.children.size && isOpen(one, depth, step_ns)) visit(one, depth + 1);
    }
  };
  visit(root, 0);
  return rows;
}

function Line(props: { one: Node; depth: number; step: number; phases: number[] }) {
  const { one, depth, phases } = props;
  const open = one.children.size > 0 && isOpen(one, depth, props.step);
  const palette = colours(dark.value);
  const name = (
    <span class="named">
      {one.family >= 0 ? (
        <i class="dot" style={{ background: palette.families[one.family] }} />
      ) : null}
      <span class={one.family >= 0 && !one.children.size ? "mono named" : "named"}>
        <Name text={one.label} />
      </span>
      {one.detail ? <span class="faint nobreak">&nbsp;{one.detail}</span> : null}
    </span>
  );
  return (
    <tr>
      <td style={{ paddingLeft: `${8 + 16 * depth}px` }}>
        {one.children.size ? (
          <button
            type="button"
            class="link twist"
            aria-expanded={open}
            aria-label={`${one.label} ${one.detail}`.trim()}
            onClick={() => {
              const [add, take] = open ? [closed, opened] : [opened, closed];
              add.value = new Set([...add.value, one.key]);
              take.value = new Set([...take.value].filter((key) => key !== one.key));
            }}
          >
            <span class="arrow" aria-hidden="true">
              {open ? "▾" : "▸"}
            </span>
            {name}
          </button>
        ) : (
          <button
            type="button"
            class="link leaf"
            aria-label={`${one.label}: find it on the timeline`}
            onClick={() => {
              query.value = one.label;
              view.value = "timeline";
            }}
          >
            {name}
          </button>
        )}
      </td>
      <td class="right">{duration(one.total)}</td>
      <td>
        <Bar share={one.total / props.step} />
        <span class="share">{percent(one.total / props.step)}</span>
      </td>
      {phases.map((phase) => (
        <td key={phase} class="right">
          {one.phases[phase] ? duration(one.phases[phase]) : <span class="faint">–</span>}
        </td>
      ))}
      <td class="right">{count(one.calls)}</td>
    </tr>
  );
}

export function Choice<T extends string>(props: {
  label: string;
  options: readonly T[];
  names?: Record<T, string>;
  value: T;
  onChange: (next: T) => void;
}) {
  return (
    <div class="choice" role="group" aria-label={props.label}>
      <span class="faint">{props.label}</span>
      {props.options.map((option) => (
        <button
          key={option}
          type="button"
          aria-pressed={props.value === option}
          onClick={() => props.onChange(option)}
        >
          {props.names?.[option] ?? option}
        </button>
      ))}
    </div>
  );
}
