// The actions of a person on groups and images: sends each to the service and shows the result.

import { Problem } from "./api.js";
import { ask } from "./dialogs.js";
import { images, quoted } from "./elements.js";
import { fail, notify, run } from "./notices.js";
import * as api from "./unknowns-api.js";
import {
  allItems,
  drafts,
  groupWith,
  latest,
  looseByGroup,
  refresh,
  selection,
  spelled,
  splits,
  wanted,
} from "./unknowns-board.js";

const AT_ONCE = 100;

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
  const shown = new Map(allItems().map((item) => [item.id, item]));
  const whole = ids === undefined ? groupWith(group) : null;
  const uniform = whole?.state === "new";
  if (!uniform && whole && whole.items.length < whole.size) return null;
  // Nobody knows what images were before that only the map shows; those that look like a group are in none.
  const loose = new Set(what === "move" ? looseByGroup().flatMap((some) => some.ids) : []);
  if (ids && !ids.every((id) => shown.has(id) || loose.has(id))) return null;
  // A group that has lost its last image no longer exists.
  const possible = () =>
    what !== "move" || ids.every((id) => !shown.get(id)?.group || groupWith(shown.get(id).group));
  const back = async (changed) => {
    const steps = new Map();
    for (const id of changed) {
      const item = uniform ? { state: "new" } : shown.get(id);
      const [path, rest] = what === "move" ? ["move", { group: item?.group ?? null }] : restoring(item);
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

// ---- naming

export async function name(which, text) {
  const { label, known } = spelled(text);
  if (!label) return fail(new Problem("Please type a name first."));
  const chosen = await agreed(which, label);
  if (!chosen) return;
  const message = (count) =>
    known
      ? `Marked ${images(count)} as ${quoted(label)}, which the model already knows.`
      : `Named ${images(count)} ${quoted(label)}.`;
  await act(known ? "known" : "label", { ...chosen, label }, message);
}

// Nobody should name images that they have not seen without knowing it.
async function agreed(which, label) {
  const group = which.group === undefined ? null : groupWith(which.group);
  const shown = group?.items.filter((item) => item.state !== "junk" && item.state !== "learned") ?? [];
  if (!group || group.items.length >= group.size) return which;
  const reply = await ask({
    title: `Name all ${images(group.size)} ${quoted(label)}?`,
    text: `Only ${group.items.length.toLocaleString()} of them are shown. The others would get the name unseen.`,
    choices: [
      { value: "all", text: `Name all ${group.size.toLocaleString()}` },
      ...(shown.length ? [{ value: "shown", text: `Only the ${shown.length.toLocaleString()} shown` }] : []),
    ],
  });
  if (!reply) return null;
  return reply.choice === "all" ? which : { ids: shown.map((item) => item.id) };
}

export const junk = (which) => act("junk", which, (count) => `Marked ${images(count)} as junk.`);
export const clear = (which) => act("clear", which, (count) => `Removed the label of ${images(count)}.`);

export const move = (ids, group) =>
  act("move", { ids, group }, (count) =>
    group === null ? `Removed ${images(count)} from the group.` : `Moved ${images(count)} to group ${group}.`,
  );

export const merge = (group, target) =>
  run(async () => {
    const ids = splits() ? await everyId(group) : null;
    await api.change("merge", { groups: [target, group] });
    selection.ids.clear();
    await refresh();
    // The merged group's number is gone, so its images become a group with another number.
    notify(`Merged group ${group} into group ${target}.`, ids && (() => splits()(ids)));
  });

async function everyId(group) {
  const ids = [];
  for (let after = 0; after !== null; ) {
    const { items, next } = await api.items(group, after, 500);
    ids.push(...items.map((item) => item.id));
    after = next;
  }
  return ids;
}

// Makes a group of its own from some images.
export const split = (ids) =>
  run(async () => {
    const back = wayBack("move", { ids });
    const group = await splits()(ids);
    selection.ids.clear();
    await refresh();
    notify(`Made group ${group} of ${images(ids.length)}.`, back?.possible() ? () => back.run(ids) : null);
  });

// Moves the images that look like a group, and are in none, into it.
export const joinAlike = (number) => move(looseByGroup().find(({ group }) => group.id === number).ids, number);

export function more(group) {
  wanted.set(group.id, group.items.length + AT_ONCE);
  return run(refresh);
}

// ---- deleting

const REMOVE = { value: "yes", text: "Delete", danger: true };

export async function remove(ids) {
  const which = images(ids.length);
  const text = "The files are deleted as well. This cannot be undone.";
  if (!(await ask({ title: `Delete ${which}?`, text, choices: [REMOVE] }))) return;
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
  if (!(await ask({ title: `Delete all ${images(count)}?`, text, choices: [REMOVE], typed: count }))) return;
  await run(async () => {
    const { deleted } = await api.removeAll();
    selection.ids.clear();
    await refresh();
    notify(`Deleted ${images(deleted)}.`);
  });
}
