// Sends examples to the service, a few at a time.

import { shrink } from "./shrink.js";
import * as api from "./teach-api.js";
import { change, remove } from "./unknowns-api.js";

const AT_ONCE = 3;
const MOST_TRIES = 5;

const sleep = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));

// work: [{ file, label }]. Calls `done` with each outcome { file, added } or { file, problem }.
export async function upload(work, { done, signal }) {
  const queue = [...work];
  const sender = async () => {
    for (let next = queue.shift(); next && !signal.aborted; next = queue.shift()) {
      try {
        done({ ...next, added: await send(next, signal) });
      } catch (problem) {
        if (problem.name === "AbortError") return;
        done({ ...next, problem });
      }
    }
  };
  await Promise.all(Array.from({ length: AT_ONCE }, sender));
}

async function send({ file, label }, signal) {
  const content = await shrink(file);
  for (let tries = 1; ; tries++) {
    try {
      return await api.add(content, label, signal);
    } catch (problem) {
      // A busy service is asked again, with more and more time in between.
      if (!problem.retry || tries === MOST_TRIES) throw problem;
      await sleep(250 * 2 ** tries);
    }
  }
}

// Takes added examples back: new files are deleted, and files that were here before get their label back.
export async function unload(added) {
  const fresh = new Set(added.filter((entry) => !entry.duplicate).map((entry) => entry.id));
  for (const id of fresh) await remove(id);
  const before = new Map();
  for (const { id, label, label_before: old } of added) {
    if (!fresh.has(id) && old !== label) before.set(old, [...(before.get(old) ?? []), id]);
  }
  for (const [label, ids] of before) await (label === null ? change("clear", { ids }) : api.label(ids, label));
}
