// Shows stored images large, one after the other.

import { make } from "./elements.js";
import { file } from "./unknowns-api.js";

const LARGE = 96; // images with fewer pixels are not smoothed

// Thumbnails of small images keep their pixels; those of photos are smoothed.
export function sharpen(image) {
  const show = () => image.classList.toggle("smooth", Math.max(image.naturalWidth, image.naturalHeight) > LARGE);
  image.addEventListener("load", show);
  return image;
}

// list: [{ id, text }]; actions: [{ text, key, run(entry) }] are offered for each image and close the dialog.
export function zoom(list, at = 0, actions = []) {
  let now = at;
  const image = sharpen(make("img", { alt: "" }));
  const caption = make("figcaption", { "aria-live": "polite" });
  const open = make("a", { target: "_blank", rel: "noopener", text: "Open the file", class: "small" });
  const place = make("p", { class: "small", "data-testid": "zoom-place" });
  const step = (by, text, label) =>
    make("button", { type: "button", class: "step", text, "aria-label": label, on: { click: () => show(now + by) } });
  const close = make("button", { type: "button", class: "main", text: "Close", on: { click: () => dialog.close() } });
  const dialog = make(
    "dialog",
    { class: "zoom", "aria-label": "Image", "data-testid": "zoom" },
    make("div", { class: "zoom-top" }, place, close),
    make(
      "figure",
      {},
      make("div", { class: "zoom-image" }, step(-1, "‹", "Previous image"), image, step(1, "›", "Next image")),
      caption,
    ),
    make(
      "div",
      { class: "row" },
      ...actions.map(({ text, run }) => make("button", { type: "button", text, on: { click: () => choose(run) } })),
      open,
    ),
  );

  function show(next) {
    now = (next + list.length) % list.length;
    const { id, text } = list[now];
    image.src = open.href = file(id);
    image.alt = caption.textContent = text;
    place.textContent = `${now + 1} of ${list.length}`;
  }

  function choose(run) {
    dialog.close();
    run(list[now]);
  }

  dialog.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by) return;
    event.preventDefault();
    show(now + by);
  });
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
  for (const button of dialog.querySelectorAll(".step")) button.hidden = list.length < 2;
  document.body.append(dialog);
  show(now);
  dialog.showModal();
  close.focus();
  dialog.addEventListener("close", () => dialog.remove());
}
