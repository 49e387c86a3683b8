// The state of teaching as the service last reported it, for all parts of the page.

import * as api from "./teach-api.js";

export let status = null;

const watchers = [];

export const onStatus = (watch) => watchers.push(watch);

// Whether a lesson waits for a decision. A change of a class that the model has would discard it.
export const lessonWaits = () => status?.job?.kind === "learn" && status.job.state === "done";

export async function loadStatus() {
  status = await api.status();
  for (const watch of watchers) watch(status);
  return status;
}
