// Shows answers and problems as text and bars. Values from the service are only inserted as text, never as HTML.

import { element, percent, shortPercent } from "./elements.js";

// Slider positions: the share of known images that may be rejected.
export const ALPHAS = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5];

export function taskName(model, task) {
  const labels = model.tasks[task]?.labels ?? [];
  const shown = labels.slice(0, 4).join(", ");
  return `Task ${task}: ${shown}${labels.length > 4 ? " …" : ""}`;
}

export function showModel(model) {
  const chip = element("model-chip");
  chip.replaceChildren(...[model.name, model.version, device(model.provider)].map((text) => made("span", text)));
  chip.hidden = false;
  element("task").replaceChildren(
    element("task").options[0],
    ...model.tasks.map(({ task }) => {
      const option = made("option", taskName(model, task));
      option.value = String(task);
      return option;
    }),
  );
  element("about-list").replaceChildren(...about(model).map(([name, text]) => fact(name, text)));
  element("about").hidden = false;
  showVerdict(model.verdict);
}

const PARTS = { wp: "Classes within a task", tp: "Task prediction", unknown: "Unknown detection" };
const GRADES = ["good", "not measured", "weak", "not working"];

// The parts of the model that are not good, worst first; nothing if all are.
function showVerdict(verdict) {
  const parts = Object.entries(PARTS)
    .map(([name, title]) => ({ title, ...verdict[name] }))
    .filter((part) => ["weak", "not working"].includes(part.grade))
    .sort((one, other) => GRADES.indexOf(other.grade) - GRADES.indexOf(one.grade));
  const notice = element("verdict");
  notice.hidden = !parts.length;
  if (!parts.length) return;
  notice.dataset.grade = parts[0].grade;
  const lead = parts[0].grade === "not working" ? "Do not rely on this model. " : "This model is weak in parts. ";
  const texts = parts.map((part) => `${part.title}: ${part.grade} (${part.numbers}).`);
  notice.replaceChildren(made("strong", lead), texts.join(" "));
}

function about(model) {
  const { metrics = {} } = model;
  const unknown = metrics.unknown ?? {};
  const shares = [
    ["Correct on test images", metrics.cil_accuracy ?? metrics.accuracy],
    ["Correct if the task is given", metrics.til_accuracy],
    ["Known images accepted", unknown.accepted_known],
    ["Unknown images rejected", unknown.rejected_unknown],
  ];
  return [
    ["Model", `${model.name} ${model.version} on ${device(model.provider)}`],
    ["Classes", model.tasks.map((task) => task.labels.join(", ")).join(" · ")],
    ["Image", `${model.image.width} × ${model.image.height}, ${model.image.mode === "L" ? "grey" : "colour"}`],
    ["Method", `${model.method}, ${model.preset}`],
    ["Created", model.created.slice(0, 10)],
    ...Object.entries(PARTS).map(([name, title]) => [title, inWords(model.verdict[name])]),
    ...shares.filter(([, share]) => typeof share === "number").map(([name, share]) => [name, percent(share)]),
  ];
}

function inWords({ grade, numbers }) {
  return numbers ? `${grade} (${numbers})` : grade;
}

export function showStrictness(alpha, own) {
  const text = `Accepts about ${percent(1 - alpha)} of images of known classes`;
  const suffix = alpha === own ? ", the model's default" : "";
  element("strictness-text").textContent = `${text} (alpha ${alpha})${suffix}.`;
  element("strictness").setAttribute("aria-valuetext", `${text}${suffix}`);
}

export function showBusy(busy) {
  element("answer").setAttribute("aria-busy", String(busy));
}

function showParts({ headline = false, problem = false, detail = false }) {
  element("headline").hidden = !headline;
  element("problem").hidden = !problem;
  element("task-detail").hidden = element("class-detail").hidden = !detail;
}

export function showEmpty() {
  element("answer").dataset.state = "empty";
  element("label").textContent = "?";
  element("label").dataset.size = "short";
  element("badge").textContent = "waiting";
  element("task-badge").hidden = true;
  element("warning").hidden = true;
  element("sentence").textContent = "Draw something or choose an image. The answer appears here.";
  showParts({ headline: true });
}

export function showProblem(problem) {
  element("answer").dataset.state = "problem";
  element("problem-text").textContent = problem.message;
  element("problem-more").textContent = problem.more ?? "";
  element("again").hidden = !problem.retry;
  showParts({ problem: true });
}

