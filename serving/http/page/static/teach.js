// The page for teaching: its tabs, its shortcuts, and what they share.

import { Problem } from "./api.js";
import { counted, element, images, listed, make, quoted } from "./elements.js";
import { fail, idle, load, notify, refreshWith, run } from "./notices.js";
import * as api from "./teach-api.js";
import { cameraIsOpen, closeCamera, openCamera, takePicture } from "./teach-camera.js";
import { classesWith, loadClasses } from "./teach-classes.js";
import { leaveWith } from "./teach-examples.js";
import { follow, hideProgress, showProgress } from "./teach-jobs.js";
import { accept, discard, learn, reloadWith } from "./teach-lesson.js";
import { shortText } from "./teach-lesson-view.js";
import { loadStatus, onStatus, status } from "./teach-state.js";
import { loadVersions, versionsWith } from "./teach-versions.js";
import { configure, hidden, hideFinished, latest, putAway, refresh } from "./unknowns-board.js";
import { free } from "./unknowns-controls.js";

const TABS = ["unknown", "examples", "learn", "classes", "versions"];
const LOADERS = { classes: loadClasses, versions: loadVersions };
const SIGNED_IN = "openworld-teacher";
const AT_ONCE = 500;
const MOST_LOOSE = 2500;

let tab = null;
let grouping = false;

// ---- tabs

const panel = (name) => element(`panel-${name}`);
const wanted = () => (TABS.includes(location.hash.slice(1)) ? location.hash.slice(1) : null);

function go(name) {
  if (wanted() !== name) history.pushState(null, "", `#${name}`);
  showTab(name);
}

function showTab(name) {
  if (name === tab) return;
  tab = name;
  for (const other of TABS) {
    panel(other).hidden = other !== name;
    element(`tab-${other}`).setAttribute("aria-selected", String(other === name));
    element(`tab-${other}`).tabIndex = other === name ? 0 : -1;
  }
  element(`tab-${name}`).scrollIntoView({ block: "nearest", inline: "nearest" });
  scrollTo(0, 0);
  document.body.dataset.tab = name;
  if (name !== "examples") closeCamera();
  showStrip();
  if (LOADERS[name] && status?.enabled) load(LOADERS[name]);
}

element("tabs").addEventListener("click", (event) => {
  const chosen = event.target.closest("[role=tab]");
  if (!chosen) return;
  event.preventDefault();
  go(chosen.hash.slice(1));
});
element("tabs").addEventListener("keydown", (event) => {
  const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (event.key === " ") go(event.target.hash.slice(1));
  else if (step) {
    go(TABS[(TABS.indexOf(tab) + step + TABS.length) % TABS.length]);
    element(`tab-${tab}`).focus();
  } else return;
  event.preventDefault();
});
for (const event of ["hashchange", "popstate"]) addEventListener(event, () => showTab(wanted() ?? tab ?? "unknown"));

// ---- loading

async function reload() {
  await loadStatus();
  if (!status.enabled) return;
  await refresh();
  await LOADERS[tab]?.();
}

// The board has loaded automatically, after a change of groups or names.
function boardShown(overview, groups) {
  const { states } = overview;
  const named = (states.named ?? 0) + (states.known ?? 0);
  const count = states.new ?? 0;
  const all = groups.some((group) => group.id !== "none");
  element("unknown-title").textContent = count ? `${images(count)} without a name` : "No unknown images wait";
  element("unknown-text").textContent = count
    ? all
      ? "Name each group, or mark it as junk. What you name can be learned at once."
      : "Similar images are easier to name together."
    : named
      ? "All images that arrived are named. New unknown images appear here."
      : "Images that the model answers with “unknown” appear here. You can also bring examples yourself.";
  element("unknown-empty").hidden = count > 0;
  element("group").hidden = count < 2;
  const away = hidden();
  element("finished-box").hidden = !away;
  element("finished-text").textContent = `Show ${away} finished ${away === 1 ? "group" : "groups"}`;
  loadStatus().catch(fail);
}

async function loose() {
  const found = [];
  for (let after = 0; after !== null && found.length < MOST_LOOSE; ) {
    const { items, next } = await api.loose(after, AT_ONCE);
    found.push(...items);
    after = next;
  }
  return found;
}

onStatus(({ enabled, reason, user, model, unknown, classes, unnamed = [], job }) => {
  element("off").hidden = enabled;
  element("off-text").textContent = reason ? `Reason: ${reason}.` : "";
  element("tabs").hidden = !enabled;
  for (const name of TABS) panel(name).hidden = !enabled || name !== tab;
  element("chip").replaceChildren(
    make("span", { text: user, title: "your name" }),
    make("span", { text: `${model.name} ${model.version}`, title: "the model that is served" }),
  );
  element("chip").hidden = false;
  element("count-unknown").textContent = unknown > 999 ? "999+" : unknown || "";
  element("count-classes").textContent = unnamed.length || "";
  const ready = job?.kind === "learn" && job.state === "done";
  element("count-learn").textContent = ready ? "!" : Object.keys(classes).length || "";
  if (job?.kind === "group" && job.state === "running") watchGrouping(job);
  showStrip();
});

