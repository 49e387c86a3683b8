// The selected images and the image in focus, by mouse and keyboard, as in desktop lists.

export class Selection {
  constructor(root, { onChange, onOpen = () => {} }) {
    this.ids = new Set();
    this.root = root;
    this.onChange = onChange;
    this.onOpen = onOpen;
    this.anchor = null; // where a range starts
    root.addEventListener("click", (event) => this.#click(event));
    root.addEventListener("dblclick", (event) => this.#open(event));
    root.addEventListener("keydown", (event) => this.#key(event));
    root.addEventListener("focusin", (event) => this.#focused(event.target.closest(".thumb")));
  }

  // The selected images or, if there are none, the one in focus.
  chosen() {
    if (this.ids.size) return [...this.ids];
    const focused = document.activeElement?.closest?.(".thumb");
    return focused ? [idOf(focused)] : [];
  }

  clear() {
    this.ids.clear();
    this.anchor = null;
    this.onChange();
  }

  // Deselects images that are no longer shown.
  keep(shown) {
    for (const id of this.ids) if (!shown.has(id)) this.ids.delete(id);
  }

  #click(event) {
    const thumb = event.target.closest(".thumb");
    if (!thumb) return;
    if (event.shiftKey && this.anchor !== null) this.#range(thumb);
    else this.#toggle(thumb);
    thumb.focus({ preventScroll: true });
  }

  #open(event) {
    const thumb = event.target.closest(".thumb");
    if (thumb) this.onOpen(idOf(thumb));
  }

  #key(event) {
    const thumb = event.target.closest(".thumb");
    if (!thumb || event.altKey) return;
    const whole = (event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "a";
    if (whole) for (const other of siblings(thumb)) this.ids.add(idOf(other));
    else if (event.ctrlKey || event.metaKey) return;
    else if (event.key === " ") this.#toggle(thumb);
    else if (event.key === "Enter") this.onOpen(idOf(thumb));
    else {
      const next = neighbour(thumb, event.key);
      if (!next) return;
      if (event.shiftKey) {
        this.anchor ??= idOf(thumb);
        this.#range(next);
      }
      next.focus();
    }
    event.preventDefault();
    if (whole) this.onChange();
  }

  #toggle(thumb) {
    const id = idOf(thumb);
    if (!this.ids.delete(id)) this.ids.add(id);
    this.anchor = id;
    this.onChange();
  }

  #range(thumb) {
    const all = siblings(thumb);
    const from = all.findIndex((other) => idOf(other) === this.anchor);
    const to = all.indexOf(thumb);
    // A range cannot extend from one group into another.
    if (from < 0) return this.#toggle(thumb);
    for (const other of all.slice(Math.min(from, to), Math.max(from, to) + 1)) this.ids.add(idOf(other));
    this.onChange();
  }

  // Tab reaches one image per group: the one that was in focus last.
  #focused(thumb) {
    if (!thumb) return;
    for (const other of siblings(thumb)) other.tabIndex = other === thumb ? 0 : -1;
  }
}

export const idOf = (thumb) => Number(thumb.dataset.id);

const siblings = (thumb) => [...thumb.parentElement.children];

function neighbour(thumb, key) {
  const all = siblings(thumb);
  const at = all.indexOf(thumb);
  const row = all.filter((other) => other.offsetTop === all[0].offsetTop).length;
  const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -row, ArrowDown: row, Home: -at, End: all.length - 1 - at };
  return key in steps ? all[at + steps[key]] : undefined;
}
