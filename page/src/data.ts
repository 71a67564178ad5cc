// From the file's text to typed columns. A live page brings the same two parts another way.

import type { Column, Doc, Ref } from "./types";

const KINDS = {
  u8: Uint8Array,
  u16: Uint16Array,
  i32: Int32Array,
  f32: Float32Array,
  f64: Float64Array,
} as const;

export interface Data {
  doc: Doc;
  column(ref: Ref): Column;
}

export async function load(): Promise<Data> {
  const doc = JSON.parse(text("document")) as Doc;
  const buffer = await inflate(text("arrays").trim());
  return { doc, column: (ref) => new KINDS[ref.type](buffer, ref.at, ref.length) };
}

function text(id: string): string {
  return document.getElementById(id)?.textContent ?? "";
}

async function inflate(base64: string): Promise<ArrayBuffer> {
  const letters = atob(base64);
  const packed = new Uint8Array(letters.length);
  for (let i = 0; i < packed.length; i++) packed[i] = letters.charCodeAt(i);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).arrayBuffer();
}
