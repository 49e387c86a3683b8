// Builds a lesson's result: before and after, the result of the gate, and the decision.

import { counted, images, listed, make, percent, quoted } from "./elements.js";
import { duration, sentence } from "./teach-jobs.js";
import { button, heading, shortText } from "./teach-lesson-view.js";

const GRADE_STATES = { good: "known", weak: "new", "not working": "wrong", "few examples": "named" };
const FEW = "With so few images, no image can be called unknown with confidence. More examples help.";

const share = (number) => (typeof number === "number" ? `${(100 * number).toFixed(1)}\u00a0%` : "–");

const OUTDATED = "Another version was put into service since this lesson began. Learn again to build on that version.";

// `before` is the version to go back to, if it is known; an outdated lesson cannot be accepted. `short` are classes with too few
// examples.
export function result(job, { before, outdated, short }) {
  const { learned } = job;
  const open = job.state === "done";
  const facts = open
    ? `Learned in ${duration(job.seconds)} by ${job.who}. Nothing has changed for anybody yet.`
    : `Version ${job.candidate} is served. It was taught by ${job.who}.`;
  return [
    heading(open ? "Before and after" : "Accepted"),
    make("p", {}, make("strong", { text: `${what(learned)}. ` }), facts),
    open && outdated && make("p", { class: "caution", "data-testid": "outdated", text: OUTDATED }),
    open && !outdated && !learned.gate && objection(learned),
    short.length > 0 && make("p", { class: "caution", "data-testid": "too-few", text: shortText(short) }),
    figures(learned),
    !learned.rejects_unknown && make("p", { class: "caution", text: FEW }),
    learned.classes.length > 0 && classTable(learned.classes),
    oldClasses(learned.old_classes),
    make("div", { class: "row", "data-testid": "decide" }, ...(open ? decisions(learned, outdated) : goOn(before))),
    timing(learned.seconds),
  ].filter(Boolean);
}

// What a lesson changes, in a few words.
function what({ classes, deleted, renamed, merged }) {
  const names = (labels) => listed(labels.map(quoted), 4);
  const pairs = (map) => listed(Object.entries(map).map(([old, now]) => `${quoted(old)} to ${quoted(now)}`), 4);
  const added = classes.filter((entry) => entry.new).map((entry) => entry.label);
  const extended = classes.filter((entry) => !entry.new).map((entry) => entry.label);
  const parts = [
    added.length && `new: ${names(added)}`,
    extended.length && `more of ${names(extended)}`,
    deleted.length && `without ${names(deleted)}`,
    Object.keys(renamed).length && `renamed ${pairs(renamed)}`,
    Object.keys(merged).length && `merged ${pairs(merged)}`,
  ].filter(Boolean);
  return sentence(listed(parts)) || "A lesson";
}

function objection({ old_classes: old, known_images: known, max_loss: loss }) {
  const worse = old.worse.length > 0;
  const lost = known && known.too_many;
  const limits = [
    worse && `A known class may lose ${loss} percentage points at most. `,
    lost && `At most ${percent(known.alpha)} of the known images may become unknown. `,
  ].filter(Boolean);
  const advice =
    "More varied examples, or fewer mistakes in the names, often help. You can also discard the lesson and keep the " +
    "model as it is.";
  return make(
    "div",
    { class: "problem objection", role: "alert", "data-testid": "objection" },
    worse && make("p", { text: `The lesson would make ${listed(old.worse.map(({ label }) => quoted(label)))} worse.` }),
    lost && make("p", { text: `The lesson would make ${known.lost} of ${known.known} known images unknown.` }),
    make("p", { text: limits.join("") + advice }),
    worse && changes(old.worse),
  );
}

