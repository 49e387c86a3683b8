// The Classes tab: rename, merge and delete classes, and look after their examples.

import { Problem } from "./api.js";
import { ask } from "./dialogs.js";
import { element, images, make, quoted } from "./elements.js";
import { fail, load, notify, run } from "./notices.js";
import * as api from "./teach-api.js";
import { about, classCard, headline } from "./teach-classes-view.js";
import { setLabel } from "./teach-examples.js";
import { exchangeWith, showExports } from "./teach-exchange.js";
import { follow, hideProgress, showProgress } from "./teach-jobs.js";
import { lessonWaits, status } from "./teach-state.js";
import { Selection } from "./unknowns-selection.js";
import { zoom } from "./zoom.js";

const FIRST = 8;
const PAGE = 200;
const MOST_UNDONE = 5000; // examples whose labels are remembered for an undo

let list = { classes: [], version: "", export_parts: 1 };
let open = null; // the class of which all examples are shown
let examples = [];
let after = { reload: async () => {}, go: () => {} };

const selection = new Selection(element("class-list"), { onChange: showOpen, onOpen: enlarge });

export function classesWith(chosen) {
  after = chosen;
  exchangeWith(chosen.reload);
}

export async function loadClasses() {
  list = await api.classes(FIRST);
  if (open !== null && !list.classes.some(({ label }) => label === open)) open = null;
  examples = open === null ? [] : await every(open);
  selection.keep(new Set(examples.map(({ id }) => id)));
  show();
}

async function every(label) {
  const found = [];
  for (let from = 0; from !== null && found.length < MOST_UNDONE; ) {
    const { items, next } = await api.examples(label, from, PAGE);
    found.push(...items);
    from = next;
  }
  return found;
}

function show() {
  const back = focusKept();
  const wanted = element("classes-filter").value.trim();
  const found = list.classes.filter(({ label }) => label.toLowerCase().includes(wanted.toLowerCase()));
  const none = list.classes.length
    ? `No class has ${quoted(wanted)} in its name.`
    : "There are no classes yet. Make one, or name unknown images.";
  element("classes-text").textContent = headline(list);
  element("class-list").replaceChildren(
    ...(found.length ? found.map(card) : [make("p", { class: "card", text: none })]),
  );
  showExports(list.export_parts);
  back();
}

const card = (entry) =>
  classCard(entry, {
    open: entry.label === open,
    examples,
    selected: selection.ids,
    unnamed: status?.unnamed ?? [],
    short: status?.too_few?.find(({ label }) => label === entry.label),
  });
const cards = () => [...element("class-list").querySelectorAll(".class")];

// A click on an example changes one card; the others keep their images.
function showOpen() {
  const shown = cards().find(({ dataset }) => dataset.label === open);
  if (!shown) return;
  const back = focusKept();
  shown.replaceWith(card(entryOf(open)));
  back();
}

// Returns what puts the keyboard focus back once the cards have been made again.
function focusKept() {
  const focused = document.activeElement?.closest?.("#class-list .thumb, #class-list button");
  const label = focused && cardOf(focused);
  const key = focused?.dataset.id ?? focused?.dataset.do;
  return () => {
    if (label === undefined || label === null) return;
    const again = cards().find(({ dataset }) => dataset.label === label);
    const same = `[data-id="${CSS.escape(key)}"], [data-do="${CSS.escape(key)}"]`;
    again?.querySelector(same)?.focus({ preventScroll: true });
  };
}

const cardOf = (node) => node.closest(".class")?.dataset.label;
const entryOf = (label) => list.classes.find((entry) => entry.label === label);

function enlarge(id) {
  const label = list.classes.find((entry) => entry.examples.some((example) => example.id === id))?.label ?? open;
  const shown = label === open ? examples : (entryOf(label)?.examples ?? []);
  const pictures = shown.map((example) => ({ id: example.id, text: about(example) }));
  zoom(pictures, Math.max(0, pictures.findIndex((picture) => picture.id === id)), [
    { text: "Not an example", run: (picture) => removeExamples([picture.id], label) },
    { text: "It is another class", run: (picture) => relabel([picture.id], label) },
  ]);
}

