// Questions in a dialog that is made when it is asked.

import { make } from "./elements.js";

let count = 0;

// Resolves to the value of the chosen button with the text of the field, or to null if the person cancels.
// choices: [{ value, text, danger }]; field: { label, value, list, check(text) -> hint or { refused } };
// typed: what must be typed before a choice is possible.
export function ask({ title, text = "", details = [], choices, field = null, typed = null }) {
  const number = ++count;
  const input = (field || typed !== null) && fieldOf(number, field, typed);
  const buttons = choices.map(({ value, text: shown, danger }, at) =>
    make("button", {
      class: `${at ? "" : "main"} ${danger ? "danger" : ""}`,
      value,
      text: shown,
      "data-testid": at ? `sure-${value}` : "sure-yes",
    }),
  );
  const cancel = make("button", { type: "button", text: "Cancel", "data-testid": "sure-cancel" });
  const dialog = make(
    "dialog",
    { "aria-labelledby": `question-${number}`, "data-testid": "sure" },
    make(
      "form",
      { method: "dialog" },
      make("h2", { id: `question-${number}`, text: title }),
      text && make("p", { text }),
      ...details,
      input,
      make("div", { class: "row" }, ...buttons, cancel),
    ),
  );
  cancel.addEventListener("click", () => dialog.close(""));
  if (input) watch(input.querySelector("input"), input.querySelector(".kind"), buttons, { field, typed });
  document.body.append(dialog);
  dialog.showModal();
  if (input) input.querySelector("input").select();
  else if (choices[0].danger) cancel.focus();
  else buttons[0].focus();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      const value = input ? input.querySelector("input").value.trim() : "";
      resolve(dialog.returnValue ? { choice: dialog.returnValue, value } : null);
      dialog.remove();
    });
  });
}

function fieldOf(number, field, typed) {
  return make(
    "div",
    { class: "asked" },
    make("label", { for: `asked-${number}`, text: field?.label ?? `Type ${typed} to confirm` }),
    make("input", {
      id: `asked-${number}`,
      "data-testid": "sure-count",
      list: field?.list,
      value: field?.value,
      maxlength: "200",
      inputmode: field ? null : "numeric",
      autocomplete: "off",
      autocapitalize: "none",
      spellcheck: "false",
    }),
    make("p", { class: "small kind", "aria-live": "polite" }),
  );
}

function watch(input, hint, buttons, { field, typed }) {
  const check = () => {
    const text = input.value.trim();
    const found = field?.check?.(text) ?? "";
    hint.textContent = found.refused ?? found;
    const bad = typed === null ? !text || found.refused !== undefined : text !== String(typed);
    for (const button of buttons) button.disabled = bad;
  };
  input.addEventListener("input", check);
  check();
}
