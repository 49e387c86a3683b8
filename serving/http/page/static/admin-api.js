// Sends requests under the admin token. The browser adds the name and the token that it asked the person for.

import { IMAGE_MESSAGES, Problem } from "./api.js";

const MESSAGES = {
  ...IMAGE_MESSAGES,
  quarantine_off: "This server does not store unknown images.",
  quarantine_unavailable: "The quarantine cannot be reached right now.",
  no_such_item: "Some of these images or groups no longer exist.",
  already_learned: "The model has already learned this.",
  bad_label: "This name cannot be used.",
  admin_off: "This server has no admin token, so nobody can sign in.",
  teach_off: "Teaching is off on this server.",
  teach_busy: "Somebody else's lesson is running. Try again when it is finished.",
  teach_changed: "Another version was put into service since this lesson began. Learn again to build on that version.",
  nothing_to_learn: "There is nothing to learn.",
  gate_objects: "Known classes would get worse than is allowed.",
  bad_state: "This lesson is no longer open.",
  class_exists: "There is such a class already.",
  bundle_refused: "The new version did not pass the server's own tests. Nothing has changed.",
};
const STATUS_MESSAGES = {
  401: "The service needs the admin token.",
  403: "The service does not allow this.",
  413: "This is too large.",
  503: "The service is busy right now.",
  504: "The service took too long to answer.",
};

// Sends JSON, or a file. The service detects an image's format from its content, because the browser's guess from the
// file name may be wrong.
export async function send(path, { method = "GET", json, file, type = "application/octet-stream", signal } = {}) {
  const headers = {};
  if (json !== undefined) headers["content-type"] = "application/json";
  if (file !== undefined) headers["content-type"] = type;
  let response;
  try {
    response = await fetch(path, { method, headers, body: file ?? (json && JSON.stringify(json)), signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem("The service cannot be reached.", {
      more: "It may have stopped, or the network is down.",
      retry: true,
    });
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
  throw new Problem(MESSAGES[detail.code] ?? STATUS_MESSAGES[status] ?? fallback, {
    more: detail.message ?? "",
    code: detail.code ?? "",
    status,
    retry: status === 429 || status === 503,
  });
}
