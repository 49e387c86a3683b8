// Builds what the Learn tab shows around a lesson: what waits, and how far it is.

import { counted, images, listed, make, quoted, when } from "./elements.js";
import { sentence } from "./teach-jobs.js";

export const button = (text, id, properties = {}) =>
  make("button", { type: "button", id, "data-testid": id, text, ...properties });

export const heading = (text) => make("h2", { class: "headline-text", id: "lesson-title", tabindex: "-1", text });

// The first step that is possible is the prominent one.
export function nothing({ unknown }) {
  const text = "Name unknown images or bring examples of a class. Then the model can learn them here, in seconds.";
  return [
    heading("Nothing waits to be learned"),
    make("p", { text }),
    make(
      "p",
      { class: "row" },
      unknown > 0 && make("a", { class: "button main", href: "#unknown", text: "Name unknown images" }),
      make("a", { class: unknown > 0 ? "button" : "button main", href: "#examples", text: "Bring examples" }),
    ),
  ];
}

// What a lesson leaves as it is, because it has too few examples.
export const shortText = (entries) =>
  entries
    .map(({ label, images: count, missing, learned }) =>
      learned
        ? `${quoted(label)} stays as it is: only ${counted(count, "example")} would be left. ` +
          `Add ${missing} more, or delete the class.`
        : `${quoted(label)} waits: it needs ${missing} more ${missing === 1 ? "example" : "examples"}.`,
    )
    .join(" ");

export function waiting(status) {
  const { waiting: added, removed, minimum, ready, too_few: short } = status;
  const entries = Object.entries(status.classes);
  // New classes have a badge in the list.
  const stays = short.filter(({ learned }) => learned);
  const parts = [
    added && `${images(added)} of ${counted(entries.length, "class", "classes")}`,
    removed && `${images(removed)} to take out`,
  ];
  const what = listed(parts.filter(Boolean));
  return [
    heading(ready ? "Ready to learn" : "More examples are needed"),
    make("p", { text: `Waiting: ${what}.${ready ? " The model stays as it is until you accept the result." : ""}` }),
    make(
      "ul",
      { class: "classes-named", "data-testid": "waiting-classes", "aria-label": "Classes with waiting examples" },
      ...entries.map(([label, count]) => waitingClass(label, count, status)),
    ),
    stays.length > 0 && make("p", { class: "caution", "data-testid": "too-few", text: shortText(stays) }),
    make("p", {
      class: "small",
      text: `About ${minimum} examples per class give a reliable result. Fewer work, less surely.`,
    }),
    make(
      "div",
      { class: "row" },
      ready
        ? button("Learn", "learn-now", { class: "main" })
        : make("a", { class: "button main", href: "#examples", text: "Bring examples" }),
    ),
  ].filter(Boolean);
}

function waitingClass(label, count, { minimum, too_few: short }) {
  const missing = short.find((entry) => entry.label === label && !entry.learned)?.missing ?? 0;
  const few = count < minimum ? "few" : "enough";
  return make(
    "li",
    { "data-label": label },
    make("strong", { text: label }),
    make("span", { class: "small", text: images(count) }),
    make("span", {
      class: "badge",
      "data-state": missing ? "new" : count < minimum ? "named" : "known",
      text: missing ? `${missing} more needed` : few,
    }),
  );
}

export const running = (job) => [
  heading(`${job.who} teaches the model`),
  make("div", { class: "working", id: "lesson-progress", "data-testid": "lesson-progress" }),
  make("p", { class: "small", text: "The model goes on answering as before." }),
];

// Shown above what waits.
export const failed = (job) =>
  make(
    "div",
    { class: "caution", role: "alert", "data-testid": "lesson-failed" },
    make("p", {}, make("strong", { text: "The lesson failed. " }), sentence(job.error ?? "the service gave no reason")),
    make("p", { class: "small", text: "Nothing has changed, and no example is lost." }),
  );

export function last(job) {
  const state = job.state === "failed" ? "failed" : `was ${job.state}`;
  const text = `The last lesson ${state} (${job.who}, ${when(job.started_at)}).`;
  return make("p", { class: "small", "data-testid": "last-lesson", text });
}
