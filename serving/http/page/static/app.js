// Connects the parts of the page: sends drawn, dropped, pasted or chosen images to the service and shows the responses.

import { Problem, getBlob, getJson, predict, storeKey, storedKey } from "./api.js";
import { element } from "./elements.js";
import { forgetWhy, offerWhy } from "./explain.js";
import { offer, startFeedback } from "./feedback.js";
import { Pad } from "./pad.js";
import { look } from "./picture.js";
import { explained } from "./refused.js";
import { shrunk } from "./upload.js";
import {
  ALPHAS,
  showAnswer,
  showBusy,
  showEmpty,
  showModel,
  showOnPhoto,
  showProblem,
  showSent,
  showStrictness,
} from "./view.js";

const AFTER_STROKE = 350;
const AFTER_SETTING = 150;
const MOST_CLASSES = 4;

let model = null;
let alphas = ALPHAS;
let image = null; // the chosen { file, bitmap }, or null while the pad has a drawing
let pending = null; // the request in progress
let timer = 0;

const pad = new Pad(element("pad"), { onBegin: beginDrawing, onStroke: () => askSoon(AFTER_STROKE) });

// ---- the model

async function start() {
  try {
    adopt(await withKey(() => getJson("model")));
  } catch (problem) {
    fail(problem);
    return;
  }
  showEmpty();
  await showSamples();
}

function adopt(described) {
  model = described;
  if (image) image.upload = null; // the model may be of another size
  pad.setUp(model.image);
  element("stage").style.setProperty("--ratio", String(model.image.width / model.image.height));
  element("stage").classList.toggle("light", !pad.grey);
  element("colour-box").hidden = pad.grey;
  pad.colour = pad.grey ? "#ffffff" : element("colour").value;
  element("hint-more").textContent = hint();
  showModel(model);
  setUpStrictness();
  showPad();
}

function hint() {
  const labels = model.tasks.flatMap((task) => task.labels);
  const short = labels.every((label) => label.length === 1) && labels.length <= 12;
  return short ? `${labels.slice(0, -1).join(" ")} or ${labels.at(-1)}, or anything else` : "with a mouse, pen or finger";
}

function setUpStrictness() {
  alphas = [...new Set([...ALPHAS, model.alpha])].sort((a, b) => a - b);
  const slider = element("strictness");
  slider.max = String(alphas.length - 1);
  slider.value = String(alphas.indexOf(model.alpha));
  showStrictness(model.alpha, model.alpha);
}

const alpha = () => alphas[Number(element("strictness").value)];

// ---- requests

function askSoon(delay) {
  clearTimeout(timer);
  timer = setTimeout(ask, delay);
}

async function ask() {
  clearTimeout(timer);
  pending?.abort();
  const mine = (pending = new AbortController());
  if (!model) await start();
  if (!model || mine !== pending) return;
  offer();
  forgetWhy();
  if (!image && !pad.drawn) return showEmpty();
  showBusy(true);
  try {
    const content = image ? await upload(image) : await drawing();
    const classes = model.tasks.reduce((sum, task) => sum + task.labels.length, 0);
    const options = { alpha: alpha(), task: element("task").value, top: Math.min(MOST_CLASSES, classes) };
    const { answer, milliseconds } = await withKey(() => predict(content, options, mine.signal));
    if (mine !== pending) return;
    // The service may have switched to another bundle since the page was opened.
    if (answer.model.version !== model.version) adopt(await getJson("model"));
    showAnswer(answer, model, milliseconds, options.task);
    showOnPhoto(image?.bitmap ? answer : null);
    const explain = () => withKey(() => predict(content, { ...options, explain: "png" }));
    offerWhy(content, model.explains ? explain : null);
    offer(answer, content, model.tasks.flatMap((task) => task.labels));
  } catch (problem) {
    if (mine === pending) fail(explained(problem, image?.file));
  } finally {
    if (mine === pending) showBusy(false);
  }
}

async function upload(chosen) {
  if (!chosen.bitmap) return chosen.file; // no preview: the service decides whether the file is an image
  chosen.upload ??= shrunk(chosen.file, chosen.bitmap, model.image);
  const { content, note } = await chosen.upload;
  if (chosen === image) showSent(note);
  return content;
}

function drawing() {
  const picture = pad.picture();
  see(picture);
  return new Promise((resolve) => picture.toBlob(resolve, "image/png"));
}

function fail(problem) {
  if (problem.name === "AbortError") return;
  showBusy(false);
  showOnPhoto(null);
  if (!(problem instanceof Problem)) console.error(problem);
  showProblem(problem instanceof Problem ? problem : new Problem("Something went wrong in this page.", { retry: true }));
}

async function withKey(send) {
  for (;;) {
    try {
      return await send();
    } catch (problem) {
      if (problem.status !== 401 || !(await askForKey())) throw problem;
    }
  }
}

function askForKey() {
  const dialog = element("key-dialog");
  element("key").value = dialog.returnValue = "";
  element("key-refused").hidden = !storedKey();
  if (!dialog.open) dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "use"), { once: true });
  });
}

