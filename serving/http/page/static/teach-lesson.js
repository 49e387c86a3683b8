// The Learn tab: starts a lesson, shows what it would change, and accepts or discards it.

import { Problem } from "./api.js";
import { element, listed, quoted } from "./elements.js";
import { fail, notify, run } from "./notices.js";
import * as api from "./teach-api.js";
import { follow, showProgress } from "./teach-jobs.js";
import * as view from "./teach-lesson-view.js";
import { result } from "./teach-result-view.js";
import { loadStatus, onStatus, status } from "./teach-state.js";

let job = null; // the lesson that is shown
let before = null; // the version that was served before the lesson that was just accepted
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
  else if (!(job?.state === "accepted" && !now.waiting && !now.removed)) {
    job = isLesson(now.job) ? now.job : null;
    show();
  }
});

function show(focus = false) {
  const open = job?.state === "done" || (job?.state === "accepted" && !status.waiting && !status.removed);
  if (open && job.learned) place().replaceChildren(...result(job, before));
  else place().replaceChildren(...(job?.state === "failed" ? view.failed(job) : beginning()));
  if (focus) element("lesson-title")?.focus();
}

function beginning() {
  const parts = status.waiting || status.removed ? view.waiting(status) : view.nothing(status);
  return job && job.state !== "running" ? [...parts, view.last(job)] : parts;
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
  if (following !== null || job?.state === "done") return;
  notify("");
  run(async () => {
    const few = view.tooFew(status);
    watchLesson(
      await api.learn().catch((problem) => {
        if (problem.code !== "bad_label" || !few.length) throw problem;
        const more = `${listed(few.map(quoted))}: a new class needs ${status.least} examples at least.`;
        throw new Problem("A class has too few examples.", { more });
      }),
    );
  });
}

export function accept(force = false) {
  if (job?.state !== "done") return;
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
      await reload();
      show(true);
      notify(`Version ${version} is served now.`, before && (() => back(old)));
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
  if (id === "learn-now") {
    if (job?.state === "failed") job = null;
    learn();
  } else if (id === "accept") accept(dataset.force === "true");
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
