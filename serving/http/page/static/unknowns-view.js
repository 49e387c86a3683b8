// Builds the elements of the page. Values from the store are only inserted as text, never as HTML.

import { images, make, quoted, when } from "./elements.js";
import { thumbnail } from "./unknowns-api.js";
import { sharpen } from "./zoom.js";

export const NONE = "none"; // the id that stands for images in no group
export const SPLIT = "split"; // stands for a group that is still to be made

const STATES = {
  new: "to review",
  named: "named",
  known: "known",
  junk: "junk",
  learned: "learned",
};
// What a person did, by the name of the change in the store.
const CHANGES = {
  name: (count, detail) => `named ${count} ${quoted(detail)}`,
  known: (count, detail) => `marked ${count} as known: ${quoted(detail)}`,
  junk: (count) => `marked ${count} as junk`,
  clear: (count) => `removed the label of ${count}`,
  move: (count, detail) => `moved ${count} ${detail}`,
  merge: (count, detail) => `merged ${count}: ${detail}`,
  split: (count, detail) => `made a group of ${count}: ${detail.replace("to ", "")}`,
  delete: (count, detail) => `deleted ${count}${detail && `: ${detail}`}`,
  teach: (count, detail) => `added ${count} to the examples of ${quoted(detail)}`,
  relabel: (count, detail) => `gave ${count} the label ${quoted(detail)} again, as the version has learned them`,
  withdraw: (count) => `took ${count} out of the examples`,
  begin: (count, detail) => `made the class ${quoted(detail)}`,
  rename: (count, detail) => `renamed a class: ${detail}`,
  forget: (count, detail) => `deleted the class ${quoted(detail)}`,
  group: () => "grouped the unknown images",
  learn: () => "started a lesson",
  accept: () => "accepted a lesson",
  discard: (count, detail) => `discarded a lesson${detail.replace(/^job \d+/, "")}`,
  damaged: () => "did something, but another program has changed this entry",
  publish: (count, detail) => `put a version into service: ${detail}`,
};
// The common label of all images of a group that are not junk; null if they differ or some have no label.
export function labelOf(group) {
  const labels = Object.keys(group.labels);
  return labels.length === 1 && !group.states.new ? labels[0] : null;
}

export function groupTitle(group) {
  if (group.id === NONE) return "Not grouped yet";
  const label = labelOf(group);
  return label === null ? `Group ${group.id}` : `${quoted(label)} (group ${group.id})`;
}

// ---- one image

export function makeThumb(item) {
  return make(
    "div",
    { class: "thumb", role: "option", id: `thumb-${item.id}`, "data-testid": `thumb-${item.id}`, "data-id": item.id },
    sharpen(make("img", { src: thumbnail(item.id), alt: "", loading: "lazy", decoding: "async", draggable: "false" })),
    make("span", { class: "tag", "aria-hidden": "true" }),
    make("span", { class: "times", "aria-hidden": "true" }),
  );
}

export function updateThumb(thumb, item, { selected, groupLabel, focusable, like = null }) {
  const own = item.state === "junk" ? "junk" : item.label !== null && item.label !== groupLabel ? item.label : "";
  const [, tag, times] = thumb.children;
  const kind = item.kind === "unknown" ? "" : item.kind;
  tag.textContent = own || (like === null ? kind : `like ${like}`);
  times.textContent = item.copies > 1 ? `×${item.copies}` : "";
  thumb.dataset.state = item.state;
  thumb.dataset.group = item.group ?? NONE;
  thumb.setAttribute("aria-selected", String(selected));
  thumb.tabIndex = focusable ? 0 : -1;
  if (item.damage !== null) tag.textContent = "damaged";
  const looks = like === null ? "" : `, looks like group ${like}`;
  thumb.setAttribute("aria-label", `Image ${item.id}${looks}, ${about(item)}`);
  thumb.title = about(item);
}

