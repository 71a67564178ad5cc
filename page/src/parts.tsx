// Small pieces that several views use.

import type { ComponentChildren } from "preact";
import { colours, roleColour } from "./colours";
import { percent, times } from "./format";
import { dark, doc } from "./state";
import type { Refusal, Shares, Verdict } from "./types";

/** A state in which there is nothing to draw, and why. */
export function Empty(props: { title: string; text: string; children?: ComponentChildren }) {
  return (
    <div class="empty">
      <h2>{props.title}</h2>
      <p>{props.text}</p>
      {props.children}
    </div>
  );
}

/** Notes for the reader, one sentence per line. */
export function Notes({ lines }: { lines: string[] }) {
  if (!lines.length) return null;
  return (
    <div class="notes">
      {lines.map((line) => (
        <p key={line}>{line}</p>
      ))}
    </div>
  );
}

/** Techniques with the reason each has for not being in the table. */
export function Reasons({ title, found }: { title: string; found: Refusal[] }) {
  if (!found.length) return null;
  return (
    <>
      <h2>{title}</h2>
      <dl class="reasons">
        {found.map((one) => (
          <div key={one.technique}>
            <dt class="mono">{one.technique}</dt>
            <dd>{one.reason}</dd>
          </div>
        ))}
      </dl>
    </>
  );
}

// Enough to distinguish `..._for_cpu` from `..._for_cpu_backward`, and `_foreach_mul_` from `_foreach_add_`.
const TAIL = 14;

/** A name without a line break; a long one is shortened in the middle. */
export function Name({ text }: { text: string }) {
  return (
    <span class="middle" title={text}>
      <span>{text.slice(0, -TAIL)}</span>
      <span>{text.slice(-TAIL)}</span>
    </span>
  );
}

export function Legend({ names, kind }: { names: string[]; kind: "family" | "role" }) {
  const palette = colours(dark.value);
  const d = doc();
  const colour = (name: string): string =>
    kind === "role" ? roleColour(palette, name) : palette.families[d.families.indexOf(name)];
  return (
    <ul class="legend" aria-label="Colours">
      {names.map((name) => (
        <li key={name}>
          <i style={{ background: colour(name) }} />
          {name}
        </li>
      ))}
    </ul>
  );
}

/** A length within its cell. */
export function Bar({ share, colour }: { share: number; colour?: string }) {
  const width = `${Math.max(0, Math.min(1, share)) * 100}%`;
  return (
    <span class="bar" aria-hidden="true">
      <i style={colour ? { width, background: colour } : { width }} />
    </span>
  );
}

export interface Scale {
  low: number;
  high: number;
}

// Anything slower is drawn at the edge, because the exact value does not matter.
const LOWEST = 0.6;

/** A logarithmic axis of speed-ups that holds 1x and all of these that are not far below it. */
export function scaleOf(values: number[]): Scale {
  const finite = values.filter((value) => Number.isFinite(value) && value > 0);
  const low = Math.max(Math.min(0.95, ...finite), LOWEST);
  return { low: low * 0.97, high: Math.max(1.05, ...finite) * 1.03 };
}

function place(scale: Scale, value: number): number {
  const share = Math.log(value / scale.low) / Math.log(scale.high / scale.low);
  return 100 * Math.min(Math.max(share, 0), 1);
}

// Percent of the width between two ticks; columns are narrow.
const APART = 30;
const TICKS = [0.1, 0.2, 0.5, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.5, 2, 3, 5, 10, 20, 50, 100];

/** Ticks that stand apart from each other; 1x is always among them. */
function ticksOf(scale: Scale): number[] {
  const found = [1];
  const inside = TICKS.filter((tick) => tick > scale.low && tick < scale.high);
  for (const tick of inside) {
    if (found.every((other) => Math.abs(place(scale, tick) - place(scale, other)) > APART)) {
      found.push(tick);
    }
  }
  return found;
}

export function ScaleHead({ scale }: { scale: Scale }) {
  return (
    <span class="axis">
      {ticksOf(scale).map((tick) => (
        <span key={tick} style={{ left: `${place(scale, tick)}%` }}>
          {tick}x
        </span>
      ))}
    </span>
  );
}

export interface Reach {
  low: number;
  middle: number;
  high: number;
  kind: "predicted" | "measured";
}

/** Values with their intervals on `scale`, with the line of no change. */
export function Intervals(props: { scale: Scale; reaches: Reach[] }) {
  const { scale, reaches } = props;
  const tall = 10 * reaches.length + 6;
  const text = reaches
    .map((r) => `${r.kind} ${times(r.middle)}, interval ${times(r.low)} to ${times(r.high)}`)
    .join("; ");
  return (
    <svg class="intervals" height={tall} role="img" aria-label={text}>
      {ticksOf(scale).map((tick) => (
        <line
          key={tick}
          class={tick === 1 ? "one" : "tick"}
          x1={`${place(scale, tick)}%`}
          x2={`${place(scale, tick)}%`}
          y1="0"
          y2={tall}
        />
      ))}
      {reaches.map((r, index) => {
        const y = 8 + 10 * index;
        if (r.middle < scale.low) {
          return <path key={r.kind} class={r.kind} d={`M7,${y - 4} L0,${y} L7,${y + 4} Z`} />;
        }
        return (
          <g key={r.kind} class={r.kind}>
            <line x1={`${place(scale, r.low)}%`} x2={`${place(scale, r.high)}%`} y1={y} y2={y} />
            <circle cx={`${place(scale, r.middle)}%`} cy={y} r="3.5" />
          </g>
        );
      })}
    </svg>
  );
}

/** The colours of `Intervals`, in words. */
export function Keys() {
  return (
    <>
      <span class="key predicted">●</span> predicted <span class="key measured">●</span> measured
    </>
  );
}

/** Shares of a number's provenances, the strongest first. */
export function RestsOn({ shares }: { shares: Shares }) {
  const rows = Object.entries(shares)
    .filter(([, share]) => share > 0)
    .sort((a, b) => b[1] - a[1]);
  return (
    <span class="rests">
      <span class="stack" aria-hidden="true">
        {rows.map(([name, share]) => (
          <i key={name} class={name} style={{ width: `${100 * share}%` }} />
        ))}
      </span>
      <span>
        {rows.map(([name, share]) => (
          <>
            <span key={name} class="nobreak">
              {percent(share)} {name}
            </span>{" "}
          </>
        ))}
      </span>
    </span>
  );
}

export function tone(verdict: Verdict): string {
  if (verdict === "worth-it") return "good";
  return verdict === "inconclusive" ? "open" : "poor";
}
