// Builds the list of classes.

import { counted, images, listed, make, quoted, when } from "./elements.js";
import { shortText } from "./teach-lesson-view.js";
import { thumbnail } from "./unknowns-api.js";
import { sharpen } from "./zoom.js";

const ORIGINS = {
  waiting: ["named", "waits to be learned"],
  taught: ["known", "taught"],
  fit: ["plain", "learned in training"],
};

// `unnamed` are the classes that the server has learned automatically; `short` is given if a class has too few examples.
export function classCard(entry, { open, examples, selected, unnamed, short }) {
  const { label } = entry;
  const shown = open ? examples : entry.examples;
  return make(
    "section",
    { class: "card class", "data-label": label, "data-testid": "class", "aria-label": `Class ${label}` },
    make(
      "div",
      { class: "heading" },
      make(
        "div",
        { class: "summary" },
        make("h3", { text: label }),
        badges(entry, unnamed.includes(label)),
        make("p", { class: "small", text: facts(entry) }),
        short && make("p", { class: "small advice", text: shortText([short]) }),
        entry.advice && make("p", { class: "small advice", text: entry.advice }),
      ),
      make("div", { class: "row" }, ...actions(entry, open)),
    ),
    shown.length > 0 && thumbs(entry, shown, open, selected),
    open && !examples.length && make("p", { class: "small", text: "No picture of this class is stored here." }),
    open && selected.size > 0 && forSelected(selected.size),
  );
}

const badge = (state, text) => make("span", { class: "badge", "data-state": state, text });

const GRADES = { good: "known", weak: "new", "not working": "wrong", "few examples": "named" };

function badges({ origin, waiting, removed, extended, grade }, nameless) {
  const [state, text] = origin === "waiting" && !waiting ? ["plain", "no examples yet"] : ORIGINS[origin];
  return make(
    "p",
    { class: "badges" },
    state === "plain" ? make("span", { class: "badge plain", text }) : badge(state, text),
    nameless && badge("new", "needs a name"),
    extended && badge("known", "extended"),
    grade && grade !== "good" && badge(GRADES[grade], grade),
    waiting > 0 && origin !== "waiting" && badge("named", `${waiting} waiting`),
    removed > 0 && badge("new", `${removed} to take out`),
  );
}

function facts({ learned, waiting, origin, images: count, taught_by: who, taught_at: at, created_by: creator }) {
  return [
    origin === "fit" && count > 0 && `learned from ${images(count)}`,
    origin === "fit" && !learned && !waiting && "no pictures, because training photos are not stored",
    origin === "waiting" && waiting > 0 && counted(waiting, "example"),
    learned > 0 && counted(learned, "taught example"),
    who && `taught by ${who}${at ? `, ${when(at)}` : ""}`,
    !who && creator && `made by ${creator}`,
  ]
    .filter(Boolean)
    .join(" · ");
}

const action = (what, text, properties = {}) =>
  make("button", { type: "button", "data-do": what, "data-testid": `class-${what}`, text, ...properties });

const NO_MERGE = "Its training photos are not stored, so they cannot become examples of another class.";

// A class of the run has no examples that could become those of another class.
function actions({ examples, origin }, open) {
  return [
    (examples.length > 0 || open) &&
      action("open", open ? "Show fewer" : "Show all", { "aria-expanded": String(open) }),
    action("bring", "Add examples"),
    action("rename", "Rename"),
    origin !== "fit" && action("merge", "Merge"),
    origin === "fit" && make("span", { class: "small", title: NO_MERGE, text: "Cannot be merged" }),
    action("delete", "Delete", { class: "danger" }),
  ];
}

function thumbs({ label, in_model: learned }, examples, open, selected) {
  const name = `Examples of ${label}`;
  return make(
    "div",
    { class: open ? "thumbs" : "thumbs few", role: "listbox", "aria-multiselectable": "true", "aria-label": name },
    ...examples.map((example, at) =>
      make(
        "div",
        {
          class: "thumb",
          role: "option",
          "data-id": example.id,
          "data-state": example.state,
          "data-testid": "example",
          tabindex: at ? "-1" : "0",
          "aria-selected": String(selected.has(example.id)),
          "aria-label": about(example),
          title: about(example),
        },
        sharpen(make("img", { src: thumbnail(example.id), alt: "", loading: "lazy", draggable: "false" })),
        make("span", { class: "tag", "aria-hidden": "true", text: learned && example.state === "waiting" ? "new" : "" }),
      ),
    ),
  );
}

export const about = (example) =>
  [
    example.state === "waiting" ? "waits to be learned" : "learned",
    example.labelled_by && `named ${quoted(example.label)} by ${example.labelled_by}, ${when(example.labelled_at)}`,
    example.best_guess && `best guess ${quoted(example.best_guess)}`,
    example.width && `${example.width} × ${example.height}`,
  ]
    .filter(Boolean)
    .join(" · ");

const forSelected = (count) =>
  make(
    "div",
    { class: "row", role: "group", "aria-label": "Selected examples" },
    make("strong", { text: `${images(count)} selected` }),
    action("relabel", "It is another class"),
    action("remove", "Not an example"),
    action("none", "Clear selection", { class: "plain" }),
  );

export function headline({ classes, version }) {
  const words = { fit: "from training", taught: "taught", waiting: "waiting" };
  const kinds = Object.entries(words)
    .map(([origin, text]) => [classes.filter((entry) => entry.origin === origin).length, text])
    .flatMap(([count, text]) => (count ? [`${count} ${text}`] : []));
  return `${listed(kinds)}. Version ${version} is served.`;
}
