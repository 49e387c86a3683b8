// The Examples tab: files, folders and pasted images become examples of a class.

import { Problem } from "./api.js";
import { ask } from "./dialogs.js";
import { counted, element, images, listed, make, quoted } from "./elements.js";
import { fail, notify } from "./notices.js";
import { byClass, chosen, dropped, isImage } from "./teach-files.js";
import { loadStatus, status } from "./teach-state.js";
import { unload, upload } from "./teach-upload.js";
import { thumbnail } from "./unknowns-api.js";
import { latest, refresh, spelled } from "./unknowns-board.js";
import { sharpen, zoom } from "./zoom.js";

const MOST_SHOWN = 60;
const MOST_PROBLEMS = 12;

let pending = []; // files that still need a class
let cancel = null; // stops the upload in progress
let adding = Promise.resolve(); // the upload in progress; another one waits for it
let shown = []; // added examples, the newest first
let leave = () => {};

// `go` opens another part of the page.
export function leaveWith(go) {
  leave = go;
}

export const label = () => (latest ? spelled(element("bring-label").value).label : element("bring-label").value.trim());

export function setLabel(name) {
  element("bring-label").value = name;
  showHint();
}

export function askForLabel(text) {
  element("bring-hint").textContent = text;
  element("bring-label").focus();
}

function showHint() {
  const text = element("bring-label").value.trim();
  element("bring-hint").textContent = text && latest ? hint() : "";
  element("pending-add").disabled = !text;
}

function hint() {
  const { label: name, known } = spelled(element("bring-label").value);
  const waiting = status?.classes[name] ?? 0;
  const more = waiting ? `, ${images(waiting)} of it wait already` : "";
  return known ? `The model knows ${quoted(name)}: examples extend it${more}` : `${quoted(name)} is a new class${more}`;
}

// ---- from files to classes

export async function bring(found) {
  const usable = found.filter(isImage);
  const skipped = found.length - usable.length;
  if (!usable.length && found.length) {
    return fail(new Problem("None of these files is an image.", { more: "PNG, JPEG, WebP and BMP files are." }));
  }
  if (!usable.length) {
    return fail(new Problem("Only files and folders can be dropped here.", { more: "Links and text are ignored." }));
  }
  const { classes, unnamed, folders } = byClass(usable, label());
  if (folders > 1 && !(await agreed(classes))) return;
  if (unnamed.length) wait(unnamed);
  const work = [...classes].flatMap(([name, files]) => files.map((file) => ({ file, label: spelled(name).label })));
  if (work.length) await add(work, skipped);
}

function agreed(classes) {
  const entry = ([name, files]) => make("li", {}, make("strong", { text: name }), `: ${images(files.length)}`);
  return ask({
    title: `Add ${counted(classes.size, "class", "classes")}?`,
    text: "Each folder is a class:",
    details: [make("ul", { class: "changes" }, ...[...classes].map(entry))],
    choices: [{ value: "yes", text: "Add them" }],
  });
}

function wait(files) {
  pending = [...pending, ...files];
  element("pending-text").textContent = `${images(pending.length)} ready. Which class are they? Type it above.`;
  element("pending").hidden = false;
  element("problem").hidden = true;
  showHint();
  element("bring-label").focus();
}

function addPending() {
  const name = label();
  if (!name || !pending.length) return element("bring-label").focus();
  const files = pending;
  dropPending();
  add(files.map((file) => ({ file, label: name })));
}

function dropPending() {
  pending = [];
  element("pending").hidden = true;
}

// ---- from classes to examples

// Adds examples, shows what became of each, and offers to take them back.
export function add(work, skipped = 0) {
  adding = adding.then(() => addNow(work, skipped)).catch(fail);
  return adding;
}

async function addNow(work, skipped) {
  cancel = new AbortController();
  const outcomes = [];
  const done = (outcome) => {
    outcomes.push(outcome);
    if (outcome.added) remember(outcome.added);
    progress(outcomes.length, work.length);
    showAdded();
  };
  progress(0, work.length);
  await upload(work, { done, signal: cancel.signal });
  cancel = null;
  element("bringing").hidden = true;
  const added = outcomes.flatMap((outcome) => outcome.added ?? []);
  report(outcomes, skipped, work.length - outcomes.length);
  await Promise.all([loadStatus(), refresh()]).catch(fail);
  showHint();
  const undoable = added.some((entry) => !entry.duplicate || entry.label_before !== entry.label);
  if (added.length) notify(summary(added), undoable ? () => forget(added) : null);
}

// A file that comes twice is shown once.
function remember(added) {
  if (!shown.some((entry) => entry.id === added.id)) shown.unshift(added);
}

async function forget(added) {
  await unload(added);
  const gone = new Set(added.map((entry) => entry.id));
  shown = shown.filter((entry) => !gone.has(entry.id));
  showAdded();
  element("brought-problems").replaceChildren();
}

