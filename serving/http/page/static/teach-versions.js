// The Versions tab: every version of the model, the way back to it, and who did what.

import { counted, element, make, when } from "./elements.js";
import { notify, run } from "./notices.js";
import * as api from "./teach-api.js";
import { sentence } from "./teach-jobs.js";
import { lessonWaits } from "./teach-state.js";
import { changeEntry } from "./unknowns-view.js";

const LATEST = 200;
const TOGETHER = 10 * 60_000;

let versions = [];
let reload = async () => {};

export function versionsWith(again) {
  reload = again;
}

export async function loadVersions() {
  const [found, { changes }] = await Promise.all([api.versions(), api.log(LATEST)]);
  versions = found.versions;
  element("version-list").replaceChildren(...versions.map(entry));
  const none = make("li", { class: "small", text: "Nothing has been changed yet." });
  element("log").replaceChildren(...(changes.length ? gathered(changes).map(changeEntry) : [none]));
}

// Examples that were added one after the other are one line.
function gathered(changes) {
  const lines = [];
  for (const change of changes) {
    const last = lines.at(-1);
    const same = last && ["who", "what", "detail"].every((key) => last[key] === change[key]);
    if (same && Math.abs(Date.parse(last.at) - Date.parse(change.at)) < TOGETHER) last.items += change.items;
    else lines.push({ ...change });
  }
  return lines;
}

function entry({ version, created, current, previous, classes, who, what, lessons }) {
  const size = counted(classes, "class", "classes");
  const facts = [when(created), who, size, lessons > 0 && counted(lessons, "lesson")].filter(Boolean);
  return make(
    "li",
    { "data-testid": "version", "data-version": version, "data-current": String(current) },
    make(
      "div",
      { class: "summary" },
      make(
        "p",
        {},
        make("strong", { text: sentence(what) }),
        current && make("span", { class: "badge", "data-state": "known", text: "served" }),
        previous && make("span", { class: "badge plain", text: "served before" }),
      ),
      make("p", { class: "small" }, make("code", { text: version }), ` · ${facts.join(" · ")}`),
    ),
    !current &&
      make("button", {
        type: "button",
        "data-testid": "rollback",
        text: "Go back to this",
        on: { click: () => goBack(version) },
      }),
  );
}

// One click, because it is undone by going to the version that was served; what was taught since stays stored.
async function goBack(version) {
  const now = versions.find(({ current }) => current);
  await run(async () => {
    await api.rollback(version);
    await reload();
    const open = lessonWaits() ? " The lesson that waits continues another version: learn it again." : "";
    notify(`Version ${version} is served now.${open}`, now ? () => api.rollback(now.version) : null);
  });
}
