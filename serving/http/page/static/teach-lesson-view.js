// Builds what the Learn tab shows around a lesson: what waits, and how far it is.

import { counted, images, listed, make, when } from "./elements.js";

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

// The classes with too few examples to be learned.
export const tooFew = ({ classes, least }) =>
  Object.entries(classes).flatMap(([label, count]) => (count < least ? [label] : []));

export function waiting(status) {
  const { waiting: added, removed, minimum } = status;
  const entries = Object.entries(status.classes);
  const parts = [
    added && `${images(added)} of ${counted(entries.length, "class", "classes")}`,
    removed && `${images(removed)} to take out`,
  ];
  const what = listed(parts.filter(Boolean));
  return [
    heading("Ready to learn"),
    make("p", { text: `Waiting: ${what}. The model stays as it is until you accept the result.` }),
    make(
      "ul",
      { class: "classes-named", "data-testid": "waiting-classes", "aria-label": "Classes with waiting examples" },
      ...entries.map(([label, count]) => waitingClass(label, count, status)),
    ),
    make("p", {
      class: "small",
      text: `About ${minimum} examples per class give a reliable result. Fewer work, less surely.`,
    }),
    make("div", { class: "row" }, button("Learn", "learn-now", { class: "main" })),
  ];
}

function waitingClass(label, count, { minimum }) {
  return make(
    "li",
    { "data-label": label },
    make("strong", { text: label }),
    make("span", { class: "small", text: images(count) }),
    make("span", {
      class: "badge",
      "data-state": count < minimum ? "named" : "known",
      text: count < minimum ? "few" : "enough",
    }),
  );
}

export const running = (job) => [
  heading(`${job.who} teaches the model`),
  make("div", { class: "working", id: "lesson-progress", "data-testid": "lesson-progress" }),
  make("p", { class: "small", text: "The model goes on answering as before." }),
];

export const failed = (job) => [
  heading("The lesson failed"),
  make("p", { text: job.error ?? "The service gave no reason." }),
  make("p", { class: "small", text: "Nothing has changed, and no example is lost." }),
  make("div", { class: "row" }, button("Try again", "learn-now", { class: "main" })),
];

export const last = (job) =>
  make("p", {
    class: "small",
    "data-testid": "last-lesson",
    text: `The last lesson was ${job.state} (${job.who}, ${when(job.started_at)}).`,
  });