// A one-line description of an image.
export function about(item) {
  if (item.damage !== null) return `damaged: ${item.damage}`;
  const state = {
    new: "not reviewed",
    named: `named ${quoted(item.label)}`,
    known: `known as ${quoted(item.label)}`,
    junk: "junk",
    learned: `learned as ${quoted(item.label)} in ${item.learned_in}`,
  }[item.state];
  return [
    item.labelled_by ? `${state} by ${item.labelled_by}, ${when(item.labelled_at)}` : state,
    item.kind === "audit" && "accepted, stored as a sample for review",
    item.kind === "example" && "brought as an example",
    item.best_guess !== null && `best guess ${quoted(item.best_guess)}`,
    item.p_value !== null && `p ${item.p_value.toPrecision(2)}`,
    `received ${item.copies > 1 ? `${item.copies} times, first ` : ""}${when(item.received_at)}`,
    `${item.width} × ${item.height}`,
  ]
    .filter(Boolean)
    .join(" · ");
}

// ---- one group

export function makeGroup(group, { thumbs, left, others, draft, suggestion, alike = [] }) {
  const { id } = group;
  const title = groupTitle(group);
  // Images that a model has learned cannot be changed.
  const open = id !== NONE && group.state !== "learned";
  return make(
    "section",
    {
      class: "card cluster",
      id: `group-${id}`,
      "data-testid": `group-${id}`,
      "data-group": id,
      "data-state": id === NONE ? "none" : (group.state ?? "mixed"),
      "aria-labelledby": `title-${id}`,
    },
    make(
      "div",
      { class: "heading" },
      make(
        "div",
        { class: "summary" },
        make("h3", { id: `title-${id}`, "data-testid": `title-${id}`, text: title }),
        badges(group),
        make("p", { class: "small", text: facts(group) }),
        labelledBy(group),
      ),
      open && nameForm(group, draft),
    ),
    make(
      "div",
      { class: "thumbs", role: "listbox", "aria-multiselectable": "true", "aria-label": `Images: ${title}` },
      ...thumbs,
    ),
    alike.length > 0 && looksLike(alike),
    left > 0 &&
      make("button", {
        type: "button",
        class: "plain more",
        id: `more-${id}`,
        "data-testid": `more-${id}`,
        "data-do": "more",
        text: `Show more (${left.toLocaleString()} left)`,
      }),
    open && actions(group, others, suggestion),
  );
}

// Buttons that move loose images to the group that they look like.
function looksLike(alike) {
  return make(
    "div",
    { class: "row actions" },
    ...alike.map(({ group, ids }) =>
      make("button", {
        type: "button",
        id: `alike-${group.id}`,
        "data-testid": `alike-${group.id}`,
        "data-do": "alike",
        "data-target": group.id,
        text: `Move ${images(ids.length)} to ${groupTitle(group)}`,
      }),
    ),
  );
}

function badges(group) {
  if (group.id === NONE) return null;
  const counted = Object.entries(STATES).filter(([state]) => group.states[state]);
  const names = Object.entries(group.labels);
  return make(
    "p",
    { class: "badges" },
    ...counted.map(([state, text]) =>
      make("span", {
        class: "badge",
        "data-state": state,
        text: counted.length > 1 ? `${group.states[state]} ${text}` : text,
      }),
    ),
    ...(labelOf(group) === null ? names : []).map(([label, count]) =>
      make("span", { class: "badge plain", text: `${count} ${quoted(label)}` }),
    ),
  );
}

function facts(group) {
  if (group.id === NONE) return `${images(group.size)}. They arrived after the last grouping, or look like no other image.`;
  return [
    images(group.size),
    group.copies > group.size && `received ${group.copies.toLocaleString()} times`,
    `${Math.round(group.cohesion * 100)} % alike`,
    group.near_class !== null &&
      `${group.shifted ? "looks like a variant of" : "nearest class:"} ${quoted(group.near_class)}`,
  ]
    .filter(Boolean)
    .join(" · ");
}

