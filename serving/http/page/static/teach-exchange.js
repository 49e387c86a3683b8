// Labels and images from and for other tools, on the Classes tab.

import { ask } from "./dialogs.js";
import { element, images, make, quoted } from "./elements.js";
import { fail, notify, run } from "./notices.js";
import * as api from "./teach-api.js";

const EXPORTS = { folders: "Export as class folders", "label-studio": "Export for Label Studio" };
const MOST_PROBLEMS = 10; // files that the page names

let reload = async () => {};

export function exchangeWith(chosen) {
  reload = chosen;
}

// One archive, or one link for each part that is small enough to be imported.
export function showExports(parts) {
  for (const [format, title] of Object.entries(EXPORTS)) {
    const link = element(`export-${format}`);
    link.href = api.archive(format, parts > 1 ? 1 : undefined);
    link.textContent = parts > 1 ? `${title}, part 1 of ${parts}` : title;
    const others = Array.from({ length: parts - 1 }, (_, index) => {
      const text = `part ${index + 2}`;
      const about = `${title}, ${text} of ${parts}`;
      const href = api.archive(format, index + 2);
      return make("a", { class: "button", href, download: true, text, "aria-label": about });
    });
    const place = element(`export-${format}-parts`);
    place.hidden = others.length === 0;
    place.replaceChildren(...others);
  }
}

async function importFiles(files) {
  let [added, duplicates, relabelled] = [0, 0, 0];
  const failed = [];
  const advice = new Set();
  showProblems([]);
  try {
    for (const file of files) {
      const found = await api.bringIn(file);
      added += found.added;
      duplicates += found.duplicates;
      relabelled += found.relabelled;
      failed.push(...found.failed);
      if (found.advice) advice.add(found.advice);
    }
  } finally {
    await reload();
    const more = failed.length - MOST_PROBLEMS;
    showProblems([
      ...advice,
      ...failed.slice(0, MOST_PROBLEMS).map(({ name, reason }) => `${name}: ${reason}`),
      ...(more > 0 ? [`${more} more could not be imported.`] : []),
    ]);
  }
  const parts = [
    `Imported ${images(added)}`,
    duplicates && `${duplicates} were here already`,
    relabelled && `${relabelled} got another name`,
    failed.length && `${failed.length} could not be imported`,
  ];
  notify(`${parts.filter(Boolean).join(", ")}.`);
}

// They stay until the next import: a notice would be gone before they are read.
function showProblems(texts) {
  const place = element("import-problems");
  place.hidden = texts.length === 0;
  place.replaceChildren(...texts.map((text) => make("li", { text })));
}

element("import").addEventListener("click", () => element("import-file").click());
element("import-file").addEventListener("change", ({ target }) => {
  const files = [...target.files];
  target.value = "";
  if (files.length) askAndImport(files).catch(fail);
});

async function askAndImport(files) {
  const reply = await ask({
    title: `Import ${files.length > 1 ? `${files.length} archives` : quoted(files[0].name)}?`,
    text:
      "Their images become examples. Images that are here already get the label that the file has for them. " +
      "An import cannot be undone.",
    choices: [{ value: "yes", text: "Import" }],
  });
  if (reply) await run(() => importFiles(files));
}
