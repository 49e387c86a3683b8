// The actions of a person: sends each to the service and shows the result.

import { Problem } from "./api.js";
import * as api from "./unknowns-api.js";
import {
  allItems,
  drafts,
  element,
  fail,
  groupWith,
  latest,
  notify,
  refresh,
  selection,
  spelled,
  undo,
  wanted,
} from "./unknowns-board.js";
import * as view from "./unknowns-view.js";

const AT_ONCE = 100;

let last = Promise.resolve();
let waiting = 0;

export const idle = () => waiting === 0;

// Runs one action after the other: a fast typist may be ahead of the service.
export function run(work) {
  waiting += 1;
  element("main").setAttribute("aria-busy", "true");
  last = last.then(() => attempt(work));
  return last;
}

async function attempt(work) {
  try {
    await work();
    element("problem").hidden = true;
  } catch (problem) {
    fail(problem);
    // Somebody else may have changed the images that are shown here.
    if (problem.status === 404 || problem.status === 409) await refresh().catch(() => {});
  }
  waiting -= 1;
  element("main").setAttribute("aria-busy", String(!idle()));
}

// Sends a change, shows the result and offers to undo it. `message` makes the notice from the number of changed images.
const act = (what, body, message) =>
  run(async () => {
    const back = wayBack(what, body);
    const { items = [] } = await api.change(what, body);
    selection.ids.clear();
    if (body.label !== undefined) drafts.delete(body.group);
    await refresh();
    notify(message(items.length), back?.possible() ? () => back.run(items) : null);
  });

// How to undo a change; null if the page does not have all images that it concerns.
function wayBack(what, { ids, group }) {
  if (what === "merge") return null;
  const shown = new Map(allItems().map((item) => [item.id, item]));
  const whole = ids === undefined ? groupWith(group) : null;
  const uniform = whole?.state === "new";
  if (!uniform && whole && whole.items.length < whole.size) return null;
  // A group that has lost its last image no longer exists.
  const possible = () =>
    what !== "move" || ids.every((id) => shown.get(id).group === null || groupWith(shown.get(id).group));
  const back = async (changed) => {
    const steps = new Map();
    for (const id of changed) {
      const item = uniform ? { state: "new" } : shown.get(id);
      const [path, rest] = what === "move" ? ["move", { group: item.group }] : restoring(item);
      const key = JSON.stringify([path, rest]);
      if (!steps.has(key)) steps.set(key, { path, body: { ids: [], ...rest } });
      steps.get(key).body.ids.push(id);
    }
    for (const { path, body } of steps.values()) await api.change(path, body);
  };
  return { possible, run: back };
}

const restoring = ({ state, label }) =>
  ({ named: ["label", { label }], known: ["known", { label }], junk: ["junk", {}] })[state] ?? ["clear", {}];

export function takeBack() {
  const work = undo;
  if (!work) return;
  notify("");
  run(async () => {
    await work();
    await refresh();
    notify("Undone.");
  });
}

// ---- naming

export function name(which, text) {
  const { label, known } = spelled(text);
  if (!label) return fail(new Problem("Please type a name first."));
  const message = (count) =>
    known
      ? `Marked ${view.images(count)} as ${view.quoted(label)}, which the model already knows.`
      : `Named ${view.images(count)} ${view.quoted(label)}.`;
  return act(known ? "known" : "label", { ...which, label }, message);
}

export const junk = (which) => act("junk", which, (count) => `Marked ${view.images(count)} as junk.`);
export const clear = (which) => act("clear", which, (count) => `Removed the label of ${view.images(count)}.`);

export const move = (ids, group) =>
  act("move", { ids, group }, (count) =>
    group === null ? `Removed ${view.images(count)} from the group.` : `Moved ${view.images(count)} to group ${group}.`,
  );

export const merge = (group, target) =>
  act("merge", { groups: [target, group] }, () => `Merged group ${group} into group ${target}.`);

export function more(group) {
  wanted.set(group.id, group.items.length + AT_ONCE);
  return run(refresh);
}

// ---- deleting

function sure(title, text, count = null) {
  const dialog = element("sure");
  dialog.returnValue = "";
  element("sure-title").textContent = title;
  element("sure-text").textContent = text;
  element("sure-count-box").hidden = count === null;
  element("sure-count-label").textContent = `Type ${count} to confirm`;
  element("sure-count").value = "";
  element("sure-yes").disabled = count !== null;
  element("sure-count").oninput = ({ target }) => {
    element("sure-yes").disabled = target.value.trim() !== String(count);
  };
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
  });
}

export async function remove(ids) {
  const which = view.images(ids.length);
  if (!(await sure(`Delete ${which}?`, "The files are deleted as well. This cannot be undone."))) return;
  await run(async () => {
    for (const id of ids) await api.remove(id);
    selection.ids.clear();
    await refresh();
    notify(`Deleted ${which}.`);
  });
}

export async function removeAll() {
  const count = Object.values(latest.states).reduce((sum, some) => sum + some, 0);
  const text = "This deletes named and learned images as well, with all files. It cannot be undone.";
  if (!(await sure(`Delete all ${view.images(count)}?`, text, count))) return;
  await run(async () => {
    const { deleted } = await api.removeAll();
    selection.ids.clear();
    await refresh();
    notify(`Deleted ${view.images(deleted)}.`);
  });
}
