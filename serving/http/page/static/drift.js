// Shows whether the images that the service answers are still like those before, over all its workers.

import { getJson } from "./api.js";
import { percent } from "./elements.js";
import { taskName } from "./view.js";

const element = (id) => document.getElementById(id);
const EVERY = 15_000; // milliseconds

let timer = 0;

async function update() {
  clearTimeout(timer);
  try {
    const [report, model] = await Promise.all([getJson("drift"), getJson("model")]);
    show(report, model);
  } catch (problem) {
    // Without a key or a service there is nothing to show; the rest of the page shows the reason.
    element("drift").hidden = element("drift-notice").hidden = true;
    if (problem.status === 401) return;
  }
  if (!document.hidden) timer = setTimeout(update, EVERY);
}

function show(report, model) {
  const { unknown, tests, alarms } = report;
  const name = (task) => (task === null ? "All tasks" : taskName(model, task));
  const share = unknown.images
    ? `${percent(unknown.share)} of the last ${number(unknown.images)} (${percent(unknown.low)} to ${percent(unknown.high)}, 95 % interval)`
    : "no answers yet";
  const rows = [["Unknown answers", share]];
  for (const test of tests) rows.push([name(test.task), `${strength(test.evidence)} in ${count(test.images)}`]);
  element("drift-list").replaceChildren(...rows.map(fact));
  element("drift-alarms").replaceChildren(...alarms.map((alarm) => made("li", sentence(alarm, name))));
  element("drift").hidden = false;
  const notice = element("drift-notice");
  notice.hidden = !alarms.length;
  if (alarms.length) notice.replaceChildren(made("strong", "The images have changed. "), sentence(alarms[0], name));
}

function sentence(alarm, name) {
  const shown = alarm.examples.filter((example) => example.request_id).slice(0, 3);
  const list = shown.map((example) => `${example.request_id} (${example.label}, brightness ${number(Math.round(example.brightness))})`);
  const examples = list.length ? ` For example requests ${list.join(", ")}.` : "";
  return (
    `${name(alarm.task)}: ${alarm.change} since ${time(alarm.since)} ` +
    `(${count(alarm.images)}, compared with ${number(alarm.before)} before).${examples}`
  );
}

// Evidence grows by factors; an alarm is raised at 1.
function strength(evidence) {
  if (evidence >= 0.1) return "strong signs of a change";
  return evidence >= 0.001 ? "some signs of a change" : "no sign of a change";
}

const number = (value) => value.toLocaleString("en");
const count = (images) => `${number(images)} ${images === 1 ? "image" : "images"}`;
const time = (text) => new Date(text).toLocaleString([], { dateStyle: "medium", timeStyle: "short" });

function fact([name, text]) {
  const entry = document.createElement("div");
  entry.append(made("dt", name), made("dd", text));
  return entry;
}

function made(tag, text) {
  const node = document.createElement(tag);
  node.textContent = text;
  return node;
}

document.addEventListener("visibilitychange", () => {
  if (!document.hidden) update();
});
update();