function progress(count, total) {
  const place = element("bringing");
  if (!place.querySelector("progress")) {
    place.replaceChildren(
      make("p", { class: "step" }),
      make("progress", { max: String(total), "aria-label": "Images added" }),
      make("button", { type: "button", text: "Stop", on: { click: () => cancel?.abort() } }),
    );
  }
  place.querySelector(".step").textContent = `Adding ${count} of ${images(total)} …`;
  Object.assign(place.querySelector("progress"), { max: total, value: count });
  place.hidden = total < 2;
}

function summary(added) {
  const classes = [...new Set(added.map((entry) => entry.label))].sort();
  const fresh = added.filter((entry) => !entry.duplicate).length;
  const twice = added.length - fresh;
  const news = fresh ? `Added ${counted(fresh, "example")} of ${listed(classes.map(quoted), 3)}.` : "";
  return [news, twice && alreadyHere(added)].filter(Boolean).join(" ");
}

function alreadyHere(added) {
  const twice = added.filter((entry) => entry.duplicate);
  return `${images(twice.length)} ${twice.length === 1 ? "was" : "were"} here already: not added twice.`;
}

function report(outcomes, skipped, stopped) {
  const added = outcomes.flatMap((outcome) => outcome.added ?? []);
  const old = added.flatMap(({ label: now, label_before: name }) => (name !== null && name !== now ? [name] : []));
  const failed = outcomes.filter((outcome) => outcome.problem);
  const lines = [
    added.some((entry) => entry.duplicate) && alreadyHere(added),
    old.length && `${images(old.length)} had another name: ${listed([...new Set(old)].map(quoted), 3)}.`,
    skipped && `${counted(skipped, "file")} skipped: not an image.`,
    stopped && `${counted(stopped, "file")} not sent.`,
    ...failed.slice(0, MOST_PROBLEMS).map(({ file, problem }) => `${file.name ?? "picture"}: ${problem.message}`),
    failed.length > MOST_PROBLEMS && `${failed.length - MOST_PROBLEMS} more files were refused.`,
  ].filter(Boolean);
  element("brought-problems").replaceChildren(...lines.map((text) => make("li", { text })));
  showAdded();
}

function showAdded() {
  const lines = element("brought-problems").children.length;
  element("brought").hidden = !shown.length && !lines;
  element("brought-title").textContent = title();
  element("brought-learn").hidden = !shown.length;
  element("brought-thumbs").replaceChildren(...shown.slice(0, MOST_SHOWN).map(thumb));
}

function title() {
  const fresh = shown.filter((entry) => !entry.duplicate).length;
  if (fresh) return `${counted(fresh, "example")} brought just now`;
  return shown.length ? "All of these were here already" : "Nothing was added";
}

const answered = ({ known, label: name }) => (known ? quoted(name) : "unknown");

function about({ label: name, duplicate, answer }) {
  return [quoted(name), duplicate && "was here already", `the model's answer: ${answered(answer)}`].filter(Boolean).join(" · ");
}

const thumbs = new Map();

function thumb(entry, at) {
  if (!thumbs.has(entry)) {
    thumbs.set(
      entry,
      make(
        "button",
        { type: "button", class: "thumb", "data-testid": "brought-thumb", "aria-label": about(entry), title: about(entry) },
        sharpen(make("img", { src: thumbnail(entry.id), alt: "", loading: "lazy" })),
        make("span", { class: "tag", text: entry.duplicate ? "copy" : answered(entry.answer) }),
      ),
    );
  }
  const made = thumbs.get(entry);
  made.onclick = () =>
    zoom(
      shown.map((other) => ({ id: other.id, text: about(other) })),
      at,
    );
  return made;
}

// ---- events

const openTab = () => !element("panel-examples").hidden;

element("bring-label").addEventListener("input", showHint);
element("bring-form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (pending.length) addPending();
  else element("bring-files").focus();
});
element("pending-add").addEventListener("click", addPending);
element("pending-drop").addEventListener("click", dropPending);
element("brought-learn").addEventListener("click", () => leave("learn"));

for (const [button, input] of [["bring-files", "bring-file"], ["bring-folder", "bring-directory"]]) {
  element(button).addEventListener("click", () => element(input).click());
  element(input).addEventListener("change", ({ target }) => {
    const files = [...target.files];
    target.value = "";
    if (files.length) bring(chosen(files));
  });
}

document.addEventListener("paste", (event) => {
  const files = [...(event.clipboardData?.files ?? [])];
  if (!files.length || document.querySelector("dialog[open]")) return;
  event.preventDefault();
  leave("examples");
  bring(chosen(files));
});

let within = 0;
const overPage = (inside) => element("drop").classList.toggle("dropping", inside);
const carriesFiles = (event) => [...(event.dataTransfer?.types ?? [])].includes("Files");
document.addEventListener("dragenter", (event) => {
  if (!carriesFiles(event)) return;
  if (!openTab()) leave("examples");
  overPage(++within > 0);
});
document.addEventListener("dragleave", (event) => carriesFiles(event) && overPage(--within > 0));
document.addEventListener("dragover", (event) => event.preventDefault());
document.addEventListener("drop", (event) => {
  event.preventDefault();
  within = 0;
  overPage(false);
  leave("examples");
  dropped(event.dataTransfer).then(bring, fail);
});
