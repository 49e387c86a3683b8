// The API under /teach.

import { send } from "./admin-api.js";

const post = (path, json = {}) => send(`teach/${path}`, { method: "POST", json });
const query = (values) =>
  new URLSearchParams(Object.entries(values).filter(([, value]) => value !== undefined && value !== null));

export const status = () => send("teach/status");
export const job = (id) => send(`teach/jobs/${id}`);

export const group = () => post("group");
export const loose = (after, limit) => send(`teach/loose?${query({ after, limit })}`);
export const split = (ids) => post("groups/split", { ids });

export const learn = () => post("learn");
export const accept = (id, force) => post("accept", { job: id, force });
export const discard = (id) => post("discard", { job: id });

export const classes = (examples) => send(`teach/classes?${query({ examples })}`);
export const create = (label) => post("classes", { label });
export const rename = (label, to) => post("classes/rename", { label, to });
export const merge = (labels, into) => post("classes/merge", { labels, into });
export const remove = (label, examples) => post("classes/delete", { label, examples });

export const examples = (label, after, limit) => send(`teach/examples?${query({ label, after, limit })}`);
export const add = (file, label, signal) =>
  send(`teach/examples?${query({ label })}`, { method: "POST", file, signal });
export const label = (ids, name) => post("examples/label", { ids, label: name });
export const take = (ids) => post("examples/remove", { ids });

export const versions = () => send("teach/versions");
export const rollback = (version) => post("rollback", { version });
export const log = (limit) => send(`teach/log?${query({ limit })}`);

export const bringIn = (file) => {
  const type = file.name.toLowerCase().endsWith(".json") ? "application/json" : "application/zip";
  return send("teach/import", { method: "POST", file, type });
};
export const archive = (format, part) => `teach/export?${query({ format, part })}`;