// What waits for a person: a lesson, examples that can be learned, or classes that the server has learned automatically.
function nextStep() {
  const { waiting = 0, removed = 0, classes = {}, unnamed = [], job = null, too_few: short = [] } = status ?? {};
  if (job?.kind === "learn" && job.state === "running") {
    return { tab: "learn", button: "Show", text: `${job.who} teaches the model right now.` };
  }
  if (job?.kind === "learn" && job.state === "done") {
    const text = "A lesson is ready. Look at before and after, then accept or discard it.";
    return { tab: "learn", button: "Show", text };
  }
  if (waiting || removed) {
    if (!status.ready) return { tab: "examples", button: "Bring examples", text: shortText(short) };
    const few = short.map(({ label }) => label);
    const ready = Object.entries(classes).filter(([label]) => !few.includes(label));
    const names = ready.map(([label, count]) => `${quoted(label)} ${count}`);
    const parts = [...names, removed && `${images(removed)} to take out`].filter(Boolean);
    const text = `Waiting to be learned: ${listed(parts, 5)}. ${shortText(short)}`.trim();
    return { tab: "learn", button: "Learn", text, act: learn };
  }
  if (!unnamed.length) return null;
  const text = `The server has learned ${listed(unnamed.map(quoted), 4)} automatically. What do they show?`;
  return { tab: "classes", button: "Name them", text };
}

function showStrip() {
  const next = status?.enabled ? nextStep() : null;
  element("strip").hidden = !next || tab === next.tab;
  element("strip-text").textContent = next?.text ?? "";
  element("strip-go").textContent = next?.button ?? "Learn";
}

// ---- grouping

function group() {
  if (grouping || element("group").hidden) return;
  run(async () => watchGrouping(await api.group()));
}

async function watchGrouping(job) {
  if (grouping) return;
  grouping = element("group").disabled = true;
  try {
    const done = await follow(job, (now, lost) => showProgress(element("grouping"), now, lost));
    if (done.state === "failed") throw new Problem("The images could not be grouped.", { more: done.error ?? "" });
    await refresh();
    notify(found(done.grouped));
    element("groups").querySelector(".thumb")?.focus({ preventScroll: true });
  } catch (problem) {
    fail(problem);
  }
  hideProgress(element("grouping"));
  grouping = element("group").disabled = false;
}

function found({ groups, loose, known_by_now: known }) {
  const parts = [
    counted(groups, "group"),
    loose && `${images(loose)} in no group`,
    known && `${images(known)} that the model knows by now`,
  ];
  return `Found ${listed(parts.filter(Boolean))}.`;
}

// ---- shortcuts

const KEYS = {
  g() {
    go("unknown");
    group();
  },
  l() {
    go("learn");
    learn();
  },
  a: () => tab === "learn" && accept(),
  d: () => tab === "learn" && discard(),
  c() {
    go("examples");
    if (!cameraIsOpen()) openCamera();
  },
  " "(event) {
    if (!cameraIsOpen() || event.target.matches("button, a, summary")) return false;
    takePicture();
    return true;
  },
};
TABS.forEach((name, at) => (KEYS[String(at + 1)] = () => go(name)));

document.addEventListener("keydown", (event) => {
  if (!status?.enabled || event.ctrlKey || event.metaKey || !free(event)) return;
  const react = KEYS[event.key.toLowerCase()];
  if (react && react(event) !== false) event.preventDefault();
});

// ---- start

element("group").addEventListener("click", group);
element("strip-go").addEventListener("click", () => {
  const next = nextStep();
  if (!next) return;
  go(next.tab);
  next.act?.();
});
element("finished").addEventListener("change", ({ target }) => hideFinished(!target.checked));
element("problem-close").addEventListener("click", () => (element("problem").hidden = true));

configure({ shown: boardShown, loose, split: async (ids) => (await api.split(ids)).group });
refreshWith(reload);
leaveWith(go);
classesWith({ reload, go });
versionsWith(reload);
reloadWith(async () => {
  putAway();
  await reload();
});
hideFinished(true);
showTab(wanted() ?? "unknown");

// Somebody else may have taught something, and more images may have arrived.
document.addEventListener("visibilitychange", () => {
  if (!document.hidden && idle() && latest) run(reload);
});

run(async () => {
  await reload();
  try {
    // The page for trying the model offers teaching to people who have signed in.
    sessionStorage.setItem(SIGNED_IN, "yes");
  } catch {
    // A browser may forbid storage.
  }
});
