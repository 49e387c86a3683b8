// The labelling page: the board of groups, with what is around it.

import { element, make } from "./elements.js";
import { idle, refreshWith, run } from "./notices.js";
import { removeAll } from "./unknowns-actions.js";
import { configure, latest, refresh } from "./unknowns-board.js";
import "./unknowns-controls.js";
import * as view from "./unknowns-view.js";

function showAround({ user, model, states, classes, minimum, commands, changes }, groups) {
  const count = Object.values(states).reduce((sum, some) => sum + some, 0);
  element("chip").replaceChildren(
    make("span", { text: user, title: "your name" }),
    make("span", { text: `${model.name} ${model.version}`, title: "the model that is served" }),
  );
  element("chip").hidden = false;
  element("progress").hidden = count === 0;
  element("tally").replaceChildren(...view.tally(states));
  element("classes").replaceChildren(...classes.map((entry) => view.namedClass(entry, minimum)));
  element("next-text").textContent = view.nextText(classes, minimum);
  element("learn-command").textContent = commands.learn;
  element("learn").hidden = !classes.some((entry) => entry.ready);
  element("start").hidden = groups.some((group) => group.id !== view.NONE);
  element("start-title").textContent = count ? "No groups yet" : "No unknown images yet";
  element("start-text").textContent = count
    ? "Similar images are easier to name together. To group them, run this where the training code is installed:"
    : "Images that the server answers with “unknown” appear here. Once there are some, group them with:";
  element("discover-command").textContent = commands.discover;
  element("changes").replaceChildren(...changes.map(view.changeEntry));
  element("history").hidden = !changes.length;
  element("delete-all").hidden = count === 0;
}

configure({ shown: showAround });
refreshWith(refresh);
element("refresh").addEventListener("click", () => run(refresh));
element("delete-all").addEventListener("click", removeAll);

// Somebody else may have labelled images, and more may have arrived.
document.addEventListener("visibilitychange", () => {
  if (!document.hidden && idle() && latest) run(refresh);
});

run(refresh);
