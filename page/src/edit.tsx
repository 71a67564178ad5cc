// Edits of the user's file: shown as a diff, written when confirmed, undone byte for byte.

import { signal } from "@preact/signals";
import { ask, batch, faultOf, now } from "./live";
import type { Fault } from "./live";
import { chosen, selectionName } from "./state";

interface Proposal {
  title: string;
  change: { batch?: number; technique?: string };
  diff: string;
  note: string;
  digest: string;
}

export const proposal = signal<Proposal | null>(null);
export const fault = signal<Fault | null>(null);
/** The running operation on the file; empty if there is none. */
const busy = signal("");

async function attempt(doing: string, deed: () => Promise<void>): Promise<void> {
  busy.value = doing;
  fault.value = null;
  try {
    await deed();
  } catch (error) {
    fault.value = faultOf(error);
  } finally {
    busy.value = "";
  }
}

/** Show what would be written. `digest`: of the file as it was when this began, if that matters. */
export function propose(
  title: string,
  change: Proposal["change"],
  digest?: string | null,
): Promise<void> {
  proposal.value = null;
  return attempt("finding the place of the edit", async () => {
    const found = await ask<{ diff: string; note: string; digest: string }>({
      do: "preview",
      ...change,
      ...(digest ? { digest } : {}),
    });
    proposal.value = { title, change, ...found };
  });
}

export function forgetProposal(): void {
  proposal.value = null;
  fault.value = null;
}

function save(): Promise<void> {
  return attempt("writing the file", async () => {
    const { change, digest } = proposal.value!;
    proposal.value = null;
    await ask({ do: "save", ...change, digest });
  });
}

export function undo(): Promise<void> {
  proposal.value = null;
  return attempt("undoing the edit", async () => void (await ask({ do: "undo" })));
}

export function FaultBox() {
  const one = fault.value;
  if (!one) return null;
  return (
    <div class="fault" role="alert">
      <p>
        <b>{one.what}</b>
      </p>
      {one.where ? <p class="mono small">{one.where}</p> : null}
      {one.remedy ? <p>{one.remedy}</p> : null}
      <button type="button" onClick={() => (fault.value = null)}>
        Close
      </button>
    </div>
  );
}

/** The changed lines of a unified diff, with one line of context. */
function changes(diff: string): string[] {
  const lines = diff
    .split("\n")
    .filter((line) => /^[-+@ ]/.test(line) && !/^(---|\+\+\+) /.test(line));
  const near = (index: number) => /^[-+]/.test(lines[index] ?? "");
  return lines.filter(
    (line, index) => line[0] === "@" || near(index) || near(index - 1) || near(index + 1),
  );
}

/** The diff that awaits confirmation. */
export function Confirm() {
  const one = proposal.value;
  if (!one) return busy.value ? <p class="faint small">{busy.value}</p> : null;
  const file = batch.value?.file ?? "the file";
  return (
    <div class="confirm" role="group" aria-label="Edit to confirm">
      <p>
        <b>{one.title}</b> is not written yet.
      </p>
      <pre class="diff" tabIndex={0} aria-label="Diff">
        {changes(one.diff).map((line, index) => (
          <span key={index} class={line[0] === "+" ? "added" : line[0] === "-" ? "removed" : ""}>
            {line}
            {"\n"}
          </span>
        ))}
      </pre>
      {one.note ? <p class="faint small">{one.note}</p> : null}
      <button type="button" class="main" id="save" disabled={busy.value !== ""} onClick={save}>
        Save to {file}
      </button>{" "}
      <button type="button" id="put-back" onClick={forgetProposal}>
        Put back
      </button>
    </div>
  );
}

export function Undo() {
  const edits = now.value?.undo ?? 0;
  return (
    <button type="button" id="undo" disabled={!edits || busy.value !== ""} onClick={undo}>
      Undo the last edit
    </button>
  );
}

/** Button of a live page's switchboard that writes the selected techniques into the file. */
export function Apply() {
  const on = chosen.value;
  if (!on) return null;
  const name = selectionName.value;
  return (
    <button
      type="button"
      id="apply"
      disabled={busy.value !== ""}
      onClick={() => void propose(name, { technique: name })}
    >
      Write it into {batch.value?.file ?? "the file"}
    </button>
  );
}
