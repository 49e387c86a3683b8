// The Learn tab: starts a lesson, shows what it would change, and accepts or discards it.

import { element } from "./elements.js";
import { fail, notify, run } from "./notices.js";
import * as api from "./teach-api.js";
import { follow, showProgress } from "./teach-jobs.js";
import * as view from "./teach-lesson-view.js";
import { result } from "./teach-result-view.js";
import { loadStatus, onStatus, status } from "./teach-state.js";

let job = null; // the lesson that is shown
let before = null; // the version that was served before the lesson that was just accepted
let accepted = null; // the number of the lesson that was accepted here
let seen = null; // the lesson that waits, and the version that was served when it was first shown
let refused = null; // the number of a lesson that could not be accepted, because another version was published
let failure = null; // the lesson that failed, and what waited then
let following = null; // the number of the job that is being followed
let reload = async () => {};

// `again` loads the page's content after the model has changed.
export function reloadWith(again) {
  reload = again;
}

const isLesson = (found) => found?.kind === "learn";
const place = () => element("lesson");

onStatus((now) => {
  if (following !== null) return;
  if (isLesson(now.job) && now.job.state === "running") watchLesson(now.job);
  else if (!(job?.state === "accepted" && !now.ready)) {
    job = isLesson(now.job) ? now.job : null;
    if (job?.state === "done" && seen?.id !== job.id) seen = { id: job.id, version: now.model.version };
    if (job?.state === "failed" && failure?.id !== job.id) failure = { id: job.id, waited: waits(now) };
    show();
  }
});

// Whether an accepted lesson is shown: until something waits, or can be learned after one that was accepted here.
const isLast = () => (job.id === accepted ? !status.ready : !status.waiting && !status.removed);

const waits = ({ classes, removed }) => JSON.stringify([classes, removed]);

// Whether another version was published since the lesson began, so that it cannot be accepted.
const outdated = () => refused === job.id || (seen?.id === job.id && seen.version !== status.model.version);

function show(focus = false) {
  const open = job?.state === "done" || (job?.state === "accepted" && isLast());
  if (open && job.learned) {
    const short = (job.state === "done" ? job.learned.too_few : status.too_few) ?? [];
    place().replaceChildren(...result(job, { before, outdated: outdated(), short }));
  } else place().replaceChildren(...beginning());
  if (focus) element("lesson-title")?.focus();
}

function beginning() {
  const parts = status.waiting || status.removed ? view.waiting(status) : view.nothing(status);
  if (!job || job.state === "running") return parts;
  // What has changed since may have removed the reason.
  const failed = job.state === "failed" && failure?.id === job.id && failure.waited === waits(status);
  return failed ? [view.failed(job), ...parts] : [...parts, view.last(job)];
}

// Shows a running lesson until it is finished, whoever started it.
export async function watchLesson(started) {
  following = started.id;
  job = started;
  place().replaceChildren(...view.running(started));
  try {
    job = await follow(started, (now, lost) => {
      const bar = element("lesson-progress");
      if (bar) showProgress(bar, now, lost);
    });
  } catch (problem) {
    fail(problem);
    job = null;
  }
  following = null;
  await loadStatus().catch(fail);
  show(true);
  return job;
}

export function learn() {
  if (following !== null) return;
  if (job?.state === "done" && !outdated()) return notify("A lesson is ready. Accept or discard it first.");
  notify("");
  run(async () => {
    watchLesson(await api.learn());
  });
}

export function accept(force = false) {
  if (job?.state !== "done" || outdated()) return;
  // A key alone does not overrule the gate.
  if (!job.learned.gate && !force) return element("accept").focus();
  const { id } = job;
  const old = status.model.version;
  run(async () => {
    busy(true);
    try {
      const { version, changed } = await api.accept(id, force);
      job = { ...job, state: "accepted", candidate: version };
      before = changed ? old : null;
      accepted = id;
      await reload();
      show(true);
      notify(`Version ${version} is served now.`, before && (() => back(old)));
    } catch (problem) {
      if (problem.code === "teach_changed") refused = id;
      throw problem;
    } finally {
      busy(false);
    }
  });
}

const busy = (now) => {
  for (const button of place().querySelectorAll("button")) button.disabled = now;
};

async function back(version) {
  await api.rollback(version);
  job = null;
}

export function discard() {
  if (job?.state !== "done") return;
  const { id } = job;
  run(async () => {
    await api.discard(id);
    job = null;
    await loadStatus();
    show(true);
    notify("Discarded. The model is as it was, and the examples still wait.");
  });
}

place().addEventListener("click", ({ target }) => {
  const { id, dataset } = target.closest("button") ?? {};
  if (id === "learn-now") learn();
  else if (id === "accept") accept(dataset.force === "true");
  else if (id === "discard") discard();
  else if (id === "lesson-back") {
    const version = before;
    const { candidate } = job;
    run(async () => {
      await back(version);
      await reload();
      notify(`Version ${version} is served again.`, () => back(candidate));
    });
  }
});
