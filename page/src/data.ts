// From text to typed columns: of the file itself, or as a live page's server brings them.

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
  const letters = atob(text("arrays").trim());
  const packed = new Uint8Array(letters.length);
  for (let i = 0; i < packed.length; i++) packed[i] = letters.charCodeAt(i);
  return dataOf(doc, await inflate(packed));
}

/** The same two parts, as a server brings them. */
export async function fetchData(document: string, columns: string): Promise<Data> {
  const [text, packed] = await Promise.all([fetch(document), fetch(columns)]);
  if (!text.ok || !packed.ok) throw new Error("the server has a newer document");
  return dataOf((await text.json()) as Doc, await inflate(await packed.arrayBuffer()));
}

function dataOf(doc: Doc, buffer: ArrayBuffer): Data {
  return { doc, column: (ref) => new KINDS[ref.type](buffer, ref.at, ref.length) };
}

function text(id: string): string {
  return document.getElementById(id)?.textContent ?? "";
}

async function inflate(packed: BlobPart): Promise<ArrayBuffer> {
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).arrayBuffer();
}
