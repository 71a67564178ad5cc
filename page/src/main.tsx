// Load the document, draw the page, listen to keys.

import { effect } from "@preact/signals";
import { render } from "preact";
import { Breakdown } from "./breakdown";
import { load } from "./data";
import { Header } from "./header";
import { Help } from "./help";
import { HistoryView } from "./history";
import { MemoryView } from "./memory";
import { MovementView } from "./movement";
import { Overview } from "./overview";
import { RunView } from "./run";
import { connect } from "./live";
import { LiveView, Waiting } from "./liveview";
import { begin, dark, hasDoc, help, isView, view, views } from "./state";
import type { View } from "./state";
import { Switchboard } from "./switchboard";
import { Timeline } from "./timeline";
import { WhatIfView } from "./whatifs";

const CONTENT: Record<View, () => preact.JSX.Element> = {
  live: LiveView,
  overview: Overview,
  timeline: Timeline,
  breakdown: Breakdown,
  memory: MemoryView,
  movement: MovementView,
  whatifs: WhatIfView,
  history: HistoryView,
  run: RunView,
};

function Page() {
  const Content = view.value === "live" || hasDoc() ? CONTENT[view.value] : Waiting;
  return (
    <>
      <Header />
      <div class="body">
        <main class={view.value}>
          <div id="view" role="tabpanel" aria-labelledby={`tab-${view.value}`}>
            <Content />
          </div>
        </main>
        {hasDoc() ? <Switchboard /> : null}
      </div>
      <Help />
    </>
  );
}

function keys(event: KeyboardEvent): void {
  if (event.ctrlKey || event.metaKey || event.altKey || help.value) return;
  if (event.target instanceof HTMLInputElement && event.target.type === "search") return;
  // There letters and digits choose.
  if (event.target instanceof HTMLSelectElement) return;
  const number = Number(event.key);
  if (number >= 1 && number <= views.value.length) view.value = views.value[number - 1][0];
  else if (event.key === "t" || event.key === "T") dark.value = !dark.value;
  else if (event.key === "?") help.value = true;
  else if (event.key === "/") {
    view.value = "timeline";
    requestAnimationFrame(() => document.getElementById("search")?.focus());
    event.preventDefault();
  }
}

function fail(target: HTMLElement, error: unknown): void {
  const box = document.createElement("div");
  box.className = "empty";
  const title = document.createElement("h1");
  title.textContent = "This report cannot be drawn";
  const text = document.createElement("p");
  text.textContent = `${String(error)}. A browser of 2023 or later draws it.`;
  box.append(title, text);
  target.replaceChildren(box);
}

async function start(): Promise<void> {
  const target = document.getElementById("page");
  if (!target) return;
  const prefers = window.matchMedia("(prefers-color-scheme: dark)");
  dark.value = prefers.matches;
  prefers.addEventListener("change", () => (dark.value = prefers.matches));
  effect(() => {
    document.documentElement.dataset.theme = dark.value ? "dark" : "light";
  });
  try {
    if (target.dataset.live) {
      connect();
      view.value = "live";
    } else {
      begin(await load());
    }
    const named = location.hash.slice(1);
    if (isView(named)) view.value = named;
    target.replaceChildren();
    render(<Page />, target);
  } catch (error) {
    fail(target, error);
    throw error;
  }
  effect(() => {
    // A file opened from a disk has a history, too; nothing is sent anywhere.
    if (location.hash.slice(1) !== view.value)
      history.replaceState(null, "", `${location.search}#${view.value}`);
  });
  window.addEventListener("hashchange", () => {
    const named = location.hash.slice(1);
    if (isView(named)) view.value = named;
  });
  document.addEventListener("keydown", keys);
}

void start();
