// Connects the board of groups: buttons, fields and keyboard shortcuts, for every page that has one.

import { Problem } from "./api.js";
import { element } from "./elements.js";
import { fail, notify, takeBack, tryAgain, undo } from "./notices.js";
import { clear, joinAlike, junk, merge, more, move, name, remove, split } from "./unknowns-actions.js";
import { drafts, groupOf, latest, selection, showHint, showSelection } from "./unknowns-board.js";
import { NONE, SPLIT } from "./unknowns-view.js";

const ACTIONS = {
  junk: (group) => junk({ group: group.id }),
  clear: (group) => clear({ group: group.id }),
  near: (group) => name({ group: group.id }, group.near_class),
  merge(group) {
    const target = Number(element(`target-${group.id}`).value);
    if (!target) return fail(new Problem("Please choose the group to merge into first."));
    return merge(group.id, target);
  },
  alike: (group, button) => joinAlike(Number(button.dataset.target)),
  more,
};

element("groups").addEventListener("click", ({ target }) => {
  const button = target.closest("button[data-do]");
  if (button) ACTIONS[button.dataset.do](groupOf(button), button);
});

element("groups").addEventListener("submit", (event) => {
  event.preventDefault();
  name({ group: groupOf(event.target).id }, event.target.querySelector("input").value);
});

element("groups").addEventListener("input", ({ target }) => {
  if (!target.matches(".name-field")) return;
  drafts.set(groupOf(target).id, target.value);
  showHint(target);
});

element("bar-form").addEventListener("submit", (event) => {
  event.preventDefault();
  name({ ids: [...selection.ids] }, element("bar-name").value);
});
element("bar-junk").addEventListener("click", () => junk({ ids: [...selection.ids] }));
element("bar-clear").addEventListener("click", () => clear({ ids: [...selection.ids] }));
element("bar-delete").addEventListener("click", () => remove([...selection.ids]));
element("bar-none").addEventListener("click", () => selection.clear());
element("bar-open").addEventListener("click", () => selection.onOpen([...selection.ids][0]));
element("bar-move").addEventListener("click", () => {
  const target = element("bar-target").value;
  const ids = [...selection.ids];
  if (!target) return fail(new Problem("Please choose the group to move to first."));
  if (target === SPLIT) return split(ids);
  return move(ids, target === NONE ? null : Number(target));
});

element("undo").addEventListener("click", takeBack);
element("again").addEventListener("click", tryAgain);
// What only this page has comes first.
document.querySelector(".keys-list").prepend(element("own-keys")?.content ?? "");
element("show-keys").addEventListener("click", () => element("keys").showModal());

for (const button of document.querySelectorAll(".copy")) {
  // Browsers let a page write to the clipboard only over HTTPS or from the same machine.
  button.hidden = !navigator.clipboard;
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(element(button.dataset.copies).textContent);
    notify("Copied.");
  });
}

function toGroup(step) {
  const all = [...element("groups").children];
  const at = all.findIndex((group) => group.contains(document.activeElement));
  const next = all[at < 0 ? (step > 0 ? 0 : all.length - 1) : at + step];
  if (!next) return;
  next.scrollIntoView({ block: "nearest" });
  next.querySelector(".thumb[tabindex='0']")?.focus();
}

// Moves the focus to the field. If nothing is selected, the image in focus is selected first.
function toBar(id) {
  const [only] = selection.chosen();
  if (only === undefined) return;
  if (!selection.ids.size) {
    selection.ids.add(only);
    showSelection();
  }
  element(id).focus();
}

function onChosen(work) {
  const ids = selection.chosen();
  if (ids.length) work({ ids });
}

const KEYS = {
  j: () => toGroup(1),
  k: () => toGroup(-1),
  n() {
    const group = document.activeElement?.closest?.(".cluster");
    if (selection.ids.size) element("bar-name").focus();
    else group?.querySelector(".name-field")?.select();
  },
  m: () => toBar("bar-target"),
  x: () => onChosen(junk),
  u: () => onChosen(clear),
};

// Whether a key is meant for the page, and not for a field or a dialog.
export const free = (event) =>
  !document.querySelector("dialog[open]") && !event.altKey && !event.target.matches("input, select, textarea");

function escape(event) {
  // The first press leaves the field, the next one clears the selection.
  const typing = event.target.matches("input, select, textarea");
  if (typing && selection.ids.size) element(`thumb-${[...selection.ids].at(-1)}`)?.focus();
  else if (typing) event.target.closest(".cluster")?.querySelector(".thumb")?.focus();
  else selection.clear();
}

document.addEventListener("keydown", (event) => {
  if (document.querySelector("dialog[open]") || !latest) return;
  if (event.key === "Escape") return escape(event);
  if (!free(event)) return;
  if (event.ctrlKey || event.metaKey) {
    if (event.key.toLowerCase() === "z" && undo) takeBack();
    return;
  }
  if (event.key === "?") element("keys").showModal();
  const react = element("groups").closest("[hidden]") ? null : KEYS[event.key.toLowerCase()];
  if (!react) return;
  event.preventDefault();
  react();
});
