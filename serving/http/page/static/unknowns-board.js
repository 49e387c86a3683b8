// The groups and images of the service, as they are shown.

import { element, images, make, quoted } from "./elements.js";
import * as api from "./unknowns-api.js";
import { Selection } from "./unknowns-selection.js";
import * as view from "./unknowns-view.js";
import { zoom } from "./zoom.js";

export let latest = null; // the latest response of the service
export const wanted = new Map(); // group -> number of items to show, if more than the default
export const drafts = new Map(); // group -> a name that was typed but not saved
export const selection = new Selection(element("groups"), { onChange: showSelection, onOpen: enlarge });

// What a page adds: `loose` loads the images in no group, each with the group that it looks like, `split` makes a group
// of images, `shown` is called with the latest response whenever the board is shown, and `placed` returns images that can
// be selected elsewhere.
const extras = { loose: null, split: null, shown: () => {}, placed: () => [] };

const FIRST = 24;

let groups = []; // in an order that does not change while the page is open, each with all shown items
let alike = new Map(); // image in no group -> the group that it looks like
const finished = new Set(); // groups that needed nothing when they were last put away
let showFinished = true;
const thumbs = new Map(); // item -> its element, kept so that its image is not loaded again

export const configure = (chosen) => Object.assign(extras, chosen);
export const splits = () => extras.split;

export async function refresh() {
  const [response, alone] = await Promise.all([api.overview(), extras.loose?.()]);
  const before = groups.map((group) => group.id);
  const place = (group) => (before.includes(group.id) ? before.indexOf(group.id) : before.length);
  // A group that was just labelled keeps its place on the page.
  const sorted = [...response.groups].sort((a, b) => place(a) - place(b));
  const loose = { ...(alone ? some(alone) : response.ungrouped), id: view.NONE, states: {}, labels: {} };
  const all = loose.size ? [...sorted, loose] : sorted;
  await Promise.all(all.map(complete));
  const first = latest === null;
  latest = response;
  groups = all;
  alike = new Map((alone ?? []).flatMap(({ id, looks_like: like }) => (like ? [[id, like.group]] : [])));
  if (first && !showFinished) putAway();
  show();
}

// The first of the images in no group, or as many as were shown before.
const some = (alone) => ({ size: alone.length, items: alone.slice(0, wanted.get(view.NONE) ?? FIRST) });

// Hides the groups that need nothing more, unless the person wants to see them.
export function putAway() {
  for (const group of groups) if (isFinished(group)) finished.add(group.id);
}

export function hideFinished(hide) {
  showFinished = !hide;
  if (!latest) return;
  if (hide) putAway();
  show();
}

const isFinished = (group) => group.id !== view.NONE && !group.states.new;
const visible = (group) => showFinished || !(finished.has(group.id) && isFinished(group));
export const hidden = () => groups.filter((group) => finished.has(group.id) && isFinished(group)).length;

// Loads as many items of a group as were shown before.
async function complete(group) {
  const number = group.id === view.NONE ? null : group.id;
  const count = number === null && extras.loose ? 0 : Math.min(wanted.get(group.id) ?? 0, group.size);
  while (group.items.length < count) {
    const after = group.items.at(-1)?.id ?? 0;
    const more = await api.items(number, after, Math.min(500, count - group.items.length));
    group.items = [...group.items, ...more.items];
    if (more.next === null) break;
  }
}

export const allItems = () => groups.flatMap((group) => group.items);
export const itemOf = (id) => allItems().find((item) => item.id === id);
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
  const hint = known ? `The model already knows ${quoted(label)}` : `${quoted(label)} is a new class`;
  element(`hint-${group.id}`).textContent = text && text !== view.labelOf(group) ? hint : "";
}

// ---- showing

// Deselects images that are no longer shown, here or elsewhere.
export const keepSelection = () => selection.keep(new Set([...allItems().map(({ id }) => id), ...extras.placed()]));

function show() {
  const focused = document.activeElement;
  const { id: focusedId, dataset } = focused ?? {};
  const place = dataset?.id ? [...focused.parentElement.children].indexOf(focused) : -1;
  const shown = new Set(allItems().map((item) => item.id));
  keepSelection();
  for (const id of thumbs.keys()) if (!shown.has(id)) thumbs.delete(id);
  element("groups").replaceChildren(...groups.filter(visible).map(groupElement));
  for (const input of element("groups").querySelectorAll(".name-field")) showHint(input);
  element("labels").replaceChildren(
    ...[...new Set([...latest.classes.map((entry) => entry.label), ...latest.known])].map((value) =>
      make("option", { value }),
    ),
  );
  extras.shown(latest, groups);
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
    const like = group.id === view.NONE && groupWith(alike.get(item.id)) ? alike.get(item.id) : null;
    view.updateThumb(thumb, item, { selected: selection.ids.has(item.id), groupLabel, focusable: at === 0, like });
    return thumb;
  });
  const near = group.near_class;
  return view.makeGroup(group, {
    thumbs: inGroup,
    left: group.size - group.items.length,
    others: realGroups().filter((other) => other !== group),
    draft: drafts.get(group.id),
    alike: group.id === view.NONE ? looseByGroup() : [],
    suggestion: !Object.keys(group.labels).length && latest.known.includes(near) ? near : null,
  });
}

// The groups that images without one look like, each with these images.
export function looseByGroup() {
  const found = new Map();
  for (const [id, number] of alike) found.set(number, [...(found.get(number) ?? []), id]);
  return [...found].map(([number, ids]) => ({ group: groupWith(number), ids })).filter(({ group }) => group);
}

function enlarge(id) {
  const shown = groups.find((group) => group.items.some((item) => item.id === id))?.items ?? [];
  const list = shown.map((item) => ({ id: item.id, text: view.about(item) }));
  zoom(list, list.findIndex((entry) => entry.id === id));
}

export function showSelection() {
  for (const [id, thumb] of thumbs) thumb.setAttribute("aria-selected", String(selection.ids.has(id)));
  const ids = [...selection.ids];
  const only = ids.length === 1 ? itemOf(ids[0]) : null;
  element("bar").hidden = !ids.length;
  element("bar-count").textContent = `${images(ids.length)} selected`;
  element("bar-about").textContent = only ? view.about(only) : "";
  element("bar-open").hidden = !only;
  const chosen = element("bar-target").value;
  element("bar-target").replaceChildren(
    ...view.options("Move to …", realGroups()),
    make("option", { value: view.NONE, text: "no group" }),
    ...(extras.split ? [make("option", { value: view.SPLIT, text: "a new group" })] : []),
  );
  element("bar-target").value = chosen;
  if (!element("bar-target").value) element("bar-target").value = "";
  if (!ids.length) element("bar-name").value = "";
}
