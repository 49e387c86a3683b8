// What a page shows about an action: that it is done, with a way back, or why it was not done. Actions run one
// after the other.

import { Problem } from "./api.js";
import { element } from "./elements.js";

const NOTICE_MILLISECONDS = 12_000;

export let undo = null; // undoes the last change, if that is possible

let timer = 0;
let last = Promise.resolve();
let waiting = 0;
let refresh = async () => {};

// `again` loads everything that the page shows.
export function refreshWith(again) {
  refresh = again;
}

export const tryAgain = () => run(() => refresh());

export function notify(text, back = null) {
  clearTimeout(timer);
  undo = back;
  element("notice").hidden = !text;
  element("notice-text").textContent = element("announced").textContent = text;
  element("undo").hidden = !back;
  timer = setTimeout(() => (element("notice").hidden = true), NOTICE_MILLISECONDS);
}

export function fail(problem) {
  if (!(problem instanceof Problem)) console.error(problem);
  const known = problem instanceof Problem ? problem : new Problem("Something went wrong in this page.");
  element("problem-text").textContent = known.message;
  element("problem-more").textContent = known.more;
  element("problem").hidden = false;
  notify("");
}

export const idle = () => waiting === 0;

// Runs one action after the other: a fast typist may be ahead of the service.
export function run(work) {
  waiting += 1;
  element("main").setAttribute("aria-busy", "true");
  last = last.then(() => attempt(work));
  return last;
}

// Runs beside the actions: loading does not wait for them.
export function load(work) {
  waiting += 1;
  element("main").setAttribute("aria-busy", "true");
  return attempt(work);
}

async function attempt(work) {
  try {
    await work();
    element("problem").hidden = true;
  } catch (problem) {
    fail(problem);
    // Somebody else may have changed what is shown here.
    if (problem.status === 404 || problem.status === 409) await refresh().catch(() => {});
  }
  waiting -= 1;
  element("main").setAttribute("aria-busy", String(!idle()));
}

export function takeBack() {
  const work = undo;
  if (!work) return;
  notify("");
  run(async () => {
    const result = await work();
    await refresh();
    notify(typeof result === "string" ? `Undone. ${result}` : "Undone.");
  });
}
