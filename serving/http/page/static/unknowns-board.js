// The groups and images of the service, as they are shown.

import { Problem } from "./api.js";
import * as api from "./unknowns-api.js";
import { Selection } from "./unknowns-selection.js";
import * as view from "./unknowns-view.js";

export const element = (id) => document.getElementById(id);
const NOTICE_MILLISECONDS = 12_000;

export let latest = null; // the latest response of the service
export let undo = null; // undoes the last change, if that is possible
export const wanted = new Map(); // group -> number of items to show, if more than the default
export const drafts = new Map(); // group -> a name that was typed but not saved
export const selection = new Selection(element("groups"), { onChange: showSelection });

let groups = []; // in an order that does not change while the page is open, each with all shown items
let timer = 0;
const thumbs = new Map(); // item -> its element, kept so that its image is not loaded again

export async function refresh() {
  const response = await api.overview();
  const before = groups.map((group) => group.id);
  const place = (group) => (before.includes(group.id) ? before.indexOf(group.id) : before.length);
  // A group that was just labelled keeps its place on the page.
  const sorted = [...response.groups].sort((a, b) => place(a) - place(b));
  const loose = { ...response.ungrouped, id: view.NONE, states: {}, labels: {} };
  const all = loose.size ? [...sorted, loose] : sorted;
  await Promise.all(all.map(complete));
  latest = response;
  groups = all;
  show();
}

// Loads as many items of a group as were shown before.
async function complete(group) {
  const number = group.id === view.NONE ? null : group.id;
  const count = Math.min(wanted.get(group.id) ?? 0, group.size);
  while (group.items.length < count) {
    const after = group.items.at(-1)?.id ?? 0;
    const more = await api.items(number, after, Math.min(500, count - group.items.length));
    group.items = [...group.items, ...more.items];
    if (more.next === null) break;
  }
}

export const allItems = () => groups.flatMap((group) => group.items);
const itemOf = (id) => allItems().find((item) => item.id === id);
export const groupWith = (id) => groups.find((group) => String(group.id) === String(id));
export const groupOf = (node) => groupWith(node.closest("[data-group]")?.dataset.group);
const realGroups = () => groups.filter((group) => group.id !== view.NONE);

// ---- names

// The spelling of an existing class, if there is one: "Cat" becomes "cat".
export function spelled(text) {
  const name = text.trim();
  const same = (label) => label.toLowerCase() === name.toLowerCase();
  const known = latest.known.find((label) => label === name) ?? latest.known.find(same);
  const named = latest.classes.find((entry) => !entry.in_model && same(entry.label))?.label;
  return known !== undefined ? { label: known, known: true } : { label: named ?? name, known: false };
}

export function showHint(input) {
  const group = groupOf(input);
  const text = input.value.trim();
  const { label, known } = spelled(text);
  const hint = known ? `The model already knows ${view.quoted(label)}` : `${view.quoted(label)} is a new class`;
  element(`hint-${group.id}`).textContent = text && text !== view.labelOf(group) ? hint : "";
}

// ---- showing

function show() {
  const focused = document.activeElement;
  const { id: focusedId, dataset } = focused ?? {};
  const place = dataset?.id ? [...focused.parentElement.children].indexOf(focused) : -1;
  const shown = new Set(allItems().map((item) => item.id));
  selection.keep(shown);
  for (const id of thumbs.keys()) if (!shown.has(id)) thumbs.delete(id);
  element("groups").replaceChildren(...groups.map(groupElement));
  for (const input of element("groups").querySelectorAll(".name-field")) showHint(input);
  element("labels").replaceChildren(
    ...[...new Set([...latest.classes.map((entry) => entry.label), ...latest.known])].map((value) =>
      view.make("option", { value }),
    ),
  );
  showAround();
  showSelection();
  // Keeps the keyboard focus where it was, or moves it to the image that is now in that place.
  if (focusedId && document.activeElement !== element(focusedId)) {
    const neighbours = dataset.id && element(`group-${dataset.group}`)?.querySelectorAll(".thumb");
    const next = element(focusedId) ?? neighbours?.[Math.min(place, neighbours.length - 1)];
    next?.focus({ preventScroll: true });
  }
}

function groupElement(group) {
  const groupLabel = view.labelOf(group);
  const inGroup = group.items.map((item, at) => {
    const thumb = thumbs.get(item.id) ?? view.makeThumb(item);
    thumbs.set(item.id, thumb);
    view.updateThumb(thumb, item, { selected: selection.ids.has(item.id), groupLabel, focusable: at === 0 });
    return thumb;
  });
  const near = group.near_class;
  return view.makeGroup(group, {
    thumbs: inGroup,
    left: group.size - group.items.length,
    others: realGroups().filter((other) => other !== group),
    draft: drafts.get(group.id),
    suggestion: !Object.keys(group.labels).length && latest.known.includes(near) ? near : null,
  });
}

function showAround() {
  const count = Object.values(latest.states).reduce((sum, some) => sum + some, 0);
  element("chip").replaceChildren(
    view.make("span", { text: latest.user, title: "your name" }),
    view.make("span", { text: `${latest.model.name} ${latest.model.version}`, title: "the model that is served" }),
  );
  element("chip").hidden = false;
  element("progress").hidden = count === 0;
  element("tally").replaceChildren(...view.tally(latest.states));
  element("classes").replaceChildren(...latest.classes.map((entry) => view.namedClass(entry, latest.minimum)));
  element("next-text").textContent = view.nextText(latest.classes, latest.minimum);
  element("learn-command").textContent = latest.commands.learn;
  element("learn").hidden = !latest.classes.some((entry) => entry.ready);
  element("start").hidden = realGroups().length > 0;
  element("start-title").textContent = count ? "No groups yet" : "No unknown images yet";
  element("start-text").textContent = count
    ? "Similar images are easier to name together. To group them, run this where the training code is installed:"
    : "Images that the server answers with “unknown” appear here. Once there are some, group them with:";
  element("discover-command").textContent = latest.commands.discover;
  element("changes").replaceChildren(...latest.changes.map(view.changeEntry));
  element("history").hidden = !latest.changes.length;
  element("delete-all").hidden = count === 0;
}

export function showSelection() {
  for (const [id, thumb] of thumbs) thumb.setAttribute("aria-selected", String(selection.ids.has(id)));
  const ids = [...selection.ids];
  const only = ids.length === 1 ? itemOf(ids[0]) : null;
  element("bar").hidden = !ids.length;
  element("bar-count").textContent = `${view.images(ids.length)} selected`;
  element("bar-about").textContent = only ? view.about(only) : "";
  element("bar-open").hidden = !only;
  if (only) element("bar-open").href = api.file(only.id);
  const chosen = element("bar-target").value;
  const none = view.make("option", { value: view.NONE, text: "no group" });
  element("bar-target").replaceChildren(...view.options("Move to …", realGroups()), none);
  element("bar-target").value = chosen;
  if (!element("bar-target").value) element("bar-target").value = "";
  if (!ids.length) element("bar-name").value = "";
}

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