// Who labelled the shown images, and when.
function labelledBy(group) {
  const labelled = group.items.filter((item) => item.labelled_by !== null);
  if (!labelled.length) return null;
  const people = [...new Set(labelled.map((item) => item.labelled_by))];
  const last = labelled.map((item) => item.labelled_at).sort().at(-1);
  const text = `labelled by ${people.join(", ")} · ${when(last)}`;
  return make("p", { class: "small who", "data-testid": `who-${group.id}`, text });
}

function nameForm(group, draft) {
  const { id } = group;
  const form = make(
    "form",
    { class: "naming", "data-do": "name" },
    make("label", { class: "unseen", for: `name-${id}`, text: `Name for group ${id}` }),
    make("input", {
      id: `name-${id}`,
      "data-testid": `name-${id}`,
      class: "name-field",
      list: "labels",
      maxlength: "200",
      autocomplete: "off",
      autocapitalize: "none",
      spellcheck: "false",
      placeholder: "What do they show?",
    }),
    make("button", { type: "submit", class: "main", id: `save-${id}`, "data-testid": `save-${id}`, text: "Name" }),
    make("p", { class: "small kind", id: `hint-${id}`, "data-testid": `hint-${id}` }),
  );
  form.querySelector("input").value = draft ?? labelOf(group) ?? "";
  return form;
}

function actions(group, others, suggestion) {
  const { id } = group;
  const button = (what, text) =>
    make("button", { type: "button", id: `${what}-${id}`, "data-testid": `${what}-${id}`, "data-do": what, text });
  return make(
    "div",
    { class: "row actions" },
    suggestion !== null && button("near", `Yes, it is ${quoted(suggestion)}`),
    button("junk", "Mark all as junk"),
    Object.keys(group.states).some((state) => state !== "new" && state !== "learned") && button("clear", "Remove labels"),
    others.length > 0 &&
      make(
        "span",
        { class: "row joined" },
        make("label", { class: "unseen", for: `target-${id}`, text: `Group to merge group ${id} into` }),
        chooser(`target-${id}`, "Merge into …", others),
        button("merge", "Merge"),
      ),
  );
}

function chooser(id, first, groups) {
  return make("select", { id, "data-testid": id }, ...options(first, groups));
}

export function options(first, groups) {
  return [
    make("option", { value: "", text: first }),
    ...groups.map((group) => make("option", { value: String(group.id), text: groupTitle(group) })),
  ];
}

// ---- around the groups

export function tally(states) {
  return Object.entries(STATES)
    .filter(([state]) => states[state])
    .map(([state, text]) =>
      make("li", { class: "badge", "data-state": state, text: `${states[state].toLocaleString()} ${text}` }),
    );
}

export function namedClass({ label, images: count, ready, in_model: inModel }, minimum) {
  const missing = inModel ? "now in the model: mark as known" : `needs ${minimum - count} more`;
  return make(
    "li",
    { "data-testid": "named-class", "data-label": label, "data-ready": String(ready) },
    make("strong", { text: label }),
    make("span", { class: "small", text: images(count) }),
    make("span", { class: "badge", "data-state": ready ? "known" : "new", text: ready ? "ready" : missing }),
  );
}

export function nextText(classes, minimum) {
  const ready = classes.filter((entry) => entry.ready).length;
  if (!classes.length) return `No class is named yet. A class needs at least ${images(minimum)}.`;
  if (!ready) return `No class has enough images yet: each needs ${minimum}.`;
  const subject = ready === 1 ? "One class can be learned now" : `${ready} classes can be learned now`;
  return `${subject}. Run this where the training code is installed, with RUN as the folder of the run:`;
}

export function changeEntry({ at, who, what, items, detail }) {
  const count = images(items);
  const text = CHANGES[what]?.(count, detail) ?? `${what} ${count}${detail && `: ${detail}`}`;
  return make(
    "li",
    {},
    make("span", {}, make("strong", { text: who }), ` ${text}`),
    make("time", { class: "small", datetime: at, text: when(at) }),
  );
}
