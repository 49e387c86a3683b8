// Talks to the service; whatever goes wrong becomes a Problem, in words for people.

const KEY = "openworld-key";

const WORDS = {
  unsupported_image: "This is not an image that the service reads. It reads PNG, JPEG, WebP and BMP.",
  unsupported_media_type: "This is not an image that the service reads. It reads PNG, JPEG, WebP and BMP.",
  broken_image: "This image file is damaged or incomplete and cannot be read.",
  empty_image: "This file is empty.",
  too_many_bytes: "This file is too large.",
  too_many_pixels: "This image has too many pixels.",
  bad_parameter: "The service does not accept this setting.",
  model_failed: "The model could not answer for this image.",
};

const STATUS_WORDS = {
  401: "The service asks for a key.",
  403: "The service does not accept this key.",
  404: "The service does not know this address. It may be an older version.",
  408: "The image took too long to arrive.",
  413: "This file is too large.",
  429: "The service is busy right now.",
  503: "The service is busy right now.",
  504: "The service took too long to answer.",
};

export class Problem extends Error {
  constructor(text, { more = "", status = 0, retry = false } = {}) {
    super(text);
    this.more = more;
    this.status = status;
    this.retry = retry;
  }
}

export function storedKey() {
  try {
    return sessionStorage.getItem(KEY) ?? "";
  } catch {
    return "";
  }
}

export function storeKey(key) {
  try {
    sessionStorage.setItem(KEY, key);
  } catch {
    // A browser may forbid storage; the key is then asked for again.
  }
}

export async function getJson(path) {
  return (await request(path)).json();
}

export async function getBlob(path) {
  return (await request(path)).blob();
}

// The answer for an image, with the milliseconds from sending it to having read the answer.
export async function predict(image, { alpha, task, top }, signal) {
  const query = new URLSearchParams({ alpha, top });
  if (task !== "") query.set("task", task);
  // The service tells the format by content; the browser's guess from the file's name may be wrong.
  const headers = { "content-type": "application/octet-stream" };
  const started = performance.now();
  const response = await request(`predict?${query}`, { method: "POST", body: image, headers, signal });
  const answer = await response.json();
  return { answer, milliseconds: performance.now() - started };
}

async function request(path, options = {}) {
  const key = storedKey();
  const headers = { ...options.headers, ...(key && { "x-api-key": key }) };
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem("The service cannot be reached.", {
      more: "It may have stopped, or the network is down.",
      retry: true,
    });
  }
  if (response.ok) return response;
  throw await problemOf(response);
}

async function problemOf(response) {
  let detail = {};
  try {
    detail = (await response.json()).error ?? {};
  } catch {
    // Not every layer in front of the service answers with JSON.
  }
  const { status } = response;
  const fallback = status >= 500 ? "The service failed." : "The service did not accept this request.";
  const more = [detail.message, waiting(response), traced(response)].filter(Boolean).join(" · ");
  return new Problem(WORDS[detail.code] ?? STATUS_WORDS[status] ?? fallback, {
    more,
    status,
    retry: status === 429 || status >= 500 || status === 401,
  });
}

function waiting(response) {
  const seconds = Number(response.headers.get("retry-after"));
  return seconds > 0 ? `Try again in ${seconds} ${seconds === 1 ? "second" : "seconds"}.` : "";
}

function traced(response) {
  const id = response.headers.get("x-request-id");
  return id && response.status >= 500 ? `request ${id}` : "";
}
