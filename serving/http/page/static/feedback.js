// Under an answer on the main page: "this is right", or "it is ...". The image becomes an example. Only for people who
// have signed in on the page for teaching.

import { getJson } from "./api.js";
import { element, make, quoted } from "./elements.js";
import * as api from "./teach-api.js";
import { unload } from "./teach-upload.js";

const SIGNED_IN = "openworld-teacher";

let mode = "off"; // off, signed out, or on
let status = null;
let shown = null; // the answer and the image that it is for
let labels = [];

export async function startFeedback() {
  const { teach } = await getJson("features");
  element("teach-link").hidden = !teach;
  if (!teach) return;
  // Asking without a password that the browser knows would open its sign-in window, so only a person who has signed in
  // in this tab is asked for.
  mode = signedIn() ? await signIn() : "signed out";
  show();
}

async function signIn() {
  try {
    status = await api.status();
  } catch (problem) {
    if (problem.status === 401) return "signed out";
    throw problem;
  }
  return status.enabled ? "on" : "off";
}

function signedIn() {
  try {
    return sessionStorage.getItem(SIGNED_IN) !== null;
  } catch {
    return false;
  }
}

// Offers to teach the image of an answer; without one, nothing is offered.
export function offer(answer = null, image = null, known = []) {
  shown = answer && { answer, image };
  labels = known;
  show();
}

function show() {
  element("feedback").hidden = !shown || mode === "off";
  element("feedback-sign-in").hidden = mode !== "signed out";
  element("feedback-form").hidden = mode !== "on";
  if (!shown || mode !== "on") return;
  const { known, label, best_guess: guess } = shown.answer;
  const right = known ? label : guess;
  element("feedback-title").textContent = known ? "Is this right?" : "Do you know what it is?";
  element("feedback-right").textContent = known ? `Yes, it is ${quoted(right)}` : `It is ${quoted(right)}`;
  element("feedback-right").dataset.label = right;
  element("feedback-label").value = "";
  const names = new Set([...labels, ...Object.keys(status.classes)]);
  element("feedback-labels").replaceChildren(...[...names].map((value) => make("option", { value })));
  report("");
}

function report(text, { undo = null, wrong = false } = {}) {
  element("feedback-text").textContent = text;
  element("feedback-text").classList.toggle("refused", wrong);
  element("feedback-more").hidden = !text || wrong;
  element("feedback-undo").hidden = !undo;
  element("feedback-undo").onclick = undo;
  for (const part of ["feedback-choices", "feedback-title"]) element(part).hidden = Boolean(text) && !wrong;
}

// The spelling of an existing class, if there is one: "Cat" becomes "cat".
function spelled(text) {
  const name = text.trim();
  const all = [...labels, ...Object.keys(status.classes)];
  return all.find((label) => label === name) ?? all.find((label) => label.toLowerCase() === name.toLowerCase()) ?? name;
}

async function teach(text) {
  const label = spelled(text);
  if (!label || !shown) return element("feedback-label").focus();
  const { image } = shown;
  const mine = shown;
  try {
    const added = await api.add(image, label);
    status = await api.status();
    if (mine !== shown) return;
    const here = added.duplicate && added.label_before === label;
    const waiting = status.classes[label] ?? 0;
    const many = waiting > 1 ? ` ${waiting} of it wait to be learned.` : "";
    const what = here ? `It was an example of ${quoted(label)} already.` : `Kept as an example of ${quoted(label)}.`;
    report(`${what}${many}`, { undo: here ? null : () => takeBack(added, mine) });
    element("feedback-more").querySelector("a, button:not([hidden])").focus({ preventScroll: true });
  } catch (problem) {
    report([problem.message, problem.more].filter(Boolean).join(" "), { wrong: true });
  }
}

async function takeBack(added, mine) {
  try {
    await unload([added]);
    if (mine === shown) show();
    element("feedback-right").focus({ preventScroll: true });
  } catch (problem) {
    report(problem.message, { wrong: true });
  }
}

element("feedback-right").addEventListener("click", ({ currentTarget }) => teach(currentTarget.dataset.label));
element("feedback-form").addEventListener("submit", (event) => {
  event.preventDefault();
  teach(element("feedback-label").value);
});
