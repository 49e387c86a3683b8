// The API under /unknowns.

import { send } from "./admin-api.js";

export const overview = () => send("unknowns/groups");

export const items = (group, after, limit) =>
  send(`unknowns/items?${new URLSearchParams({ group: group ?? "none", after, limit })}`);

export const change = (what, json) => send(`unknowns/${what}`, { method: "POST", json });

export const remove = (id) => send(`unknowns/items/${id}`, { method: "DELETE" });

export const removeAll = () => send("unknowns/items?confirm=all", { method: "DELETE" });

export const thumbnail = (id) => `unknowns/items/${id}/thumbnail`;

export const file = (id) => `unknowns/items/${id}/image`;