// ---- what is shown on the pad

function showPad() {
  element("hint").hidden = !pad.empty;
  element("hint").classList.toggle("blank", image !== null);
  element("undo").disabled = !pad.drawn;
  element("clear").disabled = pad.empty && image === null;
  element("sees").hidden = pad.empty;
}

function see(picture) {
  look(element("seen"), picture, model.image);
  element("seen-size").textContent = `${model.image.width} × ${model.image.height}`;
  showPad();
}

function beginDrawing() {
  clearTimeout(timer);
  leave();
  showPad();
}

function leave() {
  image = null;
  select(null);
  showOnPhoto(null);
  showSent();
}

async function take(file, button = null) {
  leave();
  const mine = (image = { file });
  select(button);
  pad.clear();
  try {
    const bitmap = await createImageBitmap(file);
    if (image !== mine) return;
    mine.bitmap = bitmap;
    pad.show(bitmap);
    if (model) see(bitmap);
  } catch {
    // No preview. The service decides whether the file is an image.
  }
  showPad();
  await ask();
}

function select(button) {
  for (const other of element("sample-list").querySelectorAll("button")) {
    other.setAttribute("aria-pressed", String(other === button));
  }
}

// ---- samples

async function showSamples() {
  let names = [];
  try {
    names = (await getJson("samples")).samples;
  } catch {
    return; // the page works without samples
  }
  const entries = await Promise.all(names.map((name) => sample(name).catch(() => null)));
  element("sample-list").replaceChildren(...entries.filter(Boolean));
  element("samples").hidden = !element("sample-list").children.length;
}

async function sample(name) {
  const file = await getBlob(`samples/${encodeURIComponent(name)}`);
  const canvas = document.createElement("canvas");
  look(canvas, await createImageBitmap(file), { ...model.image, mode: "RGB", ...thumbnail() });
  const button = document.createElement("button");
  button.type = "button";
  button.className = "sample";
  button.setAttribute("aria-pressed", "false");
  const caption = document.createElement("span");
  caption.textContent = name.replace(/\.[^.]+$/, "").replaceAll(/[_-]+/g, " ");
  button.setAttribute("aria-label", `Sample ${caption.textContent}`);
  button.append(canvas, caption);
  button.addEventListener("click", () => take(file, button));
  const entry = document.createElement("li");
  entry.append(button);
  return entry;
}

function thumbnail() {
  const zoom = Math.min(1, 112 / Math.max(model.image.width, model.image.height));
  return { width: Math.round(model.image.width * zoom), height: Math.round(model.image.height * zoom) };
}

// ---- events

function useTool(tool) {
  pad.tool = tool;
  for (const name of ["pen", "eraser"]) element(name).setAttribute("aria-pressed", String(name === tool));
}

element("pen").addEventListener("click", () => useTool("pen"));
element("eraser").addEventListener("click", () => useTool("eraser"));
element("colour").addEventListener("input", (event) => {
  pad.colour = event.target.value;
  useTool("pen");
});

function undo() {
  pad.undo();
  showPad();
  askSoon(AFTER_STROKE);
}

element("undo").addEventListener("click", undo);
element("clear").addEventListener("click", () => {
  leave();
  pad.clear();
  showPad();
  ask();
  element("choose").focus({ preventScroll: true });
});

element("choose").addEventListener("click", () => element("file").click());
element("file").addEventListener("change", ({ target }) => {
  if (target.files.length) take(target.files[0]);
  target.value = "";
});
element("again").addEventListener("click", ask);

document.addEventListener("paste", (event) => {
  const [file] = event.clipboardData?.files ?? [];
  if (!file) return;
  event.preventDefault();
  take(file);
});

document.addEventListener("keydown", (event) => {
  const typing = event.target.matches("input:not([type=range]):not([type=color])");
  if ((event.ctrlKey || event.metaKey) && event.key === "z" && !typing && pad.drawn) undo();
});

let within = 0;
const overPage = (inside) => element("stage").classList.toggle("dropping", inside);
document.addEventListener("dragenter", () => overPage(++within > 0));
document.addEventListener("dragleave", () => overPage(--within > 0));
document.addEventListener("dragover", (event) => event.preventDefault());
document.addEventListener("drop", (event) => {
  event.preventDefault();
  within = 0;
  overPage(false);
  const [file] = event.dataTransfer?.files ?? [];
  if (file) take(file);
  else fail(new Problem("Only image files can be dropped here.", { more: "Links and text are ignored." }));
});

element("strictness").addEventListener("input", () => {
  showStrictness(alpha(), model?.alpha);
  askSoon(AFTER_SETTING);
});
element("task").addEventListener("change", ask);

element("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  storeKey(element("key").value);
  element("key-dialog").close("use");
});
element("key-cancel").addEventListener("click", () => element("key-dialog").close(""));

start();
startFeedback().catch((problem) => problem instanceof Problem || console.error(problem));
