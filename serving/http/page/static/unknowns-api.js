// Sends requests to the API under /unknowns. The browser adds the name and the admin token that it asked the person for.

import { Problem } from "./api.js";

const MESSAGES = {
  quarantine_off: "This server does not store unknown images.",
  quarantine_unavailable: "The quarantine cannot be reached right now.",
  no_such_item: "Some of these images or groups no longer exist.",
  already_learned: "The model has already learned this.",
  bad_label: "This name cannot be used.",
};
const STATUS_MESSAGES = { 401: "The service needs the admin token.", 403: "The service does not allow this." };

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
    // A proxy in front of the service may not answer with JSON.
  }
  const { status } = response;
  const fallback = status >= 500 ? "The service failed." : "The service did not accept this.";
  throw new Problem(MESSAGES[detail.code] ?? STATUS_MESSAGES[status] ?? fallback, { more: detail.message ?? "", status });
}
