// Talks to the pages under /unknowns; the browser itself sends the name and the admin token that it asked for.

import { Problem } from "./api.js";

const WORDS = {
  quarantine_off: "This server keeps no unknown images.",
  quarantine_unavailable: "The quarantine cannot be reached right now.",
  no_such_item: "Some of it is no longer there.",
  already_learned: "The model has learned this already.",
  bad_label: "This name cannot be used.",
};
const STATUS_WORDS = { 401: "The service asks for the admin token.", 403: "The service does not allow this." };

export const overview = () => request("groups");

export const items = (group, after, limit) =>
  request(`items?${new URLSearchParams({ group: group ?? "none", after, limit })}`);

export const change = (what, body) => request(what, "POST", body);

export const remove = (id) => request(`items/${id}`, "DELETE");

export const removeAll = () => request("items?confirm=all", "DELETE");

export const thumbnail = (id) => `unknowns/items/${id}/thumbnail`;

export const file = (id) => `unknowns/items/${id}/image`;

async function request(path, method = "GET", body = undefined) {
  const headers = body && { "content-type": "application/json" };
  let response;
  try {
    response = await fetch(`unknowns/${path}`, { method, headers, body: body && JSON.stringify(body) });
  } catch {
    throw new Problem("The service cannot be reached.", { more: "It may have stopped, or the network is down." });
  }
  if (response.ok) return response.json();
  let detail = {};
  try {
    detail = (await response.json()).error ?? {};
  } catch {
    // Not every layer in front of the service answers with JSON.
  }
  const { status } = response;
  const fallback = status >= 500 ? "The service failed." : "The service did not accept this.";
  throw new Problem(WORDS[detail.code] ?? STATUS_WORDS[status] ?? fallback, { more: detail.message ?? "", status });
}