// ---- one class

// Sends a change of a class. The labels change at once, and a lesson follows if the model has the class.
async function changed(request, done, undo) {
  const version = status.model.version;
  notify("");
  const { job } = await request;
  if (job) load(() => untilServed(job, version, done, undo));
  else {
    await after.reload();
    notify(done, undo);
  }
}

async function untilServed(job, version, done, undo) {
  const place = element("class-working");
  let last;
  try {
    last = await follow(job, (now, lost) => showProgress(place, now, lost));
  } finally {
    hideProgress(place);
  }
  await after.reload();
  if (last.state === "failed") throw new Problem("The change failed. Nothing has changed.", { more: last.error ?? "" });
  // The gate may object; then the lesson waits for a decision.
  if (last.state === "done") return after.go("learn");
  notify(done, async () => {
    await api.rollback(version);
    return undo?.();
  });
}

// Gives examples the label that they had. The service does it for those that the model has learned, once it serves the
// version before again.
async function labelsBack(before, label) {
  const ids = before.filter(({ state }) => state === "waiting").map(({ id }) => id);
  if (ids.length) await api.label(ids, label);
}

// Brings back a class that the model has not learned: what it has are examples, or a name alone.
const classBack = (before, label) => (before.length ? labelsBack(before, label) : api.create(label));

const DISCARDS = "A lesson waits for a decision. This change discards it; its examples still wait to be learned.";

// A change of a class that the model has is a lesson, too, and only one can wait.
const warning = ({ in_model: learned }) =>
  learned && lessonWaits() ? [make("p", { class: "caution", "data-testid": "discards", text: DISCARDS })] : [];

async function rename(label) {
  const check = (text) => {
    if (text === label) return { refused: "" };
    return entryOf(text) ? { refused: `There is a class ${quoted(text)} already. Merge the two instead.` } : "";
  };
  const field = { label: "New name", value: label, check };
  const entry = entryOf(label);
  const reply = await ask({
    title: `Rename ${quoted(label)}`,
    field,
    details: warning(entry),
    choices: [{ value: "yes", text: "Rename" }],
  });
  if (!reply) return;
  const to = reply.value;
  await run(async () => {
    const before = await every(label);
    const undo = entry.in_model ? () => labelsBack(before, label) : () => api.rename(to, label);
    if (open === label) open = to;
    await changed(api.rename(label, to), `Renamed ${quoted(label)} to ${quoted(to)}.`, undo);
  });
}

async function merge(label) {
  const check = (text) => {
    if (text === label) return { refused: "Choose another class." };
    return !text || entryOf(text) ? "" : { refused: "There is no such class." };
  };
  const entry = entryOf(label);
  const reply = await ask({
    title: `Merge ${quoted(label)} into another class`,
    text: `All examples of ${quoted(label)} become examples of that class.`,
    field: { label: "Class to merge into", list: "labels", check },
    details: warning(entry),
    choices: [{ value: "yes", text: "Merge" }],
  });
  if (!reply) return;
  await run(async () => {
    const before = await every(label);
    const done = `Merged ${quoted(label)} into ${quoted(reply.value)}.`;
    const undo = () => (entry.in_model ? labelsBack(before, label) : classBack(before, label));
    await changed(api.merge([label], reply.value), done, undo);
  });
}

