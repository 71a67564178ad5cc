// The keys, in a dialog.

import { useEffect, useRef } from "preact/hooks";
import { help } from "./state";

const KEYS: [string, string][] = [
  ["1 – 9", "views"],
  ["/", "find an operator, module or line on the timeline"],
  ["Enter, Shift+Enter", "next match, previous match"],
  ["← →", "pan the timeline; with Shift by half a screen; move along the memory curve"],
  ["↑ ↓ or + −", "zoom the timeline"],
  ["Home", "the whole step"],
  ["N, P", "next task, previous task of the lane"],
  ["F", "fit the chosen task"],
  ["PgUp, PgDn", "lanes above, lanes below"],
  ["T", "light or dark"],
  ["Esc", "deselect the task; close this"],
  ["Tab, Space", "switches and buttons, as everywhere"],
];

export function Help() {
  const dialog = useRef<HTMLDialogElement>(null);
  useEffect(() => {
    if (help.value) dialog.current?.showModal();
    else dialog.current?.close();
  }, [help.value]);
  return (
    <dialog ref={dialog} aria-labelledby="keys" onClose={() => (help.value = false)}>
      <h2 id="keys">Keys</h2>
      <dl class="pairs">
        {KEYS.map(([key, what]) => (
          <div key={key}>
            <dt>
              <kbd>{key}</kbd>
            </dt>
            <dd>{what}</dd>
          </div>
        ))}
      </dl>
      <button type="button" onClick={() => (help.value = false)}>
        Close
      </button>
    </dialog>
  );
}
