// Follows a job of the service until it is finished, and shows its progress.

import { make } from "./elements.js";
import * as api from "./teach-api.js";

const INTERVAL = 300;
const MOST_FAILURES = 8;
const MOST_WAITS = 100; // for a result to be published

const sleep = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));

// Calls `show` with every state while the job runs; resolves to the finished job. A lost connection is tried again. A job
// that publishes its result automatically is done for a moment before it is accepted.
export async function follow(job, show) {
  const objected = (found) => found.learned && !found.learned.gate;
  const publishing = (found) => found.accepts && found.state === "done" && !objected(found) && waits < MOST_WAITS;
  let now = job;
  let failures = 0;
  let waits = 0;
  while (now.state === "running" || publishing(now)) {
    if (now.state === "done") waits += 1;
    show(now, failures > 0);
    await sleep(INTERVAL * 2 ** Math.min(failures, 4));
    try {
      now = await api.job(job.id);
      failures = 0;
    } catch (problem) {
      failures += 1;
      const final = problem.status >= 400 && problem.status < 500;
      if (final || failures > MOST_FAILURES) throw problem;
    }
  }
  return now;
}

// Shows the progress of a job. Only a change of the step is announced, not every percent.
export function showProgress(place, { progress, step, seconds }, lost = false) {
  if (!place.querySelector("progress")) {
    place.replaceChildren(
      make("p", { class: "step", role: "status", "aria-live": "polite" }),
      make("progress", { max: "1", "aria-label": "Progress" }),
      make("p", { class: "small seconds" }),
    );
  }
  const [text, bar, time] = place.children;
  const now = lost ? "The connection is lost. Trying again …" : sentence(step);
  if (text.textContent !== now) text.textContent = now;
  bar.value = progress;
  time.textContent = duration(seconds);
  place.hidden = false;
}

export function hideProgress(place) {
  place.hidden = true;
  place.replaceChildren();
}

export const duration = (seconds) => (seconds < 60 ? `${seconds.toFixed(1)} s` : `${Math.round(seconds / 60)} min`);

export const sentence = (text) => (text ? text[0].toUpperCase() + text.slice(1) : "");