async function remove(label) {
  const entry = entryOf(label);
  const count = entry.learned + entry.waiting;
  const forgets = "The model forgets this class. Undo, or the version before under Versions, brings it back.";
  const lost = entry.in_model ? "Images that are deleted do not come back with it." : "Deleted images cannot be brought back.";
  const reply = await ask({
    title: `Delete ${quoted(label)}?`,
    text: `${entry.in_model ? forgets : "The model has not learned this class yet."}${count ? ` ${lost}` : ""}`,
    details: warning(entry),
    choices: [
      { value: "keep", text: count ? "Delete the class, keep the images" : "Delete", danger: true },
      ...(count ? [{ value: "delete", text: `Delete ${images(count)} as well`, danger: true }] : []),
    ],
  });
  if (!reply) return;
  await run(async () => {
    const before = reply.choice === "keep" ? await every(label) : [];
    const [done, undo] = reply.choice === "keep" ? kept(entry, before) : lostImages(entry, count);
    await changed(api.remove(label, reply.choice), done, undo);
  });
}

// The notice after a class was deleted, and what undoes it beside going back to the version before.
function kept({ label, in_model: learned }, before) {
  const undo = () => (learned ? labelsBack(before, label) : classBack(before, label));
  return [`Deleted ${quoted(label)}.`, undo];
}

function lostImages({ label, in_model: learned }, count) {
  const done = `Deleted ${quoted(label)} and ${images(count)}.`;
  if (!learned) return [`${done} This cannot be undone.`, null];
  return [`${done} Undo brings the class back without them.`, () => `${quoted(label)} is back without its images.`];
}

async function create() {
  const taken = (text) => list.classes.some((entry) => entry.label.toLowerCase() === text.toLowerCase());
  const check = (text) => (taken(text) ? { refused: `There is a class ${quoted(text)} already.` } : "");
  const reply = await ask({
    title: "New class",
    field: { label: "Name", check },
    choices: [{ value: "yes", text: "Make it" }],
  });
  if (!reply) return;
  await run(async () => {
    await api.create(reply.value);
    await after.reload();
    bring(reply.value);
    notify(`Made the class ${quoted(reply.value)}.`, () => api.remove(reply.value, "keep"));
  });
}

function bring(label) {
  setLabel(label);
  after.go("examples");
}

// ---- examples of a class

const removeExamples = (ids, label) =>
  run(async () => {
    await api.take(ids);
    selection.ids.clear();
    await after.reload();
    const rest = ids.length === 1 ? "no longer an example" : "no longer examples";
    notify(`${images(ids.length)} ${rest} of ${quoted(label)}.`, () => api.label(ids, label));
  });

async function relabel(ids, label) {
  const check = (text) => (text === label ? { refused: `That is what it is now: ${quoted(label)}.` } : "");
  const reply = await ask({
    title: `What ${ids.length === 1 ? "is it" : `are these ${images(ids.length)}`}?`,
    field: { label: "Class", list: "labels", check },
    choices: [{ value: "yes", text: "Change" }],
  });
  if (!reply) return;
  await run(async () => {
    await api.label(ids, reply.value);
    selection.ids.clear();
    await after.reload();
    notify(`${images(ids.length)} moved to ${quoted(reply.value)}.`, () => api.label(ids, label));
  });
}

const ACTIONS = {
  open(label) {
    open = open === label ? null : label;
    selection.ids.clear();
    load(loadClasses);
  },
  bring,
  rename,
  merge,
  delete: remove,
  relabel: (label) => relabel([...selection.ids], label),
  remove: (label) => removeExamples([...selection.ids], label),
  none: () => selection.clear(),
};

element("class-list").addEventListener("click", ({ target }) => {
  const button = target.closest("button[data-do]");
  if (button) Promise.resolve(ACTIONS[button.dataset.do](cardOf(button))).catch(fail);
});
// Without all examples in view, a click enlarges: there is nothing to select among.
element("class-list").addEventListener(
  "click",
  (event) => {
    const thumb = event.target.closest(".thumbs.few .thumb");
    if (!thumb) return;
    event.stopPropagation();
    enlarge(Number(thumb.dataset.id));
  },
  true,
);
element("classes-filter").addEventListener("input", show);
element("class-new").addEventListener("click", () => create().catch(fail));