function figures(learned) {
  const { old_classes: old, waiting_unknown: unknown, waiting_known: known } = learned;
  const tested = learned.classes.reduce((sum, entry) => sum + entry.of, 0);
  const names = Object.entries(learned.waiting_by_class).map(([label, count]) => `${count} ${quoted(label)}`);
  return make(
    "dl",
    { class: "figures", "data-testid": "figures" },
    tested > 0 &&
      figure("Taught classes answered right", {
        before: share(learned.accuracy_before),
        after: share(learned.accuracy_after),
        note: `${images(tested)}, each left out in turn`,
      }),
    figure("Old classes answered right", {
      before: share(old.before),
      after: share(old.after),
      note: old.images ? images(old.images) : "nothing to compare is stored",
    }),
    unknown > 0 &&
      figure("Waiting unknown images that become known", {
        after: `${known.toLocaleString()} of ${unknown.toLocaleString()}`,
        note: names.length ? listed(names, 4) : "of those without a name",
      }),
  );
}

const figure = (title, { before, after, note }) =>
  make(
    "div",
    {},
    make("dt", { text: title }),
    make(
      "dd",
      {},
      before && make("span", { class: "before", text: before }),
      before && make("span", { class: "arrow", text: " → " }),
      make("strong", { text: after }),
    ),
    make("dd", { class: "small", text: note }),
  );

function classTable(classes) {
  const titles = ["Class", "Examples", "Right before", "Right after", "Accepted as known", "Verdict"];
  return make(
    "div",
    { class: "scroll" },
    make(
      "table",
      { class: "results", "data-testid": "class-table" },
      make("thead", {}, make("tr", {}, ...titles.map((text) => make("th", { scope: "col", text })))),
      make("tbody", {}, ...classes.map(classRow)),
    ),
  );
}

function classRow({ label, new: isNew, images: count, added, removed, of, grade, advice, ...right }) {
  const changed = `${added ? ` (+${added})` : ""}${removed ? ` (−${removed})` : ""}`;
  const cell = (title, text) => make("td", { "data-title": title, text });
  return make(
    "tr",
    { "data-label": label },
    make("th", { scope: "row" }, label, make("span", { class: "small", text: isNew ? " new" : " extended" })),
    cell("Examples", `${count}${changed}`),
    cell("Right before", `${right.right_before} of ${of}`),
    cell("Right after", `${right.right_after} of ${of}`),
    cell("Accepted as known", `${right.known_after} of ${of}`),
    make(
      "td",
      { "data-title": "Verdict" },
      make("span", { class: "badge", "data-state": GRADE_STATES[grade], text: grade }),
      advice && make("span", { class: "small advice", text: advice }),
    ),
  );
}

function oldClasses({ changed, missing }) {
  if (!changed.length && !missing.length) {
    return make("p", { class: "small", text: "No old class gets better or worse." });
  }
  const rest = missing.length ? `, ${missing.length} not measured` : "";
  return make(
    "details",
    { "data-testid": "old-classes" },
    make("summary", { text: `Old classes: ${counted(changed.length, "change")}${rest}` }),
    changed.length > 0 && changes(changed),
    missing.length > 0 && make("p", { class: "small", text: `Not measured: ${listed(missing.map(quoted), 12)}.` }),
  );
}

function changes(entries) {
  return make(
    "ul",
    { class: "changes" },
    ...entries.map(({ label, images: count, before, after, taken_for: taken }) => {
      const wrong = taken.map(([other, times]) => `${quoted(other)} (${times})`);
      const mistakes = wrong.length ? `; taken for ${listed(wrong, 3)}` : "";
      const text = `: ${before} of ${count} right before, ${after} after${mistakes}`;
      return make("li", {}, make("strong", { text: label }), text);
    }),
  );
}

// If the gate objects, the safe choice is the prominent one.
function decisions({ gate }, outdated) {
  if (outdated) return [button("Learn again", "learn-now", { class: "main" }), button("Discard", "discard")];
  return gate
    ? [button("Accept", "accept", { class: "main" }), button("Discard", "discard")]
    : [
        button("Discard", "discard", { class: "main" }),
        button("Accept anyway", "accept", { class: "danger", "data-force": "true" }),
      ];
}

const goOn = (before) => [
  make("a", { class: "button main", href: "./", text: "Try it" }),
  before && button("Go back to the version before", "lesson-back"),
];

function timing(seconds) {
  const steps = Object.entries(seconds).map(([step, time]) => `${step} ${duration(time)}`);
  return steps.length ? make("p", { class: "small", text: `Time: ${steps.join(", ")}.` }) : null;
}
