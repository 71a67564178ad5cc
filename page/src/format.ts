// Numbers as people read them; the same digits and units as the command line prints.

const TIMES: [string, number, number][] = [
  ["h", 3600e9, 2],
  ["min", 60e9, 2],
  ["s", 1e9, 1],
  ["ms", 1e6, 1],
  ["µs", 1e3, 1],
];
const SIZES: [string, number][] = [
  ["TiB", 2 ** 40],
  ["GiB", 2 ** 30],
  ["MiB", 2 ** 20],
  ["KiB", 2 ** 10],
];
const PREFIXES: [string, number][] = [
  ["T", 1e12],
  ["G", 1e9],
  ["M", 1e6],
  ["k", 1e3],
];
// What would round to "1000 µs" is "1.00 ms".
const ALMOST = 0.9995;

export function significant(value: number): string {
  if (value === 0) return "0";
  const digits = Math.floor(Math.log10(Math.abs(Number(value.toPrecision(3)))));
  return value.toFixed(Math.max(0, 2 - digits));
}

export function duration(ns: number): string {
  if (!Number.isFinite(ns)) return "–";
  const size = Math.abs(ns);
  for (const [unit, scale, from] of TIMES) {
    if (size >= scale * from * ALMOST) return `${significant(ns / scale)} ${unit}`;
  }
  return `${significant(ns)} ns`;
}

export function bytes(count: number): string {
  if (!Number.isFinite(count)) return "–";
  for (const [unit, scale] of SIZES) {
    if (Math.abs(count) >= scale * ALMOST) return `${significant(count / scale)} ${unit}`;
  }
  return `${Math.round(count)} B`;
}

export function percent(share: number): string {
  if (!Number.isFinite(share)) return "–";
  return `${(100 * share).toFixed(1)} %`;
}

/** A relative change with its sign, in whole percent. */
export function change(ratio: number): string {
  const value = Math.round(100 * (ratio - 1));
  return `${value > 0 ? "+" : value < 0 ? "−" : "±"}${Math.abs(value)} %`;
}

export function times(speedup: number): string {
  if (!Number.isFinite(speedup)) return "–";
  return `${speedup >= 100 ? speedup.toFixed(0) : speedup.toFixed(2)}x`;
}

const WHOLE = new Intl.NumberFormat("en-US");

export function count(value: number): string {
  return WHOLE.format(value);
}

/** A large count in three digits, with a decimal prefix. */
export function scaled(value: number): string {
  for (const [prefix, scale] of PREFIXES) {
    if (value >= scale * ALMOST) return `${significant(value / scale)} ${prefix}`;
  }
  return count(Math.round(value));
}

export function plural(value: number, one: string, many = `${one}s`): string {
  return `${count(value)} ${value === 1 ? one : many}`;
}

/** Without the namespace that every operator shares. */
export function plainName(name: string): string {
  return name.startsWith("aten::") ? name.slice(6) : name;
}