export function showAnswer(answer, model, milliseconds, within) {
  element("answer").dataset.state = answer.known ? "known" : "unknown";
  showParts({ headline: true, detail: true });
  const label = element("label");
  label.textContent = answer.label;
  label.dataset.size = answer.label.length <= 2 ? "short" : answer.label.length <= 10 ? "middle" : "long";
  element("badge").textContent = answer.known ? `${percent(answer.confidence)} confident, if known` : "fits no task";
  element("task-badge").textContent = taskName(model, answer.task);
  element("task-badge").hidden = !answer.known;
  element("sentence").replaceChildren(...sentence(answer, within));
  element("warning").textContent = answer.warning ?? "";
  element("warning").hidden = !answer.warning;
  showTasks(answer, model, within);
  showClasses(answer);
  element("fact-latency").textContent = `${milliseconds < 10 ? milliseconds.toFixed(1) : Math.round(milliseconds)} ms`;
  element("fact-score").textContent = `${answer.unknown_score.toFixed(2)} (limit ${answer.threshold.toFixed(2)})`;
  element("fact-model").textContent = `${answer.model.name} ${answer.model.version} on ${device(model.provider)}`;
}

// The answer in short on the photo itself; the headline announces it, so this is for the eyes only.
export function showOnPhoto(answer) {
  const caption = element("on-photo");
  caption.hidden = !answer;
  if (!answer) return;
  caption.dataset.state = answer.known ? "known" : "unknown";
  const more = answer.known ? `${percent(answer.confidence)}, if known` : `perhaps ${answer.best_guess}`;
  caption.replaceChildren(made("strong", answer.label), made("span", more));
}

// How a photo was shrunk for the upload, or nothing.
export function showSent(note = "") {
  element("sent").textContent = note;
  element("sent").hidden = !note;
}

function sentence(answer, within) {
  const whose = within === "" ? "known images" : `known images, task ${within}'s first,`;
  const share = percent(answer.p_value);
  if (answer.known) return [`This image fits: ${share} of ${whose} look at least as unusual.`];
  const guess = made("strong", answer.best_guess);
  const few = share.startsWith("less") ? share : `only ${share}`;
  const reason = `but ${few} of ${whose} look this unusual. Below ${percent(answer.alpha)}, the answer is “unknown”.`;
  return ["Best guess: ", guess, ` (${percent(answer.confidence)} if it were of a known class), ${reason}`];
}

// Bars start at zero and the line is at the threshold. Very long bars are cut off, so that the line stays visibly apart
// from zero.
function showTasks(answer, model, within) {
  const scores = answer.tasks.map((task) => task.unknown_score);
  const end = Math.min(Math.max(answer.threshold * 1.7, ...scores.map((score) => score * 1.04)), answer.threshold * 6);
  element("task-bars").replaceChildren(
    ...answer.tasks.map((task) => {
      const inside = task.unknown_score <= answer.threshold;
      const row = bar(taskName(model, task.task), task.unknown_score / end, task.unknown_score.toFixed(2));
      row.classList.toggle("inside", inside);
      row.classList.toggle("cut", task.unknown_score > end);
      row.classList.toggle("aside", within !== "" && Number(within) !== task.task);
      row.append(made("span", inside ? " within the limit" : " past the limit", "unseen"));
      return row;
    }),
  );
  element("line").style.setProperty("--at", String(answer.threshold / end));
  // Beside the line there is room for its label only on the left half.
  element("line").classList.toggle("left", answer.threshold / end > 0.5);
  element("line-label").textContent = `unknown above ${answer.threshold.toFixed(2)}`;
}

function showClasses(answer) {
  element("class-bars").replaceChildren(
    ...answer.top.map((entry) => {
      const row = bar(entry.label, entry.probability, shortPercent(entry.probability));
      row.classList.toggle("best", entry.class_id === answer.class_id && answer.known);
      return row;
    }),
  );
}

function bar(name, share, value) {
  const row = document.createElement("li");
  const track = made("span", "", "track");
  const fill = made("span", "", "fill");
  fill.style.setProperty("--share", String(Math.min(Math.max(share, 0), 1)));
  track.append(fill);
  row.append(made("span", name, "name"), track, made("span", value, "value"));
  return row;
}

function fact(name, text) {
  const entry = document.createElement("div");
  entry.append(made("dt", name), made("dd", text));
  return entry;
}

function made(tag, text, className = "") {
  const node = document.createElement(tag);
  node.textContent = text;
  if (className) node.className = className;
  return node;
}

function device(provider) {
  return provider.replace("ExecutionProvider", "");
}
